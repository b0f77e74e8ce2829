"""Changes that set the time of a call: as if the recorded call had taken that long."""

from __future__ import annotations

from pathlib import Path

import pytest

import etloom
from support.small_traces import RankBuilder

STEPS = 25
CALL: list[object] = [
    "outer",
    10,
    ["aten::mm", 6, ["aten::mm", 4, "launch", 8], 2],
    20,
    ["aten::add", 6, "launch", 4],
    10,
]
"""An operator: its name, pieces of its own time (us), the operators that it calls, and launches of kernels (4 us)."""


def record(folder: Path, kernel_us: float, scaled: str = "", scale: float = 1.0, more: float = 0.0) -> Path:
    """Write a run whose operators named ``scaled`` take ``scale`` times as long, and ``more`` us of their own."""
    run = RankBuilder()
    device_us = 0.0

    def call(pieces: list[object], at: float, factor: float) -> float:
        nonlocal device_us
        name, start = str(pieces[0]), at
        if name == scaled and factor == 1.0:
            factor = scale
        for piece in pieces[1:]:
            if isinstance(piece, list):
                at = call(piece, at, factor)
            elif piece == "launch":
                took = 4 * factor
                device_us = max(device_us, at + took + 4)
                run.kernel(at, device_us, kernel_us, call_us=took)
                device_us += kernel_us + 1
                at += took
            else:
                assert isinstance(piece, int)
                at += piece * factor
        run.op(name, start, at - start)
        return at

    at = 0.0
    for step in range(STEPS):
        start, at = at, call(CALL, at + 5, 1.0) + 5
        run.step(step, start, at - start)
        at += 2
    folder.mkdir()
    run.trace(folder)
    return folder


def measure_job(run: Path, *changes: str) -> list[int]:
    table = etloom.simulate(etloom.open(run, use_cache=False), *changes).table
    job = table.filter(scope="job").row(0, named=True)
    return [job["before_ns"], job["lower_bound_ns"], job["upper_bound_ns"]]


@pytest.mark.parametrize(
    ("name", "recorded_us", "to_us", "kernel_us"),
    [
        ("outer", 78, 39, 1),
        ("outer", 78, 156, 1),
        ("outer", 78, 39, 200),
        ("aten::mm", 24, 6, 1),
        ("aten::add", 14, 35, 1),
    ],
)
def test_a_call_set_to_a_time_is_a_call_that_took_it(
    name: str, recorded_us: int, to_us: int, kernel_us: float, tmp_path: Path
) -> None:
    recorded = record(tmp_path / "recorded", kernel_us)
    rewritten = record(tmp_path / "rewritten", kernel_us, name, to_us / recorded_us)
    (truth, *_) = measure_job(rewritten, "host x1")
    for change in (f"op:{name} ={to_us}us", f"op:{name} {to_us - recorded_us:+}us"):
        assert measure_job(recorded, change)[1:] == pytest.approx([truth, truth], abs=2 * STEPS), change
