"""Tables that compare two runs: by category, operator, kernel and collective, per step and rank."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.analyses import kernel_families, temporal_breakdown
from etloom.analyses.collectives import number_instances, summarize_instances
from etloom.analyses.helpers.operator_times import measure_operators
from etloom.collectives import match_collectives
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.intervals import Intervals
from etloom.core.nesting import find_innermost
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, select_device_events, to_intervals

BY = ("category", "family", "operator", "kernel", "collective", "step")
NEGLIGIBLE = 0.001
"""Share of a total below which percentages are not meaningful."""
MIN_NET_SHARE = 0.2
"""Share of the sum of absolute changes: if the total changed by less, rows have no share in it."""
MIN_MENTIONED_SHARE = 0.03
MIN_COMMON_SHARE = 1 / 3
"""Share of the time in operators of both runs below which they may be different programs."""
_PARTS = ("compute", "exposed_communication", "exposed_memory", "exposed_other", "idle")


def by_category(job: Job, stepped: bool) -> pl.DataFrame:
    """Return category, ns: the parts of temporal-breakdown."""
    parts = []
    for trace in job.values():
        table = temporal_breakdown.analyze(trace)
        parts.append(table.filter(pl.col("step").is_not_null() == stepped).select(f"{p}_ns" for p in _PARTS))
    means = pl.concat(part.mean() for part in parts).mean().row(0)
    return pl.DataFrame({"category": _PARTS, "ns": means}, schema={"category": pl.String, "ns": pl.Float64})


def by_operator(job: Job, stepped: bool) -> pl.DataFrame:
    """Return operator, count, ns (exclusive time on the host: self time and runtime calls), device_ns (of GPU
    activities that it launched directly, not through an inner operator).

    GPU activities without an operator have a row with a null operator, so that device_ns sums to all GPU activities.
    """
    by_rank = [_operators(trace, stepped) for trace in job.values()]
    return _mean_over_ranks(by_rank, ["name"]).rename({"name": "operator"})


def _operators(trace: Trace, stepped: bool) -> pl.DataFrame:
    sums = pl.len().alias("count"), pl.col("exclusive_ns").sum().alias("ns")
    calls = _per_step(trace, measure_operators(trace), stepped, ["name"], *sums)
    by = trace.launches.select("device_event", id="operator").unique("device_event", keep="first")
    names = by.join(trace.events.select("id", "name"), on="id").select(id="device_event", operator="name")
    activities = (
        _assign_steps(trace).drop("name").join(names, on="id", how="left").rename({"operator": "name"})
    )
    launched = _per_step(trace, activities, stepped, ["name"], pl.col("dur").sum().alias("device_ns"))
    both = calls.join(launched, on="name", how="full", coalesce=True, nulls_equal=True)
    return both.select("name", "count", "ns", "device_ns").fill_null(0.0)


def by_family(job: Job, stepped: bool) -> pl.DataFrame:
    """Return family, count, ns (sum of durations) by kernel family, which is independent of the vendor."""
    sums = pl.len().alias("count"), pl.col("dur").sum().alias("ns")
    by_rank = []
    for trace in job.values():
        activities = _assign_steps(trace)
        if activities.height:
            named = kernel_families.classify_kernels(trace).select("id", "family")
            activities = activities.join(named, on="id", how="left")
        else:
            activities = activities.with_columns(family=pl.lit(None, pl.String))
        by_rank.append(_per_step(trace, activities, stepped, ["family"], *sums))
    return _mean_over_ranks(by_rank, ["family"])


def by_kernel(job: Job, stepped: bool) -> pl.DataFrame:
    """Return kernel, kind, count, ns (sum of durations)."""
    keys = ["name", "kind"]
    sums = pl.len().alias("count"), pl.col("dur").sum().alias("ns")
    by_rank = [_per_step(trace, _assign_steps(trace), stepped, keys, *sums) for trace in job.values()]
    return _mean_over_ranks(by_rank, keys).rename({"name": "kernel"})


def _assign_steps(trace: Trace) -> pl.DataFrame:
    """Return GPU activities by start, with the step of their launch. Without a recorded launch, the step is the
    innermost one at their start, unless they were launched before the recording."""
    activities = _with_launched(trace, select_device_events(trace).sort("ts"))
    marks = find_steps(trace)
    enclosing = take_rows(marks["step"], find_innermost(marks["start"], marks["end"], activities["ts"]))
    inferred_step = pl.when(~pl.col("launched") & ~_launched_before_recording()).then(enclosing)
    return activities.with_columns(step=pl.coalesce("step", inferred_step)).drop("launched")


def _with_launched(trace: Trace, activities: pl.DataFrame) -> pl.DataFrame:
    """Add ``launched``: True for GPU activities with a recorded launch call."""
    by_a_call = trace.launches.drop_nulls("launch")["device_event"].implode()
    return activities.with_columns(launched=activities["id"].is_in(by_a_call))


def _launched_before_recording() -> pl.Expr:
    """Return an expression: True for activities launched before the recording began. They have no recorded launch, and
    the first launched activity of their stream, or else of any, is later. Streams work in the order of launches."""
    start = pl.when("launched").then("ts")
    first = pl.coalesce(start.min().over("device", "stream"), start.min())
    return (~pl.col("launched") & (pl.col("ts") < first)).fill_null(False)


def unattributed_gpu_ns(trace: Trace) -> int:
    """Return the time in steps with GPU activities launched before the recording or outside of steps, ns."""
    marks = find_steps(trace)
    if not marks.height:
        return 0
    before = to_intervals(_assign_steps(trace).filter(pl.col("step").is_null()))
    return (before & Intervals.of(marks["start"].to_numpy(), marks["end"].to_numpy())).total


def by_collective(job: Job, stepped: bool) -> pl.DataFrame:
    """Return collective, group_size, bytes, count, ns, wait_ns and transfer_ns of the communications of the job.

    ns: sum over the communications of the shortest duration of a rank.
    """
    keys = ["collective", "group_size", "bytes"]
    schema = {"collective": pl.String, "group_size": pl.Int64, "bytes": pl.Int64}
    names = ("ns", "wait_ns", "transfer_ns")
    if not match_collectives(job).parts.height:
        return pl.DataFrame(schema={**schema, **dict.fromkeys(("count", *names), pl.Float64)})
    parts = number_instances(match_collectives(job).comparable)
    totals = summarize_instances(parts).select("instance", *keys, "wait_ns", "transfer_ns", ns="duration_ns")
    sums = pl.len().alias("count"), *(pl.col(name).sum() for name in names)
    by_rank = []
    for rank, trace in job.items():
        participations = parts.filter(pl.col("rank") == rank).select("event", "where", "issuer", "instance")
        participations = participations.join(totals, on="instance", maintain_order="left")
        participations = participations.join(
            _assign_steps(trace).select("step", event="id"), on="event", how="left", maintain_order="left"
        )
        # A host backend may begin its work in a later step than that of the call.
        call = participations.select(pl.coalesce("issuer", "event")).to_series()
        calls = take_rows(trace.events["step"], rows_of_ids(trace.events, call))
        call_step = pl.when(pl.col("where") == "host").then(calls)
        participations = participations.with_columns(step=pl.coalesce("step", call_step))
        by_rank.append(_per_step(trace, participations, stepped, keys, *sums))
    return _mean_over_ranks(by_rank, keys).cast(schema)  # type: ignore[arg-type]


def _per_step(
    trace: Trace, events: pl.DataFrame, stepped: bool, keys: list[str], *sums: pl.Expr
) -> pl.DataFrame:
    """Return the sums over the events of a rank's steps, divided by the number of steps."""
    number = find_steps(trace).height if stepped else 1
    in_steps = events.filter(pl.col("step").is_not_null()) if stepped else events
    grouped = in_steps.group_by(pl.col(key).cast(pl.String) for key in keys).agg(sums)
    return grouped.with_columns(pl.exclude(keys).cast(pl.Float64) / number)


def _mean_over_ranks(by_rank: Sequence[pl.DataFrame], keys: list[str]) -> pl.DataFrame:
    """Return the mean over ranks; a missing row counts as 0."""
    return pl.concat(by_rank).group_by(keys).agg(pl.exclude(keys).sum() / len(by_rank))


TABLES = {
    "category": by_category,
    "family": by_family,
    "operator": by_operator,
    "kernel": by_kernel,
    "collective": by_collective,
}


def join_sides(before: pl.DataFrame, after: pl.DataFrame, clear: bool = True) -> pl.DataFrame:
    """Join both tables, largest change first: each sum before and after, the change, and ``in``: both, added or
    removed.

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
    """Return the prefix of the column that orders a table: "device_" if both sides have GPU time, else ""."""
    has_gpu_time = all("device_ns" in side.columns and side["device_ns"].sum() for side in (before, after))
    return "device_" if has_gpu_time else ""


def common_operator_shares(operators: pl.DataFrame) -> tuple[float, float] | None:
    """Return the share of the time before and after in operators of both runs (table of `join_sides`); None if most
    time of a side has no known operator."""
    stem = "device_" if operators["device_before_ns"].sum() and operators["device_after_ns"].sum() else ""
    times = [f"{stem}before_ns", f"{stem}after_ns"]
    totals = operators.select(times).sum().row(0)
    named = operators.drop_nulls("operator")
    named_totals = named.select(times).sum().row(0)
    if any(2 * part <= total for part, total in zip(named_totals, totals, strict=True)):
        return None
    first, second = named.filter(pl.col("in") == "both").select(times).sum().row(0)
    return first / named_totals[0], second / named_totals[1]


def describe_largest_changes(table: pl.DataFrame, name: str, change: str, most: int = 3) -> list[str]:
    """The changes of a table worth a word, the largest first: those above MENTIONED of all, without their signs."""
    gross = float(table[change].abs().sum())
    rows = table.sort(pl.col(change).abs(), descending=True, maintain_order=True).head(most)
    mentioned = rows.filter(pl.col(change).abs() > MIN_MENTIONED_SHARE * gross)
    names = mentioned[name].cast(pl.String).fill_null(f"no {name}").to_list()
    # Parts of a step are column names.
    words = [text.replace("_", " ") for text in names] if name == "category" else names
    return [f"{word} {format_signed_time(ns)}" for word, ns in zip(words, mentioned[change], strict=True)]


def format_signed_time(ns: float) -> str:
    """+1.25 ms, -30.1 µs."""
    return f"{ns / 1e6:+,.2f} ms" if abs(ns) >= 1e6 else f"{ns / 1e3:+.1f} µs"
