"""The HTML report that compares two runs: whether the second is slower, why, the steps of both, and tables.

It uses the page of the report of a run, is as self-contained, and escapes all text from traces.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from etloom.comparison import BY, Difference
from etloom.core.text import count_noun
from etloom.core.trace import Job
from etloom.formats.io.atomic_file import write_atomically
from etloom.reports.formatting import format_duration
from etloom.reports.html_charts import render_bars, render_legend
from etloom.reports.html_report import PART_COLORS
from etloom.reports.html_tables import render_table
from etloom.reports.page import Page, Section, titled_section
from etloom.reports.time_shares import PART_LABELS

SCRIPTS = ("tables.js", "difference.js")
MAX_ROWS = 300
_TABLE_TITLES = {
    "category": (
        "Where the time went",
        "Parts of the step; a later part contains only time that no earlier part covers.",
    ),
    "family": ("Families", "GPU activities by the kind of computation, independent of kernel names."),
    "operator": (
        "Operators",
        "Exclusive time on the host, and GPU activities that each operator launched directly.",
    ),
    "kernel": ("Kernels", "GPU activities by name, sums of durations: concurrent kernels count twice."),
    "collective": (
        "Collectives",
        "The shortest time of a rank in each collective, the wait for the last rank, and the transfer.",
    ),
    "rank": ("Ranks", "Time of each rank outside of communication, in which it may wait for others."),
}


def write_page(difference: Difference, path: str | os.PathLike[str]) -> None:
    """Write the HTML report of the difference between two linked runs to a file."""
    write_atomically(Path(path), render_page(difference))


def render_page(difference: Difference) -> str:
    """Return the HTML report of the difference between two runs."""
    before, after = _name_runs(difference)
    tables = {by: table for by in BY if by != "step" and (table := difference.table(by)).height}
    sections = [
        titled_section(
            "explained",
            "What changed",
            render_explanation(difference, tables),
            "What explains the difference",
        ),
        titled_section("steps", "Steps", render_steps(difference), "Steps of both runs"),
        *(_render_table_section(by, table) for by, table in tables.items()),
    ]
    return Page(
        title=f"{before} and {after} - etloom diff",
        heading=f"{before} → {after}",
        subtitle=escape(
            f"before: {_describe_run(difference.before)} · after: {_describe_run(difference.after)}"
        ),
        summary=_render_summary(difference),
        sections=sections,
        scripts=SCRIPTS,
    ).render()


def _name_runs(difference: Difference) -> list[str]:
    """Return a name for each of the two runs: the last 1 to 3 parts of its path, as many as distinguish them."""
    paths = [Path(str(job.meta.get("path") or side)) for job, side in label_sides(difference)]
    for depth in (1, 2, 3):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if names[0] != names[1]:
            return names
    return ["before", "after"]


def _describe_run(job: Job) -> str:
    devices = {
        str(device["name"])
        for trace in job.values()
        for device in trace.meta.get("device_properties") or []
        if device.get("name")
    }
    return ", ".join([count_noun(len(job), "rank"), *sorted(devices)])


def _render_summary(difference: Difference) -> str:
    measures = difference.table("step")
    unit = "step" if difference.stepped else "run"
    row = measures.row(by_predicate=pl.col("measure") == "step time", named=True) if measures.height else {}
    tone, headline = _summarize_step_time(difference)
    tiles = [(tone, f"A {unit}", headline, difference.verdict)]
    for side in ("before", "after"):
        if row.get(side) is not None:
            text = f"median of {count_noun(row[f'values_{side}'], unit)}"
            tiles.append(("plain", side.capitalize(), format_duration(row[side]), text))
    for other in measures.filter(pl.col("measure") != "step time").iter_rows(named=True):
        if other["change"] and other["unit"] == "B":
            change = f"{other['change'] / 1e6:+,.1f} MB"
            tiles.append(("plain", "Peak memory", change, f"now {other['after'] / 1e6:,.1f} MB"))
    items = "".join(
        f'<li class="{tone}"><span class="topic">{escape(topic)}</span><b>{escape(figure)}</b>'
        f"<span>{escape(text)}</span></li>"
        for tone, topic, figure, text in tiles
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in difference.notes)
    return f'<ul class="summary fitting">{items}</ul>{notes}'


def _summarize_step_time(difference: Difference) -> tuple[str, str]:
    step_time = difference.step_time
    if step_time is None:
        return "plain", "unknown"
    if not step_time.is_known:
        return "warn", "too few steps"
    if not step_time.is_clear:
        return "plain", "no clear change"
    return (
        ("bad", f"{step_time.percent:+.1f} %")
        if step_time.percent > 0
        else ("good", f"{step_time.percent:+.1f} %")
    )


def _render_table_section(by: str, table: pl.DataFrame) -> Section:
    title, note = _TABLE_TITLES[by]
    is_gpu = has_gpu_time(table)
    bar = "device_change_ns" if is_gpu else "change_ns"
    sides = [name for name in table.columns if name.endswith(("before_ns", "after_ns", "change_ns"))]
    counts = [name for name in table.columns if name.startswith("count_")]
    main = [
        name
        for name in sides
        if name.startswith("device_") == is_gpu and not name.startswith(("wait", "transfer", "device_total"))
    ]
    first = [name for name in table.columns if name not in (*sides, *counts, "change_pct", "share_pct")]
    order = [*first, *main, "change_pct", "share_pct", *counts, *(name for name in sides if name not in main)]
    hidden = [
        name
        for name in order
        if table[name].null_count() == table.height or (name in sides and not (table[name] != 0).any())
    ]
    integers = [pl.col(name).cast(pl.Int64) for name in counts if (table[name] % 1 == 0).all()]
    visible = (
        table.select(order)
        .with_columns(integers)
        .filter(pl.max_horizontal(main) > 0)
        .drop(name for name in hidden if name != bar)
    )
    net = int(table[bar].sum())
    if table["share_pct"].null_count() < table.height:
        note += f" Share: of the total change, {'+' if net > 0 else '-'}{format_duration(abs(net))}."
    if by == "category":
        visible = visible.with_columns(pl.col(by).cast(pl.String).replace(PART_LABELS))
    absent = {by: f"no {by}", "change_pct": "-", "share_pct": "-"}
    html = render_table(visible, by, title, note, limit=MAX_ROWS, bar=bar, absent=absent)
    return Section(
        f"{by}-section", title, f'<section id="{by}-section" aria-label="{title}">{html}</section>'
    )


# HTML sections that compare two runs: time categories of a step, the largest changes, and the step times.

MAX_STEPS = 500
"""Steps charts per run, the first ones."""
CHANGES_PER_GROUPING = {"category": 4, "operator": 6, "collective": 3}
"""Number of changes listed per grouping, if above MIN_CHANGE_SHARE."""
MIN_CHANGE_SHARE = 0.03


def label_sides(difference: Difference) -> list[tuple[Job, str]]:
    return [(difference.before, "before"), (difference.after, "after")]


def render_explanation(difference: Difference, tables: Mapping[str, pl.DataFrame]) -> str:
    bars = _render_category_bars(tables["category"]) if "category" in tables else ""
    rows = [
        row
        for by, limit in CHANGES_PER_GROUPING.items()
        if by in tables
        for row in _largest_changes(by, tables[by], limit)
    ]
    top = max((abs(change) for _, _, change, _, _ in rows), default=1)
    items = "".join(_render_change(*row, top) for row in rows)
    note = (
        '<p class="soft">Per step and rank. Categories partition the step; operators and collectives show the '
        "same time by its cause.</p>"
    )
    changes_html = f'<ol class="findings">{items}</ol>' if items else '<p class="soft">Nothing changed.</p>'
    return f"{bars}{note}{changes_html}"


def _render_category_bars(table: pl.DataFrame) -> str:
    """Draw the mean step of both runs as two stacked bars on one scale, divided by category of time."""
    names = [name for name, *_ in table.filter(pl.max_horizontal("before_ns", "after_ns") > 0).iter_rows()]
    ordered = [part for part in PART_LABELS if part in names]
    longest = max(float(table[f"{side}_ns"].sum()) for side in ("before", "after")) or 1.0
    by_category = {row["category"]: row for row in table.iter_rows(named=True)}
    rows: list[tuple[str, Mapping[str, float]]] = [
        (side, {part: by_category[part][f"{side}_ns"] / longest for part in ordered})
        for side in ("before", "after")
    ]
    texts = {
        (side, part): format_duration(by_category[part][f"{side}_ns"])
        for side in ("before", "after")
        for part in ordered
    }
    legend = render_legend({PART_COLORS[part]: PART_LABELS[part] for part in ordered})
    note = '<p class="soft">Both bars: the mean step, on one scale.</p>'
    head = f'<div class="bars-head">{note}<ul class="legend">{legend}</ul></div>'
    return head + render_bars(rows, PART_COLORS, PART_LABELS, texts)


Change = tuple[str, Mapping[str, Any], int, str, float | None]


def _largest_changes(by: str, table: pl.DataFrame, limit: int) -> list[Change]:
    """Return up to ``limit`` of a table's largest changes: grouping, row, change (ns), column prefix, share_pct."""
    stem = "device_" if has_gpu_time(table) else ""
    gross = float(table[f"{stem}change_ns"].abs().sum())
    return [
        (by, row, row[f"{stem}change_ns"], stem, row["share_pct"])
        for row in table.head(limit).iter_rows(named=True)
        if abs(row[f"{stem}change_ns"]) > MIN_CHANGE_SHARE * gross
    ]


def has_gpu_time(table: pl.DataFrame) -> bool:
    return "device_before_ns" in table.columns and bool(
        table["device_before_ns"].sum() and table["device_after_ns"].sum()
    )


def _render_change(
    by: str, row: Mapping[str, Any], change: int, stem: str, share: float | None, top: int
) -> str:
    name = row[by] if row[by] is not None else f"no {by}"
    label = PART_LABELS.get(name, name) if by == "category" else name
    sides = f"{format_duration(row[f'{stem}before_ns'])} → {format_duration(row[f'{stem}after_ns'])}"
    calls = ""
    if "count_before" in row and row["count_before"] != row["count_after"]:
        calls = f" · {row['count_before']:,.4g} → {row['count_after']:,.4g} per step"
    presence = {"both": "", "added": " · only after", "removed": " · only before"}[row["in"]]
    subject = f"GPU activities of the {by}" if stem else by
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
        f'<div><p class="what">{escape(str(label))}{escape(size)}</p>'
        f'<p class="soft">{escape(subject)} · {escape(sides)}{escape(calls)}{escape(presence)}</p></div></li>'
    )


def render_steps(difference: Difference) -> str:
    """Draw the step times of both runs as bars on one scale."""
    step_times = difference.step_times
    if max(map(len, step_times)) < 2:
        return '<p class="soft">Each run has at most one step: nothing to draw.</p>'
    times = pl.Series([value for side in step_times for value in side[:MAX_STEPS]], dtype=pl.Float64)
    median: Any = times.median()
    # A step of a hundred times the others must not flatten them.
    top = min(float(times.max() or 1), 4 * float(median or 1))  # type: ignore[arg-type]
    charts = [
        _render_step_bars(side, name, top)
        for side, (_, name) in zip(step_times, label_sides(difference), strict=True)
    ]
    cut_count = sum(value > top for value in times)
    note = (
        f" {count_noun(cut_count, 'step')} longer than {format_duration(top)} cut off." if cut_count else ""
    )
    more = max(len(side) for side in step_times) - MAX_STEPS
    margin = f" The first {MAX_STEPS:,} are charts." if more > 0 else ""
    return f'<p class="soft">Both charts have one scale; the line is the median.{note}{margin}</p>{"".join(charts)}'


def _render_step_bars(side: Sequence[float], name: str, top: float) -> str:
    width, height, margin = 1000, 110, 90
    displayed = side[:MAX_STEPS]
    width_per_step = min((width - margin) / max(len(displayed), 1), 40.0)
    gap = 1 if width_per_step > 4 else 0
    bars = "".join(
        f"<g><title>{escape(f'step {i + 1} of {len(side)}: {format_duration(value)}')}</title>"
        f'<rect class="step" x="{margin + i * width_per_step:.2f}" y="{height * (1 - min(value / top, 1)):.2f}" '
        f'width="{width_per_step - gap:.2f}" height="{height * min(value / top, 1):.2f}"/></g>'
        for i, value in enumerate(displayed)
    )
    median: Any = pl.Series(side, dtype=pl.Float64).median()
    if median is None:
        return ""
    y = height * (1 - min(float(median) / top, 1))
    right = f"{margin + width_per_step * len(displayed):.2f}"
    line = f'<line class="median" x1="{margin}" x2="{right}" y1="{y:.2f}" y2="{y:.2f}"/>'
    label = (
        f'<text x="0" y="{height - 22}">{escape(name)}</text>'
        f'<text class="quiet" x="0" y="{height - 6}">{escape(format_duration(float(median)))}</text>'
    )
    return (
        f'<div class="bars-wrap"><svg class="step-bars" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Steps {escape(name)}">{label}{bars}{line}</svg></div>'
    )
