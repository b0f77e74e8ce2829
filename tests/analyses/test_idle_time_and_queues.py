"""Idle time, launches and queues against HolisticTraceAnalysis' tables, and against sets of ticks on random work."""

from __future__ import annotations

import statistics
from math import ceil
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import AnalysisError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from support.examples import examples

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


def made(works: list[tuple[int, int, int, int | None, int]]) -> Trace:
    """Kernels of (stream, start, duration, start of the launch call or None, step)."""
    kernels = [
        {
            "cat": "kernel",
            "name": "k",
            "ts": ts,
            "dur": dur,
            "device": 0,
            "stream": stream,
            "step": step,
            "call": call,
        }
        for stream, ts, dur, call, step in works
    ]
    calls = [
        {"cat": "cuda_runtime", "name": "launch", "ts": one["call"], "dur": 1, "for": at}
        for at, one in enumerate(kernels)
        if one["call"] is not None
    ]
    rows = pl.DataFrame([*kernels, *calls], infer_schema_length=None, strict=False).with_row_index("made")
    events = rows.sort("ts", -pl.col("dur"), maintain_order=True).with_row_index("id")
    id_of = dict(events.select("made", "id").rows())
    launches = pl.DataFrame(
        [(id_of[len(kernels) + at], id_of[call["for"]]) for at, call in enumerate(calls)],
        schema={"launch": pl.UInt32, "device_event": pl.UInt32},
        orient="row",
    )
    columns = [name for name in events.columns if name in TABLES["events"].schema]
    return Trace({"events": events.select(columns), "launches": launches}, {"rank": 0, "linked": True})


WORKS = st.lists(
    st.tuples(
        st.sampled_from([7, 20]),
        st.integers(20, 60),
        st.integers(0, 9),
        st.none() | st.integers(0, 70),
        st.just(1),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(WORKS)
def test_idle_time_is_that_of_ticks(works: list[tuple[int, int, int, int | None, int]]) -> None:
    answer = etloom.analyze(made(works), "idle-time", consecutive_kernel_delay=5).filter(
        pl.col("step").is_null()
    )
    for stream in {work[0] for work in works}:
        mine = sorted((work[1:4] for work in works if work[0] == stream), key=lambda work: work[0])
        busy = {tick for ts, dur, _ in mine for tick in range(ts, ts + dur)}
        span = max(ts + dur for ts, dur, _ in mine) - mine[0][0]
        rows = answer.filter(pl.col("stream") == stream)
        assert rows["busy_ns"].to_list() == [len(busy)] * 3
        assert rows["span_ns"].to_list() == [span] * 3
        assert rows["idle_ns"].sum() + len(busy) == span
        # Two pieces that start at one time leave it open which of them ended a gap.
        if len({ts for ts, _, _ in mine}) == len(mine):
            gaps: dict[str, list[int]] = {"host_wait": [], "kernel_wait": [], "other": []}
            for ts, _, call in mine:
                ended = max((begin + dur for begin, dur, _ in mine if begin < ts), default=ts)
                late = call is not None and call > ended
                cause = "host_wait" if late else "kernel_wait" if ts - ended < 5 else "other"
                gaps[cause] += [ts - ended] * (ts > ended)
            stats = ("gaps", "idle_ns", "mean_ns", "std_ns", "min_ns", "median_ns", "max_ns")
            assert {cause: tuple(told) for cause, *told in rows.select("cause", *stats).rows()} == {
                cause: (
                    len(of),
                    sum(of),
                    round(statistics.mean(of)) if of else None,
                    round(statistics.stdev(of)) if of[1:] else None,
                    min(of, default=None),
                    round(statistics.median(of)) if of else None,
                    max(of, default=None),
                )
                for cause, of in gaps.items()
            }


@settings(max_examples=examples(60))
@given(WORKS)
def test_queues_are_those_of_ticks(works: list[tuple[int, int, int, int | None, int]]) -> None:
    known = [(stream, min(call, ts), ts) for stream, ts, _, call, _ in works if call is not None]
    if not known:
        with pytest.raises(AnalysisError, match="no launch"):
            etloom.analyze(made(works), "queue-length")
        return
    summary = etloom.analyze(made(works), "queue-summary", limit=2)
    for stream in {one for one, _, _ in known}:
        waits = [(call, ts) for one, call, ts in known if one == stream]
        first, last = min(call for call, _ in waits), max(ts for _, ts in waits)
        lengths = sorted(sum(call <= tick < ts for call, ts in waits) for tick in range(first, last))
        rows = summary.filter(pl.col("stream") == stream)
        if not lengths:
            assert rows.is_empty()
            continue
        row = rows.row(0, named=True)
        assert (row["span_ns"], row["max"]) == (len(lengths), lengths[-1])
        assert row["mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert row["empty_ns"] == lengths.count(0)
        assert row["blocked_ns"] == sum(length >= 2 for length in lengths)
        assert row["median"] == lengths[ceil(len(lengths) / 2) - 1]
