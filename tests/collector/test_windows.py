"""Windows: their steps and contents, periodic, on demand, under nsys."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import yaml

import etloom
from etloom.cli import main
from etloom.collector import diagnosis, run_folder, workload_card
from etloom.collector import options as recording_options
from etloom.collector.launcher import child_process
from etloom.collector.launcher.collection import CollectResult, collect
from etloom.collector.observer import native_build
from etloom.collector.options import CollectOptions, RecordingOptions
from etloom.collector.rank_environment import current_rank, rank_from_environment
from etloom.collector.session import messages, on_demand, profilers
from etloom.core.errors import CollectError
from etloom.formats.io.workload_card import read_card
from support.paths import ROOT
from support.script_runs import Server, jobs_in_forks, profiles_all_threads
from support.windows import FakeWindow

EXAMPLES = ROOT / "examples"
SCRIPTS = ROOT / "tests" / "collector" / "scripts"
LIGHT = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import light\n"


# What is asked for


@pytest.mark.parametrize(
    ("asked", "window"),
    [
        ((None, None, None, None), (3, 5)),
        (("7:9", None, None, None), (7, 9)),
        ((None, 1000, 4, None), (1000, 1004)),
        ((None, 1000, None, None), (1000, 1002)),
        (("3:5", 100, None, None), (3, 5)),
        ((None, None, None, 2), (3, 5)),
    ],
)
def test_windows(asked: Any, window: tuple[int, int]) -> None:
    assert recording_options.parse_window(*asked) == window


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((None, None, 2, None), "requires --every"),
        ((None, 0, 2, None), "expected at least 1 step, got 0"),
        ((None, 5, 5, None), "overlap"),
        ((None, 5, 2, 2), "cannot be combined with --on-demand"),
        (("3:5", 100, 2, None), "cannot be combined with --steps"),
        (("3:", 100, None, None), "expected a last step with --every"),
    ],
)
def test_invalid_windows_are_refused(asked: Any, words: str) -> None:
    with pytest.raises(CollectError, match=words):
        recording_options.parse_window(*asked)


def test_parse_sources() -> None:
    given = recording_options.parse_sources("kineto, et,stacks,flight-recorder")
    assert [name for name, wanted in given.items() if wanted] == ["kineto", "et", "stack", "flight_recorder"]
    for text, words in (
        ("kineto,tea", "unknown source 'tea'"),
        ("kineto,nsys", "both use CUPTI"),
        ("shapes", "only adds details to a trace"),
        ("et,memory", "require the Kineto trace"),
    ):
        with pytest.raises(CollectError, match=words):
            recording_options.parse_sources(text)


def test_parse_step_by() -> None:
    assert recording_options.parse_step_by(None) == recording_options.parse_step_by("optimizer") == {}
    assert recording_options.parse_step_by("500ms") == {"step_ns": 500_000_000}
    assert recording_options.parse_step_by("1.5s") == {"step_ns": 1_500_000_000}
    assert recording_options.parse_step_by("profiler")["kineto"] is False
    for text in ("5", "1ms", "day", ""):
        with pytest.raises(CollectError):
            recording_options.parse_step_by(text)


def test_expand_folder_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert recording_options.expand_folder_name("/x/{host}/r{rank}") == "/x/node7/r3"
    assert len(recording_options.expand_folder_name("{time}")) == len("20260102T030405Z")
    monkeypatch.delenv("SLURM_PROCID")
    with pytest.raises(CollectError, match="the environment has no rank"):
        recording_options.expand_folder_name("{rank}")
    with pytest.raises(CollectError, match="unknown placeholder"):
        recording_options.expand_folder_name("{node}")


# The windows of one process, without torch


@pytest.mark.torch
def test_periodic_windows_and_a_full_disk(make_recorder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_recorder(first=10, last=12, every=10)
    for _ in range(31):
        job.end_step()
        job.wait()  # the disk keeps up
    job.finish_process()
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [[10, 11], [30]]
    stops = [steps for what, steps in FakeWindow.done if what == "stop"]
    assert stops == [[10, 11], [20, 21], [30]]  # the last was open as the job ended
    (line, end) = capsys.readouterr().err.splitlines()
    assert (
        line == "etloom: the traces of steps 20:22 are dropped: OSError: [Errno 28] No space left on device"
    )
    assert "recorded 1 complete step of the requested steps 30:32" in end


@pytest.mark.torch
def test_repeated_warnings_are_printed_once_and_recorded_each_time(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed: list[list[str]] = []

    def write(window: FakeWindow, warnings: list[str]) -> list[str]:
        sealed.append([*warnings, *window.warnings])
        return ["no dump"]

    monkeypatch.setattr(FakeWindow, "write", write)
    monkeypatch.setattr(FakeWindow, "stop", lambda window: window.warnings.append("lost"))
    job = make_recorder(first=1, last=2, every=3)
    job.messages.warn("11 operators are lost")  # holds a line of the window's as a part
    for _ in range(9):
        job.end_step()
        job.wait()
    assert sealed == [["11 operators are lost", "lost"], ["lost", "no dump", "lost"], ["lost"]]
    assert capsys.readouterr().err.splitlines() == [
        "etloom: 11 operators are lost",
        "etloom: lost",
        "etloom: no dump",
    ]


@pytest.mark.torch
def test_a_slow_disk_skips_windows(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(FakeWindow, "gate", gate)
    job = make_recorder(first=1, last=2, every=3)
    for _ in range(5):
        job.end_step()
    gate.set()
    job.wait()
    for _ in range(3):
        job.end_step()
    job.finish_process()
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [[1], [7]]
    assert capsys.readouterr().err.splitlines() == [
        "etloom: nothing recorded of steps 4:5: the previous window is still being written"
    ]


def test_the_newest_windows_are_kept(tmp_path: Path) -> None:
    def seal(step: int, rank: int, when: int) -> None:
        place = tmp_path / f"step_{step}"
        place.mkdir(exist_ok=True)
        for name in (f"observer_{rank}.etob", f"rank_{rank}.json", "run.json"):
            (place / name).write_text("{}")
        workload_card.write_card(place, {"ranks": []}, tmp_path)
        os.utime(place / f"rank_{rank}.json", (when, when))

    # The job began anew after step 30: 10 is newer.
    for when, step in enumerate((20, 30, 10)):
        for rank in (0, 1):
            seal(step, rank, when)
    assert not run_folder.prune_windows(tmp_path, 0, 3)
    assert run_folder.prune_windows(tmp_path, 0, 2)
    assert sorted(path.name for path in (tmp_path / "step_20").iterdir()) == [
        "observer_1.etob", "rank_1.json", "run.json", "step_20.yaml",
    ]  # fmt: skip
    assert run_folder.prune_windows(tmp_path, 1, 1) and not (tmp_path / "step_20").exists()
    assert [rank for _, rank in run_folder.list_trace_files(tmp_path / "step_30")] == [0, 0, None]
    assert len(run_folder.list_trace_files(tmp_path / "step_10")) == 5
    # What its people put there stays.
    (tmp_path / "step_30" / "notes.txt").write_text("slow")
    (tmp_path / "step_30" / "step_30.yaml").write_text("version: 1")
    assert run_folder.prune_windows(tmp_path, 0, 1)
    assert sorted(path.name for path in (tmp_path / "step_30").iterdir()) == ["notes.txt", "step_30.yaml"]


def test_concurrent_pruning_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seal(step: int, rank: int, when: int) -> Path:
        place = tmp_path / f"step_{step}"
        place.mkdir(exist_ok=True)
        for name in (f"observer_{rank}.etob", f"rank_{rank}.json", "run.json"):
            (place / name).write_text("{}")
        os.utime(place / f"rank_{rank}.json", (when, when))
        return place

    for rank in (0, 1):
        seal(1, rank, 1)
        seal(2, rank, 2)
    unlink = Path.unlink

    def interleaved(path: Path, missing_ok: bool = False) -> None:
        if path.name == "rank_0.json":  # each rank sees a file of the other's
            monkeypatch.setattr(Path, "unlink", unlink)
            assert run_folder.prune_windows(tmp_path, 1, 1)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", interleaved)
    assert run_folder.prune_windows(tmp_path, 0, 1)
    assert [path.name for path in run_folder.list_windows(tmp_path)] == ["step_2"]
    # Left by an earlier such race; one that is being filled now is another thing.
    left = tmp_path / "step_1"
    left.mkdir()
    (left / "run.json").write_text("{}")
    workload_card.write_card(left, {"ranks": []}, tmp_path)
    seal(3, 0, 3)
    assert run_folder.prune_windows(tmp_path, 0, 1)
    assert left.exists()
    os.utime(left, (1, 1))
    os.utime(seal(4, 0, 4) / "rank_0.json", (4, 4))
    assert run_folder.prune_windows(tmp_path, 0, 1)
    assert not left.exists()


def test_a_vanished_card_is_not_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload_card.write_card(tmp_path, {"ranks": []}, tmp_path)
    assert workload_card.generated_cards(tmp_path) == [tmp_path / f"{tmp_path.name}.yaml"]
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as it was when it was asked
    (tmp_path / f"{tmp_path.name}.yaml").unlink()
    assert workload_card.generated_cards(tmp_path) == []


def test_a_job_without_records_gets_no_card(tmp_path: Path) -> None:
    (tmp_path / "observer_0.etob").write_bytes(b"")
    run_folder.add_sequence_length(tmp_path, 128)
    assert [path.name for path in tmp_path.iterdir()] == ["observer_0.etob"]


@pytest.mark.torch
def test_repeated_windows_on_demand(make_recorder: Any, tmp_path: Path) -> None:
    job = make_recorder(on_demand=2)
    for step in range(30):
        if step in (2, 20):
            assert not on_demand.request_recording(tmp_path, timeout_s=0)
        job.end_step()
        job.wait()
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [[6, 7], [24, 25]]


@pytest.mark.torch
def test_the_status_explains_an_empty_run(
    make_recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(ranks: tuple[int, ...] | None = None, steps: int = 6, **options: Any) -> str:
        (tmp_path / "s").mkdir()
        job = make_recorder(supervised=True, ranks=ranks, **options)
        job.report_status(began=True, rank=0)
        for _ in range(steps):
            job.end_step()
        job.finish_process()
        said = diagnosis.explain_empty_run(job.options, messages.read_statuses(tmp_path / "s"))
        (tmp_path / "s").rmdir()
        return said

    assert told(on_demand=2) == "no window was requested: the job ended after 6 steps"
    assert told(first=10, last=12).startswith("the job ended after 6 steps, before step 10 began")
    monkeypatch.setenv("RANK", "1")
    assert told(ranks=(0,), first=2, last=4) == "--ranks 0 excludes all ranks of the job, 1"
    monkeypatch.delenv("RANK")
    on_demand.request_recording(tmp_path, timeout_s=0)
    assert told(on_demand=2, steps=2) == "the job ended after 2 steps, before requested step 4 began"
    assert capsys.readouterr().err == ""  # it is the launcher who says it
    # Where none waits, the process says it itself.
    job = make_recorder(first=10, last=12)
    job.end_step()
    job.finish_process()
    assert capsys.readouterr().err.startswith(
        "etloom: nothing recorded: the job ended after 1 step, before step 10"
    )


@pytest.mark.torch
def test_unmarked_steps_by_time_do_not_count(make_recorder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*counts: int, **options: Any) -> list[Any]:
        FakeWindow.done.clear()
        job = make_recorder(step_ns=20_000_000, first=3, last=6, **options)
        job.count = 1
        for count in counts:
            job.end_step(count)
            job.wait()
        job.finish_process()
        return [steps for what, steps in FakeWindow.done if what == "write"]

    assert ran(2, 3, 4, 5, 6) == [[3, 4, 5]] and capsys.readouterr().err == ""
    # 4 was marked too late to be one: 3 lasted for both.
    assert ran(2, 3, 5, 6) == [[3, 5]]
    assert "too busy to mark the begin of every step by time" in capsys.readouterr().err
    # As where the profilers took long to get ready: no window of empty steps.
    assert ran(2, 52, 53) == [] and FakeWindow.done[-1] == ("abandon", [])
    assert capsys.readouterr().err == (
        "etloom: nothing recorded of steps 3:6: the profilers were ready only in step 52; choose later steps\n"
    )
    # The last steps of the window went by.
    assert ran(2, 3, 9) == [[3]]
    assert "recorded 1 complete step of the requested steps 3:6" in capsys.readouterr().err


@pytest.mark.torch
def test_a_ring_keeps_what_came_before_a_request(make_recorder: Any, tmp_path: Path) -> None:
    job = make_recorder(first=3, last=5, on_demand=2, ring=True)
    for step in range(30):
        if step == 20:
            assert not on_demand.request_recording(tmp_path, timeout_s=0)
        job.end_step()
        job.wait()
    job.finish_process()
    # Asked in step 20, so two steps from 24 on; what the ring held at the job's end nobody asked for.
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [[*range(3, 26)]]
    assert FakeWindow.done[-1] == ("abandon", [*range(27, 30)])


@pytest.mark.torch
def test_a_ring_is_kept_if_the_job_raises(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_recorder(first=3, last=5, on_demand=2, ring=True)
    for _ in range(10):
        job.end_step()
    monkeypatch.setattr(sys, "last_value", KeyError("x"), raising=False)
    job.finish_process()
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [[*range(3, 10)]]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "etloom: this window was not requested; it is kept because the job ended with KeyError"


# Jobs


@pytest.fixture(scope="module")
def native() -> None:
    from etloom.collector.observer import BuildError, build_library

    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the native observer cannot be built here: {error}")


ASKING = (
    LIGHT
    + """
import os, signal, sys, threading, time, torch
from pathlib import Path
net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), 0.1)
run = Path(sys.argv[1])
for step in range(40):
    if step == 2:
        os.kill(os.getppid(), signal.SIGUSR2)
        while not (run / ".etloom-request").exists(): time.sleep(0.01)
    if step == 20:
        while not (run / "step_6" / "run.json").exists(): time.sleep(0.05)
        while any(thread.name == "etloom-writer" for thread in threading.enumerate()): time.sleep(0.01)
        (run / ".etloom-request").touch()
    net(torch.ones(1, 2)).sum().backward(); optimizer.step()
"""
)


@pytest.mark.torch
@pytest.mark.slow
def test_requests_by_signal_and_by_file(
    tmp_path: Path, native: None, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    collected = collect(
        [sys.executable, "-c", ASKING, str(out)],
        out,
        CollectOptions(on_demand=2, sources="et", max_windows=1),
    )
    assert (collected.exit_status, collected.warnings, collected.ranks) == (0, (), (0,))
    assert capfd.readouterr().err == "etloom: only the newest 1 windows are kept (--max-windows)\n"
    assert [path.name for path in collected.windows] == ["step_24"]  # the job saw step_6
    assert json.loads((out / "step_24" / "rank_0.json").read_text())["steps"] == [24, 25]
    assert sorted(etloom.open(out / "step_24")[0].events["step"].drop_nulls().unique()) == [24, 25]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    again = [sys.executable, "-c", "pass"]
    with pytest.raises(CollectError, match=r"contains step_24/\S+ of an earlier run"):
        collect(again, out)
    assert collect(again, out, overwrite=True).exit_status == 0
    assert run_folder.list_trace_files(out / "step_24") == []


@pytest.mark.torch
@pytest.mark.slow
def test_steps_of_the_jobs_own_profiler(tmp_path: Path, native: None, script_server: Server) -> None:
    out = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / "train_oddly.py"), "profile"]
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect(command, out, CollectOptions("3:5", step_by="profiler"))
    assert (collected.exit_status, collected.warnings) == (0, ())
    trace = etloom.open(out)[0]
    named = trace.events["name"].cast(pl.String).to_list()
    assert [name for name in named if name.startswith("ProfilerStep#")] == [
        "ProfilerStep#3",
        "ProfilerStep#4",
    ]
    assert named.count("aten::addmm") == 2 and not list(out.glob("kineto*"))
    assert sorted(trace.events["step"].drop_nulls().unique()) == [3, 4]


TIMED = (
    LIGHT
    + """
import time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
records = [Path(sys.argv[1]) / f"rank_{rank}.json" for rank in range(2)]
deadline = time.time() + 120
while True:
    going = torch.tensor([float(time.time() < deadline and not all(path.exists() for path in records))])
    dist.broadcast(going, 0)
    if not going.item(): break
    net(torch.ones(1, 2)); time.sleep(0.005)
dist.destroy_process_group()
time.sleep(0.2)  # see examples/train_ddp.py
"""
)


@pytest.mark.torch
@pytest.mark.slow
def test_steps_by_time_are_the_same_on_all_ranks(tmp_path: Path, native: None) -> None:
    if not profiles_all_threads():
        pytest.skip("this torch cannot profile the threads of the job from one of the collector")
    out, script = tmp_path / "run", tmp_path / "timed.py"
    script.write_text(TIMED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    collected = collect(
        [*torchrun, str(script), str(out)],
        out,
        CollectOptions("5:7", step_by="1s", sources="kineto,et,flight-recorder"),
    )
    assert (collected.exit_status, collected.warnings, collected.ranks) == (0, (), (0, 1))
    begins = []
    for trace in etloom.open(out).values():
        steps = trace.events.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#"))
        assert steps["name"].cast(pl.String).to_list() == ["ProfilerStep#5", "ProfilerStep#6"]
        begins.append(steps["ts"][1])
        named = trace.nodes["name"].cast(pl.String).to_list()
        # Recorded on a thread of ours: of what the job's own thread does nothing is missing in Kineto.
        assert named.count("aten::linear") > 5
        own = [name for name in named if not name.startswith(("[", "##"))]
        assert 0.97 * len(own) < trace.links.height <= len(own)  # but at the window's edges
    assert abs(begins[0] - begins[1]) < 1_000_000_000  # the length of a step
    dump = json.loads((out / "flight_recorder_1.json").read_text())
    assert {entry["profiling_name"] for entry in dump["entries"]} == {"gloo:broadcast"}


FULL = (
    LIGHT
    + """
import torch
net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    for _ in range(int(sys.argv[1])): net(torch.ones(1, 2))
    net(torch.ones(1, 2)).sum().backward(); optimizer.step()
"""
)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("why", ["full", "another torch"])
def test_a_limited_recording_is_reported_in_one_line(
    tmp_path: Path, native: None, monkeypatch: pytest.MonkeyPatch, script_server: Server, why: str
) -> None:
    if why != "full":  # as where the job's Python has another one than this
        monkeypatch.setattr(native_build, "build_if_native", lambda requested, *_: (requested, []))
        monkeypatch.setenv("ETLOOM_OBSERVER_CACHE", str(tmp_path / "nothing"))
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect(
            [sys.executable, "-c", FULL, "6000" if why == "full" else "10"],
            tmp_path / "run",
            CollectOptions("1:2", sources="et", max_bytes=1 << 20),
        )
    assert (collected.exit_status, collected.warnings, collected.ranks) == (0, (), (0,))
    stderr = (tmp_path / "fork" / "stderr").read_text()
    (line,) = [line for line in stderr.splitlines() if line.startswith("etloom:")]
    if why == "full":
        assert re.fullmatch(
            r"etloom: \d+ operators are not recorded: --max-size is reached or the disk is full", line
        )
        assert int(line.split()[1]) > 10_000
    else:
        assert line.startswith(
            "etloom: the native observer was not built for this torch: torch's observer is used"
        )
        assert (tmp_path / "run" / "torch_et_0.json.gz").exists()
    said = json.loads((tmp_path / "run" / "rank_0.json").read_text())["warnings"]
    assert said == [line.removeprefix("etloom: ")]


# What each launcher puts into the environment of rank 2 of 4.
LAUNCHERS = {
    "torchrun": {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "SLURM_PROCID": "1",
    },  # one a node, by srun
    "accelerate": {"RANK": "2", "WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "true"},
    "deepspeed": {"RANK": "2", "WORLD_SIZE": "4", "CROSS_RANK": "0"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    "mpiexec": {"PMI_RANK": "2", "PMI_SIZE": "4"},
    "srun": {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"},
    "torchrun by srun": {"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    "srun with mpich": {"PMI_RANK": "2", "PMI_SIZE": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"},
}
# What is no rank: a batch script is task 0 of its own, and so is one that srun starts alone.
ALONE = {
    "nothing": {},
    "sbatch": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    "srun -n 1": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "nonsense": {"RANK": "two", "PMI_RANK": "\u00b2", "SLURM_PROCID": "", "SLURM_STEP_NUM_TASKS": "4"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_from_each_launcher(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    set_launcher(monkeypatch, LAUNCHERS[launcher])
    assert (current_rank(), rank_from_environment()) == ((2, 4), 2)


@pytest.mark.parametrize("launcher", ALONE)
def test_no_rank_in_the_environment(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    set_launcher(monkeypatch, ALONE[launcher])
    assert (current_rank(), rank_from_environment()) == ((0, 1), None)


def set_launcher(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name in {name for names in LAUNCHERS.values() for name in names}:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


SRUN = """#!/bin/sh
shift 2
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 "$@" & done
wait
"""
BY_SLURM = (
    LIGHT
    + """
import os, sys, time, torch, torch.distributed as dist
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(20):
    if rank == 1 and step == 2: open(sys.argv[2], "w").close()  # anybody asks
    net(torch.ones(1, 2)).sum().backward(); dist.all_reduce(net.weight.grad); optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
time.sleep(0.2)  # see examples/train_ddp.py
"""
)


@pytest.mark.torch
@pytest.mark.slow
def test_all_ranks_of_srun_record_the_requested_steps(
    tmp_path: Path, native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    script = [
        sys.executable,
        "-c",
        BY_SLURM,
        str(tmp_path / "meeting"),
        str(tmp_path / "run" / on_demand.REQUEST_FILE),
    ]
    collected = collect(
        [str(tmp_path / "srun"), "-n", "2", *script],
        tmp_path / "run",
        CollectOptions(sources="et", on_demand=2),
    )
    assert (collected.exit_status, collected.warnings, collected.ranks) == (0, (), (0, 1))
    (window,) = collected.windows
    steps = [json.loads((window / f"rank_{rank}.json").read_text())["steps"] for rank in (0, 1)]
    assert steps[0] == steps[1] and len(steps[0]) == 2 and f"step_{steps[0][0]}" == window.name
    card = read_card(window / f"{window.name}.yaml")
    assert card["workload"]["hardware"]["xpu_spec"]["total_count"] == 2


@pytest.mark.torch
@pytest.mark.slow
def test_tasks_of_srun_are_ranks(tmp_path: Path, native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher(monkeypatch, {})
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    script = [sys.executable, str(EXAMPLES / "train_plain.py")]
    collected = collect(
        [str(tmp_path / "srun"), "-n", "2", *script], tmp_path / "run", CollectOptions(sources="et")
    )
    assert (collected.exit_status, collected.warnings, collected.ranks) == (0, (), (0, 1))
    for rank in (0, 1):
        facts = json.loads((tmp_path / "run" / f"rank_{rank}.json").read_text())
        assert (facts["rank"], facts["world_size"], facts["steps"]) == (rank, 2, [3, 4])
        assert (tmp_path / "run" / f"observer_{rank}.etob").exists()


FAKE_NSYS = """#!/bin/sh
echo "$@" > "$NSYS_SAID"
while [ "${1#--}" != "$1" ] || [ "$1" = profile ]; do shift; done
exec "$@"
"""


@pytest.mark.torch
@pytest.mark.slow
def test_under_nsys(tmp_path: Path, native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA there is no capture range to open; the program runs, and its operators are recorded beside."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").write_text(FAKE_NSYS)
    (tmp_path / "bin" / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NSYS_SAID", str(tmp_path / "said"))
    out = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / "train_plain.py")]
    collected = collect(command, out, CollectOptions(sources="et,shapes,nsys"))
    assert (collected.exit_status, collected.ranks) == (0, (0,))
    (line,) = collected.warnings
    assert line.startswith(f"{out}: nsys wrote no report of rank 0: it records between cudaProfilerStart and")
    said = (tmp_path / "said").read_text()
    assert "--capture-range=cudaProfilerApi" in said and f"--output={out}/nsys_0 {sys.executable}" in said
    assert (out / "observer_0.etob").exists() and not (out / "kineto_trace_0.json.gz").exists()


@pytest.mark.parametrize(
    ("command", "around"),
    [
        ("python t.py -x", "NSYS_0 python t.py -x"),
        ("srun -n 8 python3 -m a.b --x", "srun -n 8 NSYS_%q{SLURM_PROCID} python3 -m a.b --x"),
        ("mpirun -n 2 /bin/python3.11 t.py", "mpirun -n 2 NSYS_%q{OMPI_COMM_WORLD_RANK} /bin/python3.11 t.py"),
        (
            "torchrun --nproc-per-node 8 t.py --lr 1",
            "torchrun --nproc-per-node 8 --no-python NSYS_%q{RANK} python -u t.py --lr 1",
        ),
        (
            "python -m torch.distributed.run --standalone -m pkg.train a",
            "python -m torch.distributed.run --standalone --no-python NSYS_%q{RANK} python -u -m pkg.train a",
        ),
        (
            "accelerate launch --num_processes 2 t.py",
            "accelerate launch --num_processes 2 --no_python NSYS_%q{RANK} python -u t.py",
        ),
        ("./train.sh", None),
        ("torchrun train", None),
    ],
)  # fmt: skip
def test_nsys_wraps_the_program_of_a_rank(command: str, around: str | None) -> None:
    words = child_process.wrap_command(shlex.split(command), "/r")
    if around is None:
        assert words is None
        return
    assert words is not None
    start = words.index("nsys")
    end = next(i for i, word in enumerate(words) if word.startswith("--output="))
    assert words[start + 1] == "profile" and "--capture-range-end=stop" in words[start:end]
    rank = words[end].removeprefix("--output=/r/nsys_")
    assert " ".join([*words[:start], f"NSYS_{rank}", *words[end + 1 :]]) == around


def test_explain_missing_reports(tmp_path: Path) -> None:
    (tmp_path / "nsys_1.nsys-rep").touch()
    assert child_process.explain_missing_reports(tmp_path, [1]) is None
    assert (child_process.explain_missing_reports(tmp_path, [0, 1]) or "").startswith(
        "nsys wrote no report of rank 0: "
    )
    assert (child_process.explain_missing_reports(tmp_path, [0, 1, 2, 3]) or "").startswith(
        "nsys wrote no report of ranks 0, 2-3: "
    )


@pytest.mark.parametrize("more", [{"every": 10}, {"on_demand": 2}])
def test_nsys_records_one_window(tmp_path: Path, more: dict[str, int]) -> None:
    with pytest.raises(CollectError, match="nsys records one window"):
        collect([sys.executable, "-c", "pass"], tmp_path / "run", CollectOptions(sources="nsys", **more))


def test_the_command_for_a_cluster_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "build_if_native", lambda requested, *_: (requested, []))
    monkeypatch.setattr("shutil.which", lambda name: None)
    out = str(tmp_path / "run")
    front = ["collect", "--out", out, "--with", "nsys,flight-recorder"]
    assert main([*front, "--print-command", "--", "torchrun", "t.py"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["mkdir", "-p"] and words[3:5] == ["&&", "env"]
    assert "TORCH_FR_BUFFER_SIZE=2000" in words and words[-4:] == [
        f"--output={out}/nsys_%q{{RANK}}",
        "python",
        "-u",
        "t.py",
    ]
    options = json.loads(next(word for word in words if word.startswith("ETLOOM_COLLECT=")).partition("=")[2])
    assert (options["nsys"], options["kineto"], options["out"]) == (True, False, out)
    assert not Path(out).exists()
    assert main([*front, "--", "torchrun", "t.py"]) == 1
    assert "nsys is not on the PATH; use --print-command" in capsys.readouterr().err


# The card


def test_the_card_contains_the_facts_of_the_ranks(tmp_path: Path) -> None:
    def rank(number: int, stage: int) -> dict[str, Any]:
        return {
            "rank": number,
            "host": f"node{number // 4}",
            "world_size": 8,
            "local_world_size": 4,
            "backend": "nccl",
            "device_name": "NVIDIA H100",
            "steps": [3, 4],
            "files": [f"observer_{number}.etob", f"nsys_{number}.nsys-rep"],
            "versions": {"torch": "2.13.0", "nccl": "2.27.3"},
            "environment": {"NCCL_ALGO": "Ring"},
            "groups": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(8))}],
            "model": {
                "parameters": 1000 + stage,
                "embedding_parameters": 10,
                "batch_of_rank": 4,
                "training": True,
                "dtype": "bfloat16",
                "parallel": {"pp": 2, "tp": 2},
                "sequence": 48,
            },
        }

    run = {
        "ranks": [rank(number, number // 4) for number in range(8)],
        "world_size": 8,
        "command": ["t.py", '"q"'],
    }
    folder = tmp_path / "llama"
    folder.mkdir()
    workload_card.write_card(folder, run, tmp_path)
    found = read_card(folder / "llama.yaml")
    plan = found["Model-executor"]["model_plan_parallelization"]
    assert plan == {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "pp": 2, "cp": 1, "ep": 1, "pp_mb": None}
    workload = found["workload"]
    assert workload["model"]["model_arch"]["num_params"] == 2001  # of both stages
    assert (workload["model"]["phase"], workload["model"]["precision"]) == ("training", "bf16")
    assert (workload["data"]["batch_size"], workload["data"]["seq_len"]) == (8, 48)
    assert workload["hardware"]["xpu_spec"] == {
        "type": "GPU", "model": "NVIDIA H100", "total_count": 8, "count_per_node": 4,
    }  # fmt: skip
    library = found["Model-executor"]["communication_library"]
    assert library == {"name": "nccl", "version": "2.27.3", "env": {"NCCL_ALGO": "Ring"}}
    assert found["Model-executor"]["communicator_groups"] == [
        {"name": "0", "description": "default_pg", "ranks": list(range(8))}
    ]
    assert found["metric_source"]["traces"] == ["json", "nsys"]
    assert found["description"] == 'llama: t.py "q"'
    # What its people wrote stays.
    (folder / "llama.yaml").write_text("version: 1\nworkload: {}\n")
    workload_card.write_card(folder, run, tmp_path)
    assert yaml.safe_load((folder / "llama.yaml").read_text()) == {"version": 1, "workload": {}}


FACTS = """
import json, torch, sys
sys.path.insert(0, sys.argv[1])
from torch import nn
from etloom.collector.session import model_facts
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.MultiheadAttention(8, 2) for _ in range(3)])
        self.tied = self.words
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
class Sums(torch.utils.data.Dataset):
    def __len__(self): return 4
net, loss = Net().bfloat16(), nn.MSELoss()
loader = torch.utils.data.DataLoader(torch.utils.data.Subset(Sums(), [0, 1]), batch_size=2)
print(json.dumps(model_facts.collect_model_facts()))
"""


@pytest.mark.torch
@pytest.mark.slow
def test_collect_model_facts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FACTS, str(ROOT)], capture_output=True, text=True, check=True
    )
    attention = 3 * 8 * 8 + 3 * 8 + 8 * 8 + 8
    assert json.loads(done.stdout) == {
        "parameters": 80 + 3 * attention + 5 * 72,
        "embedding_parameters": 80,
        "class": "Net",
        "dtype": "bfloat16",
        "layers": 3,
        "heads": 2,
        "head_dim": 4,
        "training": True,
        "moe": True,
        "batch_of_rank": 2,
        "dataset": "Sums",
    }


@pytest.mark.torch
def test_the_data_set_is_found_without_running_code_of_the_job() -> None:
    from torch.utils.data import Subset as TorchSubset

    from etloom.collector.session import model_facts

    class Subset:  # by name only
        @property
        def info(self) -> Any:
            raise RuntimeError("a database is asked here")

    class Named:
        def __init__(self) -> None:
            self._info = SimpleNamespace(dataset_name="wikitext")

    def of(dataset: Any) -> str | None:
        return model_facts._dataset_name(SimpleNamespace(dataset=dataset))

    ring: Any = TorchSubset(Named(), [0])  # type: ignore[arg-type,var-annotated]
    assert (of(Subset()), of(ring)) == ("Subset", "wikitext")
    ring.dataset = ring
    assert of(ring) is None


@pytest.mark.torch
def test_an_error_in_the_model_does_not_cost_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from etloom.collector.session import model_facts
    from etloom.collector.session.window import Window as RealWindow

    def raises() -> Any:
        raise ValueError("no\nway")

    monkeypatch.setattr(model_facts, "collect_model_facts", raises)
    window = RealWindow(RecordingOptions(str(tmp_path), str(tmp_path / "s"), kineto=False, et=False))
    window.prepare()
    window.start()
    window.stop()
    assert window.warnings == ["the model could not be inspected: ValueError: no way"]
    window.write([])
    seal = json.loads((tmp_path / "rank_0.json").read_text())
    assert (seal["model"], seal["warnings"]) == ({}, ["the model could not be inspected: ValueError: no way"])


@pytest.mark.torch
@pytest.mark.parametrize("error", [OSError("file too short"), AttributeError("etloom_export")])
def test_without_the_library_torch_exports_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pytest.importorskip("torch")
    from etloom.collector.observer import BuildError, execution_trace_observer, profiler_gate

    def broken(path: Path) -> Any:
        raise error

    monkeypatch.setattr(execution_trace_observer, "build_library", lambda: tmp_path / "observer.so")
    monkeypatch.setattr(execution_trace_observer, "_load", broken)
    execution_trace_observer.load_library.cache_clear()
    with pytest.raises(BuildError, match="cannot be loaded"):
        execution_trace_observer.load_library()
    monkeypatch.setattr(profiler_gate, "find_library", lambda: tmp_path / "observer.so")
    written: list[str] = []
    profile = SimpleNamespace(
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(_pybind11_conduit_v1_=None)),
        export_chrome_trace=written.append,
    )
    profiler_gate.export_chrome_trace(profile, tmp_path / "kineto.json")
    assert written == [str(tmp_path / "kineto.json")]


# After the job


def test_failures_after_the_job_keep_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launched(*_: Any, **__: Any) -> CollectResult:
        (tmp_path / "observer_0.etob").write_bytes(b"")
        return CollectResult(tmp_path, 3, (0,))

    def broken(*_: Any) -> None:
        raise TypeError("not\nthis")

    monkeypatch.setattr("etloom.collector.collect", launched)
    monkeypatch.setattr("etloom.api.files.convert", broken)
    monkeypatch.setattr("etloom.formats.read", broken)
    monkeypatch.setattr("etloom.cli.report.write_report", broken)
    assert main(["collect", "--out", str(tmp_path), "--observer", "stock", "--report", "--", "true"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        f"etloom: {tmp_path / 'torch_et_0.json.gz'} is not written: TypeError: not this",
        f"etloom: {tmp_path}: the workload card lacks the sequence length: TypeError: not this",
        f"etloom: recorded rank 0 in {tmp_path}; next: etloom report {tmp_path}",
        f"etloom: {tmp_path}: no report: TypeError: not this",
    ]


def test_sequence_length_with_a_nested_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from etloom.api import recording

    (tmp_path / "observer_0.etob").write_bytes(b"")
    nodes = pl.DataFrame({"id": [1, 2], "name": ["aten::embedding"] * 2})
    tensors = pl.DataFrame({"node": [1, 2], "io": [0, 0], "index": [1, 1], "shape": [None, "[4, 128]"]})
    noted: list[int] = []
    monkeypatch.setattr("etloom.formats.read", lambda path: SimpleNamespace(nodes=nodes, tensors=tensors))
    monkeypatch.setattr(run_folder, "add_sequence_length", lambda folder, length: noted.append(length))
    recording.record_sequence_length(tmp_path)
    assert noted == [128]


@pytest.mark.torch
def test_a_torch_that_profiles_one_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C import _profiler

    def config() -> None:
        """Accept no argument, as in torch 2.6."""

    monkeypatch.setattr(_profiler, "_ExperimentalConfig", config)
    for step_ns, lost in ((None, "their operators"), (20_000_000, "all operators")):
        warnings: list[str] = []
        profilers._all_threads_config(RecordingOptions("run", "scratch", step_ns=step_ns), warnings)
        assert lost in warnings[0]
