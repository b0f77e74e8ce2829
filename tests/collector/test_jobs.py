"""Recording in the processes of jobs, which must not be disturbed. Traces are read with the standard library."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.collector import run_folder
from etloom.collector.launcher.collection import collect
from etloom.collector.options import VARIABLE, CollectOptions, RecordingOptions, parse_ranks, parse_steps
from etloom.collector.session import trace_packing
from etloom.core.errors import CollectError
from etloom.formats.io.workload_card import read_card
from support.paths import ROOT
from support.script_runs import Server, jobs_in_forks, profiles_all_threads, without_limitations

SCRIPTS = ROOT / "tests" / "collector" / "scripts"
TINY = str(SCRIPTS / "tiny.py")
LIGHT = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import light\n"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIGHTLY = [str(SCRIPTS / "light.py")]
NOT_OURS = re.compile(
    r"USDT:|.*(?:Enabling|Disabling) Execution Trace Observer|ERROR:.*(?: output_json| gpuGetDeviceCount)"
)


def run_collect(
    out: Path, steps: str, *command: str, observer: str = "native", **environment: str
) -> SimpleNamespace:
    """What the command and the collector say and end with, the streams those of this process meanwhile."""
    texts = {1: out.parent / "stdout", 2: out.parent / "stderr"}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in {"PYTHONPATH": str(ROOT / "src"), "OUT": str(out), **environment}.items():
            patch.setenv(name, value)
        for stream, path in texts.items():
            before = os.dup(stream)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, stream)
            os.dup2(stack.enter_context(path.open("w")).fileno(), stream)
        collected = collect(command, out, CollectOptions(steps, observer=observer))
    stdout, stderr = (path.read_text() for path in texts.values())
    said = [line for line in stderr.splitlines() if line.startswith("etloom:")]
    said += [f"etloom: {line}" for line in collected.warnings]
    return SimpleNamespace(
        returncode=collected.exit_status, stdout=stdout, stderr=stderr, said=without_limitations(said)
    )


def front(out: Path, steps: str, *command: str, **environment: str) -> SimpleNamespace:
    """The same by the command line, in a process of its own; what it says at the end of a recording is left out."""
    done = subprocess.run(
        [sys.executable, "-m", "etloom", "collect", "--out", str(out), "--steps", steps, "--", *command],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )
    said = [
        line for line in done.stderr.splitlines() if line.startswith("etloom:") and "; next: " not in line
    ]
    return SimpleNamespace(
        returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, said=without_limitations(said)
    )


@pytest.fixture
def tiny(script_server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Record scripts/tiny.py, in a fork of a process that has torch loaded already."""

    def record_tiny(out: Path, case: str, steps: str = "2:5", observer: str = "native") -> SimpleNamespace:
        place = out.parent / "fork"
        for name, value in {"OUT": str(out), "OWN_ET": str(out.parent / "own_et.json")}.items():
            monkeypatch.setenv(name, value)
        with jobs_in_forks(script_server, place):
            options = CollectOptions(steps, observer=observer)
            collected = collect([sys.executable, TINY, case], out, options)
        stdout, stderr = ((place / name).read_text() for name in ("stdout", "stderr"))
        messages = [line for line in stderr.splitlines() if line.startswith("etloom:")]
        messages += [f"etloom: {line}" for line in collected.warnings]
        said = without_limitations(messages)
        return SimpleNamespace(returncode=collected.exit_status, stdout=stdout, stderr=stderr, said=said)

    return record_tiny


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return dict(json.load(file))


def operators(out: Path, rank: int = 0) -> tuple[dict[int, str], dict[int, str]]:
    """The operators of both traces, their names by rf_id (in Kineto: Record function id), each id once."""
    nodes, events = [], []
    if (out / f"observer_{rank}.etob").exists():
        recorded = etloom.read(out / f"observer_{rank}.etob").nodes.filter(pl.col("rf_id").is_not_null())
        nodes = recorded.select("rf_id", pl.col("name").cast(pl.String)).rows()
    else:
        for node in load(out / f"torch_et_{rank}.json.gz")["nodes"]:
            rf_id = next(attr["value"] for attr in node["attrs"] if attr["name"] == "rf_id")
            if rf_id:
                nodes.append((rf_id, node["name"]))
    for event in load(out / f"kineto_trace_{rank}.json.gz")["traceEvents"]:
        rf_id = event.get("args", {}).get("Record function id")
        if rf_id is not None:
            events.append((rf_id, event["name"]))
    assert len(dict(nodes)) == len(nodes) and len(dict(events)) == len(events)
    return dict(nodes), dict(events)


def step_times(out: Path, rank: int = 0) -> dict[int, float]:
    """Milliseconds of each ProfilerStep#N of the Kineto trace."""
    events = load(out / f"kineto_trace_{rank}.json.gz")["traceEvents"]
    named = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#")]
    assert all(event["cat"] == "user_annotation" for event in named)
    return {int(event["name"].partition("#")[2]): event["dur"] / 1e3 for event in named}


def no_orphans(out: Path, rank: int = 0) -> bool:
    if (out / f"observer_{rank}.etob").exists():
        stats = etloom.read(out / f"observer_{rank}.etob").stats
        return stats.filter((pl.col("name") == "read.missing_parent") & (pl.col("count") > 0)).is_empty()
    nodes = load(out / f"torch_et_{rank}.json.gz")["nodes"]
    ids = {node["id"] for node in nodes}
    return all(node["ctrl_deps"] in ids for node in nodes)


def visible(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


WHOLE = {
    "native": ["kineto_trace_0.json.gz", "observer_0.etob", "rank_0.json", "run.json", "run.yaml"],
    "stock": ["kineto_trace_0.json.gz", "rank_0.json", "run.json", "run.yaml", "torch_et_0.json.gz"],
}
ALL_STEPS = "".join(f"step {number}\n" for number in range(6)) + "done\n"


# What needs no torch


@pytest.mark.parametrize(
    ("text", "window"),
    [(None, (0, None)), ("3:5", (3, 5)), ("3:", (3, None)), (":5", (0, 5)), ("3", (3, 4)), (":", (0, None))],
)
def test_steps_are_a_slice(text: str | None, window: tuple[int, int | None]) -> None:
    assert parse_steps(text) == window


@pytest.mark.parametrize("text", ["", "5:3", "3:3", "-1:2", "1:5:2", "three", "3-5"])
def test_invalid_step_ranges_are_refused(text: str) -> None:
    with pytest.raises(CollectError, match="3:5 for steps 3 and 4"):
        parse_steps(text)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_name_of_a_node_reads_back(name: str) -> None:
    if re.search(r'", "ctrl_deps": \d+,', name):
        return  # the one name that cannot be told from the end of a name
    raw = f'{{\n  "nodes": [\n      {{\n        "id": 3, "name": "{name}", "ctrl_deps": 2,\n'.encode()
    repaired = b"".join(trace_packing._escape_names(raw.splitlines(keepends=True))).decode()
    assert json.loads(repaired + '        "x": 1}]}')["nodes"][0] == {
        "id": 3,
        "name": name,
        "ctrl_deps": 2,
        "x": 1,
    }


def test_truncated_files_are_not_packed(tmp_path: Path) -> None:
    whole = '{"nodes": [\n],\n"finish_ts": 12\n}\n'
    (tmp_path / "et.json").write_text(whole[:-4])
    with pytest.raises(OSError, match=r"torch wrote an incomplete et\.json"):
        trace_packing.pack_execution_trace(tmp_path / "et.json", None)
    assert visible(tmp_path) == ["et.json"]
    (tmp_path / "et.json").write_text(whole)
    trace_packing.pack_execution_trace(tmp_path / "et.json", None)
    assert load(tmp_path / "et.json.gz") == {"nodes": [], "finish_ts": 12}


def packed(scratch: Path, text: str) -> Path:
    scratch.mkdir(parents=True, exist_ok=True)
    for name in ("et.json.gz", "kineto.json.gz"):
        (scratch / name).write_text(text)
    return scratch


def facts(rank: int, pid: int, restart: int = 0) -> dict[str, Any]:
    times = {"start_ns": 10**18 + rank, "end_ns": 10**18 + 5}
    return {
        "rank": rank,
        "pid": pid,
        "restart": restart,
        "world_size": 2,
        "host": "h",
        "versions": {},
        **times,
    }


def test_publish_rank(tmp_path: Path) -> None:
    options = RecordingOptions(str(tmp_path), str(tmp_path / "s"))
    assert run_folder.publish_rank(packed(tmp_path / "s", "first"), tmp_path, facts(1, 11), options) == []
    assert run_folder.publish_rank(packed(tmp_path / "s", "zero"), tmp_path, facts(0, 10), options) == []
    run = json.loads((tmp_path / "run.json").read_text())
    assert [rank["pid"] for rank in run["ranks"]] == [10, 11]
    assert (run["start_ns"], run["start"], run["world_size"]) == (10**18, "2001-09-09T01:46:40+00:00", 2)
    # A second process of the same rank does not replace the first, a restart of the whole job does.
    assert run_folder.publish_rank(packed(tmp_path / "s", "twin"), tmp_path, facts(1, 12), options) == [
        "rank 1 was recorded by process 11 already: these traces are dropped"
    ]
    assert (tmp_path / "torch_et_1.json.gz").read_text() == "first"
    assert (
        run_folder.publish_rank(packed(tmp_path / "s", "again"), tmp_path, facts(1, 13, restart=1), options)
        == []
    )
    assert (tmp_path / "torch_et_1.json.gz").read_text() == "again"
    assert [rank["pid"] for rank in run_folder.read_rank_records(tmp_path)] == [10, 13]


def test_run_json_is_rewritten_if_a_rank_is_published_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_0.json").write_text(json.dumps(facts(0, 10)))
    write = run_folder.write_json

    def write_slowly(path: Path, value: dict[str, Any], scratch: Path) -> None:
        write(path, value, scratch)
        (tmp_path / "rank_1.json").write_text(json.dumps(facts(1, 11)))

    (tmp_path / "s").mkdir()
    monkeypatch.setattr(run_folder, "write_json", write_slowly)
    run_folder.write_run(tmp_path, {}, tmp_path / "s")
    assert [rank["rank"] for rank in json.loads((tmp_path / "run.json").read_text())["ranks"]] == [0, 1]


def test_a_full_disk_leaves_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: dict[str, Any], scratch: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_json", full)
    options = RecordingOptions(str(tmp_path), str(tmp_path / "s"))
    with pytest.raises(OSError, match="No space left"):
        run_folder.publish_rank(packed(tmp_path / "s", "x"), tmp_path, facts(0, 1), options)
    assert visible(tmp_path) == ["s"]


def test_ranks_of_one_run_do_not_refuse_each_other(tmp_path: Path) -> None:
    for name in ("torch_et_1.json.gz", "rank_1.json", "run.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    run_folder.claim_folder(str(tmp_path), False, rank=0, world_size=2)  # rank 1 was faster
    with pytest.raises(CollectError, match=r"contains rank_1\.json of an earlier run"):
        run_folder.claim_folder(str(tmp_path), False, rank=1, world_size=2)
    with pytest.raises(CollectError, match=r"contains rank_1\.json of an earlier run"):
        run_folder.claim_folder(str(tmp_path), False, rank=0, world_size=1)  # the earlier run was larger
    run_folder.claim_folder(str(tmp_path), True, rank=1, world_size=2)
    assert visible(tmp_path) == ["notes.txt", "run.json"]


# The command


def test_collect_refuses_before_it_runs(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(proof)!r}, 'w')"]
    (tmp_path / "a file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "torch_et_7.json").write_text("{}")
    with pytest.raises(CollectError, match=r"contains torch_et_7\.json of an earlier run; overwrite it"):
        collect(command, tmp_path / "full")
    with pytest.raises(CollectError, match="cannot write here"):
        collect(command, tmp_path / "a file")
    with pytest.raises(CollectError, match="expected a range of steps"):
        collect(command, tmp_path / "new", CollectOptions("5:2"))
    with pytest.raises(CollectError, match="no command"):
        collect([], tmp_path / "new")
    with pytest.raises(CollectError, match="no-such-command: cannot run: No such file"):
        collect(["no-such-command"], tmp_path / "new")
    assert not proof.exists()
    assert visible(tmp_path / "new") == []


def test_a_command_without_torch(tmp_path: Path) -> None:
    collected = collect([sys.executable, "-c", "raise SystemExit(5)"], tmp_path / "out")
    assert (collected.exit_status, collected.ranks) == (5, ())
    (warning,) = collected.warnings
    assert "status 5 before a Python imported torch.optim, or PYTHONPATH was lost" in warning
    assert visible(tmp_path / "out") == []
    (warning,) = collect([sys.executable, "-c", ""], tmp_path / "out").warnings
    assert "no Python of the command imported torch.optim" in warning and "PYTHONPATH" in warning


def test_collect_loads_neither_torch_nor_the_readers_for_a_command_without_torch(
    tmp_path: Path, native: None
) -> None:
    """Torch alone would take 2 s of CPU time."""
    words = ["-X", "importtime", "-m", "etloom", "collect", "--out", str(tmp_path / "out"), "--", "true"]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert result.returncode == 0 and "etloom.collector.launcher.finalization" in loaded
    assert not loaded & {"torch", "polars", "numpy", "pyarrow", "etloom.api", "etloom.formats"}


def test_exit_status_of_a_signal(tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert collect([sys.executable, "-c", kill], tmp_path / "out").exit_status == 143


def test_the_python_of_the_job_sees_no_difference(tmp_path: Path) -> None:
    """sys.path, the modules and the user's own sitecustomize are as without us."""
    look = (
        "import sys; c = sys.modules.get('sitecustomize'); print(sys.path[1:], getattr(c, 'MARK', None), "
        "[m for m in sys.modules if 'etloom_' in m and 'editable' not in m], 'torch' in sys.modules)"
    )
    own = tmp_path / "own"
    own.mkdir()
    for body, shown in (("MARK = 41", "41"), (None, "None")):
        if body is None:
            (own / "sitecustomize.py").unlink()
        else:
            (own / "sitecustomize.py").write_text(body)
        seen = []
        for extra in ({}, {VARIABLE: "{}"}):
            path = [str(ROOT / "src/etloom/collector/launcher/bootstrap")] if extra else []
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(own)]), **extra}
            command = [sys.executable, "-c", look]
            seen.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True))
        assert seen[0].stdout == seen[1].stdout
        assert f" {shown} [] False" in seen[1].stdout
        assert seen[1].stderr == ""


# Jobs with torch


@pytest.mark.torch
@pytest.mark.parametrize("observer", ["native", pytest.param("stock", marks=pytest.mark.slow)])
def test_a_window_of_steps(
    tmp_path: Path, native: None, tiny: Callable[..., SimpleNamespace], observer: str
) -> None:
    out = tmp_path / "run"
    done = tiny(out, "plain", observer=observer)
    assert (done.returncode, done.stdout, done.said) == (0, ALL_STEPS, [])
    assert visible(out) == WHOLE[observer]
    nodes, events = operators(out)
    assert nodes == events
    assert len(nodes) > 300 and no_orphans(out)
    assert list(nodes.values()).count("Optimizer.step#SGD.step") == 3
    assert sorted(step_times(out)) == [2, 3, 4]
    run = json.loads((out / "run.json").read_text())
    assert run["command"] == [sys.executable, TINY, "plain"] and run["returncode"] == 0
    (rank,) = run["ranks"]
    assert (rank["steps"], rank["unfinished_step"], rank["steps_asked"]) == ([2, 3, 4], None, "2:5")
    assert (rank["rank"], rank["world_size"], rank["device"]) == (0, 1, "cpu")
    assert rank["end_ns"] - rank["start_ns"] >= sum(step_times(out).values()) * 1e6
    if observer == "native":
        again = front(out, "2:5", sys.executable, "-c", "print('ran')")
        assert (again.returncode, again.stdout) == (1, "") and "of an earlier run" in again.said[0]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "returncode", "because"),
    [
        ("raise", 1, "the job ended"),
        ("sys_exit", 7, "the job ended"),
        ("sigint", 130, "the job ended"),
        ("own_profiler", 0, "the job started torch.profiler"),
        ("own_observer", 0, "the job started ExecutionTraceObserver"),
    ],
)
def test_a_window_that_ends_early_is_kept(
    tmp_path: Path,
    native: None,
    tiny: Callable[..., SimpleNamespace],
    case: str,
    returncode: int,
    because: str,
) -> None:
    out = tmp_path / "run"
    observer = "stock" if case == "own_observer" else "native"  # ours and the job's own record side by side
    by_front = case == "sys_exit"
    done = front(out, "2:5", sys.executable, TINY, case) if by_front else tiny(out, case, observer=observer)
    assert done.returncode == returncode
    assert done.said == [f"etloom: {because} in step 3: recorded 1 complete step of the requested steps 2:5"]
    assert done.stdout == (ALL_STEPS if not returncode else "step 0\nstep 1\nstep 2\n")
    assert visible(out) == WHOLE[observer] + ["torch_et_0.json.gz"] * by_front
    nodes, events = operators(out)
    assert nodes == events and no_orphans(out)
    assert list(step_times(out)) == [2] and "etloom:unfinished step 3" in nodes.values()
    (rank,) = json.loads((out / "run.json").read_text())["ranks"]
    assert (rank["steps"], rank["unfinished_step"]) == ([2], 3)
    assert without_limitations(rank["warnings"]) == [done.said[0].removeprefix("etloom: ")]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("case", "returncode"), [("os_exit", 9), ("sigkill", 137), ("sigterm", 143)])
def test_a_killed_window_leaves_nothing_under_final_names(
    tmp_path: Path, tiny: Callable[..., SimpleNamespace], case: str, returncode: int
) -> None:
    out = tmp_path / "run"
    done = tiny(out, case, observer="stock")
    assert done.returncode == returncode
    (said,) = done.said
    assert "which ended during its window" in said
    assert [name.startswith(".etloom-") for name in visible(out)] == [True]
    assert (Path(said.split(": ")[1]) / "et.json").is_file()


@pytest.mark.torch
@pytest.mark.slow
def test_a_process_that_ends_before_its_window_leaves_nothing(
    tmp_path: Path, native: None, tiny: Callable[..., SimpleNamespace]
) -> None:
    """In step 3, in which the profilers for step 4 are ready already."""
    out = tmp_path / "run"
    done = tiny(out, "os_exit", "4:6")
    assert done.returncode == 9 and visible(out) == []
    assert done.said == [
        f"etloom: {out}: nothing recorded: the command ended with status 9; its process was killed, "
        "or ended by os._exit, before step 4 began"
    ]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "observer", "ones"),
    [
        ("fork+thread", "native", 7),
        ("workers+two_optimizers", "native", 6),
        ("subclass+own_observer", "native", 7),
        ("scaler", "native", 8),
        ("fork", "stock", 6),
    ],
)
def test_jobs_of_all_kinds(
    tmp_path: Path, native: None, tiny: Callable[..., SimpleNamespace], cases: str, observer: str, ones: int
) -> None:
    if "thread" in cases and not profiles_all_threads():
        pytest.skip("this torch cannot profile threads that Python code starts")
    out = tmp_path / "run"
    done = tiny(out, cases, observer=observer)
    said = {
        "workers+two_optimizers": [
            "etloom: several optimizers step: only steps of the first one, SGD, are counted"
        ],
        "scaler": ["etloom: GradScaler skipped a step: the next counted step includes it"],
    }
    assert (done.returncode, done.stdout, done.said) == (0, ALL_STEPS, said.get(cases, []))
    assert visible(out) == WHOLE[observer]
    nodes, events = operators(out)
    assert nodes == events and no_orphans(out)
    assert sorted(step_times(out)) == [2, 3, 4]
    # A forked child computes 300 sums that are none of this process; a scaler skips one step, so 3 spans two.
    assert list(nodes.values()).count("aten::ones") == ones


@pytest.mark.torch
@pytest.mark.slow
def test_a_name_that_breaks_json(tmp_path: Path, tiny: Callable[..., SimpleNamespace]) -> None:
    out = tmp_path / "run"
    assert tiny(out, "bad_name", observer="stock").returncode == 0
    try:
        nodes, events = operators(out)
    except json.JSONDecodeError:
        pytest.skip("this torch does not escape the names in Kineto's trace")
    assert set(nodes) == set(events)
    assert 'a "quoted"\nC:\\name é' in nodes.values()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps", "words"),
    [
        ("running_profiler", "2:5", "torch.profiler is in use by the job itself"),
        ("warmed_profiler", "2:5", "torch.profiler is in use by the job itself"),
        ("small_files", "2:5", "torch wrote an incomplete kineto.json"),
        ("no_folder", "2:5", "recording failed in step 1, the job continues without it: NotADirectoryError"),
        ("plain", "10:20", "nothing recorded: the job ended after 6 steps, before step 10 began"),
        (
            "no_optimizer",
            "2:5",
            "nothing recorded: no torch.optim.Optimizer was created in the process with torch",
        ),
    ],
)
def test_nothing_recorded_and_the_job_undisturbed(
    tmp_path: Path, native: None, tiny: Callable[..., SimpleNamespace], case: str, steps: str, words: str
) -> None:
    out = tmp_path / "run"
    done = tiny(out, case, steps)
    assert done.returncode == 0
    if case.endswith("profiler"):
        assert "own profiler saw 1\n" in done.stdout and "done\n" in done.stdout
    elif case != "no_optimizer":
        assert done.stdout == ALL_STEPS
    if case == "small_files":
        assert re.fullmatch(
            r"etloom: \d+ operators are not recorded: --max-size is reached or the disk is full",
            done.said.pop(0),
        )
    assert words in done.said[0]
    assert out.is_file() or visible(out) == []
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line]


@pytest.mark.torch
@pytest.mark.slow
def test_fewer_steps_than_requested(
    tmp_path: Path, native: None, tiny: Callable[..., SimpleNamespace]
) -> None:
    done = tiny(tmp_path / "run", "plain", "4:20")
    assert done.said == [
        "etloom: the job ended in step 6: recorded 2 complete steps of the requested steps 4:20"
    ] and sorted(step_times(tmp_path / "run")) == [4, 5]
    steps = etloom.open(tmp_path / "run")[0].events["name"].cast(pl.String)
    assert [name for name in steps if "ProfilerStep" in name or "unfinished" in name] == [
        "ProfilerStep#4",
        "ProfilerStep#5",
        "etloom:unfinished step 6",
    ]


@pytest.mark.torch
@pytest.mark.slow
def test_from_the_first_step(tmp_path: Path, native: None, tiny: Callable[..., SimpleNamespace]) -> None:
    done = tiny(tmp_path / "run", "plain", ":2")
    assert (done.returncode, done.said, sorted(step_times(tmp_path / "run"))) == (0, [], [0, 1])


LOOP = (
    LIGHT
    + """
import sys, torch, etloom.collector, etloom.core.errors
model = torch.nn.Linear(4, 2)
with etloom.collector.record(sys.argv[1], steps=eval(sys.argv[2])) as rec:
    for batch in range(4):
        model(torch.ones(4)).sum().backward()
        rec.step()
print(tuple(message for message in rec.warnings if "cannot profile threads" not in message))
try:
    etloom.collector.record(sys.argv[1])
except etloom.core.errors.CollectError as error:
    print("refused", "of an earlier run" in str(error))
"""
)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("steps", "whole", "unfinished"), [(None, [0, 1, 2, 3], 4), ("1:3", [1, 2], None)])
def test_record_in_a_loop(
    tmp_path: Path, native: None, steps: str | None, whole: list[int], unfinished: int | None
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", LOOP, str(out), repr(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert (done.returncode, done.stdout) == (0, "()\nrefused True\n"), done.stderr
    assert visible(out) == WHOLE["native"]
    nodes, events = operators(out)
    assert nodes == events and list(nodes.values()).count("AddmmBackward0") == len(whole)
    assert sorted(step_times(out)) == whole
    run = json.loads((out / "run.json").read_text())
    assert run["returncode"] is None and run["command"][0] == sys.executable
    assert (run["ranks"][0]["steps"], run["ranks"][0]["unfinished_step"]) == (whole, unfinished)


@pytest.mark.torch
@pytest.mark.slow
def test_record_in_two_ranks_without_a_parent(tmp_path: Path, native: None) -> None:
    """Whichever rank seals last has written both into run.json."""
    out, script = tmp_path / "run", tmp_path / "loop.py"
    script.write_text(LOOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [*TORCHRUN, str(script), str(out), "'1:3'"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    # Counted, since the ranks write into one pipe and may cut each other's lines apart.
    counts = [done.stdout.count(word) for word in ("()", "refused", "True")]
    assert (done.returncode, counts) == (0, [2, 2, 2])
    assert not done.stdout.replace("()", "").replace("refused", "").replace("True", "").strip()
    run = json.loads((out / "run.json").read_text())
    assert [(rank["rank"], rank["steps"]) for rank in run["ranks"]] == [(0, [1, 2]), (1, [1, 2])]
    for rank in (0, 1):
        nodes, events = operators(out, rank)
        assert nodes == events and sorted(step_times(out, rank)) == [1, 2]
    assert not [name for name in visible(out) if name.startswith(".")]


@pytest.mark.torch
@pytest.mark.slow
def test_two_ranks_of_ddp(tmp_path: Path, native: None) -> None:
    """The script is unaware; its own clock and ProfilerStep#N agree within 2 % or half a millisecond."""
    out = tmp_path / "run"
    done = run_collect(out, "3:6", *TORCHRUN, str(ROOT / "examples" / "train_ddp.py"), "--steps", "7")
    assert done.returncode == 0, done.stderr
    assert done.said == []
    printed = {
        (int(rank), int(step)): float(time)
        for rank, step, time in re.findall(r"rank (\d) step (\d+) ([\d.]+) ms", done.stdout)
    }
    assert len(printed) == 14
    agreed: list[bool] = []
    for rank in (0, 1):
        nodes, events = operators(out, rank)
        alone = {rf_id: name for rf_id, name in nodes.items() if rf_id not in events}
        assert list(alone.values()) == ["## process_group:init ##"]
        assert {rf_id: nodes[rf_id] for rf_id in events} == events
        assert no_orphans(out, rank)
        assert list(events.values()).count("gloo:all_reduce") >= 3
        times = step_times(out, rank)
        assert sorted(times) == [3, 4, 5]
        for step, time in times.items():
            # The script's clock starts after ProfilerStep#N does and stops before it.
            assert time > printed[rank, step] - 0.05
            agreed.append(time == pytest.approx(printed[rank, step], rel=0.02, abs=0.5))
    assert sum(agreed) >= 5  # a busy machine may take the processor away between two clocks, once
    run = json.loads((out / "run.json").read_text())
    assert [(rank["rank"], rank["local_rank"], rank["world_size"]) for rank in run["ranks"]] == [
        (0, 0, 2),
        (1, 1, 2),
    ]
    assert len({rank["pid"] for rank in run["ranks"]}) == 2 and run["world_size"] == 2


@pytest.mark.torch
@pytest.mark.slow
def test_each_return_of_a_hooked_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from etloom.collector.launcher import step_hooks

    class Optimizer:
        profile_hook_step = staticmethod(lambda step: step)

    def step(optimizer: object) -> None:
        pass

    options = RecordingOptions(str(tmp_path), str(tmp_path), first=10**9, last=10**9 + 1)
    monkeypatch.setenv(VARIABLE, options.to_environment())
    recorders: list[Any] = []
    monkeypatch.setattr(
        step_hooks, "Recorder", lambda options: recorders.append(Quiet(options)) or recorders[0]
    )
    step_hooks.attach(SimpleNamespace(Optimizer=Optimizer, torch=torch))  # type: ignore[arg-type]
    hooked = Optimizer.profile_hook_step(step)
    optimizer = Optimizer()
    for _ in range(1000):
        hooked(optimizer)
    assert recorders[0].count == 1000
    recorders[0].finished = True


def Quiet(options: RecordingOptions) -> Any:
    """A recorder that counts but hooks nothing into this process."""
    from etloom.collector.session.recorder import Recorder

    recorder = Recorder(options)
    recorder.begin = lambda: None  # type: ignore[method-assign]
    return recorder


@pytest.fixture(scope="module")
def native() -> None:
    from etloom.collector.observer import BuildError, build_library

    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the native observer cannot be built here: {error}")


@pytest.mark.slow
@pytest.mark.torch
def test_the_native_observer_through_the_command_line(tmp_path: Path, native: None) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "etloom",
            "collect",
            "--out",
            str(out),
            "--",
            sys.executable,
            str(ROOT / "examples" / "train_ddp.py"),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert visible(out) == sorted({*WHOLE["native"], *WHOLE["stock"]})
    # What only the trace tells: 32 texts of 48 letters.
    assert read_card(out / "run.yaml")["workload"]["data"]["seq_len"] == 48
    trace = etloom.open(out)[0]
    assert trace.meta["formats"] == ["kineto", "observer"] or trace.meta["formats"] == ["observer", "kineto"]
    operators = trace.nodes.filter(pl.col("rf_id").is_not_null()).height
    assert trace.links.height == operators > 20
    assert trace.stats.filter(pl.col("severity") != "info").is_empty()
    assert sorted(trace.events["step"].drop_nulls().unique()) == [3, 4]


@pytest.mark.torch
@pytest.mark.slow
def test_the_native_observer_keeps_a_killed_window(
    tmp_path: Path, native: None, script_server: Server
) -> None:
    out = tmp_path / "run"
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect([sys.executable, TINY, "sigkill"], out, CollectOptions("2:5", observer="native"))
    assert collected.exit_status == 137
    assert any("rank 0 was killed in its window" in line for line in collected.warnings)
    lost = "the native observer's trace up to then is kept, but the Kineto trace of rank 0 is lost: "
    assert any(lost in line for line in collected.warnings)
    trace = etloom.read(out / "observer_0.etob")
    assert "ProfilerStep#2" in set(trace.nodes["name"].cast(pl.String))
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.torch
def test_without_a_compiler_torchs_observer_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script_server: Server
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("ETLOOM_OBSERVER_CACHE", str(tmp_path / "cache"))
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect(
            [sys.executable, TINY, "plain"], tmp_path / "run", CollectOptions(observer="native")
        )
    assert collected.ranks == (0,) and (tmp_path / "run" / "torch_et_0.json.gz").exists()
    assert [line for line in collected.warnings if "no C++ compiler: no-such-compiler" in line] == list(
        collected.warnings
    )


@pytest.mark.parametrize(
    ("text", "ranks"), [(None, None), ("0", (0,)), ("0,8-11", (0, 8, 9, 10, 11)), (" 3 , 1-2", (1, 2, 3))]
)
def test_ranks_are_numbers_and_ranges(text: str | None, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2"])
def test_invalid_ranks_are_refused(text: str) -> None:
    with pytest.raises(CollectError, match="0,8-15"):
        parse_ranks(text)


@pytest.mark.torch
@pytest.mark.slow
def test_only_some_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script_server: Server) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect([sys.executable, TINY, "plain"], tmp_path / "two", CollectOptions(ranks="1"))
    assert collected.ranks == (1,) and collected.warnings == ()


SERVING = (
    LIGHT
    + """
import torch
from torch.profiler import record_function
net = torch.nn.Linear(2, 2)
with torch.inference_mode():
    for request in range(8):
        with record_function("prepare"): batch = torch.ones(1, 2)
        with record_function(f"decode {request}"):
            with record_function("decode inner"): net(batch)
print("served")
"""
)


@pytest.mark.slow
@pytest.mark.torch
def test_steps_by_the_name_of_a_scope(tmp_path: Path, script_server: Server) -> None:
    out = tmp_path / "run"
    options = CollectOptions("3:5", step_name="^decode", observer="native")
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect([sys.executable, "-c", SERVING], out, options)
    assert collected.exit_status == 0 and collected.warnings == ()
    named = etloom.open(out)[0].events.select(pl.col("name").cast(pl.String), "step")
    said = named.filter(pl.col("name").str.contains("^(decode|prepare)"))["name"].to_list()
    assert said == ["prepare", "decode 3", "decode inner", "prepare", "decode 4", "decode inner"]
    assert sorted(named["step"].drop_nulls().unique()) == [3, 4]


def test_invalid_step_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="invalid regular expression"):
        collect(["true"], tmp_path / "run", CollectOptions(step_name="("))


EXAMPLES = ROOT / "examples"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "compile", "serve", "fsdp", "tensor", "pipeline"])
def test_examples_of_each_kind(
    tmp_path: Path, native: None, monkeypatch: pytest.MonkeyPatch, script_server: Server, how: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, world, step_name = tmp_path / "run", 1, None
    in_forks: AbstractContextManager[None] = nullcontext()
    if how == "compile":
        command = [sys.executable, str(EXAMPLES / "train_plain.py"), "--compile"]
    elif how in ("plain", "serve"):
        in_forks = jobs_in_forks(script_server, tmp_path / "fork")
        command = [sys.executable, str(EXAMPLES / f"{'train_plain' if how == 'plain' else 'serve'}.py")]
        step_name = "^decode" if how == "serve" else None
    else:
        from torch.distributed import fsdp

        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("the examples need a newer torch")
        world = 2
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, str(EXAMPLES / "train_parallel.py"), how]
    with in_forks:
        collected = collect(command, out, CollectOptions(observer="native", step_name=step_name))
    assert (collected.exit_status, collected.warnings) == (0, ())
    assert collected.ranks == tuple(range(world))
    card = read_card(out / "run.yaml")["Model-executor"]
    parts = {part: size for part, size in card["model_plan_parallelization"].items() if size not in (None, 1)}
    assert parts == {"fsdp": {"dp_shard": 2}, "tensor": {"tp": 2}, "pipeline": {"pp": 2}}.get(how, {})
    assert [group["ranks"] for group in card["communicator_groups"]] == [[0, 1]] * (world - 1)
    for trace in etloom.open(out).values():
        names = trace.nodes.filter(pl.col("rf_id").is_not_null())["name"].cast(pl.String)
        assert trace.links.height == len(names) - names.str.contains("process_group:init").sum() > 20
        assert trace.stats.filter(pl.col("severity") != "info").is_empty()
        assert sorted(trace.events["step"].drop_nulls().unique()) == [3, 4]
        assert world == 1 or set(trace.comms["pg_name"].drop_nulls().cast(pl.String)) == {"0"}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("raise", 1), ("exit", 3), ("profile", 0)])
def test_examples_with_other_endings_keep_their_status(
    tmp_path: Path, native: None, how: str, status: int
) -> None:
    command = [sys.executable, *LIGHTLY, str(EXAMPLES / "train_oddly.py"), how]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=400)
    out = tmp_path / "run"
    done = run_collect(out, "3:5", *command)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert alone.returncode == status
    said, own = (
        [line for line in text.splitlines() if not NOT_OURS.match(line)]
        for text in (done.stderr, alone.stderr)
    )
    assert [line for line in said if not line.startswith("etloom:")] == own
    if how == "profile":  # its own session is there first, and it goes on
        assert (
            "torch.profiler is in use by the job itself" in done.said[0]
            and "profiled 3 layers" in done.stdout
        )
    else:
        assert sorted(step_times(out)) == [3, 4] and done.said == []
