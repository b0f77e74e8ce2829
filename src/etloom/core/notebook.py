"""Compact HTML of a Trace and of a Job for notebooks: ranks, formats, steps, table sizes, lost data and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from etloom.core.schema import TABLES
from etloom.core.text import format_ranges, format_ranks

if TYPE_CHECKING:
    from etloom.core.trace import Job, Trace

_MAX_STATS = 10


def render_trace(trace: Trace) -> str:
    """Return a Trace as an HTML table."""
    rank = "unknown rank" if trace.rank is None else f"rank {trace.rank}"
    return _render(f"Trace, {rank}", [trace], trace.table("stats"))


def render_job(job: Job) -> str:
    """Return a Job as an HTML table; sizes are sums over the ranks, steps those of the first rank."""
    return _render(f"Job, {format_ranks(job)}", list(job.values()), job.table("stats"))


def _render(title: str, traces: Sequence[Trace], stats: pl.DataFrame) -> str:
    formats = dict.fromkeys(name for trace in traces for name in trace.meta.get("formats", ()))
    sizes = {name: sum(trace.rows(name) for trace in traces) for name in TABLES if name != "stats"}
    facts = {
        "formats": ", ".join(map(str, formats)) or "unknown",
        "linked": _describe_linked(traces),
        "steps": _describe_steps(traces[:1]),
        "tables": ", ".join(f"{name} {rows:,}" for name, rows in sizes.items() if rows) or "empty",
    }
    losses = stats.filter(pl.col("severity") != "info")
    return (
        f"<div><strong>{escape(title)}</strong>{_render_facts(facts)}"
        f"{_render_losses(losses.select('severity', 'name', 'count', 'example'))}</div>"
    )


def _describe_linked(traces: Sequence[Trace]) -> str:
    linked = sum(bool(trace.meta.get("linked")) for trace in traces)
    return "yes" if linked == len(traces) else "no" if not linked else f"{linked} of {len(traces)} ranks"


def _describe_steps(traces: Iterable[Trace]) -> str:
    for trace in traces:
        column = trace.scan("events").select(pl.col("step").drop_nulls().unique())
        steps = column.collect(engine=trace.engine).to_series().to_list()
        if steps:
            return f"{len(steps)} ({format_ranges(steps)})"
    return "none"


def _render_facts(facts: Mapping[str, str]) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _render_losses(losses: pl.DataFrame) -> str:
    if not losses.height:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in losses.columns)
    rows = "".join(f"<tr>{_render_cells(row)}</tr>" for row in losses.head(_MAX_STATS).iter_rows())
    more = losses.height - _MAX_STATS
    rest = f"<p>and {more:,} more, see <code>stats</code></p>" if more > 0 else ""
    return f"<table><tr>{head}</tr>{rows}</table>{rest}"


def _render_cells(row: Iterable[object]) -> str:
    return "".join(f"<td>{'' if cell is None else escape(str(cell))}</td>" for cell in row)
