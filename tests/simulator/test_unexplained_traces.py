"""Traces that a simulation cannot explain: one line and an error, or the coverage next to the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from etloom.cli import app

Events = list[dict[str, Any]]


def host(name: str, ts: int, dur: int | None, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "args": args}
    return event if dur is None else event | {"dur": dur}


def kernel(ts: int, dur: int, correlation: int) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation}
    return host("gemm", ts, dur, "kernel") | {"pid": 0, "tid": 7, "args": args}


def launches(shift: int) -> Events:
    """Kernels with correlations that differ from those of the calls by ``shift``."""
    events: Events = []
    for i in range(50):
        at = 100 * i
        events += [
            host("cudaLaunchKernel", at + 5, 5, "cuda_runtime", correlation=i + 1),
            kernel(at + 14, 60, i + 1 + shift),
        ]
    return events


def simulate(folder: Path, events: Events, change: str) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr."""
    file = folder / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    done = CliRunner().invoke(app, ["simulate", str(file), "--set", change])
    return done.exit_code, done.stdout, done.stderr


PROCESS = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}
INSTANT = {"ph": "i", "cat": "cpu_instant_event", "name": "x", "pid": 1, "tid": 1, "ts": 1, "s": "t"}
NOTHING: dict[str, tuple[Events, str]] = {
    "empty": ([], "contains no events"),
    "metadata only": (
        [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}],
        "contains no events",
    ),
    "instants only": (
        [{"ph": "i", "cat": "cpu_instant_event", "name": "x", "pid": 1, "tid": 1, "ts": 1, "s": "t"}],
        "no",
    ),
    "unknown category": ([host("bar", 5, 7, "foo")], "contains no timed operators and no GPU activity"),
    "no durations": ([host("aten::mm", 5, None)], "contains no timed operators and no GPU activity"),
    "no time": (
        [host("aten::mm", 0, 0), host("aten::add", 0, 0)],
        "all events of the run begin and end at the same time",
    ),
    "Python only": (
        [host("f.py(1): f", 0, 9, "python_function")],
        "contains no timed operators and no GPU activity",
    ),
    "annotations only": (
        [host("batch", 0, 9, "user_annotation")],
        "contains no timed operators and no GPU activity",
    ),
    "one rank": ([host("aten::mm", 0, 9)], "matches nothing"),
}


@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("change", ["kernel x0.5", "comm x0"])
@pytest.mark.slow
def test_an_unanswerable_question_is_one_line_and_an_error(case: str, change: str, tmp_path: Path) -> None:
    events, reason = NOTHING[case]
    status, out, err = simulate(tmp_path, events, change)
    assert status == 1 and out == "" and len(err.strip().splitlines()) == 1
    answers = (reason, "matches nothing", "no GPU activities", "this run has no communication")
    assert any(answer in err for answer in answers)


def test_kernels_whose_starts_nothing_explains_are_not_predicted(tmp_path: Path) -> None:
    kernels = [event for event in launches(0) if event["cat"] == "kernel"]
    status, out, err = simulate(tmp_path, kernels, "kernel x0.5")
    assert status == 1 and not out
    assert "no prediction: the graph does not explain the recording" in err
    assert "100 % of the kernel starts are unexplained" in err


def test_kernels_without_launches_are_counted_next_to_the_answer(tmp_path: Path) -> None:
    events = launches(0)[:84] + launches(1_000)[84:]
    status, out, err = simulate(tmp_path, events, "kernel x0.5")
    assert status == 0 and "job" in out
    assert "8 of 50 GPU activities have no recorded launch call" in err


def test_linked_kernels_without_steps_are_explained(tmp_path: Path) -> None:
    status, out, err = simulate(tmp_path, launches(0), "kernel x0.5")
    assert status == 0 and "job" in out
    assert "doubtful" not in err and "no recorded launch call" not in err
