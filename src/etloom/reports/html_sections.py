"""HTML sections of the report: findings, the critical path, collectives and the comparison of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

import polars as pl

from etloom.comparison.source_lines import SourceLines
from etloom.core.text import count_noun
from etloom.reports.finding_text import format_cost, format_gain, format_parts, label_location
from etloom.reports.html_tables import render_table
from etloom.reports.longest_calls import encode_call
from etloom.reports.source_code import render_source_lines

_LOCATION_COLUMNS = ("operator", "module", "frame", "step", "stream")
MAX_ROWS = 500
OPEN_FINDINGS = 6
"""Findings that are visible when the page opens; the others are one click away."""
_OMITTED_COLUMNS = {
    "collective-summary": ("transfer_p95_ns", "transfer_max_ns", "slowest_over_median"),
    "collectives": (
        "seq",
        "how",
        "recorded",
        "mean_wait_ns",
        "clock_error_ns",
        "end_spread_ns",
        "algo_gb_per_s",
    ),
    "stragglers": ("communications", "worst_start_ns"),
}
"""Columns of analyses that the page has no room for."""
_LEADING_COLUMNS = ("start_ns", "collective", "bytes", "wait_ns", "transfer_ns", "first_rank", "last_rank")
"""Columns of a collective that are visible on a narrow page, too."""


def render_findings(
    table: pl.DataFrame,
    rank_count: int,
    limit: int,
    views: Sequence[str] = (),
    sources: Mapping[str, SourceLines] = MappingProxyType({}),
) -> str:
    """Render the first ``limit`` findings as an HTML list, each with its gain, cost, parts, location and advice.

    Args:
        views: for each finding, the part of the timeline that it is about, as JSON; empty for none.
        sources: the source lines of Python frames.
    """
    if table.is_empty():
        return '<p class="soft">No finding costs the job or a rank half a percent of its time or more.</p>'
    share = table["pct" if table["job_gain_pct"].null_count() == table.height else "job_gain_pct"]
    largest_share = float(share.max() or 100)  # type: ignore[arg-type]
    items = [
        _render_finding(
            row,
            (row[share.name] or 0) / largest_share,
            rank_count,
            views[i] if i < len(views) else "",
            sources,
        )
        for i, row in enumerate(table.head(limit).iter_rows(named=True))
    ]
    visible, folded = items[:OPEN_FINDINGS], items[OPEN_FINDINGS:]
    if len(folded) == 1:
        visible, folded = items, []
    more = table.height - limit
    rest = (
        f'<p class="soft">{count_noun(more, "smaller finding")} in <code>etloom analyze findings</code>.</p>'
        if more > 0
        else ""
    )
    note = (
        '<p class="soft">In front: upper bound of what the job would gain, simulated on the dependencies of all ranks. '
        "Lost: time of a rank. Figures of different findings can cover the same time, so they do not add up.</p>"
    )
    html = f'<ol class="findings">{"".join(visible)}</ol>'
    if folded:
        largest_folded = ", ".join(format_gain(table.row(OPEN_FINDINGS, named=True)))
        html += (
            f"<details><summary>{len(folded)} more, up to {escape(largest_folded)}</summary>"
            f'<ol class="findings">{"".join(folded)}</ol></details>'
        )
    return f"{note}{html}{rest}"


def _render_finding(
    row: Mapping[str, Any], bar_length: float, rank_count: int, view: str, sources: Mapping[str, SourceLines]
) -> str:
    location = [label_location(row, name) for name in _LOCATION_COLUMNS if row[name] is not None]
    label = escape(f"Show on the timeline: {row['title']}")
    show = (
        f'<button type="button" class="show" data-view="{escape(view)}" aria-label="{label}">show</button>'
        if view
        else ""
    )
    gain, share = format_gain(row)
    parts = format_parts(row)
    parts_html = f'<p class="soft">{escape(parts[:1].upper() + parts[1:])}</p>' if parts else ""
    facts = [format_cost(row, rank_count), *location, f"{row['confidence']} confidence"]
    return (
        f'<li><div class="cost"><b>{escape(gain)}</b><span>{escape(share)}</span>'
        f'<svg viewBox="0 0 100 5" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar" width="{max(1, 100 * bar_length):.1f}" height="5"/></svg></div>'
        f'<div><p class="what">{_escape_with_code(row["title"])}</p>'
        f"<p>{_escape_with_code(row['advice'])}</p>{parts_html}"
        f'<p class="soft">{escape(" · ".join(facts))} · <code>{escape(row["pattern"])}</code> {show}</p>'
        f"{render_source_lines(row['frame'], sources)}</div></li>"
    )


def _escape_with_code(text: str) -> str:
    """Escape a text for HTML, and show text between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def render_critical_path(table: pl.DataFrame, zeros: Mapping[int, int]) -> str:
    """Render the critical path as a table, one row per kind and event name; return "" if there is no path.

    Args:
        table: the path by edge.
        zeros: the ranks whose timelines are drawn, and the time that each shows as zero, ns.
    """
    if table.is_empty():
        return ""
    total = table["time_ns"].sum()
    rows = (
        table.group_by("kind", "category", "name", "operator", maintain_order=True)
        .agg(
            pl.len().alias("count"),
            pl.col("time_ns", "unexplained_ns").sum(),
            longest=pl.struct("rank", "event", "start_ns", "time_ns").get(pl.col("time_ns").arg_max()),
        )
        .with_columns(pct=100.0 * pl.col("time_ns") / total)
        .sort("time_ns", "name", descending=(True, False), maintain_order=True)
    )
    calls = [
        encode_call(rank, event, start_ns - zeros[rank], time_ns, count)
        if rank in zeros and event is not None
        else ""
        for rank, event, start_ns, time_ns, count in rows.select(
            pl.col("longest").struct.unnest(), "count"
        ).rows()
    ]
    rows = rows.select("time_ns", "pct", "count", "kind", "category", "name", "operator", "unexplained_ns")
    if not (rows["unexplained_ns"] != 0).any():
        rows = rows.drop("unexplained_ns")
    note = (
        "The chain of work and waits that determines the end of the run; the button above the timeline highlights it. "
        "Name and operator of a delay (launch, stream, return and the like) are those of the event that ends it. "
        "Unexplained: time beyond the minimum latency."
    )
    if not table["explainable"].all():
        note = (
            f"Not reliable: the graph does not explain the recording (etloom analyze graph-quality). {note}"
        )
    html = render_table(rows, "critical-path", "Critical path", note, limit=MAX_ROWS, calls=calls)
    return f'<section id="critical-path-section" aria-label="Critical path">{html}</section>'


def render_rank_tables(tables: Mapping[str, pl.DataFrame], rank_count: int) -> str:
    """Render the tables of collectives, late ranks, rank comparison and clocks as HTML; empty if all have no rows."""
    texts = {
        "collective-summary": (
            "Collectives",
            "Sums by group and size. Wait: from the arrival of the first rank to that of the last. Transfer: the "
            "shortest time of a rank. GB = 1e9 B.",
        ),
        "collectives": (
            "Each collective",
            "The costliest first. Start: arrival of the first rank. Wait: from then to the arrival of the last rank.",
        ),
        "stragglers": (
            "Late ranks",
            "Delay: arrival after the second to last rank, and what the rank did meanwhile.",
        ),
        "imbalance": ("Comparison of ranks", "Each part of the breakdown over the ranks."),
        "clocks": ("Clocks", "Relative to the first rank, estimated from the ends of collectives."),
    }
    parts = [
        render_table(
            _drop_null_columns(_select_columns(name, tables[name])), name, title, note, limit=MAX_ROWS
        )
        for name, (title, note) in texts.items()
        if tables[name].height
    ]
    if not parts:
        return ""
    title, note_on_single_rank = "Between ranks", ""
    if rank_count == 1:
        title = "Collectives of this rank"
        note_on_single_rank = (
            '<p class="note">A single rank does not show which rank waited, nor how long a transfer took: '
            "a duration here includes wait and transfer. Open the folder with all ranks.</p>"
        )
    return (
        '<section id="ranks-section" aria-labelledby="ranks-title">'
        f'<h2 id="ranks-title">{title}</h2>{note_on_single_rank}{"".join(parts)}</section>'
    )


def _select_columns(name: str, table: pl.DataFrame) -> pl.DataFrame:
    """Select and order the columns of a table for the HTML report; the terminal shows all columns."""
    table = table.drop(_OMITTED_COLUMNS.get(name, ()), strict=False)
    if name == "collectives":
        cost = pl.sum_horizontal("wait_ns", "transfer_ns")
        table = table.sort(cost, "start_ns", descending=(True, False), nulls_last=True)
        table = table.select(*_LEADING_COLUMNS, pl.exclude(_LEADING_COLUMNS))
    if name == "collective-summary" and table["matched"].equals(table["count"], check_names=False):
        table = table.drop("matched")
    if name == "imbalance":
        table = table.with_columns(pl.col("part").cast(pl.String).str.replace_all("_", " ", literal=True))
    return table


def _drop_null_columns(table: pl.DataFrame) -> pl.DataFrame:
    """Drop the columns that contain only nulls."""
    return table.drop(name for name in table.columns if table[name].null_count() == table.height)
