"""Idle time, launches and queues against HolisticTraceAnalysis' tables."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.trace import Job

US = 1000


@pytest.fixture(scope="module")
def job(data: Path) -> Job:
    return etloom.open(data / "hta_multirank")


def table(golden: Path, name: str, folder: str = "sampled_all_steps") -> pl.DataFrame:
    return pl.read_csv(golden / "hta" / folder / f"{name}.csv")


# The files hold whole microseconds, so that HTA's cutting of times moves nothing: no value may differ.


def test_idle_time_is_htas(job: Job, golden: Path) -> None:
    ours = etloom.analyze(job, "idle-time").filter(pl.col("step").is_null())
    found = {row[:3]: row[3] for row in ours.select("rank", "stream", "cause", "idle_ns").iter_rows()}
    theirs = {
        row[:3]: round(row[3] * US)
        for row in table(golden, "get_idle_time_breakdown.0")
        .select("rank", "stream", "idle_category", "idle_time")
        .iter_rows()
    }
    # HTA lists a cause of no gap for some streams only.
    assert {key: time for key, time in found.items() if time} == {
        key: time for key, time in theirs.items() if time
    }
    assert len(found) == 3 * 10


def test_statistics_of_gaps_are_htas(job: Job, golden: Path) -> None:
    """HTA's first step: what it launched, whose gaps are those of step 551."""
    ours = etloom.analyze(job, "idle-time", step=551).filter(pl.col("gaps") > 0)
    found = {
        (rank, stream, cause): rest
        for rank, stream, cause, *rest in ours.select(
            "rank", "stream", "cause", "gaps", "mean_ns", "std_ns", "min_ns", "median_ns", "max_ns"
        ).iter_rows()
    }
    theirs = table(golden, "idle_stats", "sampled_first_step").filter(pl.col("count") > 0)
    for row in theirs.iter_rows(named=True):
        count, mean, std, low, median, high = found.pop((row["rank"], row["stream"], row["idle_category"]))
        assert (count, low, high) == (row["count"], row["min"] * US, row["max"] * US)
        assert abs(mean - row["mean"] * US) <= 5.5  # it is written with two decimals of us
        assert abs(median - row["50%"] * US) <= 5.5
        assert (std is None) == (row["std"] is None)
        assert std is None or abs(std - row["std"] * US) <= 5.5
    assert not found, "the same streams and causes"


def test_launches_are_htas(job: Job, golden: Path) -> None:
    theirs = table(golden, "get_cuda_kernel_launch_stats.0")
    ours = etloom.analyze(job[0], "launches")
    columns = ("call_ns", "device_ns", "launch_delay_ns")
    assert sorted(ours.select(columns).rows()) == sorted(
        (theirs.select("cpu_duration", "gpu_duration", "launch_delay") * US).cast(pl.Int64).rows()
    )


def test_queues_pass_through_htas_lengths(job: Job, golden: Path) -> None:
    """HTA sums up changes and not time, so its mean is that of our series, not of queue-summary."""
    path = golden / "hta" / "sampled_all_steps" / "get_queue_length_summary.csv"
    theirs = pl.read_csv(
        path, skip_rows=3, has_header=False,
        new_columns=["rank", "stream", "count", "mean", "std", "min", "q25", "q50", "q75", "max"],
    )  # fmt: skip
    length = pl.col("queue_length")
    ours = (
        etloom.analyze(job, "queue-length")
        .group_by("rank", "stream")
        .agg(length.len().alias("count"), length.mean().alias("mean"), length.max().alias("max"))
    )
    assert ours.height == theirs.height == 10
    both = ours.join(theirs, on=["rank", "stream"], suffix="_hta")
    assert both.height == 10
    # Changes at one time are one row of ours and several, in any order, of HTA's.
    assert both.select((pl.col("count_hta") - pl.col("count")).is_between(0, 40).all()).item()
    assert both.select(((pl.col("max") - pl.col("max_hta")).abs() <= 1).all()).item()
    assert both.select(((pl.col("mean") - pl.col("mean_hta")).abs() < 0.05).all()).item()
