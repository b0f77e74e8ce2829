"""CCL-Bench's metrics that a trace alone answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from etloom import kinds
from etloom.analyses import collectives as together
from etloom.analyses import mfu
from etloom.analyses._ccl_ranks import NO_SHAPES, Rank, Unknown
from etloom.analyses._together import communications
from etloom.errors import EtloomError
from etloom.intervals import Intervals
from etloom.trace import Job

Answer = tuple[float, int]
Metric = tuple[str, str, str, "Callable[[Run], Answer]"]

_MOE = r"(?i)moe|expert|topk_?gat|grouped_?gemm"
_NETWORK = r"(?i)(?:nvlink|pcie).*\b(?:tx|transmit)"
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


class Run:
    """A job, and what several metrics ask of it."""

    def __init__(self, job: Job, ranks: list[Rank]) -> None:
        self.job, self.ranks = job, ranks

    @property
    def card(self) -> dict[str, Any]:
        """The workload card. Raises Unknown where there is none."""
        card = self.job.meta.get("card")
        if not isinstance(card, dict):
            raise Unknown("there is no workload card beside the traces")
        return card

    @cached_property
    def parts(self) -> pl.DataFrame | str:
        """What each rank did of each communication, or why nothing is known of it."""
        try:
            return communications(self.job).parts
        except EtloomError as error:
            return error.what

    def communications(self) -> pl.DataFrame:
        if isinstance(self.parts, str):
            raise Unknown(self.parts)
        return self.parts

    @cached_property
    def bandwidths(self) -> pl.DataFrame:
        """collective, group_size, bytes, bus bandwidth (GB/s) and time (ns) of each communication."""
        met = together.met(self.communications())
        time = pl.coalesce("transfer_ns", "duration_ns")
        # A rank that was recorded alone has no transfer: its whole time stands for it.
        alone = met.with_columns(
            bus=pl.coalesce(
                "bus_bandwidth",
                pl.when(time > 0).then(pl.coalesce("moved", pl.col("bytes") * pl.col("factor")) / time),
            ),
            time=time,
        )
        return alone.select("collective", "group_size", "bytes", "bus", "time")


def of_ranks(question: Callable[[Rank], float]) -> Callable[[Run], Answer]:
    """The mean over the ranks of which the question can be answered."""

    def answer(run: Run) -> Answer:
        values = known(run.ranks, question)
        return sum(values) / len(values), len(values)

    return answer


def of_run(question: Callable[[Run], float]) -> Callable[[Run], Answer]:
    return lambda run: (question(run), len(run.ranks))


def known(ranks: Sequence[Rank], question: Callable[[Rank], float]) -> list[float]:
    """The answers of ranks. Raises the first Unknown where no rank has one."""
    values, why = [], Unknown("the run holds no rank")
    for rank in ranks:
        try:
            values.append(question(rank))
        except Unknown as unknown:
            why = unknown
    if not values:
        raise why
    return values


def _two(ranks: Sequence[Rank], question: Callable[[Rank], float]) -> list[float]:
    values = known(ranks, question)
    if len(values) < 2:
        raise Unknown("it compares ranks, and one alone was recorded")
    return values


def share(part: float, whole: float, why: str) -> float:
    if not whole:
        raise Unknown(why)
    return 100 * part / whole


def step_time(rank: Rank) -> float:
    """In s."""
    if not rank.inner:
        raise Unknown("no step is marked (ProfilerStep#N, execute_context_*, run_batch)")
    return sum(end - start for start, end in rank.inner) / len(rank.inner) / 1e9


def _engine(rank: Rank) -> list[tuple[int, int]]:
    if rank.marks not in ("execute_context", "run_batch"):
        raise Unknown("it is of inference, and no pass of an engine is marked (execute_context_*, run_batch)")
    return rank.passes


def _first_pass(rank: Rank) -> float:
    start, end = _engine(rank)[0]
    return (end - start) / 1e9


def _later_passes(rank: Rank) -> float:
    later = _engine(rank)[1:]
    later = later[:-1] if len(later) > 1 else later
    if not later:
        raise Unknown("one pass alone was recorded")
    return sum(end - start for start, end in later) / len(later) / 1e9


def _sums(work: pl.DataFrame) -> tuple[int, int]:
    """ns of communication kernels, and of all."""
    communicates = pl.col("kind") == "communication"
    return int(work.filter(communicates)["dur"].sum()), int(work["dur"].sum())


def _communication_fraction(rank: Rank) -> float:
    kernels = rank.kernels
    part = rank.work_of_steps(kernels.filter(pl.col("kind") == "communication"))
    whole = rank.work_of_steps(kernels)
    if not whole.any():
        raise Unknown("no kernel ran in the steps that count")
    return float((100 * part[whole > 0] / whole[whole > 0]).mean())


def _communication_ratio(run: Run) -> float:
    parts = known(run.ranks, lambda rank: _sums(rank.kernels)[0])
    wholes = known(run.ranks, lambda rank: _sums(rank.kernels)[1])
    return share(sum(parts), sum(wholes), "the kernels took no time")


def _communication_time(rank: Rank) -> float:
    spent = rank.activity().times["communication"]
    return rank.mean_of_steps(lambda start, end: _covered(spent, start, end)) / 1e9


def _covered(times: Intervals, start: int, end: int) -> int:
    return int(times.covered(np.array([start]), np.array([end]))[0])


def _overlap(rank: Rank) -> float:
    times = rank.activity().times
    spans = rank.windows()
    both, whole = (
        sum(_covered(one, *span) for span in spans)
        for one in (times["communication"] & times["computation"], times["communication"])
    )
    return share(both, whole, "no communication was recorded in the steps that count")


def _whole_overlap(rank: Rank) -> float:
    times = rank.activity().times
    both = (times["communication"] & times["computation"]).total
    return share(both, times["communication"].total, "no communication was recorded") / 100


def _active(rank: Rank) -> int:
    """ns in which some kernel runs."""
    kernels = rank.kernels
    return Intervals.of(kernels["ts"].to_numpy(), kernels["end"].to_numpy()).total


def _imbalance(run: Run) -> float:
    times = _two(run.ranks, _active)
    if not min(times):
        raise Unknown("a rank's kernels took no time")
    return max(times) / min(times)


def _straggler(run: Run) -> float:
    times = _two(run.ranks, lambda rank: _sums(rank.kernels)[0])
    return share(max(times) - min(times), max(times), "no communication kernels were recorded") / 100


def _sm_coverage(rank: Rank) -> float:
    sms = {
        one.get("id"): one.get("numSms")
        for one in rank.trace.meta.get("device_properties") or ()
        if isinstance(one, dict) and isinstance(one.get("numSms"), int) and one["numSms"] > 0
    }
    grid = pl.col("grid_x").cast(pl.Float64) * pl.col("grid_y") * pl.col("grid_z")
    per_sm = pl.coalesce(
        "blocks_per_sm", grid / pl.col("device").replace_strict(sms, default=None, return_dtype=pl.Float64)
    )
    found = rank.kernels.join(rank.trace.kernels, left_on="id", right_on="event", how="inner").select(
        "dur", coverage=per_sm.clip(upper_bound=1.0)
    )
    found = found.drop_nulls()
    if not found["dur"].sum():
        raise Unknown("neither blocks per SM nor grids and the number of SMs were recorded")
    return 100 * float((found["dur"] * found["coverage"]).sum()) / float(found["dur"].sum())


def _dominant(rank: Rank) -> float:
    by_name = rank.kernels.group_by("name").agg(pl.col("dur").sum())["dur"].to_numpy()
    return share(int(by_name.max()), int(by_name.sum()), "the kernels took no time")


def _moe(rank: Rank) -> float:
    kernels = rank.kernels
    moe = kernels.filter(pl.col("name").cast(pl.String).str.contains(_MOE))
    return share(int(moe["dur"].sum()), int(kernels["dur"].sum()), "the kernels took no time")


def _copy_bandwidth(rank: Rank) -> float:
    copies = rank.work.filter(pl.col("cat").is_in(list(kinds.COPIES)))
    found = copies.join(rank.trace.kernels, left_on="id", right_on="event").drop_nulls("bytes")
    if not found["dur"].sum():
        raise Unknown("no copies with their sizes were recorded")
    return float(found["bytes"].sum()) / float(found["dur"].sum())


def _transfer_overhead(rank: Rank) -> float:
    _ = rank.kernels  # of the device
    times = rank.activity()
    alone = (times.times["memory"] - times.times["computation"]).total
    start, end = times.busy.span or (0, 0)
    return share(alone, end - start, "the device was busy for no time")


def _utilization(rank: Rank) -> float:
    kernels = rank.kernels
    first, last = int(kernels["ts"].to_numpy().min()), int(kernels["end"].to_numpy().max())
    return share(_active(rank), last - first, "the kernels took no time")


def _kernel_seconds(kind: str | None) -> Callable[[Rank], float]:
    def question(rank: Rank) -> float:
        kernels = rank.kernels if kind is None else rank.kernels.filter(pl.col("kind") == kind)
        return int(kernels["dur"].sum()) / 1e9

    return question


def _trace_time(rank: Rank) -> float:
    timed = rank.trace.events.select("ts", "dur").drop_nulls("dur")
    if not timed.height:
        raise Unknown("no timed events were recorded")
    starts, durations = timed["ts"].to_numpy(), timed["dur"].to_numpy()
    return int((starts + durations).max() - starts.min()) / 1e9


def _calls(run: Run) -> float:
    parts = run.communications()
    return parts.height / len(run.ranks)


def _bandwidth(collective: str) -> Callable[[Run], float]:
    def question(run: Run) -> float:
        found = run.bandwidths.filter(pl.col("collective") == collective)
        if not found.height:
            raise Unknown(f"no {collective} was recorded")
        middle = found["bus"].median()
        if middle is None:
            raise Unknown(f"of no {collective} the size and the group are known")
        return float(middle)  # type: ignore[arg-type]

    return question


def _volume(collective: str) -> Callable[[Run], Answer]:
    def answer(run: Run) -> Answer:
        own = run.communications().filter(pl.col("collective") == collective)
        if not own.height:
            raise Unknown(f"no {collective} was recorded")
        if own["bytes"].null_count() == own.height:
            raise Unknown(f"of no {collective} the size is known")

        def question(rank: Rank) -> float:
            mine = own.filter(pl.col("rank") == rank.rank)
            begin, finish, size = (mine[name].to_numpy() for name in ("own_start", "own_end", "bytes"))
            size = np.nan_to_num(size)
            return rank.mean_of_steps(
                lambda start, end: float(size[(begin < end) & (finish > start)].sum() / 1e9)
            )

        return of_ranks(question)(run)

    return answer


def _network(rank: Rank) -> float:
    shares = rank.trace.counters.filter(
        pl.col("name").cast(pl.String).str.contains(_NETWORK) & (pl.col("value") > 0)
    )
    mean = shares["value"].mean()
    if mean is None:
        raise Unknown("no counters of NVLink or PCIe were recorded (nsys profile --gpu-metrics-devices=all)")
    return float(mean)  # type: ignore[arg-type]


def _bound(which: str) -> Callable[[Rank], float]:
    def question(rank: Rank) -> float:
        if isinstance(rank.bounds, str):
            raise Unknown(rank.bounds)
        return share(
            rank.bounds.get(which, 0), sum(rank.bounds.values()), "of no operator the bound is known"
        )

    return question


def counted_mfu(rank: Rank) -> float:
    """Percent, of all that was recorded."""
    if not rank.has_shapes:
        raise Unknown(NO_SHAPES)
    try:
        value = mfu.analyze(rank.trace).filter(pl.col("step").is_null())["mfu_pct"].item()
    except EtloomError as error:
        raise Unknown(error.what) from None
    if value is None:
        raise Unknown("of no matrix product the shapes are known")
    return float(value)


def _hockney(which: int) -> Callable[[Run], float]:
    """alpha (us) or bandwidth (GB/s) by least squares over all-reduces."""

    def question(run: Run) -> float:
        found = run.bandwidths.filter(
            (pl.col("collective") == "all_reduce") & (pl.col("group_size") > 1) & (pl.col("time") > 0)
        ).drop_nulls()
        sizes = (found["bytes"] / found["group_size"]).to_numpy()
        if len(np.unique(sizes)) < 2:
            raise Unknown("it takes all-reduces of two sizes")
        times = (found["time"] / (2 * (found["group_size"] - 1))).to_numpy()
        slope, alpha = np.polyfit(sizes, times, 1)
        if slope <= 0 or alpha < 0:
            raise Unknown("the times of all-reduces lie on no line of latency and bandwidth above 0")
        return float(alpha / 1e3) if which == 0 else float(1 / slope)

    return question


METRICS: tuple[Metric, ...] = (
    ("avg_step_time", "s", "steps", of_ranks(step_time)),
    ("ttft", "s", "trace", of_ranks(_first_pass)),
    ("tpot", "s", "trace", of_ranks(_later_passes)),
    ("communication_fraction", "%", "steps", of_ranks(_communication_fraction)),
    ("communication_ratio", "%", "trace", of_run(_communication_ratio)),
    ("total_communication_time", "s", "steps", of_ranks(_communication_time)),
    ("compute_comm_overlap", "%", "steps", of_ranks(_overlap)),
    ("communication_overlap_ratio", "ratio", "trace", of_ranks(_whole_overlap)),
    ("load_imbalance_ratio", "ratio", "trace", of_run(_imbalance)),
    ("straggler", "ratio", "trace", of_run(_straggler)),
    ("mean_sm_coverage", "%", "trace", of_ranks(_sm_coverage)),
    ("dominant_kernel_concentration", "%", "trace", of_ranks(_dominant)),
    ("moe_fraction", "%", "trace", of_ranks(_moe)),
    ("average_memory_bandwidth", "GB/s", "trace", of_ranks(_copy_bandwidth)),
    ("memory_transfer_overhead", "%", "trace", of_ranks(_transfer_overhead)),
    *(
        (f"bandwidth_utilization_{name}", "GB/s", "trace", of_run(_bandwidth(collective)))
        for name, collective in _COLLECTIVES.items()
    ),
    ("bandwidth_utilization_peertopeer", "%", "trace", of_ranks(_network)),
    *(
        (f"collective_vol_{name}", "GB", "steps", _volume(collective))
        for name, collective in _COLLECTIVES.items()
    ),
    ("coll_call_num", "calls", "trace", of_run(_calls)),
    ("aggregate_gpu_utilization", "%", "trace", of_ranks(_utilization)),
    ("compute_bound_fraction", "%", "trace", of_ranks(_bound("compute"))),
    ("memory_bound_fraction", "%", "trace", of_ranks(_bound("memory"))),
    ("total_kernel_time", "s", "trace", of_ranks(_kernel_seconds(None))),
    ("kernel_compute_time", "s", "trace", of_ranks(_kernel_seconds("computation"))),
    ("kernel_communication_time", "s", "trace", of_ranks(_kernel_seconds("communication"))),
    ("total_trace_time", "s", "trace", of_ranks(_trace_time)),
    ("hockney_alpha", "us", "trace", of_run(_hockney(0))),
    ("hockney_bandwidth", "GB/s", "trace", of_run(_hockney(1))),
)
