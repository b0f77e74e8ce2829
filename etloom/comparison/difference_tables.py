"""Two runs side by side: by category, operator, kernel and collective, per step and rank."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.analyses import kernel_families, temporal_breakdown
from etloom.analyses.collectives import number_instances, summarize_instances
from etloom.analyses.helpers.operator_times import measure_operators
from etloom.collectives import match_collectives
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.intervals import Intervals, find_innermost
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, select_device_events, to_intervals

BY = ("category", "family", "operator", "kernel", "collective", "step")
NEGLIGIBLE = 0.001
"""Of a whole: a change of less is no headline, and a percentage of less says nothing."""
MIN_NET_SHARE = 0.2
"""Of the changes without their signs: where the whole changed by less, no row has a share in it."""
MIN_MENTIONED_SHARE = 0.03
MIN_COMMON_SHARE = 1 / 3
"""Of the time on a side: where operators that the other has too take less, the runs may be of two programs."""
_PARTS = ("compute", "exposed_communication", "exposed_memory", "exposed_other", "idle")


def has_steps(job: Job) -> bool:
    """Whether every rank marks steps; if not, the run is taken as one."""
    return all(find_steps(trace).height for trace in job.values())


def by_category(job: Job, stepped: bool) -> pl.DataFrame:
    """category, ns: the parts of temporal-breakdown."""
    parts = []
    for trace in job.values():
        table = temporal_breakdown.analyze(trace)
        parts.append(table.filter(pl.col("step").is_not_null() == stepped).select(f"{p}_ns" for p in _PARTS))
    means = pl.concat(part.mean() for part in parts).mean().row(0)
    return pl.DataFrame({"category": _PARTS, "ns": means}, schema={"category": pl.String, "ns": pl.Float64})


def by_operator(job: Job, stepped: bool) -> pl.DataFrame:
    """operator, count, ns (own time on the host: self time and calls of the runtime), device_ns (of what it launched
    itself, not an operator inside it).

    Device work that no operator launched has a row whose operator is null, so that device_ns sums to all device work.
    """
    found = [_operators(trace, stepped) for trace in job.values()]
    return _mean_over_ranks(found, ["name"]).rename({"name": "operator"})


def _operators(trace: Trace, stepped: bool) -> pl.DataFrame:
    sums = pl.len().alias("count"), pl.col("exclusive_ns").sum().alias("ns")
    called = _per_step(trace, measure_operators(trace), stepped, ["name"], *sums)
    by = trace.launches.select("device_event", id="operator").unique("device_event", keep="first")
    names = by.join(trace.events.select("id", "name"), on="id").select(id="device_event", operator="name")
    work = _assign_steps(trace).drop("name").join(names, on="id", how="left").rename({"operator": "name"})
    launched = _per_step(trace, work, stepped, ["name"], pl.col("dur").sum().alias("device_ns"))
    both = called.join(launched, on="name", how="full", coalesce=True, nulls_equal=True)
    return both.select("name", "count", "ns", "device_ns").fill_null(0.0)


def by_family(job: Job, stepped: bool) -> pl.DataFrame:
    """family, count, ns (sum of durations): kernel-families, which kernels of two vendors share."""
    sums = pl.len().alias("count"), pl.col("dur").sum().alias("ns")
    found = []
    for trace in job.values():
        work = _assign_steps(trace)
        if work.height:
            named = kernel_families.classify_kernels(trace).select("id", "family")
            work = work.join(named, on="id", how="left")
        else:
            work = work.with_columns(family=pl.lit(None, pl.String))
        found.append(_per_step(trace, work, stepped, ["family"], *sums))
    return _mean_over_ranks(found, ["family"])


def by_kernel(job: Job, stepped: bool) -> pl.DataFrame:
    """kernel, kind, count, ns (sum of durations)."""
    keys = ["name", "kind"]
    sums = pl.len().alias("count"), pl.col("dur").sum().alias("ns")
    found = [_per_step(trace, _assign_steps(trace), stepped, keys, *sums) for trace in job.values()]
    return _mean_over_ranks(found, keys).rename({"name": "kernel"})


def _assign_steps(trace: Trace) -> pl.DataFrame:
    """Device work by start, with the step of its launch; what no recorded call launched has the innermost step in whose
    time it starts, unless `_from_before` says that it belongs to none."""
    work = _with_launched(trace, select_device_events(trace).sort("ts"))
    marks = find_steps(trace)
    around = take_rows(marks["step"], find_innermost(marks["start"], marks["end"], work["ts"]))
    alone = pl.when(~pl.col("launched") & ~_launched_before_recording()).then(around)
    return work.with_columns(step=pl.coalesce("step", alone)).drop("launched")


def _with_launched(trace: Trace, work: pl.DataFrame) -> pl.DataFrame:
    """Device work and whether a call that the trace holds launched it."""
    by_a_call = trace.launches.drop_nulls("launch")["device_event"].implode()
    return work.with_columns(launched=work["id"].is_in(by_a_call))


def _launched_before_recording() -> pl.Expr:
    """Of each row of `_with_launched` whether it was launched before the trace began: it has no recorded launch, and
    the first launched work of its stream, or else of any, comes after it. Streams work in the order of launches."""
    start = pl.when("launched").then("ts")
    first = pl.coalesce(start.min().over("device", "stream"), start.min())
    return (~pl.col("launched") & (pl.col("ts") < first)).fill_null(False)


def unattributed_gpu_ns(trace: Trace) -> int:
    """ns of the marked steps in which device work ran that was launched before the trace began, or in no step."""
    marks = find_steps(trace)
    if not marks.height:
        return 0
    before = to_intervals(_assign_steps(trace).filter(pl.col("step").is_null()))
    return (before & Intervals.of(marks["start"].to_numpy(), marks["end"].to_numpy())).total


def by_collective(job: Job, stepped: bool) -> pl.DataFrame:
    """collective, group_size, bytes, count, ns (the shortest time of a rank in each, summed), wait_ns, transfer_ns: of
    the communications that a rank takes part in."""
    keys = ["collective", "group_size", "bytes"]
    schema = {"collective": pl.String, "group_size": pl.Int64, "bytes": pl.Int64}
    names = ("ns", "wait_ns", "transfer_ns")
    if not match_collectives(job).parts.height:
        return pl.DataFrame(schema={**schema, **dict.fromkeys(("count", *names), pl.Float64)})
    parts = number_instances(match_collectives(job).comparable)
    whole = summarize_instances(parts).select("meeting", *keys, "wait_ns", "transfer_ns", ns="duration_ns")
    sums = pl.len().alias("count"), *(pl.col(name).sum() for name in names)
    found = []
    for rank, trace in job.items():
        own = parts.filter(pl.col("rank") == rank).select("event", "where", "issuer", "meeting")
        own = own.join(whole, on="meeting", maintain_order="left")
        own = own.join(
            _assign_steps(trace).select("step", event="id"), on="event", how="left", maintain_order="left"
        )
        # A backend on the host may begin its work in a later step than that of the call.
        call = own.select(pl.coalesce("issuer", "event")).to_series()
        called = take_rows(trace.events["step"], rows_of_ids(trace.events, call))
        of_call = pl.when(pl.col("where") == "host").then(called)
        own = own.with_columns(step=pl.coalesce("step", of_call))
        found.append(_per_step(trace, own, stepped, keys, *sums))
    return _mean_over_ranks(found, keys).cast(schema)  # type: ignore[arg-type]


def _per_step(
    trace: Trace, events: pl.DataFrame, stepped: bool, keys: list[str], *sums: pl.Expr
) -> pl.DataFrame:
    """The sums of the events of a rank's steps, over the number of steps."""
    number = find_steps(trace).height if stepped else 1
    chosen = events.filter(pl.col("step").is_not_null()) if stepped else events
    grouped = chosen.group_by(pl.col(key).cast(pl.String) for key in keys).agg(sums)
    return grouped.with_columns(pl.exclude(keys).cast(pl.Float64) / number)


def _mean_over_ranks(found: Sequence[pl.DataFrame], keys: list[str]) -> pl.DataFrame:
    """The mean over ranks, of which one that lacks a row counts as 0."""
    return pl.concat(found).group_by(keys).agg(pl.exclude(keys).sum() / len(found))


TABLES = {
    "category": by_category,
    "family": by_family,
    "operator": by_operator,
    "kernel": by_kernel,
    "collective": by_collective,
}


def join_sides(before: pl.DataFrame, after: pl.DataFrame, clear: bool = True) -> pl.DataFrame:
    """Both tables in one, greatest change first: each sum before and after, the change, and ``in``: both, or "added",
    "removed".

    change_pct: of the sum before; null where that is less than NEGLIGIBLE of the table's. share_pct: of the change of
    the table's sum, so that it sums to 100; null where changes of both signs nearly cancel, and unless ``clear``.
    """
    sums = [name for name in before.columns if name == "count" or name.endswith("ns")]
    keys = [name for name in before.columns if name not in sums]
    joined = before.with_columns(was=True).join(
        after.with_columns(will=True), on=keys, how="full", coalesce=True, nulls_equal=True, suffix="_after"
    )
    mark = (
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

    table = joined.select(*keys, mark.alias("in"), *(column for name in sums for column in pair(name)))
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
    """What a table is ordered by and shares are of: "device_" where both sides tell of device work, else ""."""
    told = all("device_ns" in side.columns and side["device_ns"].sum() for side in (before, after))
    return "device_" if told else ""


def common_operator_shares(operators: pl.DataFrame) -> tuple[float, float] | None:
    """Of `beside`'s table of operators the part of the time before and after that is of operators of both; None where
    most time of a side is of no known operator."""
    stem = "device_" if operators["device_before_ns"].sum() and operators["device_after_ns"].sum() else ""
    times = [f"{stem}before_ns", f"{stem}after_ns"]
    whole = operators.select(times).sum().row(0)
    named = operators.drop_nulls("operator")
    known = named.select(times).sum().row(0)
    if any(2 * some <= every for some, every in zip(known, whole, strict=True)):
        return None
    first, second = named.filter(pl.col("in") == "both").select(times).sum().row(0)
    return first / known[0], second / known[1]


def describe_largest_changes(table: pl.DataFrame, name: str, change: str, most: int = 3) -> list[str]:
    """The changes of a table worth a word, the largest first: those above MENTIONED of all, without their signs."""
    gross = float(table[change].abs().sum())
    rows = table.sort(pl.col(change).abs(), descending=True, maintain_order=True).head(most)
    worth = rows.filter(pl.col(change).abs() > MIN_MENTIONED_SHARE * gross)
    names = worth[name].cast(pl.String).fill_null(f"no {name}").to_list()
    # Parts of a step have no names of their own.
    words = [text.replace("_", " ") for text in names] if name == "category" else names
    return [f"{word} {format_signed_time(ns)}" for word, ns in zip(words, worth[change], strict=True)]


def format_signed_time(ns: float) -> str:
    """+1.25 ms, -30.1 us."""
    return f"{ns / 1e6:+,.2f} ms" if abs(ns) >= 1e6 else f"{ns / 1e3:+.1f} us"
