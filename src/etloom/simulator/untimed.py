"""Predicts step times of a job that was recorded without times (`etloom collect --fake-world`), from models only.

A rank runs its operators in order: each takes the time of the nearest shapes in measured tables or in other recordings,
else the time at the limits of the device (`etloom.analyses.flops`), divided by an assumed efficiency. Communications
take latency and bandwidth of the network; synchronous ones stop the rank, asynchronous ones run next to what follows in
the step. The bubble is that of a 1F1B pipeline with equal stages: (stages - 1) / micro-batches of the time of a rank's
step. Stages and micro-batches follow from the rank's messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.flops.call_shapes import estimate_times, parse_calls
from etloom.analyses.flops.counting import count_calls
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.analyses.flops.measured_tables import TIME_ERRORS_PCT, MeasuredRatios
from etloom.analyses.flops.peaks import Peaks, lookup_peaks
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.steps import parse_step
from etloom.core.text import count_noun
from etloom.core.trace import Job, Trace
from etloom.simulator.devices.kernel_ratios import MIN_KERNEL_NS
from etloom.simulator.durations import Z_90
from etloom.simulator.interval_classes import ERRORS, explain_interval
from etloom.simulator.network import NetworkModel, parse_target
from etloom.simulator.network.topology import ANY_SIZE, Topology

EFFICIENCY, LOW_EFFICIENCY = 0.65, 0.4
"""Share of the device's limits that operators are assumed to reach, and the share for the upper bound of the time."""
IN_STEP = 1.2
"""Time of a kernel in a training step relative to its time alone, as steps of torchtitan on A100s show."""
_TIMES = ("expected", "least", "most")
_TRANSFER_FACTOR = math.exp(Z_90 * ERRORS["never run"].deviation)
"""Ends of the interval of a communication, relative to its time on the network: none was measured."""
TABLE_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "step": pl.Int64,
    "step_ns": pl.Int64,
    "lower_bound_ns": pl.Int64,
    "upper_bound_ns": pl.Int64,
    "computation_ns": pl.Int64,
    "exposed_communication_ns": pl.Int64,
    "communication_ns": pl.Int64,
    "bubble_ns": pl.Int64,
    "peak_memory_bytes": pl.Int64,
    "operators": pl.Int64,
    "unknown": pl.Int64,
}


@dataclass(frozen=True)
class UntimedPrediction:
    """The result of `predict_untimed`: step times of a job that was recorded without times.

    ``table``: one row per step of each rank: the step time with its bounds, and its parts. unknown: operators and
    communications whose size is unknown; they take no time. peak_memory_bytes: of the tensors on the device.
    ``reasons``: what it rests on.
    """

    table: pl.DataFrame
    reasons: list[str]


def has_times(job: Job) -> bool:
    """Return whether any rank of the job has timed events."""
    return any(trace.rows("events") for trace in job.values())


def predict_untimed(
    job: Job, device: str | None, network: str | None, recordings: Iterable[Job] = ()
) -> UntimedPrediction:
    """Predict the step times of a job that was recorded without times, from operator shapes, a device and a network.

    Args:
        job: execution traces with shapes.
        device: name of a GPU with known peaks (a100).
        network: a rate, a preset or a YAML file; required if the job communicates.
        recordings: linked runs, of which those on the device show the times of its products and attention.

    Raises:
        EtloomError: the device or the network is missing or unknown.
        AnalysisError: no rank has operators with shapes.
    """
    if device is None:
        raise EtloomError(
            "the run has no times, so a device is needed", remedy="such as --device a100 --network dgx-a100"
        )
    peaks, model = lookup_peaks(device), _find_network(job, network)
    learned = learn_times(recordings, peaks)
    rows = [row for rank, trace in job.items() for row in _predict_rank(trace, rank, peaks, model, learned)]
    if not rows:
        raise AnalysisError("the run has no operators with shapes", remedy="record it with --fake-world")
    table = pl.DataFrame(rows, schema=TABLE_SCHEMA, orient="row")
    return UntimedPrediction(table, _explain(table, peaks, model, learned))


def _find_network(job: Job, network: str | None) -> NetworkModel | None:
    if network is not None:
        parsed = parse_target(network)
        if isinstance(parsed, Topology):
            return NetworkModel(_extend(parsed))
        raise EtloomError(
            f"--network {network}: the run has no times, so a factor applies to nothing",
            remedy="name a rate (200Mbit/s), a preset or a YAML file",
        )
    if any(trace.rows("comms") for trace in job.values()):
        raise EtloomError(
            "the run has no times, so a network is needed",
            remedy="such as --network dgx-a100, or a YAML file",
        )
    return None


def _extend(topology: Topology) -> Topology:
    """Return the topology with its outermost level extended to any number of ranks; unknown latencies become 0."""
    *inner, last = (
        replace(level, latency_ns=0.0) if math.isnan(level.latency_ns) else level for level in topology.levels
    )
    return replace(topology, levels=(*inner, replace(last, size=ANY_SIZE)))


def _predict_rank(
    trace: Trace, rank: int, peaks: Peaks, network: NetworkModel | None, learned: Mapping[str, MeasuredRatios]
) -> Iterable[tuple[int | None, ...]]:
    """Yield a row of predicted times (`TABLE_SCHEMA`) for each step of a rank."""
    marks = trace.nodes.select("id", "attrs", step=parse_step()).drop_nulls("step").sort("id")
    calls = add_limits(count_calls(trace), peaks).with_columns(
        pl.col("family").cast(pl.String), kind=pl.lit("operator"), is_async=pl.lit(False)
    )
    calls = calls.with_columns(_expect_times(calls, peaks, learned))
    transfers = _time_transfers(trace, rank, network)
    columns = ("node", "kind", "family", "is_async", "peer", *_TIMES)
    work = pl.concat(
        [
            calls.with_columns(peer=pl.lit(None, pl.Int64)).select(columns),
            transfers.with_columns(family=pl.lit("communication")).select(columns),
        ],
        how="vertical_relaxed",
    ).sort("node")
    begins = marks["id"].to_numpy()
    place = np.searchsorted(begins, work["node"].to_numpy(), side="right") - 1
    stages = _count_stages(trace, transfers, rank)
    for number in range(max(len(begins), 1)):
        part = work.filter(pl.Series(place == (number if len(begins) else -1)))
        step = int(marks["step"][number]) if len(begins) else None
        total, compute, exposed, transfer, bubble = _add_up(part, "expected", stages)
        below, above = (_vary_families(part, bound, stages) for bound in ("least", "most"))
        unknown = part["expected"].null_count()
        yield (
            *(
                rank,
                step,
                round(total),
                round(total - below),
                round(total + above),
                round(compute),
                round(exposed),
            ),
            *(round(transfer), round(bubble), _read_peak_memory(marks, number), part.height, unknown),
        )


def _read_peak_memory(marks: pl.DataFrame, number: int) -> int | None:
    """Return the peak device memory (bytes) that the recorder noted for a step; None if it is missing."""
    text = marks["attrs"][number] if number < marks.height else None
    attributes = json.loads(text) if text else None
    peak = attributes.get("peak_memory_bytes") if isinstance(attributes, dict) else None
    return peak if isinstance(peak, int) and not isinstance(peak, bool) and 0 <= peak < 1 << 60 else None


def _expect_times(
    calls: pl.DataFrame, peaks: Peaks, learned: Mapping[str, MeasuredRatios]
) -> list[pl.Series]:
    """Return the columns `_TIMES` of operator calls (ns): by measured tables or recordings, else by the limits."""
    table, table_errors = estimate_times(calls, peaks)
    recorded, recorded_errors = estimate_times(calls, peaks, learned)
    measured = np.where(np.isfinite(table), table * IN_STEP, recorded)
    errors = np.where(np.isfinite(table), table_errors, recorded_errors)
    limit = calls["ideal_ns"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    choices = {
        "expected": (measured, limit / EFFICIENCY),
        "least": (measured * (1 - errors / 100), limit),
        "most": (measured * (1 + errors / 100), limit / LOW_EFFICIENCY),
    }
    columns = []
    for name in _TIMES:
        by_table, by_limit = choices[name]
        times = np.maximum(np.where(np.isfinite(measured), by_table, by_limit), MIN_KERNEL_NS)
        columns.append(pl.Series(name, np.where(limit > 0, times, limit), nan_to_null=True))
    return columns


def learn_times(jobs: Iterable[Job], peaks: Peaks) -> dict[str, MeasuredRatios]:
    """Return for each family the times of calls on a device, from the first ranks of recordings that used it."""
    tables = []
    for job in jobs:
        trace = job[min(job)]
        try:
            if find_device_peaks(trace).name == peaks.name:
                tables.append(count_calls(trace).filter(pl.col("basis") == "device", pl.col("time_ns") > 0))
        except AnalysisError:
            continue
    if not tables:
        return {}
    calls = pl.concat(
        [table.select("name", "dims", "dtype", "time_ns") for table in tables], how="vertical_relaxed"
    )
    times = calls["time_ns"].cast(pl.Float64).to_numpy()
    by_family = {
        family: MeasuredRatios.learn(family, *parse_calls(calls, family), times, peaks)
        for family in TIME_ERRORS_PCT
    }
    return {family: ratios for family, ratios in by_family.items() if ratios is not None}


def _vary_families(work: pl.DataFrame, bound: str, stages: int) -> float:
    """Return how far (ns) a step is from its expected time if families of operators err independently.

    bound: "least" or "most", the time of operators at one end of the interval of their family.
    """
    expected, *_ = _add_up(work, "expected", stages)
    square = 0.0
    for family in work["family"].drop_nulls().unique():
        varied = pl.when(pl.col("family") == family).then(bound).otherwise("expected").alias("varied")
        square += (_add_up(work.with_columns(varied), "varied", stages)[0] - expected) ** 2
    return math.sqrt(square)


def _add_up(work: pl.DataFrame, column: str, stages: int) -> tuple[float, float, float, float, float]:
    """Return the time of a step and its parts, ns: computation, exposed and all communication, bubble."""
    is_operator = pl.col("kind") == "operator"
    compute_ns = pl.col(column).filter(is_operator)
    blocking_ns = pl.col(column).filter(~is_operator & ~pl.col("is_async"))
    hidden_ns = pl.col(column).filter(~is_operator & pl.col("is_async"))
    compute, blocking, hidden = work.select(
        compute_ns.sum().alias("compute"),
        blocking_ns.sum().alias("blocking"),
        hidden_ns.sum().alias("hidden"),
    ).row(0)
    exposed = blocking + max(hidden - compute, 0)
    messages = work.filter(pl.col("peer").is_not_null()).group_by("kind", "peer").len()["len"]
    micro_batches = int(messages.max() or 1)  # type: ignore[arg-type]
    bubble = (compute + exposed) * (stages - 1) / micro_batches
    return compute + exposed + bubble, compute, exposed, blocking + hidden, bubble


def _time_transfers(trace: Trace, rank: int, network: NetworkModel | None) -> pl.DataFrame:
    """Return a table of a rank's communications: node, kind (collective), times (ns), is_async, peer."""
    comms = trace.comms.filter(pl.col("node").is_not_null()).select(
        "node",
        pl.col("collective", "pg_name", "ranks").cast(pl.String),
        "bytes",
        "is_async",
        "peer",
        "group_size",
    )
    rows = []
    for node, collective, _, ranks, size, is_async, peer, group_size in comms.iter_rows():
        members = json.loads(ranks) if ranks else list(range(group_size or 0))
        members = [rank, peer] if peer is not None else members
        time = None
        if network is not None and size is not None and members:
            time = network.time_ns(collective, size, members)
        times = (None,) * 3 if time is None else (time, time / _TRANSFER_FACTOR, time * _TRANSFER_FACTOR)
        rows.append((node, collective, bool(is_async), peer, *times))
    schema: dict[str, Any] = {
        "node": comms.schema["node"],
        "kind": pl.String,
        "is_async": pl.Boolean,
        "peer": pl.Int64,
        **dict.fromkeys(_TIMES, pl.Float64),
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _count_stages(trace: Trace, transfers: pl.DataFrame, rank: int) -> int:
    """Estimate the number of pipeline stages: world size over the distance to the nearest peer; 1 without peers."""
    distances = [abs(peer - rank) for peer in transfers["peer"].drop_nulls().unique().to_list()]
    world = trace.comms["group_size"].max()
    if not distances or not isinstance(world, int) or min(distances) == 0:
        return 1
    return max(int(world) // int(min(distances)), 1)


def _explain(
    table: pl.DataFrame, peaks: Peaks, network: NetworkModel | None, learned: Mapping[str, MeasuredRatios]
) -> list[str]:
    tables = [family for family in TIME_ERRORS_PCT if MeasuredRatios.load_times(family, peaks)]
    measured = f"{IN_STEP:g} times the measured tables of {', '.join(tables)}; " if tables else ""
    shapes = {family: sum(map(len, ratios.shapes.values())) for family, ratios in learned.items()}
    counts = ", ".join(f"{count_noun(count, 'shape')} of {family}" for family, count in shapes.items())
    measured += f"recordings with {counts}; " if counts else ""
    reasons = [
        f"computation: {measured}{'else ' * bool(measured)}roofline of {peaks.name} at {100 * EFFICIENCY:.0f} % "
        f"(guessed; bounds: 100 and {100 * LOW_EFFICIENCY:.0f} %), without launches and the host",
    ]
    if network is not None:
        reasons.append(
            f"communication: latency and bandwidth of {network.topology.name}, without waiting for late ranks"
        )
    if table["bubble_ns"].sum():
        reasons.append("bubble: 1F1B with equal stages, from the rank's messages (guessed)")
    reasons.append(explain_interval(["never run"]))
    if unknown := int(table["unknown"].sum()):
        reasons.append(f"{unknown} operators or communications of unknown size take no time")
    return reasons
