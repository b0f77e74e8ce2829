"""The roofline of a rank's operators: a chart of achieved rates below the limits of the device, and its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import polars as pl

from etloom.analyses.answers import answer
from etloom.analyses.flops.limits import find_device_peaks
from etloom.analyses.flops.peaks import Peaks
from etloom.core.errors import AnalysisError
from etloom.core.text import format_duration
from etloom.core.trace import Job
from etloom.reports.html_charts import render_legend
from etloom.reports.html_tables import render_table

MAX_ROWS = 50
"""Operators in the table and in the chart, those with the most time."""
_SMALLEST, _LARGEST = 3.0, 14.0
"""Radius of an operator in the chart, pixels; its area grows with the time."""
_LAST_TICK = 97.0
"""Percent of the width after which a number would leave the chart."""
_COLUMNS = (
    "name",
    "calls",
    "time_ns",
    "roofline_pct",
    "bound",
    "tflops_per_s",
    "attainable_tflops_per_s",
    "tb_per_s",
    "intensity",
    "precision",
    "family",
    "shapes",
)


def render_roofline(job: Job) -> str:
    """Render the roofline of the first rank; empty if it has no times, no shapes, or a device of unknown peaks."""
    rank = job.ranks[0]
    try:
        rows = answer(job[rank], "roofline", top=MAX_ROWS).table
        peaks = find_device_peaks(job[rank])
    except AnalysisError:
        return ""
    if rows.is_empty() or rows["roofline_pct"].null_count() == rows.height:
        return ""
    note = (
        "Share of what the device can reach, by the operations and bytes that the shapes state; above 100 %, data came "
        "from a cache."
    )
    table = render_table(rows.select(_COLUMNS), "roofline", "Operators by their roofline", note)
    drawn = rows.filter(pl.col("intensity") > 0, pl.col("tflops_per_s") > 0, pl.col("bound").is_not_null())
    return (_render_chart(drawn, peaks, rank) if drawn.height > 1 and peaks.bandwidth_gbs else "") + table


def _render_chart(rows: pl.DataFrame, peaks: Peaks, rank: int) -> str:
    """Render rates over intensities, both logarithmic, with lines for the memory and for the peak of each precision."""
    slope = (peaks.bandwidth_gbs or 0.0) / 1e3  # TFLOP/s per FLOP/B
    precisions = rows["precision"].drop_nulls().unique().sort()
    tops = {name: top for name in precisions if (top := peaks.tflops(name)) is not None}
    ridges = [top / slope for top in tops.values()]
    place_x, x_ends = _make_scale([*rows["intensity"], *ridges])
    place_y, y_ends = _make_scale([*rows["tflops_per_s"], *tops.values()], is_upward=True)
    end = max(ridges, default=x_ends[1])

    def draw_line(start: tuple[float, float], end: tuple[float, float]) -> str:
        (x1, y1), (x2, y2) = ((place_x(x), place_y(y)) for x, y in (start, end))
        return f'<line x1="{x1:.2f}%" y1="{y1:.2f}%" x2="{x2:.2f}%" y2="{y2:.2f}%"/>'

    lines = [draw_line((x_ends[0], x_ends[0] * slope), (end, end * slope))]
    for top in sorted(set(tops.values())):
        names = " and ".join(name for name in tops if tops[name] == top)
        text = escape(f"{names}: {top:,.0f} TFLOP/s")
        lines.append(draw_line((top / slope, top), (x_ends[1], top)))
        lines.append(f'<text class="end" x="100%" dx="-4" y="{place_y(top):.2f}%" dy="-4">{text}</text>')
    ticks = [
        f'<text class="middle" x="{place_x(x):.2f}%" y="100%" dy="-4">{_format_power(x)}</text>'
        for x in _list_powers(*x_ends)
        if place_x(x) < _LAST_TICK
    ] + [f'<text x="0" dx="4" y="{place_y(y):.2f}%">{_format_power(y)}</text>' for y in _list_powers(*y_ends)]
    longest = rows["time_ns"].max()
    points = [
        _render_point(row, place_x(row["intensity"]), place_y(row["tflops_per_s"]), row["time_ns"] / longest)
        for row in rows.iter_rows(named=True)
    ]
    legend = render_legend({bound: f"limited by {bound}" for bound in rows["bound"].unique().sort()})
    note = (
        f"Rank {rank}: TFLOP/s over FLOP per byte, both logarithmic; the larger an operator, the more time it takes. "
        f"Lines: {peaks.name}, {peaks.bandwidth_gbs:,.0f} GB/s and the peak of each precision."
    )
    return (
        f'<div class="bars-head"><p class="soft">{escape(note)}</p><ul class="legend">{legend}</ul></div>'
        f'<figure class="roofline"><svg role="img" aria-label="Roofline of the operators">'
        f"{''.join((*ticks, *lines, *points))}</svg></figure>"
    )


def _make_scale(
    values: Sequence[float], is_upward: bool = False
) -> tuple[Callable[[float], float], tuple[float, float]]:
    """Return a function from a value to its place on a logarithmic axis (percent), and the ends of the axis."""
    low, high = math.log10(min(values)) - 0.2, math.log10(max(values)) + 0.3

    def place(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return 100 * (1 - share if is_upward else share)

    return place, (10**low, 10**high)


def _list_powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _format_power(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")


def _render_point(row: dict[str, Any], x: float, y: float, size: float) -> str:
    radius = max(_SMALLEST, _LARGEST * math.sqrt(size))
    text = (
        f"{row['name']}: {format_duration(row['time_ns'])}, {row['roofline_pct']:.0f} % of its roofline, "
        f"{row['tflops_per_s']:.3g} TFLOP/s"
    )
    return (
        f'<circle class="{row["bound"]}" cx="{x:.2f}%" cy="{y:.2f}%" r="{radius:.1f}">'
        f"<title>{escape(text)}</title></circle>"
    )
