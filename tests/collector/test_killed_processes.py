"""Endings of processes: what the launcher records and recovers after a kill, and what salvage recovers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

import etloom
from etloom.analyses.run_info import describe_ranks
from etloom.api.recording import record_whole_steps
from etloom.cli import main
from etloom.collector import process_endings, run_folder
from etloom.collector.launcher import finalization
from etloom.collector.launcher.collection import collect
from etloom.collector.options import CollectOptions, RecordingOptions
from etloom.collector.recovery import killed_windows
from etloom.core.errors import CollectError
from etloom.loading.folder_contents import find_unfinished_recording

HERE = socket.gethostname()


def salvage(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    result = killed_windows.salvage_run(folder)
    return list(result.recovered), list(result.warnings)


def left(run: Path, rank: int, pid: int, *, host: str = HERE, window: str = "", **facts: Any) -> Path:
    """What a process that was killed in its window leaves."""
    folder = run / f".etloom-{host}-1-abc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "et.etob").write_text(f"of rank {rank}")
    (folder / process_endings.STARTED_FILE).touch()
    job = {"launch": f"{host}-1-abc", "supervised": True}
    note = {"rank": rank, "world_size": 3, "host": host, "pid": pid, "start_ns": 10**18, "restart": 0}
    note |= {"versions": {}, "job": job, "ended": None, "window": window or ".", "command": ["train"]}
    (folder / process_endings.KILLED_NOTE).write_text(json.dumps(note | facts))
    return folder


def ended(rank: int, how: str, in_window: bool = False, **facts: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "ended": {"how": how, "in_window": in_window, "error": facts.pop("error", None)},
        **facts,
    }


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([ended(0, "exited"), {"rank": 1, "ended": None}, {"rank": 2}], None),
        ([ended(1, "killed", True)], "rank 1 was killed in its window, or ended by os._exit"),
        (
            [ended(r, "killed", True) for r in (3, 0, 1)],
            "ranks 0-1, 3 were killed in their window, or ended by os._exit",
        ),
        (
            [ended(1, "killed", True, end_ns=5), ended(0, "killed")],
            "rank 1 was killed while its window was written, or ended by os._exit; "
            "rank 0 was killed after its window, or ended by os._exit",
        ),
        ([ended(0, "raised", error="ValueError"), ended(1, "exited")], "rank 0 ended with ValueError"),
        ([ended(0, "raised", error="{x}"), ended(1, "raised", error="{x}")], "ranks 0-1 ended with {x}"),
    ],
)
def test_describe_endings(ranks: list[dict[str, Any]], words: str | None) -> None:
    assert process_endings.describe_endings(ranks) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{}, {}], "the Kineto trace of ranks 0-1 is lost: it is written when a window closes; "
         "steps 3-5 of 3-9 are recorded by each of them"),
        ([{}, {"files": ["kineto_trace_1.json.gz"], "steps": [3, 4]}],
         "the Kineto trace of rank 0 is lost: it is written when a window closes; steps 3-4 of 3-9 are"),
        ([{"steps": []}], "closes; no complete step of 3-9 is recorded"),
        ([{"steps": None}], "closes; not all of steps 3-9 are recorded"),
        ([{"sources": ["kineto", "flight_recorder"], "steps_asked": "3:"}],
         "closes; the Flight Recorder dump of rank 0 is lost: it is written when a window closes; steps 3-5 of 3 on"),
        ([{"sources": ["et"]}], "steps 3-5 of 3-9 are recorded"),
        ([{"sources": ["et"], "steps_asked": "3:6"}], None),
        ([{"sources": ["et"], "steps_asked": "3:"}], None),
        ([{"steps_asked": "odd"}], "it is written when a window closes"),
        ([{"ended": {"how": "killed", "in_window": False, "error": None}}], None),
        ([{"ended": None}, {"ended": {"how": "raised", "in_window": True, "error": "E"}}], None),
    ],
)  # fmt: skip
def test_describe_losses(changes: list[dict[str, Any]], words: str | None) -> None:
    facts = {
        "sources": ["kineto", "et"],
        "files": ["observer_0.etob"],
        "steps": [3, 4, 5],
        "steps_asked": "3:10",
    }
    said = process_endings.describe_losses(
        [ended(rank, "killed", True) | facts | change for rank, change in enumerate(changes)]
    )
    assert said is None if words is None else said is not None and words in said


def test_salvage_a_killed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    left(run, 0, 2**22 + 1)
    left(run, 1, 2**22 + 2, end_ns=10**18 + 9, steps=[5, 6])
    assert main(["info", str(run)]) == 1
    assert f"recover its traces with etloom salvage {run}" in capsys.readouterr().err
    assert main(["salvage", str(run)]) == 0
    assert capsys.readouterr().err == (
        f"etloom: {run}: rank 0 was killed in its window, or ended by os._exit; rank 1 "
        "was killed while its window was "
        f"written, or ended by os._exit; the native observer's trace up to then is kept; next: etloom info {run}\n"
    )
    assert (run / "observer_1.etob").read_text() == "of rank 1"
    assert not list(run.glob(".etloom-*"))
    facts = json.loads((run / "run.json").read_text())
    assert (facts["command"], facts["returncode"], facts["world_size"]) == (["train"], None, 3)
    assert (facts["job"]["launch"], facts["hosts"]) == (f"{HERE}-1-abc", [HERE])
    assert facts["ended"].startswith("rank 0 was killed in its window")
    assert [(rank["steps"], rank["end"]) for rank in facts["ranks"]] == [
        (None, None),
        ([5, 6], "2001-09-09T01:46:40+00:00"),
    ]
    card = yaml.safe_load((run / "run.yaml").read_text())
    assert card["description"] == f"run: train: {facts['ended']}"
    assert card["workload"]["model"]["iteration"] == 2
    assert main(["salvage", str(run)]) == 1
    assert "no unfinished recording of a killed job" in capsys.readouterr().err


def test_windows_of_a_run_that_was_moved(tmp_path: Path) -> None:
    left(tmp_path / "run", 2, 2**22 + 1, window="step_40")
    (tmp_path / "run").rename(tmp_path / "kept")
    (tmp_path / "run").mkdir()
    kept, warnings = salvage(tmp_path / "kept")
    assert [facts["rank"] for facts in kept] == [2] and not warnings
    assert (tmp_path / "kept" / "step_40" / "observer_2.etob").exists()
    assert not list((tmp_path / "run").iterdir())


def test_published_and_foreign_files_are_not_touched(tmp_path: Path) -> None:
    mine = left(tmp_path, 0, 2**22 + 1)
    (tmp_path / "rank_0.json").write_text(
        json.dumps({"rank": 0, "host": "a", "start_ns": 1, "world_size": 1, "versions": {}})
    )
    stock = left(tmp_path, 1, 2**22 + 2)
    (stock / "et.etob").rename(stock / "et.json")
    kept, warnings = salvage(tmp_path)
    assert kept == []
    assert warnings == [
        f"{mine}: not recovered: et.etob, killed.json, started (process {2**22 + 1})",
        f"{stock}: not recovered: et.json, killed.json, started (process {2**22 + 2})",
    ]
    assert (mine / "et.etob").exists() and (stock / "et.json").exists()


def test_a_rank_killed_while_publishing(tmp_path: Path) -> None:
    folder = left(tmp_path, 1, 2**22 + 1, end_ns=10**18 + 5, steps=[3])
    (folder / "et.etob").rename(tmp_path / "observer_1.etob")
    (tmp_path / "kineto_trace_1.json.gz").touch()
    kept, warnings = salvage(tmp_path)
    assert (process_endings.describe_endings(kept), warnings) == (
        "rank 1 was killed while its window was written, or ended by os._exit",
        [],
    )
    (seal,) = run_folder.read_rank_records(tmp_path)
    assert (seal["files"], seal["steps"]) == (["kineto_trace_1.json.gz", "observer_1.etob"], [3])


@pytest.mark.parametrize(
    "linked", ["run.json", "1/rank_0.json", "1/et.etob", "1/run.json", "1/deep/rank_0.json", "1", ""]
)
def test_nothing_is_written_through_a_link(tmp_path: Path, linked: str) -> None:
    """A folder may be a stranger's, and what it links to its reader's own."""
    run, own = tmp_path / "run", tmp_path / "own"
    folder = left(run, 0, 1)
    (own / "1").mkdir(parents=True)
    (own / "file").write_text("mine")
    at = folder.parent / linked
    if linked.endswith((".json", ".etob")):
        at.parent.mkdir(exist_ok=True)
        at.unlink(missing_ok=True)
        at.symlink_to(own / "file")
    else:
        for path in folder.iterdir():
            path.rename(own / "1" / path.name)
        folder.rmdir()
        if not linked:
            folder.parent.rmdir()
        at.symlink_to(own / linked)
    with pytest.raises(CollectError, match="is a link, which a recording never creates"):
        killed_windows.salvage_run(run)
    assert (own / "file").read_text() == "mine"
    assert not (run / "run.json").exists() and not (run / "rank_0.json").exists()


def test_replacing_a_link_keeps_its_target(tmp_path: Path) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    left(run, 0, 2**22 + 1, window="step_7")
    left(run, 1, 2**22 + 2)
    left(own, 2, 2**22 + 3)
    killed_windows.salvage_run(own)
    before = {path.name: path.read_text() for path in own.iterdir()}
    for name in ("run.json", "run.yaml", "rank_1.json"):
        (run / name).symlink_to(own / ("run.json" if name != "run.yaml" else "own.yaml"))
    (run / "rank_1.json").unlink()
    (run / "step_7").symlink_to(own)  # a window elsewhere
    kept, (warning,) = salvage(run)
    assert [facts["rank"] for facts in kept] == [1] and "(process 4194305)" in warning
    assert {path.name: path.read_text() for path in own.iterdir()} == before
    assert not (run / "run.json").is_symlink() and not (run / "run.yaml").is_symlink()


def test_unfinished_files_have_unique_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of who can tell our chance, a link in the place of the unfinished file is refused, not followed."""
    own = tmp_path / "own"
    own.write_text("mine")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "run.json").symlink_to(own)
    run_folder.write_json(tmp_path / "run.json", {"a": 1}, tmp_path / "s")
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1} and own.read_text() == "mine"
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / "s" / ".run.json.000000000000").symlink_to(own)
    with pytest.raises(FileExistsError):
        run_folder.write_json(tmp_path / "run.json", {"a": 2}, tmp_path / "s")
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1} and own.read_text() == "mine"


def test_files_of_users_are_not_removed(tmp_path: Path) -> None:
    notes = tmp_path / ".etloom-notes"
    notes.mkdir()
    (notes / "plan.txt").write_text("mine")
    with pytest.raises(CollectError, match="no unfinished recording of a killed job"):
        killed_windows.salvage_run(tmp_path)
    (notes / "old").mkdir()
    (notes / "old" / "plan.txt").write_text("mine")
    assert find_unfinished_recording(tmp_path) is None
    folder = left(tmp_path, 0, 2**22 + 1)
    beside = folder.parent / "todo.txt"
    beside.write_text("mine")
    (folder / "plan.txt").write_text("mine")
    kept, warnings = salvage(tmp_path)
    assert len(kept) == 1 and warnings == [f"{folder}: not recovered: plan.txt (process {2**22 + 1})"]
    (folder / "plan.txt").unlink()
    kept, warnings = salvage(tmp_path)
    assert kept == [] and warnings == [f"{folder.parent}: not recovered: todo.txt"]
    beside.unlink()
    assert salvage(tmp_path) == ([], [])
    assert (notes / "plan.txt").exists() and not list(tmp_path.glob(".etloom-*-*"))


def test_leftovers_of_a_restarted_job_are_removed(tmp_path: Path) -> None:
    left(tmp_path, 0, 2**22 + 1)
    seal = {"rank": 0, "host": HERE, "start_ns": 1, "world_size": 1, "versions": {}, "restart": 1}
    (tmp_path / "rank_0.json").write_text(json.dumps(seal))
    assert salvage(tmp_path) == ([], [])
    assert not list(tmp_path.glob(".etloom-*")) and not (tmp_path / "observer_0.etob").exists()


def test_a_running_recording_is_not_salvaged(tmp_path: Path) -> None:
    run = {**os.environ, "ETLOOM_COLLECT": f"{tmp_path}/.etloom-{HERE}-1-abc"}
    process = subprocess.Popen(["sleep", "60"], env=run)
    try:
        while b"ETLOOM_COLLECT" not in Path(f"/proc/{process.pid}/environ").read_bytes():
            time.sleep(0.01)  # it has none yet as it begins
        left(tmp_path, 0, process.pid)
        with pytest.raises(CollectError, match=f"process {process.pid} is still recording; wait"):
            killed_windows.salvage_run(tmp_path)
        # Nor does the launcher touch what a command left running.
        before = sorted(tmp_path.rglob("*"))
        options = RecordingOptions(str(tmp_path), f"{tmp_path}/.etloom-{HERE}-1-abc")
        outcome = finalization.finalize_run(options, 0)
        (line,) = outcome.warnings
        assert (outcome.windows, outcome.ranks, sorted(tmp_path.rglob("*"))) == ((), (), before)
        assert (
            f"process {process.pid} is still running and may be recording; after it has ended, etloom salvage"
            in line
        )
    finally:
        process.kill()
        process.wait()
    assert len(salvage(tmp_path)[0]) == 1
    # This process has the number, and is of no such run.
    left(tmp_path, 1, os.getpid())
    assert len(salvage(tmp_path)[0]) == 1
    # Of another host only time tells.
    folder = left(tmp_path, 2, 7, host="elsewhere")
    with pytest.raises(
        CollectError, match="process 7 on the host of elsewhere-1-abc was recording less than 5 minutes ago"
    ):
        killed_windows.salvage_run(tmp_path)
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))
    assert len(salvage(tmp_path)[0]) == 1


def test_each_launch_records_the_endings_of_its_ranks(tmp_path: Path) -> None:
    for rank, launched in ((0, "one"), (1, "one"), (2, "two")):
        seal = {"rank": rank, "host": "a", "pid": rank, "job": {"launch": launched}, "ended": None}
        seal |= {"world_size": 3, "start_ns": 1}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(seal))
    (tmp_path / "s").mkdir()
    processes = [
        {"host": "a", "pid": 0, "ended": True, "raised": "KeyError"},
        {"host": "a", "pid": 1},
        {"host": "b", "pid": 2, "ended": True},
    ]
    killed_windows.record_endings(tmp_path, "one", 3, processes, tmp_path / "s")
    assert [
        (r["ended"] and r["ended"]["how"], r.get("returncode"))
        for r in run_folder.read_rank_records(tmp_path)
    ] == [
        ("raised", 3),
        ("killed", 3),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("run", "stats"),
    [
        (
            {"ended": "rank 1 was killed", "lost": "the Kineto trace of rank 1", "returncode": 1},
            {
                "job.ended_early": "rank 1 was killed",
                "job.failed": "status 1",
                "job.truncated_recording": "the Kineto trace",
            },
        ),
        ({"ended": None, "returncode": 0}, {}),
        (
            {"ended": None, "returncode": None, "ranks": [{"job": {"supervised": True}}]},
            {"job.end_unknown": "still runs"},
        ),
        ({"returncode": None, "ranks": [{"job": {"supervised": False}}]}, {}),
        ({"returncode": None, "ranks": [None, {"job": 5}]}, {}),
        ({"returncode": None, "ranks": 5, "ended": 7, "lost": 7}, {}),
    ],
)
def test_stats_of_a_killed_run(tmp_path: Path, run: dict[str, Any], stats: dict[str, str]) -> None:
    (tmp_path / "torch_et_0.json").write_text('{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}')
    (tmp_path / "run.json").write_text(json.dumps({"schema": "etloom-run-1", **run}))
    found = etloom.open(tmp_path).stats.filter(pl.col("name").cast(pl.String).str.starts_with("job."))
    told = dict(found.select(pl.col("name", "example").cast(pl.String)).rows())
    assert told.keys() == stats.keys()
    assert all(words in told[name] for name, words in stats.items())


@pytest.mark.slow
def test_losses_are_reported_for_the_affected_ranks(tmp_path: Path) -> None:
    """Also of a rank that left no file: that is a row of the run."""
    facts = {"sources": ["kineto", "et"], "steps_asked": "3:6", "start_ns": 1, "world_size": 3, "pid": 1}
    killed = {"ended": process_endings.KILLED_IN_WINDOW, "steps": [3], "end_ns": None}
    whole = {"steps": [3, 4, 5], "files": ["kineto_trace_1.json"], "ended": {"how": "exited"}}
    for rank, how in enumerate((killed, whole, killed)):
        seal = {**facts, **how, "rank": rank, "host": "a", "job": None}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(seal))
    for rank in (0, 1):
        (tmp_path / f"torch_et_{rank}.json").write_text(
            '{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}'
        )
    (tmp_path / "s").mkdir()
    run_folder.write_run(tmp_path, {}, tmp_path / "s")
    job = etloom.open(tmp_path, use_cache=False)
    why = "is lost: it is written when a window closes; steps 3 of 3-5 are recorded"
    rows = job.stats.filter(pl.col("name") == "job.truncated_recording").select(
        "rank", "severity", "count", "example"
    )
    assert rows.rows() == [
        (None, "data_loss", 1, f"the Kineto trace of rank 2 {why}"),
        (0, "data_loss", 1, f"the Kineto trace of rank 0 {why}"),
    ]
    assert describe_ranks(job).select("rank", "lost").rows() == [(0, 1), (1, 0)]


# Jobs

JOB = """
import os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, at = dist.get_rank(), int(sys.argv[2])
net = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(12):
    if step == at and rank == 1:
        # After the window: wait until it is written.
        while at > 6 and not os.path.exists(f"{sys.argv[3]}/rank_1.json"): time.sleep(0.01)
        if sys.argv[1] == "raise": raise ValueError("no")
        os.kill(os.getpid(), signal.SIGKILL)
    net(torch.ones(1, 8)).sum().backward()
    dist.all_reduce(net.weight.grad)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def native() -> None:
    from etloom.collector.observer import BuildError, build_library

    pytest.importorskip("torch")
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the native observer cannot be built here: {error}")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "step", "words"),
    [
        ("kill", 4, "rank 1 was killed in its window"),
        ("raise", 9, "rank 1 ended with ValueError"),
    ],
)
def test_one_rank_of_two(tmp_path: Path, native: None, how: str, step: int, words: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "run"
    collected = collect(
        [*torchrun, str(script), how, str(step), str(out)], out, CollectOptions("2:6", sources="et")
    )
    assert (collected.exit_status, collected.ranks) == (1, (0, 1))
    run = json.loads((out / "run.json").read_text())
    # What torchrun makes of rank 0 then is a matter of moments.
    assert run["returncode"] == 1
    assert any(part.startswith(words) for part in run["ended"].split("; ")) or (
        run["ended"].startswith("ranks 0-1 were killed") and how == "kill"
    )
    one = run["ranks"][1]
    assert one["ended"]["in_window"] == (step == 4)
    assert one["steps"] == (None if step == 4 else [2, 3, 4, 5])
    record_whole_steps(out)
    cut = process_endings.describe_losses(run_folder.read_rank_records(out)) or ""
    assert ("steps 2-3 of 2-5 are recorded" in cut) == (step == 4)
    assert (json.loads((out / "run.json").read_text())["lost"] or "") == cut
    assert len({rank["job"]["launch"] for rank in run["ranks"]}) == 1
    job = etloom.open(out)
    assert job[1].events.height > 0
    assert run["ended"] in job.stats["example"].cast(pl.String).to_list()
