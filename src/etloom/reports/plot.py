"""Draws charts of a run with Altair, for notebooks; needs ``pip install altair``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom.analyses.answers import answer
from etloom.core.errors import AnalysisError, EtloomError, UnknownName
from etloom.core.trace import Job
from etloom.reports.time_shares import PART_LABELS
from etloom.timeline.allocations import find_allocations

if TYPE_CHECKING:
    import altair

PART_COLORS = dict(
    zip(PART_LABELS.values(), ("#4c78a8", "#e45756", "#f2a541", "#9d755d", "#d8dce2"), strict=True)
)
"""Label of a part of the breakdown -> its color."""
MAX_POINTS = 5_000
"""Points drawn per chart, which Altair embeds in the notebook."""


def plot(run: Job, what: str, **options: Any) -> altair.Chart:
    """Draw the chart ``what`` of a run, such as its time breakdown or its roofline.

    Args:
        run: linked traces of all ranks.
        what: one of `CHARTS`: ``breakdown`` (parts of each rank's time), ``roofline`` (throughput by arithmetic
            intensity), ``memory`` (allocated bytes over time), ``arrival-skew`` (wait of each rank in each collective)
            or ``critical-path`` (time by kind).
        options: of the analysis that the chart shows.

    Returns:
        An `altair.Chart`, which notebooks display, with the plotted values as its data.

    Raises:
        UnknownName: The chart does not exist.
        EtloomError: Altair is not installed.
        AnalysisError: the traces have no data for it.
    """
    if what not in CHARTS:
        raise UnknownName("chart", what, CHARTS)
    try:
        import altair
    except ImportError:
        raise EtloomError("Altair is not installed", remedy="pip install altair") from None
    return CHARTS[what](altair, run, options)


def _plot_breakdown(alt: Any, job: Job, options: Mapping[str, Any]) -> altair.Chart:
    """Draw the parts of each rank's time (compute, communication, idle, ...) as a stacked bar, in percent."""
    table = answer(job, "temporal-breakdown", **options).table.filter(pl.col("step").is_null())
    shares = [pl.col(f"{part}_pct").alias(label) for part, label in PART_LABELS.items()]
    parts = table.select("rank", *shares).unpivot(index="rank", variable_name="part", value_name="share")
    order = {label: number for number, label in enumerate(PART_LABELS.values())}
    parts = parts.filter(pl.col("share") > 0).with_columns(
        order=pl.col("part").replace_strict(order, return_dtype=pl.Int64)
    )
    colors = alt.Scale(domain=list(PART_COLORS), range=list(PART_COLORS.values()))
    chart: altair.Chart = (
        alt.Chart(_to_data(alt, parts), title="Breakdown of time")
        .mark_bar()
        .encode(
            x=alt.X("share:Q", title="share of the span (%)"),
            y=alt.Y("rank:O", title="rank"),
            color=alt.Color("part:N", scale=colors, title="part"),
            order=alt.Order("order:Q"),
            tooltip=["rank:O", "part:N", alt.Tooltip("share:Q", format=".1f")],
        )
    )
    return chart


def _plot_roofline(alt: Any, job: Job, options: Mapping[str, Any]) -> altair.Chart:
    """Draw a roofline chart: throughput over arithmetic intensity, a point per operator, sized by time."""
    table = answer(job, "roofline", **options).table.filter(
        (pl.col("intensity") > 0) & (pl.col("tflops_per_s") > 0)
    )
    points = table.sort("time_ns", descending=True).head(MAX_POINTS)
    points = points.with_columns(time_ms=pl.col("time_ns") / 1e6)
    chart: altair.Chart = (
        alt.Chart(_to_data(alt, points), title="Roofline")
        .mark_circle()
        .encode(
            x=alt.X("intensity:Q", scale=alt.Scale(type="log"), title="arithmetic intensity (FLOP/B)"),
            y=alt.Y("tflops_per_s:Q", scale=alt.Scale(type="log"), title="throughput (TFLOP/s)"),
            size=alt.Size("time_ms:Q", title="time (ms)"),
            color=alt.Color("bound:N", title="bound"),
            tooltip=["rank:O", "name:N", "time_ms:Q", "tflops_per_s:Q", "attainable_tflops_per_s:Q"],
        )
    )
    return chart


def _plot_memory(alt: Any, job: Job, options: Mapping[str, Any]) -> altair.Chart:
    """Draw the allocated bytes over time, one line per rank and device."""
    if options:
        raise EtloomError(f"the chart 'memory' has no option {next(iter(options))!r}")
    curves = []
    for rank, trace in job.items():
        curve = find_allocations(trace).select(
            pl.lit(rank, pl.Int64).alias("rank"),
            pl.format("{}:{}", pl.col("device_type").fill_null(0), pl.col("device").fill_null(0)).alias(
                "device"
            ),
            ((pl.col("ts") - pl.col("ts").min()) / 1e6).alias("time_ms"),
            (pl.col("total_allocated") / 1e6).alias("allocated_mb"),
        )
        curves += [_keep_peaks(rows) for _, rows in curve.group_by("device", maintain_order=True)]
    table = pl.concat(curves) if curves else pl.DataFrame()
    if table.is_empty():
        raise AnalysisError("no rank recorded memory", remedy="record with memory profiling")
    chart: altair.Chart = (
        alt.Chart(_to_data(alt, table), title="Allocated memory")
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X("time_ms:Q", title="time (ms)"),
            y=alt.Y("allocated_mb:Q", title="allocated (MB)"),
            color=alt.Color("rank:N", title="rank"),
            strokeDash=alt.StrokeDash("device:N", title="device type:device"),
        )
    )
    return chart


def _keep_peaks(curve: pl.DataFrame) -> pl.DataFrame:
    """Reduce a curve to `MAX_POINTS` rows: the maximum of each group of consecutive rows, so that peaks remain."""
    if curve.height <= MAX_POINTS:
        return curve
    group = pl.int_range(pl.len()) * MAX_POINTS // pl.len()
    return curve.filter(pl.col("allocated_mb").rank("ordinal", descending=True).over(group) == 1)


def _plot_arrival_skew(alt: Any, job: Job, options: Mapping[str, Any]) -> altair.Chart:
    """Draw a point per rank and collective: the time that the rank waited there, over the time of its arrival."""
    table = answer(job, "arrivals", **options).table.drop_nulls(["start_ns", "wait_ns"])
    points = table.sort("wait_ns", descending=True).head(MAX_POINTS).sort("start_ns")
    points = points.with_columns(
        start_ms=(pl.col("start_ns") - table["start_ns"].min()) / 1e6,
        wait_ms=pl.col("wait_ns") / 1e6,
    )
    chart: altair.Chart = (
        alt.Chart(_to_data(alt, points), title="Arrival skew")
        .mark_circle()
        .encode(
            x=alt.X("start_ms:Q", title="arrival (ms)"),
            y=alt.Y("wait_ms:Q", title="wait for the last rank (ms)"),
            color=alt.Color("rank:N", title="rank"),
            tooltip=["rank:O", "collective:N", "group:N", "seq:O", "wait_ms:Q"],
        )
    )
    return chart


def _plot_critical_path(alt: Any, job: Job, options: Mapping[str, Any]) -> altair.Chart:
    """Draw the time on the critical path by kind of dependency and category of work."""
    table = answer(job, "critical-path", **{"by": "edge", **options}).table
    label = pl.concat_str(
        [pl.col("kind").cast(pl.String), pl.col("category").cast(pl.String)],
        separator=", ",
        ignore_nulls=True,
    )
    bars = table.group_by(label.alias("kind")).agg(time_ms=pl.col("time_ns").sum() / 1e6)
    chart: altair.Chart = (
        alt.Chart(
            _to_data(alt, bars.sort("time_ms", "kind", descending=(True, False))), title="Critical path"
        )
        .mark_bar()
        .encode(
            x=alt.X("time_ms:Q", title="time on the critical path (ms)"),
            y=alt.Y("kind:N", sort="-x", title=None),
            tooltip=["kind:N", "time_ms:Q"],
        )
    )
    return chart


def _to_data(alt: Any, table: pl.DataFrame) -> Any:
    """Return the rows of a table as inline Altair data, which needs no particular data frame library."""
    return alt.Data(values=table.to_dicts())


CHARTS: Mapping[str, Callable[[Any, Job, Mapping[str, Any]], altair.Chart]] = {
    "breakdown": _plot_breakdown,
    "roofline": _plot_roofline,
    "memory": _plot_memory,
    "arrival-skew": _plot_arrival_skew,
    "critical-path": _plot_critical_path,
}
"""The charts by name."""
