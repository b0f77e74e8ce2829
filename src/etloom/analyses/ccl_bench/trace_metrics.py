"""CCL-Bench metrics that are computed from a trace, without a workload card."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from etloom.analyses import mfu
from etloom.analyses.ccl_bench.rank_data import NO_SHAPES, MetricUnavailable, RankData
from etloom.analyses.ccl_bench.run_data import (
    Metric,
    RunData,
    collect_comparable,
    collect_values,
    compute_percent,
    from_run,
    mean_over_ranks,
)
from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.core.intervals import Intervals

_MOE = r"(?i)moe|expert|topk_?gat|grouped_?gemm"
_NETWORK = r"(?i)(?:nvlink|pcie).*\b(?:tx|transmit)"


def mean_step_seconds(rank: RankData) -> float:
    """Return the mean step time in s."""
    if not rank.inner:
        raise MetricUnavailable("no step is annotated (ProfilerStep#N, execute_context_*, run_batch)")
    return sum(end - start for start, end in rank.inner) / len(rank.inner) / 1e9


def _engine(rank: RankData) -> list[tuple[int, int]]:
    if rank.step_annotation not in ("execute_context", "run_batch"):
        raise MetricUnavailable(
            "inference metric, but no engine step is annotated (execute_context_*, run_batch)"
        )
    return rank.passes


def _first_pass(rank: RankData) -> float:
    start, end = _engine(rank)[0]
    return (end - start) / 1e9


def _later_passes(rank: RankData) -> float:
    later = _engine(rank)[1:]
    later = later[:-1] if len(later) > 1 else later
    if not later:
        raise MetricUnavailable("only one pass was recorded")
    return sum(end - start for start, end in later) / len(later) / 1e9


def _sums(work: pl.DataFrame) -> tuple[int, int]:
    """Return the total duration (ns) of the communication kernels, and of all kernels."""
    communicates = pl.col("kind") == "communication"
    return int(work.filter(communicates)["dur"].sum()), int(work["dur"].sum())


def _communication_fraction(rank: RankData) -> float:
    kernels = rank.kernels
    part = rank.sum_step_work(kernels.filter(pl.col("kind") == "communication"))
    total = rank.sum_step_work(kernels)
    if not total.any():
        raise MetricUnavailable("no kernel ran in the selected steps")
    return float((100 * part[total > 0] / total[total > 0]).mean())


def _communication_ratio(run: RunData) -> float:
    parts = collect_values(run.ranks, lambda rank: _sums(rank.kernels)[0])
    wholes = collect_values(run.ranks, lambda rank: _sums(rank.kernels)[1])
    return compute_percent(sum(parts), sum(wholes), "the total time of the kernels is 0")


def _communication_time(rank: RankData) -> float:
    spent = rank.activity().times["communication"]
    return rank.average_steps(lambda start, end: _covered(spent, start, end)) / 1e9


def _covered(times: Intervals, start: int, end: int) -> int:
    return int(times.covered(np.array([start]), np.array([end]))[0])


def _overlap(rank: RankData) -> float:
    times = rank.activity().times
    spans = rank.windows()
    both, total = (
        sum(_covered(intervals, *span) for span in spans)
        for intervals in (times["communication"] & times["computation"], times["communication"])
    )
    return compute_percent(both, total, "no communication was recorded in the selected steps")


def _total_overlap(rank: RankData) -> float:
    times = rank.activity().times
    both = (times["communication"] & times["computation"]).total
    return compute_percent(both, times["communication"].total, "no communication was recorded") / 100


def _active(rank: RankData) -> int:
    """Return the total time (ns) in which at least one kernel runs."""
    kernels = rank.kernels
    return Intervals.of(kernels["ts"].to_numpy(), kernels["end"].to_numpy()).total


def _imbalance(run: RunData) -> float:
    times = collect_comparable(run.ranks, _active)
    if not min(times):
        raise MetricUnavailable("the total time of the kernels of a rank is 0")
    return max(times) / min(times)


def _straggler(run: RunData) -> float:
    times = collect_comparable(run.ranks, lambda rank: _sums(rank.kernels)[0])
    return (
        compute_percent(max(times) - min(times), max(times), "no communication kernels were recorded") / 100
    )


def _slowdown(run: RunData) -> float:
    times = collect_comparable(run.ranks, lambda rank: _sums(rank.kernels)[0])
    if not min(times):
        raise MetricUnavailable("a rank recorded no communication kernels")
    return max(times) / min(times)


def _sm_coverage(rank: RankData) -> float:
    sms = {
        device.get("id"): device.get("numSms")
        for device in rank.trace.meta.get("device_properties") or ()
        if isinstance(device, dict) and isinstance(device.get("numSms"), int) and device["numSms"] > 0
    }
    grid = pl.col("grid_x").cast(pl.Float64) * pl.col("grid_y") * pl.col("grid_z")
    per_sm = pl.coalesce(
        "blocks_per_sm", grid / pl.col("device").replace_strict(sms, default=None, return_dtype=pl.Float64)
    )
    kernels = rank.kernels.join(rank.trace.kernels, left_on="id", right_on="event", how="inner").select(
        "dur", coverage=per_sm.clip(upper_bound=1.0)
    )
    kernels = kernels.drop_nulls()
    if not kernels["dur"].sum():
        raise MetricUnavailable("neither blocks per SM nor grids and the number of SMs were recorded")
    return 100 * float((kernels["dur"] * kernels["coverage"]).sum()) / float(kernels["dur"].sum())


def _dominant(rank: RankData) -> float:
    by_name = rank.kernels.group_by("name").agg(pl.col("dur").sum())["dur"].to_numpy()
    return compute_percent(int(by_name.max()), int(by_name.sum()), "the total time of the kernels is 0")


def _moe(rank: RankData) -> float:
    kernels = rank.kernels
    moe = kernels.filter(pl.col("name").cast(pl.String).str.contains(_MOE))
    return compute_percent(
        int(moe["dur"].sum()), int(kernels["dur"].sum()), "the total time of the kernels is 0"
    )


def _copy_bandwidth(rank: RankData) -> float:
    copies = rank.work.filter(pl.col("cat").is_in(list(categories.MEMCPY_CATEGORIES)))
    sized = copies.join(rank.trace.kernels, left_on="id", right_on="event").drop_nulls("bytes")
    if not sized["dur"].sum():
        raise MetricUnavailable("no memcpys with sizes were recorded")
    return float(sized["bytes"].sum()) / float(sized["dur"].sum())


def _transfer_overhead(rank: RankData) -> float:
    _ = rank.kernels  # raises MetricUnavailable without GPU activity
    times = rank.activity()
    alone = (times.times["memory"] - times.times["computation"]).total
    start, end = times.busy.span or (0, 0)
    return compute_percent(alone, end - start, "the device was never busy")


def _utilization(rank: RankData) -> float:
    kernels = rank.kernels
    first, last = int(kernels["ts"].to_numpy().min()), int(kernels["end"].to_numpy().max())
    return compute_percent(_active(rank), last - first, "the total time of the kernels is 0")


def _kernel_seconds(kind: str | None) -> Callable[[RankData], float]:
    def question(rank: RankData) -> float:
        kernels = rank.kernels if kind is None else rank.kernels.filter(pl.col("kind") == kind)
        return int(kernels["dur"].sum()) / 1e9

    return question


def _communication_kernels(rank: RankData) -> pl.DataFrame:
    return rank.kernels.filter(pl.col("kind") == "communication")


def _all_reduce_seconds(rank: RankData) -> float:
    kernels = _communication_kernels(rank)
    collectives = categories.parse_collectives(kernels["name"]).cast(pl.String)
    return int(kernels.filter(collectives == "all_reduce")["dur"].sum()) / 1e9


def _mean_communication_seconds(rank: RankData) -> float:
    kernels = _communication_kernels(rank)
    if not kernels.height:
        raise MetricUnavailable("no communication kernels were recorded")
    return int(kernels["dur"].sum()) / kernels.height / 1e9


def _compute_share(rank: RankData) -> float:
    return (
        compute_percent(_kernel_seconds("computation")(rank), _trace_time(rank), "the trace has no duration")
        / 100
    )


def _trace_time(rank: RankData) -> float:
    timed = rank.trace.events.select("ts", "dur").drop_nulls()
    if not timed.height:
        raise MetricUnavailable("no timed events were recorded")
    starts, durations = timed["ts"].to_numpy(), timed["dur"].to_numpy()
    return int((starts + durations).max() - starts.min()) / 1e9


def _network(rank: RankData) -> float:
    shares = rank.trace.counters.filter(
        pl.col("name").cast(pl.String).str.contains(_NETWORK) & (pl.col("value") > 0)
    )
    mean = shares["value"].mean()
    if mean is None:
        raise MetricUnavailable(
            "no counters of NVLink or PCIe were recorded (nsys profile --gpu-metrics-devices=all)"
        )
    return float(mean)  # type: ignore[arg-type]


def _bound(bound: str) -> Callable[[RankData], float]:
    def question(rank: RankData) -> float:
        if isinstance(rank.bounds, str):
            raise MetricUnavailable(rank.bounds)
        return compute_percent(
            rank.bounds.get(bound, 0), sum(rank.bounds.values()), "the bound of all operators is unknown"
        )

    return question


def compute_counted_mfu(rank: RankData) -> float:
    """Return the model FLOPs utilization (percent) over the whole recording, with FLOPs computed from recorded
    shapes."""
    if not rank.has_shapes:
        raise MetricUnavailable(NO_SHAPES)
    try:
        value = mfu.analyze(rank.trace).filter(pl.col("step").is_null())["mfu_pct"].item()
    except EtloomError as error:
        raise MetricUnavailable(error.what) from None
    if value is None:
        raise MetricUnavailable("no shapes of matrix products are known")
    return float(value)


METRICS: tuple[Metric, ...] = (
    ("avg_step_time", "s", "steps", mean_over_ranks(mean_step_seconds)),
    ("ttft", "s", "trace", mean_over_ranks(_first_pass)),
    ("tpot", "s", "trace", mean_over_ranks(_later_passes)),
    ("communication_fraction", "%", "steps", mean_over_ranks(_communication_fraction)),
    ("communication_ratio", "%", "trace", from_run(_communication_ratio)),
    ("total_communication_time", "s", "steps", mean_over_ranks(_communication_time)),
    ("compute_comm_overlap", "%", "steps", mean_over_ranks(_overlap)),
    ("communication_overlap_ratio", "ratio", "trace", mean_over_ranks(_total_overlap)),
    ("load_imbalance_ratio", "ratio", "trace", from_run(_imbalance)),
    ("straggler", "ratio", "trace", from_run(_straggler)),
    ("straggler_metrics", "ratio", "trace", from_run(_slowdown)),
    ("mean_sm_coverage", "%", "trace", mean_over_ranks(_sm_coverage)),
    ("dominant_kernel_concentration", "%", "trace", mean_over_ranks(_dominant)),
    ("moe_fraction", "%", "trace", mean_over_ranks(_moe)),
    ("average_memory_bandwidth", "GB/s", "trace", mean_over_ranks(_copy_bandwidth)),
    ("memory_transfer_overhead", "%", "trace", mean_over_ranks(_transfer_overhead)),
    ("bandwidth_utilization_peertopeer_group_6", "%", "trace", mean_over_ranks(_network)),
    ("aggregate_gpu_utilization", "%", "trace", mean_over_ranks(_utilization)),
    ("compute_bound_fraction", "%", "trace", mean_over_ranks(_bound("compute"))),
    ("memory_bound_fraction", "%", "trace", mean_over_ranks(_bound("memory"))),
    ("total_kernel_time", "s", "trace", mean_over_ranks(_kernel_seconds(None))),
    ("kernel_compute_time_group_6", "s", "trace", mean_over_ranks(_kernel_seconds("computation"))),
    ("total_compute_time_s", "s", "trace", mean_over_ranks(_kernel_seconds("computation"))),
    ("total_comm_time_s", "s", "trace", mean_over_ranks(_kernel_seconds("communication"))),
    ("allreduce_comm_time_s", "s", "trace", mean_over_ranks(_all_reduce_seconds)),
    (
        "num_comm_kernels",
        "kernels",
        "trace",
        mean_over_ranks(lambda rank: _communication_kernels(rank).height),
    ),
    ("avg_comm_kernel_time_s", "s", "trace", mean_over_ranks(_mean_communication_seconds)),
    ("compute_utilization_proxy", "ratio", "trace", mean_over_ranks(_compute_share)),
    ("total_trace_time", "s", "trace", mean_over_ranks(_trace_time)),
    ("wall_time_s", "s", "trace", mean_over_ranks(_trace_time)),
)
