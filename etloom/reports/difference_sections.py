"""What a difference between two runs is made of, drawn: the parts of a step, the largest changes, the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import polars as pl

from etloom.comparison import Difference
from etloom.comparison.measures import step_values
from etloom.core.trace import Job
from etloom.reports.formatting import count_noun, format_duration
from etloom.reports.html_report import PART_COLORS
from etloom.reports.html_tables import render_bars
from etloom.reports.summary import PART_LABELS

MAX_STEPS = 500
"""Steps of a run that are drawn, the first ones."""
LISTED_CHANGES = {"category": 4, "operator": 6, "collective": 3}
"""How many changes of each grouping are said in words, where they are more than LITTLE of all."""
MIN_LISTED_SHARE = 0.03


def label_sides(found: Difference) -> list[tuple[Job, str]]:
    return [(found.before, "before"), (found.after, "after")]


def render_explanation(found: Difference, tables: Mapping[str, pl.DataFrame]) -> str:
    bars = _render_category_bars(tables["category"]) if "category" in tables else ""
    rows = [
        row
        for by, most in LISTED_CHANGES.items()
        if by in tables
        for row in _largest_changes(by, tables[by], most)
    ]
    top = max((abs(change) for _, _, change, _, _ in rows), default=1)
    items = "".join(_render_change(*row, top) for row in rows)
    note = (
        '<p class="soft">Per step and rank. Categories share the step between them; operators and collectives tell the '
        "same time again, by who spent it.</p>"
    )
    listed = f'<ol class="findings">{items}</ol>' if items else '<p class="soft">Nothing changed.</p>'
    return f"{bars}{note}{listed}"


def _render_category_bars(table: pl.DataFrame) -> str:
    """Before and after as bars of one scale, by category."""
    names = [name for name, *_ in table.filter(pl.max_horizontal("before_ns", "after_ns") > 0).iter_rows()]
    ordered = [part for part in PART_LABELS if part in names]
    longest = max(float(table[f"{side}_ns"].sum()) for side in ("before", "after")) or 1.0
    of = {row["category"]: row for row in table.iter_rows(named=True)}
    rows: list[tuple[str, Mapping[str, float]]] = [
        (side, {part: of[part][f"{side}_ns"] / longest for part in ordered}) for side in ("before", "after")
    ]
    texts = {
        (side, part): format_duration(of[part][f"{side}_ns"])
        for side in ("before", "after")
        for part in ordered
    }
    legend = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{PART_COLORS[part]}" width="10" height="10"/></svg>'
        f"{escape(PART_LABELS[part])}</li>"
        for part in ordered
    )
    head = f'<div class="bars-head"><p class="soft">One scale, the mean step.</p><ul class="legend">{legend}</ul></div>'
    return head + render_bars(rows, PART_COLORS, PART_LABELS, texts)


Change = tuple[str, Mapping[str, Any], int, str, float | None]


def _largest_changes(by: str, table: pl.DataFrame, most: int) -> list[Change]:
    """The changes worth a line: grouping, row, change in ns, which column, share in percent."""
    stem = "device_" if has_gpu_time(table) else ""
    gross = float(table[f"{stem}change_ns"].abs().sum())
    return [
        (by, row, row[f"{stem}change_ns"], stem, row["share_pct"])
        for row in table.head(most).iter_rows(named=True)
        if abs(row[f"{stem}change_ns"]) > MIN_LISTED_SHARE * gross
    ]


def has_gpu_time(table: pl.DataFrame) -> bool:
    return "device_before_ns" in table.columns and bool(
        table["device_before_ns"].sum() and table["device_after_ns"].sum()
    )


def _render_change(
    by: str, row: Mapping[str, Any], change: int, stem: str, share: float | None, top: int
) -> str:
    name = row[by] if row[by] is not None else f"no {by}"
    what = PART_LABELS.get(name, name) if by == "category" else name
    sides = f"{format_duration(row[f'{stem}before_ns'])} → {format_duration(row[f'{stem}after_ns'])}"
    calls = ""
    if "count_before" in row and row["count_before"] != row["count_after"]:
        calls = f" · {row['count_before']:,.4g} → {row['count_after']:,.4g} a step"
    words = {"both": "", "added": " · only after", "removed": " · only before"}[row["in"]]
    kind = f"device work of the {by}" if stem else by
    size = ""
    if by == "collective":
        size = f" of {row['bytes']:,} B" if row["bytes"] is not None else ""
        size += f" on {count_noun(row['group_size'], 'rank')}" if row["group_size"] is not None else ""
    part = f"{share:.0f} % of it" if share is not None and by == "category" else ""
    side = "worse" if change > 0 else "better"
    sign = "+" if change > 0 else "-"
    return (
        f'<li><div class="cost"><b>{sign}{escape(format_duration(abs(change)))}</b><span>{part}</span>'
        f'<svg viewBox="0 0 100 5" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{side}" width="{max(1, 100 * abs(change) / max(top, 1)):.1f}" height="5"/></svg></div>'
        f'<div><p class="what">{escape(str(what))}{escape(size)}</p>'
        f'<p class="soft">{escape(kind)} · {escape(sides)}{escape(calls)}{escape(words)}</p></div></li>'
    )


def render_steps(found: Difference) -> str:
    """The times of the steps of both runs, as bars of one scale."""
    series = [step_values(job, "step-time") for job, _ in label_sides(found)]
    if max(map(len, series)) < 2:
        return '<p class="soft">One step, or none, on each side: there is nothing to draw.</p>'
    every = pl.Series([value for side in series for value in side[:MAX_STEPS]], dtype=pl.Float64)
    middle: Any = every.median()
    # One step of a hundred times the rest must not flatten the others.
    top = min(float(every.max() or 1), 4 * float(middle or 1))  # type: ignore[arg-type]
    drawn = [
        _render_step_bars(side, name, top) for side, (_, name) in zip(series, label_sides(found), strict=True)
    ]
    cut = sum(value > top for value in every)
    note = f" {count_noun(cut, 'step')} longer than {format_duration(top)} are cut off there." if cut else ""
    more = max(len(side) for side in series) - MAX_STEPS
    left = f" The first {MAX_STEPS:,} are drawn." if more > 0 else ""
    return f'<p class="soft">One scale; the line is the median.{note}{left}</p>{"".join(drawn)}'


def _render_step_bars(side: Sequence[float], name: str, top: float) -> str:
    width, height, left = 1000, 110, 90
    shown = side[:MAX_STEPS]
    room = min((width - left) / max(len(shown), 1), 40.0)
    gap = 1 if room > 4 else 0
    bars = "".join(
        f"<g><title>{escape(f'step {i + 1} of {len(side)}: {format_duration(value)}')}</title>"
        f'<rect class="step" x="{left + i * room:.2f}" y="{height * (1 - min(value / top, 1)):.2f}" '
        f'width="{room - gap:.2f}" height="{height * min(value / top, 1):.2f}"/></g>'
        for i, value in enumerate(shown)
    )
    middle: Any = pl.Series(side, dtype=pl.Float64).median()
    if middle is None:
        return ""
    at = height * (1 - min(float(middle) / top, 1))
    line = (
        f'<line class="median" x1="{left}" x2="{left + room * len(shown):.2f}" y1="{at:.2f}" y2="{at:.2f}"/>'
    )
    label = (
        f'<text x="0" y="{height - 22}">{escape(name)}</text>'
        f'<text class="quiet" x="0" y="{height - 6}">{escape(format_duration(float(middle)))}</text>'
    )
    return (
        f'<div class="bars-wrap"><svg class="bars" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Steps {escape(name)}">{label}{bars}{line}</svg></div>'
    )
