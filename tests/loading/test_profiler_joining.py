"""Recordings of one process by two profilers: kernels of one, operators of the other, on one clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core.errors import LinkError
from etloom.core.trace import Trace
from etloom.loading.clock_fit import fit_by_name
from support.rocm_recordings import START, write_rocpd, write_rpd
from support.two_profilers import make_launches, record_with_rocprof, write_kineto, write_nsys, write_unitrace

LAUNCHES = make_launches()
ZERO = 1_700_000_000_000_000_000
TIMES = ("start", "end", "call", "kernel", "kernel_end")
RECORDED = {"calls and kernels": (True, True), "calls": (True, False), "operators only": (False, False)}


def list_operators(trace: Trace) -> list[str | None]:
    """Name of the operator of each kernel, in order of time."""
    names = trace.events.select("id", name=pl.col("name").cast(pl.String), ts="ts")
    rows = trace.launches.join(names, left_on="operator", right_on="id", how="left")
    return rows.join(names.select(device_event="id", at="ts"), on="device_event").sort("at")["name"].to_list()


TOOLS = {"rocprofv3": "rocprofv3", "rpd": "rocmProfileData", "nsys": "nsys", "unitrace": "unitrace"}
"""Recording of the other profiler -> what messages call the profiler."""


def write_other(folder: Path, tool: str) -> tuple[Path, int]:
    """Write the recording of the other profiler; return its path and the offset of its clock from Kineto's in ns."""
    if tool == "rocprofv3":
        return write_rocpd(folder / "results.db", record_with_rocprof(LAUNCHES)), START - ZERO
    if tool == "rpd":
        return write_rpd(folder / "results.rpd", record_with_rocprof(LAUNCHES)), START - ZERO
    if tool == "nsys":
        return write_nsys(folder / "report.sqlite", LAUNCHES, ZERO + 137_000_000), 137_000_000
    return write_unitrace(folder / "app.4100.json", LAUNCHES, 7_000_000), 7_000_000_000 - ZERO


@pytest.mark.slow
@pytest.mark.parametrize("part", [slice(0, None), slice(120, 240)], ids=["whole", "some steps"])
@pytest.mark.parametrize("recorded", RECORDED)
@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_of_one_profiler_join_the_operators_of_another(
    tmp_path: Path, tool: str, recorded: str, part: slice
) -> None:
    calls, kernels = RECORDED[recorded]
    other, offset = write_other(tmp_path, tool)
    profile = write_kineto(tmp_path / "kineto.json", LAUNCHES[part], calls=calls, kernels=kernels)
    trace = etloom.link(other, profile)
    assert list_operators(trace) == [launch.operator for launch in LAUNCHES[part]]
    assert trace.launches["launch"].null_count() == 0
    activities = trace.events.filter(pl.col("cat") == "kernel")
    assert activities["dur"].to_list() == [launch.kernel_end - launch.kernel for launch in LAUNCHES[part]]
    fit = trace.meta["profiler_join"]
    assert fit["share"] == 1
    assert abs(fit["offset_ns"] - offset) < 3_000
    assert fit["residual_ns"] < 3_000
    (example,) = trace.stats.filter(pl.col("name") == "job.profilers_joined")["example"]
    assert example.startswith(f"{TOOLS[tool]} with kineto: 100.0% of ")


@pytest.mark.slow
def test_a_folder_with_both_recordings_is_one_rank(tmp_path: Path) -> None:
    write_kineto(tmp_path / "kineto.json", LAUNCHES, calls=False, kernels=False)
    write_other(tmp_path, "unitrace")
    job = etloom.open(tmp_path)
    assert list(job) == [0]
    assert list_operators(job[0]) == [launch.operator for launch in LAUNCHES]
    assert etloom.analyze(job, "top-ops").height >= 7


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["rocprofv3", "rpd", "nsys"])
def test_clocks_that_drift_apart_are_fitted_with_a_line(tmp_path: Path, tool: str) -> None:
    launches = make_launches(steps=300, per_step=100)
    profile = write_kineto(tmp_path / "kineto.json", launches[:25_000], calls=True, kernels=True)
    if tool == "nsys":
        other = write_nsys(tmp_path / "report.sqlite", launches, ZERO - 55_000_000, drift=5e-6)
    else:
        write = write_rocpd if tool == "rocprofv3" else write_rpd
        other = write(tmp_path / "results.db", record_with_rocprof(launches, drift=5e-6))
    trace = etloom.link(profile, other)
    assert list_operators(trace) == [launch.operator for launch in launches[:25_000]]
    assert trace.meta["profiler_join"]["drift"] == pytest.approx(5e-6, rel=0.05)


@pytest.mark.slow
def test_recordings_of_minutes_are_fitted(tmp_path: Path) -> None:
    """The first estimate of the offset is then coarser than events are apart from each other."""
    launches = [
        replace(launch, **{name: getattr(launch, name) + launch.step * 2_000_000_000 for name in TIMES})
        for launch in make_launches(steps=200, per_step=20)
    ]
    profile = write_kineto(tmp_path / "kineto.json", launches, calls=True, kernels=True)
    other = write_rpd(tmp_path / "results.rpd", record_with_rocprof(launches, drift=2e-6))
    trace = etloom.link(profile, other)
    assert list_operators(trace) == [launch.operator for launch in launches]
    assert trace.meta["profiler_join"]["drift"] == pytest.approx(2e-6, rel=0.05)


@pytest.mark.parametrize("recorded", RECORDED)
def test_recordings_of_other_hours_are_not_joined(tmp_path: Path, recorded: str) -> None:
    """The same program an hour later, recorded by a profiler whose clock counts from the epoch too."""
    calls, kernels = RECORDED[recorded]
    profile = write_kineto(tmp_path / "kineto.json", LAUNCHES, calls=calls, kernels=kernels)
    other = write_nsys(tmp_path / "report.sqlite", LAUNCHES, ZERO + 3_600_000_000_000)
    with pytest.raises(LinkError, match="the recording of nsys does not fit"):
        etloom.link(profile, other)


@pytest.mark.parametrize("recorded", RECORDED)
@pytest.mark.parametrize("tool", TOOLS)
def test_recordings_of_different_runs_are_not_joined(tmp_path: Path, tool: str, recorded: str) -> None:
    calls, kernels = RECORDED[recorded]
    other, _ = write_other(tmp_path, tool)
    profile = write_kineto(tmp_path / "kineto.json", make_launches(seed=2), calls=calls, kernels=kernels)
    with pytest.raises(LinkError, match=f"the recording of {TOOLS[tool]} does not fit that of kineto"):
        etloom.link(profile, other)
    trace = etloom.open(tmp_path)[0]
    assert "job.profilers_not_joined" in trace.stats["name"]
    assert trace.events["name"].cast(pl.String).str.starts_with("aten::op").sum() == len(LAUNCHES)


@pytest.mark.parametrize("shares", [(0.85, 1.0), (0.0, 0.2), (0.4, 0.6)])
def test_a_recording_of_a_part_of_the_time_is_fitted(shares: tuple[float, float]) -> None:
    """Also where it does not cover the middle of the other one."""
    draw, span, offset = np.random.default_rng(1), 10_000_000_000, 5_000_000_000
    times = np.sort(draw.integers(0, span, 10_000))
    reference = pl.DataFrame({"key": draw.integers(0, 100, times.size).astype(str), "ts": times})
    part = reference.filter(pl.col("ts").is_between(int(shares[0] * span), int(shares[1] * span)))
    noise = pl.Series(draw.integers(-300, 300, part.height))
    other = part.with_columns(ts=pl.col("ts") + offset + noise)
    for first, second, expected in ((reference, other, offset), (other, reference, -offset)):
        fit = fit_by_name(first, second, share_epoch=False)
        assert fit is not None and abs(fit.line.offset - expected) < 100
