"""Tables that compare two runs: by category, operator, kernel and collective, per step and rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses import kernel_families, temporal_breakdown
from etloom.analyses.answers import answer
from etloom.analyses.collectives import number_instances, summarize_instances
from etloom.analyses.helpers.operator_times import measure_operators, measure_replayed_operators
from etloom.analyses.helpers.run_tables import RunTable
from etloom.collectives import list_participations, match_collectives
from etloom.comparison.measures import has_steps, is_stepped, measure_rank
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.intervals import Intervals
from etloom.core.nesting import find_innermost
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import (
    find_steps,
    is_launched_before_recording,
    select_device_events,
    to_intervals,
)

BY = ("category", "family", "operator", "kernel", "collective", "rank", "step")
MIN_RANK_CHANGE, OUTLIER = 0.02, 5.0
"""By how much a rank must change unlike the usual one: share of its time, and standard deviations of the ranks."""
NEGLIGIBLE = 0.001
"""Share of a total below which percentages are not meaningful."""
MIN_NET_SHARE = 0.2
"""If the total change is less than this share of the sum of absolute changes, no share of it is computed."""
MIN_MENTIONED_SHARE = 0.03
MIN_COMMON_SHARE = 1 / 3
"""Share of the time in operators of both runs below which they may be different programs."""
_WRAPPERS = r"^(?:Compiled|Torch-Compiled|Distributed|FullySharded|autograd::|nn\.Module|Optimizer)"
"""Matches operators in which any program may run."""
_PARTS = ("compute", "exposed_communication", "exposed_memory", "exposed_other", "idle")
_DURATIONS = pl.len().alias("count"), pl.col("dur").sum().alias("ns")
_SUM_COLUMNS = dict.fromkeys(("count", "ns"), pl.Float64)
_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "category": {"category": pl.String, "ns": pl.Float64},
    "family": {"family": pl.String, **_SUM_COLUMNS},
    "operator": {
        "operator": pl.String,
        **_SUM_COLUMNS,
        "device_ns": pl.Float64,
        "device_total_ns": pl.Float64,
    },
    "kernel": {"kernel": pl.String, "kind": pl.String, **_SUM_COLUMNS},
    "collective": {
        "collective": pl.String,
        "group_size": pl.Int64,
        "bytes": pl.Int64,
        **_SUM_COLUMNS,
        "wait_ns": pl.Float64,
        "transfer_ns": pl.Float64,
    },
    "rank": {"rank": pl.Int64, "ns": pl.Float64},
}


def by_category(job: Job, stepped: bool) -> pl.DataFrame:
    """Return the mean time of each category of a step, ns: compute, exposed communication, memory, other, and idle.

    Columns: category, ns. As in temporal-breakdown.
    """
    parts = []
    for trace in job.values():
        table = temporal_breakdown.analyze(trace)
        parts.append(table.filter(pl.col("step").is_not_null() == stepped).select(f"{p}_ns" for p in _PARTS))
    means = pl.concat(part.mean() for part in parts).mean().row(0)
    return pl.DataFrame({"category": _PARTS, "ns": means}, schema=_SCHEMAS["category"])


def by_operator(job: Job, stepped: bool) -> pl.DataFrame:
    """Return per operator its count, exclusive host time (ns) and the time of the GPU activity it launched.

    Host time: self time and runtime calls. device_ns: of GPU activities that the operator launched directly, not
    through an inner operator. device_total_ns: of those it or an inner operator launched, which stays comparable if the
    operator is implemented by others.

    GPU activities without an operator have a row with a null operator, so that device_ns sums to all GPU activities.
    """
    return _mean_over_ranks(job, sum_operators, stepped, ["operator"])


def by_family(job: Job, stepped: bool) -> pl.DataFrame:
    """Return per kernel family, which is independent of the vendor, the count and the sum of durations, ns."""
    return _mean_over_ranks(job, sum_families, stepped, ["family"])


def by_kernel(job: Job, stepped: bool) -> pl.DataFrame:
    """Return per kernel name its kind, count and sum of durations, ns."""
    return _mean_over_ranks(job, sum_kernels, stepped, ["kernel", "kind"])


def by_collective(job: Job, stepped: bool) -> pl.DataFrame:
    """Return per (collective, group_size, bytes) the count and the total, wait and transfer time of communications, ns.

    ns: sum over the communications of the shortest duration of a rank.
    """
    schema = _SCHEMAS["collective"]
    keys, sums = list(schema)[:3], list(schema)[4:]
    if not match_collectives(job).parts.height:
        return pl.DataFrame(schema=schema)
    parts = number_instances(match_collectives(job).comparable)
    totals = summarize_instances(parts).select("instance", *keys, "wait_ns", "transfer_ns", ns="duration_ns")
    calls = parts.select("rank", "event", "instance").join(totals, on="instance", maintain_order="left")
    if stepped:
        steps = pl.concat(
            trace.compute_once(find_communication_steps, rank).with_columns(
                pl.lit(rank, pl.Int64).alias("rank")
            )
            for rank, trace in job.items()
        )
        calls = calls.join(steps.drop_nulls("step"), on=("rank", "event"), how="semi", maintain_order="left")
    numbers = [find_steps(trace).height if stepped else 1 for trace in job.values()]
    ranks = pl.DataFrame(
        {"rank": job.ranks, "number": numbers}, schema={"rank": pl.Int64, "number": pl.Int64}
    )
    by_rank = (
        calls.group_by("rank", *keys, maintain_order=True)
        .agg(pl.len().alias("count"), *(pl.col(name).sum() for name in sums))
        .join(ranks, on="rank", maintain_order="left")
    )
    per_step = pl.col("count", *sums).cast(pl.Float64) / pl.col("number")
    means = by_rank.group_by(keys, maintain_order=True).agg(per_step.sum() / len(job))
    return means.select(pl.col(name).cast(dtype) for name, dtype in schema.items())


def by_rank(job: Job, stepped: bool) -> pl.DataFrame:
    """Return rank and the mean time of its step outside of exposed communication, in which it may wait for others."""
    outside = pl.col("span_ns") - pl.col("exposed_communication_ns")
    tables = {rank: temporal_breakdown.analyze(trace) for rank, trace in job.items()}
    means = [
        (rank, table.filter(pl.col("step").is_not_null() == stepped).select(outside.mean()).item())
        for rank, table in tables.items()
    ]
    return pl.DataFrame(means, schema=_SCHEMAS["rank"], orient="row")


def find_changed_ranks(table: pl.DataFrame) -> tuple[pl.DataFrame, float] | None:
    """Return the rows of ranks that changed unlike the usual rank, the largest change first, and the usual change, ns.

    A rank differs if its change exceeds the usual one by `MIN_RANK_CHANGE` of its time, and by `OUTLIER` standard
    deviations. Of two ranks, that with the smaller change is the usual one. None if no rank differs.

    Args:
        table: of `join_sides` for ``rank``.
    """
    rows = table.filter(pl.col("in") == "both")
    if rows.height < 2:
        return None
    change = rows["change_ns"].to_numpy().astype(float)
    middle = np.sort(change)[[(len(change) - 1) // 2, len(change) // 2]]
    usual = float(middle[np.argmin(np.abs(middle))])
    deviation = np.abs(change - usual)
    spread = 1.4826 * float(np.sort(deviation)[(len(deviation) - 1) // 2])
    limit = np.maximum(MIN_RANK_CHANGE * rows["before_ns"].to_numpy(), OUTLIER * spread)
    changed = rows.filter(pl.Series(deviation > limit))
    return (changed, usual) if changed.height else None


def sum_operators(trace: Trace, stepped: bool | None) -> pl.DataFrame:
    """Return count, host time (ns) and GPU time (ns) per operator of one rank; see `by_operator`.

    Args:
        trace: a linked trace.
        stepped: per step; None: if the rank has steps.
    """
    sums = pl.len().alias("count"), pl.col("exclusive_ns").sum().alias("ns")
    measured = measure_operators(trace)
    calls = _sum_per_step(trace, measured, stepped, ["name"], *sums)
    by = trace.launches.select("device_event", id="operator").unique("device_event", keep="first")
    names = by.join(trace.events.select("id", "name"), on="id").select(id="device_event", operator="name")
    activities = (
        trace.compute_once(assign_steps)
        .drop("name")
        .join(names, on="id", how="left")
        .rename({"operator": "name"})
    )
    launched = _sum_per_step(trace, activities, stepped, ["name"], pl.col("dur").sum().alias("device_ns"))
    columns = "name", "step", "device_ns"
    inclusive = pl.concat(
        table.filter("outermost").select(columns) for table in (measured, measure_replayed_operators(trace))
    )
    totals = _sum_per_step(
        trace, inclusive, stepped, ["name"], pl.col("device_ns").sum().alias("device_total_ns")
    )
    for table in (launched, totals):
        calls = calls.join(table, on="name", how="full", coalesce=True, nulls_equal=True)
    return (
        calls.select("count", "ns", "device_ns", "device_total_ns", operator="name")
        .select(*_SCHEMAS["operator"])
        .fill_null(0.0)
        .sort("operator")
    )


def sum_families(trace: Trace, stepped: bool | None) -> pl.DataFrame:
    """Return count and sum of durations (ns) per kernel family of one rank; see `by_family` and `sum_operators`."""
    activities = trace.compute_once(assign_steps)
    if activities.height:
        named = kernel_families.classify_kernels(trace).select("id", "family")
        activities = activities.join(named, on="id", how="left")
    else:
        activities = activities.with_columns(family=pl.lit(None, pl.String))
    return _sum_per_step(trace, activities, stepped, ["family"], *_DURATIONS)


def sum_kernels(trace: Trace, stepped: bool | None) -> pl.DataFrame:
    """Return count and sum of durations (ns) per kernel of one rank; see `by_kernel` and `sum_operators`."""
    activities = trace.compute_once(assign_steps).rename({"name": "kernel"})
    return _sum_per_step(trace, activities, stepped, ["kernel", "kind"], *_DURATIONS)


def find_communication_steps(trace: Trace, rank: int) -> pl.DataFrame:
    """Return the step number of each communication of a rank; columns event, step (null outside of steps)."""
    participations = trace.compute_once(list_participations, rank).select("event", "where", "issuer")
    participations = participations.join(
        trace.compute_once(assign_steps).select("step", event="id"),
        on="event",
        how="left",
        maintain_order="left",
    )
    # A host backend may begin its work in a later step than that of the call.
    call = participations.select(pl.coalesce("issuer", "event")).to_series()
    calls = take_rows(trace.events["step"], rows_of_ids(trace.events, call))
    call_step = pl.when(pl.col("where") == "host").then(calls)
    return participations.select("event", step=pl.coalesce("step", call_step))


def assign_steps(trace: Trace) -> pl.DataFrame:
    """Return the GPU activities by start, with the step in which they were launched.

    Without a recorded launch, the step is the innermost at their start, unless they were launched before the recording.
    """
    columns = ("id", "name", "kind", "ts", "dur", "step", "device", "stream")
    activities = _with_launched(trace, select_device_events(trace, *columns).sort("ts"))
    marks = find_steps(trace)
    enclosing = take_rows(marks["step"], find_innermost(marks["start"], marks["end"], activities["ts"]))
    inferred_step = pl.when(~pl.col("launched") & ~is_launched_before_recording()).then(enclosing)
    return activities.with_columns(step=pl.coalesce("step", inferred_step)).drop("launched")


def _with_launched(trace: Trace, activities: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``launched``: True for GPU activities with a recorded launch call."""
    by_a_call = trace.launches.drop_nulls("launch")["device_event"].implode()
    return activities.with_columns(launched=activities["id"].is_in(by_a_call))


def measure_unattributed(trace: Trace) -> int:
    """Return the time within steps, ns, of GPU activities that were launched outside of the recorded steps."""
    marks = find_steps(trace)
    if not marks.height:
        return 0
    before = to_intervals(trace.compute_once(assign_steps).filter(pl.col("step").is_null()))
    return (before & Intervals.of(marks["start"].to_numpy(), marks["end"].to_numpy())).total


def _sum_per_step(
    trace: Trace, events: pl.DataFrame, stepped: bool | None, keys: list[str], *sums: pl.Expr
) -> pl.DataFrame:
    """Sum expressions by key over the events in a rank's steps, and divide the sums by the number of steps."""
    per_step = is_stepped(trace, stepped)
    number = find_steps(trace).height if per_step else 1
    in_steps = events.drop_nulls("step") if per_step and events["step"].null_count() else events
    sums_by_key = in_steps.group_by(keys).agg(sums)
    texts = (pl.col(key).cast(pl.String) for key in keys)
    return sums_by_key.select(*texts, pl.exclude(keys).cast(pl.Float64) / number).sort(keys)


def _mean_over_ranks(
    job: Job, measure: Callable[[Trace, bool | None], pl.DataFrame], stepped: bool, keys: list[str]
) -> pl.DataFrame:
    """Average over ranks the tables that ``measure`` returns, by key columns; keys missing on a rank count as 0."""
    by_rank: list[pl.DataFrame] = [measure_rank(trace, measure, stepped) for trace in job.values()]
    return pl.concat(by_rank).group_by(keys, maintain_order=True).agg(pl.exclude(keys).sum() / len(by_rank))


_SUMS: Mapping[str, Callable[[Job, bool], pl.DataFrame]] = {
    "category": by_category,
    "family": by_family,
    "operator": by_operator,
    "kernel": by_kernel,
    "collective": by_collective,
    "rank": by_rank,
}


def _compute_sums(by: str, job: Job) -> pl.DataFrame:
    return _SUMS[by](job, has_steps(job)).sort(pl.all())


def _measure_unattributed(job: Job) -> pl.DataFrame:
    times = [trace.compute_once(measure_unattributed) for trace in job.values()]
    return pl.DataFrame({"ns": [max(times)]}, schema=UNATTRIBUTED.schema)


SUMS = {by: RunTable(f"compared-{by}", schema, partial(_compute_sums, by)) for by, schema in _SCHEMAS.items()}
"""The sums of a run as it is compared with one that has steps if it has some itself."""
UNATTRIBUTED = RunTable(
    "compared-unattributed", {"ns": pl.Int64}, _measure_unattributed, has_nulls=False, rows=1
)
"""The largest time of a rank in GPU activities that belong to no step (`measure_unattributed`)."""


def sum_run(job: Job, by: str, stepped: bool) -> pl.DataFrame:
    """Return times and counts of a run by category, operator, kernel, ... (a key of `SUMS`), as means over ranks.

    Args:
        job: linked ranks.
        by: category, family, operator, kernel or collective.
        stepped: per step, else of the run.
    """
    return SUMS[by].read(job) if stepped == has_steps(job) else _SUMS[by](job, stepped)


def join_sides(before: pl.DataFrame, after: pl.DataFrame, clear: bool = True) -> pl.DataFrame:
    """Join the sums of two runs by key: before, after, change, ``in`` (both, added, removed); largest change first.

    change_pct: relative to the sum before; null if that is below NEGLIGIBLE of the table's sum. share_pct: share of the
    total change, summing to 100; null if changes of both signs nearly cancel, and unless ``clear``.
    """
    sums = [name for name in before.columns if name == "count" or name.endswith("ns")]
    keys = [name for name in before.columns if name not in sums]
    joined = before.with_columns(was=True).join(
        after.with_columns(will=True), on=keys, how="full", coalesce=True, nulls_equal=True, suffix="_after"
    )
    presence = (
        pl.when(pl.col("was").is_null())
        .then(pl.lit("added"))
        .when(pl.col("will").is_null())
        .then(pl.lit("removed"))
        .otherwise(pl.lit("both"))
    )

    def pair(name: str) -> list[pl.Expr]:
        stem, unit = (name.removesuffix("ns"), "_ns") if name.endswith("ns") else ("count_", "")
        first, second = pl.col(name).fill_null(0), pl.col(f"{name}_after").fill_null(0)
        if unit:
            first, second = first.round().cast(pl.Int64), second.round().cast(pl.Int64)
        columns = [first.alias(f"{stem}before{unit}"), second.alias(f"{stem}after{unit}")]
        return [*columns, (second - first).alias(f"{stem}change{unit}")] if unit else columns

    table = joined.select(*keys, presence.alias("in"), *(column for name in sums for column in pair(name)))
    main = main_column(before, after)
    change, base = pl.col(f"{main}change_ns"), pl.col(f"{main}before_ns")
    net, gross = table.select(change.sum().alias("net"), change.abs().sum().alias("gross")).row(0)
    share = (
        100 * change / net + 0.0 if clear and abs(net) > MIN_NET_SHARE * gross else pl.lit(None, pl.Float64)
    )
    return table.with_columns(
        pl.when(base > NEGLIGIBLE * base.sum()).then(100 * change / base).alias("change_pct"),
        share.alias("share_pct"),
    ).sort(change.abs(), *keys, descending=[True, *(False for _ in keys)])


def main_column(before: pl.DataFrame, after: pl.DataFrame) -> str:
    """Return the prefix of the column that a table is sorted by: "device_" if both runs have GPU time, else ""."""
    has_gpu_time = all("device_ns" in side.columns and side["device_ns"].sum() for side in (before, after))
    return "device_" if has_gpu_time else ""


def common_operator_shares(operators: pl.DataFrame) -> tuple[float, float] | None:
    """Return the share of each run's operator time (before, after) that is in operators of both runs.

    ``operators``: table of `join_sides`. None if most time of a side has no known operator.
    """
    stem = "device_" if operators["device_before_ns"].sum() and operators["device_after_ns"].sum() else ""
    times = [f"{stem}before_ns", f"{stem}after_ns"]
    totals = operators.select(times).sum().row(0)
    named = operators.drop_nulls("operator")
    named_totals = named.select(times).sum().row(0)
    if any(2 * part <= total for part, total in zip(named_totals, totals, strict=True)):
        return None
    first, second = named.filter(pl.col("in") == "both").select(times).sum().row(0)
    return first / named_totals[0], second / named_totals[1]


def find_common_caller(operators: pl.DataFrame) -> dict[str, Any] | None:
    """Return the operator of both runs that launches most of their GPU time itself or through others, as a row of
    ``operators``, the table of `join_sides`; None if none launches `MIN_COMMON_SHARE` of each run's.

    Operators in which any program may run (`_WRAPPERS`) do not count.
    """
    totals = operators.select("device_before_ns", "device_after_ns").sum().row(0)
    if not all(totals):
        return None
    shares = pl.col("device_total_before_ns") / totals[0], pl.col("device_total_after_ns") / totals[1]
    callers = operators.drop_nulls("operator").with_columns(share=pl.min_horizontal(shares))
    is_common = (pl.col("in") == "both") & (pl.col("share") >= MIN_COMMON_SHARE)
    callers = callers.filter(is_common & ~pl.col("operator").str.contains(_WRAPPERS))
    return (
        callers.sort("share", descending=True, maintain_order=True).row(0, named=True)
        if callers.height
        else None
    )


def describe_largest_changes(table: pl.DataFrame, name: str, change: str, most: int = 3) -> list[str]:
    """Return the largest changes of a table as texts such as "computation +1.25 ms".

    Changes with a share of at most MIN_MENTIONED_SHARE are left out.
    """
    gross = float(table[change].abs().sum())
    rows = table.sort(pl.col(change).abs(), descending=True, maintain_order=True).head(most)
    mentioned = rows.filter(pl.col(change).abs() > MIN_MENTIONED_SHARE * gross)
    names = mentioned[name].cast(pl.String).fill_null(f"no {name}").to_list()
    # Parts of a step are column names.
    words = [text.replace("_", " ") for text in names] if name == "category" else names
    return [f"{word} {format_signed_time(ns)}" for word, ns in zip(words, mentioned[change], strict=True)]


def format_signed_time(ns: float) -> str:
    """Format a time in ns with its sign, in ms or µs, such as "+1.25 ms" or "-30.1 µs"."""
    return f"{ns / 1e6:+,.2f} ms" if abs(ns) >= 1e6 else f"{ns / 1e3:+.1f} µs"


# The difference of two memory snapshots: what each place in the program holds at the peak.

COLUMNS = {
    "place": pl.String,
    "before_blocks": pl.Int64,
    "after_blocks": pl.Int64,
    "before_bytes": pl.Int64,
    "after_bytes": pl.Int64,
    "change_bytes": pl.Int64,
}
RESERVED = "(peak of reserved memory)"
_ALL = 10**9


def compare_memory(before: Job, after: Job) -> pl.DataFrame:
    """Return what each place holds at the peak of memory in use of each run, summed over ranks and devices, largest
    change first; the first row, `RESERVED`, is the peak of reserved memory.

    Raises:
        AnalysisError: A run has no history of its allocator.
    """
    sides = []
    for name, job in (("before", before), ("after", after)):
        holders = (
            answer(job, "memory-holders", top=_ALL)
            .table.group_by("place")
            .agg(pl.col("blocks", "bytes").sum())
        )
        peak = (
            answer(job, "allocator", rows=0)
            .table.group_by("rank", "device")
            .agg(pl.col("reserved_bytes").max())
        )
        total = pl.DataFrame(
            {"place": [RESERVED], "blocks": [None], "bytes": [int(peak["reserved_bytes"].sum())]}
        )
        sides.append(
            pl.concat([total.cast(holders.schema), holders]).select(  # type: ignore[arg-type]
                "place", pl.col("blocks").alias(f"{name}_blocks"), pl.col("bytes").alias(f"{name}_bytes")
            )
        )
    joined = sides[0].join(sides[1], on="place", how="full", coalesce=True, nulls_equal=True)
    zero = pl.col("before_bytes", "after_bytes").fill_null(0)
    table = joined.with_columns(zero).with_columns(
        change_bytes=pl.col("after_bytes") - pl.col("before_bytes")
    )
    order = [pl.col("place") != RESERVED, -pl.col("change_bytes").abs(), pl.col("place")]
    return table.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()).sort(order)
