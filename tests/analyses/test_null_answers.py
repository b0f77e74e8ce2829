"""What an analysis does not know is null, not 0 and not NaN; what it cannot do it says in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import InvalidValue
from etloom.core.trace import Trace
from support import small_traces
from support.small_traces import RankBuilder


def of_lengths(tmp_path: Path, host: int, device: int) -> Trace:
    """An annotation, an operator in it and a kernel of it, of these us."""
    run = (
        RankBuilder()
        .op("range", 0, host, "user_annotation")
        .op("aten::mm", 0, host)
        .kernel(1, 0, device, "gemm")
    )
    return run.trace(tmp_path)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("kernel-breakdown", "total_pct"),
        ("kernel-families", "total_pct"),
        ("top-ops", "self_pct"),
        ("top-ops", "exclusive_pct"),
        ("annotations", "pct"),
    ],
)
def test_a_share_of_no_time_is_unknown(tmp_path: Path, name: str, column: str) -> None:
    options = {"where": "host"} if name == "annotations" else {}
    trace = of_lengths(tmp_path, 10, 10)
    shares = etloom.analyze(trace, name, **options)[column]
    assert shares.null_count() == 0 and shares.sum() == pytest.approx(100.0)
    instants = trace.replace(events=trace.events.with_columns(dur=pl.lit(0, pl.Int64)))
    shares = etloom.analyze(instants, name)[column]
    assert len(shares) and shares.null_count() == len(shares)


@pytest.mark.parametrize(
    "name", ["top-ops", "unique-args", "kernel-sequences", "flops", "roofline", "kernel-breakdown"]
)
@pytest.mark.parametrize("top", [0, -1])
def test_top_of_zero_rows_is_refused(tmp_path: Path, name: str, top: int) -> None:
    trace = etloom.open(small_traces.write_run(tmp_path / "run", (0,)), use_cache=False)[0]
    with pytest.raises(InvalidValue, match=f"top: expected at least 1 row, got {top}; specify 1 or more"):
        etloom.analyze(trace, name, top=top)


def copies(tmp_path: Path, *sizes: int | None) -> dict[str, Any]:
    """The summary of copies of 10 us, one after the other."""
    run = RankBuilder().op("aten::copy_", 0, 100)
    for at, size in enumerate(sizes):
        facts = {} if size is None else {"bytes": size}
        run.kernel(at + 1, 10 * at, 10, "Memcpy HtoD (Pinned -> Device)", cat="gpu_memcpy", **facts)
    (row,) = etloom.analyze(run.trace(tmp_path), "memory-bandwidth-summary").rows(named=True)
    return row


def test_the_memcpy_bandwidth_covers_copies_of_known_size(tmp_path: Path) -> None:
    row = copies(tmp_path, 1_000_000, None)
    assert (row["count"], row["bytes"], row["busy_ns"], row["small"]) == (2, 1_000_000, 20_000, 0)
    assert row["mean_gb_per_s"] == pytest.approx(100.0)


def test_copies_of_unknown_size_are_not_short(tmp_path: Path) -> None:
    row = copies(tmp_path, None, None)
    assert (row["count"], row["bytes"], row["mean_gb_per_s"], row["small"]) == (2, None, None, None)


def test_modules_without_a_device_have_no_device_time(tmp_path: Path) -> None:
    run = RankBuilder().op("nn.Module: Linear_0", 0, 100, "python_function").op("aten::mm", 10, 50)
    (row,) = etloom.analyze(run.trace(tmp_path), "module-view").rows(named=True)
    assert (row["path"], row["host_ns"]) == ("Linear", 100_000)
    assert (row["device_ns"], row["self_device_ns"], row["kernels"]) == (None, None, None)
