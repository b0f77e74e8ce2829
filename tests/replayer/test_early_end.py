"""Computation replay that does not come to its end: for want of memory or time, by Ctrl-C, or where one fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom import cli

torch = pytest.importorskip("torch")
from etloom.replayer.compute import progress  # noqa: E402
from etloom.replayer.compute.memory_limits import WORKING_OVERHEAD, estimate_memory, memory_limit  # noqa: E402
from etloom.replayer.compute.operator_replay import ComputeReplay  # noqa: E402
from etloom.replayer.compute.program import build_program  # noqa: E402
from etloom.replayer.compute.progress import TIME_LIMIT_REACHED, Stopped, TrialProgress  # noqa: E402
from support.replays import et_tensor, operator_node, read_nodes, relu_node, replay_trace  # noqa: E402

pytestmark = pytest.mark.torch
MB = 1 << 18  # elements of float


def chain(count: int, elements: int = 4) -> list[dict[str, Any]]:
    """Operators of which each takes what the one before gave."""
    return [
        relu_node(2 + at, et_tensor(10 + at, 100 + at, elements), et_tensor(11 + at, 101 + at, elements))
        for at in range(count)
    ]


def results(done: ComputeReplay) -> dict[tuple[str, str | None], int]:
    return {
        (result, why): count
        for result, why, count in done.coverage.select("result", "reason", "count").rows()
    }


def stats(trace: etloom.Trace | None) -> dict[str, tuple[str, int, str]]:
    assert trace is not None
    return {name: (severity, count, example) for name, severity, count, example in trace.stats.rows()}


@pytest.mark.slow
def test_operators_that_do_not_fit_are_omitted_and_reported_before_the_run(tmp_path: Path) -> None:
    """The third operator takes 8 MB where 4 are left; what would have been its result is made for the last."""
    nodes = [
        *chain(2, MB),
        relu_node(4, et_tensor(20, 120, 8 * MB), et_tensor(21, 121, 1)),
        relu_node(5, et_tensor(21, 121, 1), et_tensor(22, 122, 1)),
    ]
    trace = read_nodes(tmp_path, *nodes)
    assert (
        estimate_memory(build_program(trace)).bytes == (9 << 20) + 8
    )  # of the first two what no step gives stays
    said: list[tuple[str, int]] = []
    tried: list[str] = []
    done = replay_trace(
        trace,
        repeats=1,
        warmup=0,
        max_bytes=6 << 20,
        notify=lambda line: said.append((line, len(tried))),
        on_step=lambda step: tried.append(step.name),
    )
    assert results(done) == {
        ("replayed", None): 3,
        ("skipped", "does not fit into the memory limit"): 1,
    }
    assert said == [
        (
            "the replay needs about 0.0 GB at once, and its limit is 0.0 GB: 1 of 4 operators do not fit and are "
            "skipped; --max-memory 1 fits all, --step N replays one step, --device meta needs no memory",
            0,
        )
    ]
    assert done.stopped is None and len(done.repeats_ns) == 1
    enough = replay_trace(trace, repeats=1, warmup=0, max_bytes=int(WORKING_OVERHEAD * ((9 << 20) + 8)) + 1)
    assert enough.covered() == 1


def test_progress_names_the_purpose_of_each_pass_and_unneeded_passes_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = read_nodes(tmp_path, *chain(2, MB))
    monkeypatch.setattr("etloom.replayer.compute.operator_replay.SLOW_PASS_S", 0.0)
    ran: list[None] = []
    monkeypatch.setattr(
        "etloom.replayer.compute.replay_trace.profile_pass", lambda machine, trace: ran.append(None)
    )

    def told(**asked: Any) -> list[str]:
        said: list[str] = []
        done = replay_trace(trace, repeats=2, notify=said.append, **asked)
        assert len(done.repeats_ns) == 2 and (done.trace is None) == (not asked.get("trace", True))
        return [re.sub(r" (about|took) .*? s\b", "", line) for line in said if "trial run" not in line]

    repeats = ["repeat 1 of 2", "repeat 2 of 2"]
    repeats_follow = "all operators were tried; 2 repeats of each follow"
    assert told(trace=False) == [
        f"{repeats_follow}, after 1 warm-up pass",
        "warm-up pass 1 of 1",
        *repeats,
    ]
    assert ran == []
    assert told(warmup=0) == [
        f"{repeats_follow}, and one more pass for the trace",
        *repeats,
        "the pass for the trace",
    ]
    assert ran == [None]


def test_freed_memory_is_returned_only_if_memory_is_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, freed = read_nodes(tmp_path, *chain(2, MB)), []
    for what in ("return_freed_memory", "keep_freed_memory"):
        monkeypatch.setattr(
            f"etloom.replayer.compute.memory_limits.{what}", lambda what=what: freed.append(what)
        )
    takes = 3 << 20
    for limit in (1.5, 1.3):
        assert replay_trace(trace, repeats=1, warmup=0, max_bytes=int(takes * limit)).covered() == 1
    assert freed == ["keep_freed_memory", "return_freed_memory"]


def test_the_memory_limit_is_an_option_or_most_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etloom.replayer.compute.memory_limits.available_memory", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (memory_limit("cpu", None), memory_limit("cpu", 7), memory_limit("meta", None)) == (200, 7, None)


def test_an_interrupted_dry_run_returns_its_partial_result(tmp_path: Path) -> None:
    trace = read_nodes(tmp_path, *chain(5))

    def interrupted(step: Any) -> None:
        if step.node == third:
            raise KeyboardInterrupt

    third = build_program(trace).steps[3].node
    done = replay_trace(trace, on_step=interrupted)
    assert results(done) == {("replayed", None): 3, ("skipped", "not tried: interrupted"): 2}
    assert (done.stopped, done.failed, done.repeats_ns, done.covered()) == ("interrupted", False, [], 0.6)
    assert done.trace is not None and done.trace.events["name"].cast(str).to_list() == ["aten::relu"] * 3
    assert (
        done.trace.events["ts"][0] == 0
        and done.trace.events["ts"].is_sorted()
        and done.trace.events["dur"].min() > 0
    )
    told = stats(done.trace)
    assert told["replay.stopped"] == ("data_loss", 2, "interrupted; operators that were not tried")
    assert told["replay.trial_run"][:2] == ("info", 3)
    assert replay_trace(trace, "meta", on_step=interrupted).trace is None


@pytest.mark.slow
def test_an_exceeded_time_limit_stops_the_dry_run_or_the_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = read_nodes(tmp_path, *chain(4))
    none = replay_trace(trace, deadline=0)
    assert (
        results(none) == {("skipped", f"not tried: {TIME_LIMIT_REACHED}"): 4}
        and none.stopped == TIME_LIMIT_REACHED
    )
    repeated = replay_trace(trace, repeats=1_000_000_000, deadline=time.monotonic() + 1)
    assert results(repeated) == {("replayed", None): 4}
    assert repeated.stopped == TIME_LIMIT_REACHED and len(repeated.repeats_ns) > 10
    assert stats(repeated.trace)["replay.trial_run"][1] == 4
    assert stats(repeated.trace)["replay.stopped"][:2] == ("info", 1)


def test_an_operator_that_fails_later_ends_the_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etloom.replayer.compute.executor import Executor

    run, turns = Executor.run, iter(range(9))

    def failing(machine: Executor) -> None:
        if next(turns) == 2:
            machine._prepared[1].call = lambda *given: torch.empty(1 << 60)
        run(machine)

    monkeypatch.setattr(Executor, "run", failing)
    done = replay_trace(read_nodes(tmp_path, *chain(3)), repeats=5, warmup=1)
    assert done.failed and done.stopped and "aten::relu failed after it had run before" in done.stopped
    assert (done.covered(), len(done.repeats_ns)) == (1, 1)


def test_the_remaining_time_is_estimated_from_similar_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MB takes 1 s, as it did; else as many as go through, in and out, and one for the call."""
    cos = "aten::cos(Tensor self) -> Tensor"
    sizes = [MB, MB, 2 * MB, MB]
    nodes: list[dict[str, Any]] = [
        relu_node(
            2 + at, et_tensor(10 + 2 * at, 100 + 2 * at, size), et_tensor(11 + 2 * at, 101 + 2 * at, size)
        )
        for at, size in enumerate(sizes)
    ]
    nodes.append(
        operator_node(
            9, cos, [et_tensor(50, 150, MB)], ["Tensor(float)"], [[MB]], outputs=[et_tensor(51, 151, MB)]
        )
    )
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    steps = TrialProgress(build_program(read_nodes(tmp_path, *nodes)).steps, deadline=10)
    assert steps.remaining_s() == 0
    steps.begin_next()
    now = 1.0
    steps.begin_next()
    assert (steps.tried, steps.total) == (2, 5)
    assert steps.remaining_s() == pytest.approx(5 / 3 + 1 + 1)
    now = 10.5
    with pytest.raises(Stopped, match=TIME_LIMIT_REACHED):
        steps.begin_next()


@pytest.mark.usefixtures("in_process")
def test_the_command_reports_a_partial_replay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    read_nodes(tmp_path, *chain(4))
    given, out = str(tmp_path / "torch_et_0.json"), tmp_path / "replay.parquet"
    assert cli.main(["replay", "compute", given, "--max-time", "0", "--out", str(out)]) == 0
    assert "etloom: incomplete: the time limit was reached\n" in capfd.readouterr().err
    assert stats(etloom.open(out)[0])["replay.stopped"][:2] == ("data_loss", 4)
    threads = torch.get_num_threads()
    try:
        assert cli.main(["replay", "compute", given, "--threads", "1", "--repeats", "1"]) == 0
        assert torch.get_num_threads() == 1 and "incomplete" not in capfd.readouterr().err
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("whom", [os.kill, os.killpg])
def test_an_interrupted_command_shows_its_partial_result(
    tmp_path: Path, whom: Callable[[int, int], None]
) -> None:
    """By a signal to it alone, or to it and its process, as from a terminal."""
    read_nodes(tmp_path, *chain(4, MB))
    given, out = tmp_path / "torch_et_0.json", tmp_path / "replay.parquet"
    command = [sys.executable, "-m", "etloom", "replay", "compute", str(given), "--repeats", "1000000000"]
    running = subprocess.Popen(
        [*command, "--max-time", "60", "--format", "csv", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert running.stderr is not None
        assert "repeats of about" in running.stderr.readline()
        whom(running.pid, signal.SIGINT)
        written, said = running.communicate(timeout=400)
    finally:
        running.kill()
    assert running.returncode == 130
    assert written.splitlines()[1].startswith("aten::relu,replayed,")
    assert "incomplete: interrupted" in said and "Traceback" not in said
    assert etloom.open(out)[0].events.height == 4
