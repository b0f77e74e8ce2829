"""Failures around a recording: kills, full disks, containers, late requests."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.api import recording
from etloom.collector import process_endings, run_folder
from etloom.collector.launcher import finalization, step_hooks
from etloom.collector.launcher.collection import collect
from etloom.collector.options import CollectOptions, RecordingOptions
from etloom.collector.recovery import killed_windows
from etloom.collector.session import messages as process_messages
from etloom.collector.session import on_demand
from etloom.collector.session.messages import MessageLog
from etloom.collector.session.profiler_guard import ProfilerGuard
from etloom.collector.session.recording import record
from etloom.collector.session.window import Window
from support.script_runs import Server, jobs_in_forks
from support.windows import FakeWindow

HERE = socket.gethostname()


@pytest.mark.slow
def test_concurrent_status_writes_keep_their_order(tmp_path: Path) -> None:
    facts = process_messages.ProcessStatus(str(tmp_path))
    left: list[bool] = []

    def leave() -> None:
        for number in range(300):
            facts.facts["missed"] = ["x" * number]
            left.append(facts.write())

    threads = [threading.Thread(target=leave) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [True] * 900
    assert [found["missed"] for found in process_messages.read_statuses(tmp_path)] == [["x" * 299]]


def test_ranks_in_containers_share_pid_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    options = RecordingOptions(
        str(tmp_path), f"{tmp_path}/.etloom-host-9-abc", et=False, kineto=False, every=10
    )
    first, second = Window(options), Window(options)
    for rank, window in enumerate((first, second)):
        window.prepare()
        (window._folder / "kineto.json").write_text(str(rank))
        assert killed_windows.window_pid(window._folder) == 1
    second.abandon()
    assert [path.read_text() for path in Path(options.scratch).glob("*/kineto.json")] == ["0"]
    for rank in range(2):
        facts = process_messages.ProcessStatus(options.scratch)
        facts.facts |= {"rank": rank, "ended": rank == 1}
        assert facts.write()
    processes = process_messages.read_statuses(Path(options.scratch))
    assert [(facts["rank"], facts["pid"]) for facts in processes] == [(0, 1), (1, 1)]
    for rank in range(2):
        seal = {"rank": rank, "host": socket.gethostname(), "pid": 1, "job": {"launch": "a"}, "ended": None}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(seal | {"world_size": 2, "start_ns": 1}))
    killed_windows.record_endings(tmp_path, "a", 0, processes, tmp_path)
    assert [facts["ended"]["how"] for facts in run_folder.read_rank_records(tmp_path)] == ["killed", "exited"]


def test_kill_after_publishing_loses_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / f".etloom-{HERE}-1-abc"
    folder = scratch / f"{2**22 + 1}-{'0' * 12}"
    folder.mkdir(parents=True)
    (folder / process_endings.STARTED_FILE).touch()
    facts = {
        "rank": 0,
        "world_size": 1,
        "host": HERE,
        "pid": 2**22 + 1,
        "start_ns": 10**18,
        "end_ns": 10**18 + 9,
    }
    facts |= {
        "steps": [3, 4],
        "restart": 0,
        "files": ["observer_0.etob"],
        "ended": None,
        "job": {"launch": "a"},
    }
    (folder / process_endings.KILLED_NOTE).write_text(json.dumps(facts | {"window": "."}))
    (tmp_path / "rank_0.json").write_text(json.dumps(facts))
    (tmp_path / "observer_0.etob").write_text("whole")
    options = RecordingOptions(str(tmp_path), str(scratch), supervised=True)
    assert finalization.finalize_run(options, 137) == finalization.RunOutcome((tmp_path,), (0,), ())
    assert not scratch.exists() and (tmp_path / "observer_0.etob").read_text() == "whole"


def test_interrupted_pruning_is_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        (tmp_path / f"step_{step}").mkdir()
        for name in (
            "observer_0.etob",
            "kineto_trace_0.json.gz",
            "torch_et_0.json.gz",
            "rank_0.json",
            "run.json",
        ):
            (tmp_path / f"step_{step}" / name).write_text("{}")
        os.utime(tmp_path / f"step_{step}" / "rank_0.json", (step, step))
    unlink = Path.unlink
    for _ in range(3):
        left = 1

        def killed(path: Path, missing_ok: bool = False) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            unlink(path, missing_ok)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Path, "unlink", killed)
            run_folder.prune_windows(tmp_path, 0, 2)
        # Whatever there is of the window still has its seal, so that the next one sees it.
        assert (tmp_path / "step_0" / "rank_0.json").exists()
    assert run_folder.prune_windows(tmp_path, 0, 2)
    assert [place.name for place in run_folder.list_windows(tmp_path)] == ["step_1", "step_2"]


@pytest.mark.torch
@pytest.mark.parametrize("where", ["prepare", "start"])
def test_a_temporarily_full_disk_skips_windows(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    full, does = {8, 12}, getattr(FakeWindow, where)

    def fails(window: FakeWindow) -> None:
        if window.options.first in full:
            raise OSError(28, "No space left on device")
        does(window)

    monkeypatch.setattr(FakeWindow, where, fails)
    job = make_recorder(first=4, last=5, every=4)
    for _ in range(22):
        job.end_step()
        job.wait()
    job.finish_process()
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [
        [4],
        [16],
    ]  # the disk fails at 20
    assert [what for what, _ in FakeWindow.done].count("abandon") == 2
    assert capsys.readouterr().err.splitlines() == [
        "etloom: nothing recorded of steps 8:9: OSError: [Errno 28] No space left on device",
        "etloom: 3 windows missed in total; the last one: the traces of steps 20:21 are dropped: "
        "OSError: [Errno 28] No space left on device",
    ]


@pytest.mark.torch
def test_other_errors_end_the_recording(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(window: FakeWindow) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(FakeWindow, "prepare", fails)
    job = make_recorder(first=4, last=5, every=4)
    for _ in range(22):
        job.end_step()
    job.finish_process()
    assert capsys.readouterr().err == (
        "etloom: recording failed in step 3, the job continues without it: RuntimeError: odd\n"
    )


def test_missed_windows_are_reported_sparingly(capsys: pytest.CaptureFixture[str]) -> None:
    words = MessageLog()
    for number in range(1, 1235):
        words.report_missed(f"busy at {number}", sparingly=True)
        if number == 12:
            assert words.take_for_record(has_several_windows=True) == [
                "busy at 1",
                "busy at 10 (10 windows missed so far)",
                "10 more windows missed before this one: busy at 12",
            ]
    words.report_total_missed()
    words.report_total_missed()
    assert capsys.readouterr().err.splitlines() == [
        "etloom: busy at 1",
        "etloom: busy at 10 (10 windows missed so far)",
        "etloom: busy at 100 (100 windows missed so far)",
        "etloom: busy at 1000 (1,000 windows missed so far)",
        "etloom: 1,234 windows missed in total; the last one: busy at 1234",
    ]
    words.report_missed("the only one", sparingly=False)
    assert capsys.readouterr().err == "etloom: the only one\n"


@pytest.mark.torch
@pytest.mark.slow
def test_finished_recordings_are_freed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recordings = []
    for number in range(3):
        with record(tmp_path / str(number), steps="5:6", sources="et", observer="stock") as recording:
            recording.step()
        recordings.append(weakref.ref(recording._recorder))
    del recording
    gc.collect()
    assert [found() for found in recordings] == [None] * 3


OWN = """
import os, sys, time, torch
torch.set_num_threads(1)
def work(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.02)
with torch.profiler.profile() as own:
    model = torch.nn.Linear(4, 4)
    work(10)
print(len(own.events()) > 100)
deadline = time.time() + 120
while time.time() < deadline and not os.path.exists(sys.argv[1]):
    work(10)
print("done")
"""


@pytest.mark.torch
@pytest.mark.slow
def test_steps_by_time_do_not_disturb_the_jobs_profiler(tmp_path: Path, script_server: Server) -> None:
    """The first module, from which time is counted, is made while the job profiles itself."""
    out = tmp_path / "run"
    with jobs_in_forks(script_server, tmp_path / "fork"):
        command = [sys.executable, "-c", OWN, str(out / "rank_0.json")]
        collected = collect(command, out, CollectOptions("4:5", step_by="1s"))
    printed = (tmp_path / "fork" / "stdout").read_text().split()
    assert (collected.exit_status, printed) == (0, ["True", "done"])
    (rank,) = run_folder.read_rank_records(out)
    assert rank["steps"] == [4] and "kineto_trace_0.json.gz" in rank["files"]


@pytest.mark.slow
@pytest.mark.torch
def test_a_profiler_that_exits_past_the_guard_is_inactive() -> None:
    torch = pytest.importorskip("torch")
    with torch.autograd.profiler.profile():
        # `with` has looked up its __exit__ before the guard came.
        guard = ProfilerGuard(lambda what: None, RecordingOptions("out", "scratch", et=False))
        assert guard.active_profiler() == "torch.profiler"
    assert guard.active_profiler() is None
    guard.remove()


@pytest.mark.torch
def test_a_failed_warm_up_does_not_reach_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(recorder: Any, torch: Any) -> None:
        raise RuntimeError("odd")

    class Module:
        def __init__(self) -> None:
            self.made = True

    monkeypatch.setattr(step_hooks, "open_gate", object)
    monkeypatch.setattr(step_hooks, "_warm_up", fails)
    recorder = SimpleNamespace(options=SimpleNamespace(kineto=True), messages=MessageLog())
    step_hooks._count_intervals(recorder, SimpleNamespace(nn=SimpleNamespace(Module=Module)), 10**9)  # type: ignore[arg-type]
    assert Module().made and Module().made
    assert capsys.readouterr().err == "etloom: nothing is recorded, the job continues: RuntimeError: odd\n"


# Names


@pytest.mark.torch
@pytest.mark.parametrize(("ring", "scopes"), [(True, 40_000), (False, 65_600)])
@pytest.mark.slow
def test_unlimited_scope_names_leave_room_for_operator_names(tmp_path: Path, ring: bool, scopes: int) -> None:
    torch = pytest.importorskip("torch")
    from etloom.collector.observer import BuildError, ExecutionTraceObserver, build_library

    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the observer cannot be built here: {error}")
    observer = ExecutionTraceObserver(max_bytes=(1 if ring else 64) << 20, ring=ring)
    observer.register_callback(str(tmp_path / "names.etob"))
    observer.start()
    for number in range(scopes):
        with torch.profiler.record_function(f"request {number:030d}"):
            pass
    ones = torch.ones(3)
    for _ in range(5):
        torch.cumsum(ones, 0)
    with torch.profiler.record_function("late"):
        pass
    observer.stop()
    lost = observer.counters()["no_dictionary"]
    observer.unregister_callback()
    trace = etloom.read(tmp_path / "names.etob")
    assert isinstance(trace, etloom.Trace)
    names = trace.events["name"].cast(pl.String)
    assert (names == "aten::cumsum").sum() == 5 and names[-1] == "unknown"
    # Of a ring half of the quarter of 8 chunks, less what is behind the last whole name; else half of 2**17.
    kept = (128 << 10) // (40 + 16) if ring else 1 << 16
    assert abs(lost - (scopes + 1 - kept)) < 5
    if not ring:
        assert (names == "unknown").sum() == lost


# After the command


def test_large_files_are_not_converted_automatically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("etloom.api.files.convert", lambda source, target, form: read.append(source))
    monkeypatch.setattr(recording, "_MAX_TOTAL_BYTES", 100 << 20)
    for rank, mib in enumerate((60, 65, 40, 1)):
        with (tmp_path / f"observer_{rank}.etob").open("wb") as file:
            file.truncate(mib << 20)  # sparse
    messages = recording.convert_observer_files([tmp_path], lambda folder: Path("my run"))
    assert [path.name for path in read] == ["observer_0.etob", "observer_2.etob"]
    assert messages == [
        "2 observer files: too large to convert automatically; etloom reads it as it is. To get PyTorch's format, run: "
        "etloom convert 'my run/observer_1.etob' 'my run/torch_et_1.json.gz' --to execution-trace"
    ]
    monkeypatch.setattr("etloom.formats.read", lambda path: read.append(path))
    facts = {"rank": 1, "world_size": 4, "host": "a", "pid": 1, "start_ns": 1, "steps": None}
    (tmp_path / "rank_1.json").write_text(json.dumps(facts))
    for rank in (0, 2, 3):
        (tmp_path / f"observer_{rank}.etob").unlink()
    (message,) = recording.record_whole_steps(tmp_path, 64 << 20)
    recording.record_sequence_length(tmp_path)
    assert len(read) == 2
    assert "observer_1.etob: too large to find its complete steps automatically" in message


# Questions


def test_a_request_to_an_earlier_job_is_ignored(tmp_path: Path) -> None:
    on_demand.request_window(tmp_path)
    later = on_demand.WindowRequests(tmp_path, is_cleared=False)
    assert later.next_window(5, 2, 3) is None and not (tmp_path / on_demand.REQUEST_FILE).exists()
    on_demand.request_window(tmp_path)
    assert later.next_window(7, 2, 3) == (10, 12)
    # Asked again while the old question is still there: it is of this job.
    on_demand.request_window(tmp_path)
    os.utime(tmp_path / on_demand.REQUEST_FILE, (1, 1))
    later = on_demand.WindowRequests(tmp_path, is_cleared=False)
    on_demand.request_window(tmp_path)
    assert later.next_window(9, 2, 3) == (12, 14)


@pytest.mark.torch
def test_a_late_request_is_reported_and_removed(
    make_recorder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_recorder(on_demand=2)
    for _ in range(5):
        job.end_step()
    on_demand.request_window(tmp_path)
    job.finish_process()
    assert not (tmp_path / on_demand.REQUEST_FILE).exists()
    assert capsys.readouterr().err.splitlines() == [
        "etloom: the last request for a window came too late: no step ended after it"
    ]


def test_the_launcher_reports_a_late_request(tmp_path: Path) -> None:
    options = RecordingOptions(str(tmp_path), str(tmp_path / "s"), on_demand=2, supervised=True)
    (tmp_path / "s").mkdir()
    facts = process_messages.ProcessStatus(options.scratch)
    facts.facts |= {"began": True, "rank": 0, "steps": 60, "ended": True}
    assert facts.write()
    on_demand.request_window(tmp_path)
    assert finalization.finalize_run(options, 0).warnings == (
        f"{tmp_path}: nothing recorded: the request came too late: the job ended after 60 steps",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
def test_a_requested_window_after_the_end_is_reported(
    make_recorder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_recorder(on_demand=2)
    for count in range(20):
        if count in (1, 17):
            on_demand.request_window(tmp_path)
        job.end_step()
        job.wait()
    job.finish_process()
    assert [steps for what, steps in FakeWindow.done if what == "write"] == [[5, 6]]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "etloom: nothing recorded: the job ended before requested step 21 began"
