"""Sections of the page that say what to mend: findings, the critical path, what ranks do to each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

import polars as pl

from etloom.reports.formatting import count_noun, format_duration
from etloom.reports.html_tables import render_table

_LOCATION_COLUMNS = ("operator", "module", "frame", "step", "stream")
MAX_ROWS = 500
OPEN_FINDINGS = 6
"""Findings that are open when the page is; the others are one click away."""
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
"""Columns of answers that the page has no room for."""
_LEADING_COLUMNS = ("start_ns", "collective", "bytes", "wait_ns", "transfer_ns", "first_rank", "last_rank")
"""Of a collective, what is in sight also on a narrow page."""


def render_findings(table: pl.DataFrame, of_ranks: int, most: int) -> str:
    """The costliest findings as a list, each with where it is and what to do."""
    if table.is_empty():
        return '<p class="soft">No pattern was found that costs half a percent of the run or more.</p>'
    top = float(table["cost_ns"].max() or 1)  # type: ignore[arg-type]
    items = [_render_finding(row, top, of_ranks) for row in table.head(most).iter_rows(named=True)]
    open_, folded = items[:OPEN_FINDINGS], items[OPEN_FINDINGS:]
    if len(folded) == 1:
        open_, folded = items, []
    more = table.height - most
    rest = (
        f'<p class="soft">{count_noun(more, "smaller finding")} in <code>etloom analyze findings</code>.</p>'
        if more > 0
        else ""
    )
    note = (
        '<p class="soft">Cost: what the rank would gain at most. Costs of different patterns can be of the same time, '
        "so they do not add up.</p>"
    )
    listed = f'<ol class="findings">{"".join(open_)}</ol>'
    if folded:
        most_of_rest = format_duration(table["cost_ns"][OPEN_FINDINGS])
        listed += (
            f"<details><summary>{len(folded)} more, of {escape(most_of_rest)} and less</summary>"
            f'<ol class="findings">{"".join(folded)}</ol></details>'
        )
    return f"{note}{listed}{rest}"


def _render_finding(row: Mapping[str, Any], top: float, of_ranks: int) -> str:
    place = [f"{name} {row[name]}" for name in _LOCATION_COLUMNS if row[name] is not None]
    if of_ranks > 1:
        place.insert(
            0, f"rank {row['rank']}" + (f" and {row['ranks'] - 1:,} more" if row["ranks"] > 1 else "")
        )
    show = ""
    if row["event"] is not None:
        show = (
            f'<button type="button" class="show" data-at-rank="{row["rank"]}" data-at-event="{row["event"]}">'
            "show</button>"
        )
    share = f"{row['pct']:.1f} %" if row["pct"] is not None else ""
    return (
        f'<li><div class="cost"><b>{escape(format_duration(row["cost_ns"]))}</b><span>{share}</span>'
        f'<svg viewBox="0 0 100 5" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar" width="{max(1, 100 * row["cost_ns"] / top):.1f}" height="5"/></svg></div>'
        f'<div><p class="what">{_escape_with_code(row["title"])}</p><p>{_escape_with_code(row["advice"])}</p>'
        f'<p class="soft">{escape(" · ".join(place))}{" · " if place else ""}{escape(row["confidence"])} confidence · '
        f"<code>{escape(row['pattern'])}</code> {show}</p></div></li>"
    )


def _escape_with_code(text: str) -> str:
    """The text escaped, what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def render_critical_path(table: pl.DataFrame) -> str:
    """The critical path by what it consists of; nothing where there is none."""
    if table.is_empty():
        return ""
    total = table["time_ns"].sum()
    rows = (
        table.group_by("kind", "category", "name", "operator", maintain_order=True)
        .agg(pl.len().alias("count"), pl.col("time_ns", "unexplained_ns").sum())
        .with_columns(pct=100 * pl.col("time_ns") / total)
        .sort("time_ns", "name", descending=(True, False), maintain_order=True)
        .select("time_ns", "pct", "count", "kind", "category", "name", "operator", "unexplained_ns")
    )
    if not (rows["unexplained_ns"] != 0).any():
        rows = rows.drop("unexplained_ns")
    note = (
        "The chain of work and waits on which the end of the run hangs; the button above the timeline marks it there. "
        "Unexplained: beyond the least that such a step takes."
    )
    if not table["explainable"].all():
        note = f"Not to be relied on: the graph does not explain the recording (etloom analyze graph-quality). {note}"
    shown = render_table(rows, "critical-path", "Critical path", note, limit=500)
    return f'<section id="critical-path-section" aria-label="Critical path">{shown}</section>'


def render_rank_tables(tables: Mapping[str, pl.DataFrame], of_ranks: int) -> str:
    """Collectives with arrival, wait and transfer, and the ranks side by side; nothing of a run without any."""
    texts = {
        "collective-summary": (
            "Collectives",
            "Sums by group and size. Wait: from the first rank's coming to the last's. Transfer: the shortest time "
            "that a rank spent. GB = 1e9 B.",
        ),
        "collectives": (
            "Each collective",
            "The costliest first. Start: when the first rank came. Wait: from then until the last rank came.",
        ),
        "stragglers": (
            "Who comes late",
            "Delay: how much later than the last but one, and what the rank did meanwhile.",
        ),
        "imbalance": ("Ranks side by side", "Each part of the breakdown over the ranks."),
        "clocks": ("Clocks", "Against the first rank, told from the ends of collectives."),
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
    title, alone = "Between ranks", ""
    if of_ranks == 1:
        title = "Collectives of this rank"
        alone = (
            '<p class="note">One rank alone does not say who waited for whom, nor how long a transfer took: '
            "a duration here is wait and transfer together. Open the folder that holds all ranks.</p>"
        )
    return (
        '<section id="ranks-section" aria-labelledby="ranks-title">'
        f'<h2 id="ranks-title">{title}</h2>{alone}{"".join(parts)}</section>'
    )


def _select_columns(name: str, table: pl.DataFrame) -> pl.DataFrame:
    """What the page shows of an answer that the terminal gives whole."""
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
    """Without the columns of nulls."""
    return table.drop(name for name in table.columns if table[name].null_count() == table.height)
