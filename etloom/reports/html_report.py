"""The HTML report of a run: one self-contained file that makes no network requests.

The template, the style and the scripts are files next to this one. Text from a trace reaches the page in two ways only:
escaped (html_tables.py, and `escape` here) and as base64 (timeline_data.py). The policy of the page allows exactly the
style and the script that are written here, by their hashes; trusted types prevent the script from turning text into
markup.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

import polars as pl

from etloom.core.text import format_ranks
from etloom.core.trace import Job
from etloom.reports.colors import COLORS
from etloom.reports.html_sections import render_critical_path, render_findings, render_rank_tables
from etloom.reports.html_tables import render_bars, render_table
from etloom.reports.page import Page, Section, fill_template, read_asset, titled_section
from etloom.reports.rank_spread import MAX_LISTED_RANKS, group_stats_by_name
from etloom.reports.summary import MAX_OPERATORS, PART_LABELS, RunSummary, is_untimed, summarize_run
from etloom.reports.timeline_data import PackedTimeline
from etloom.reports.timeline_selection import pack_timelines

MAX_EVENTS = 200_000
"""Events drawn per rank; about 8 bytes each in the file."""
MAX_RANKS = 64
"""Ranks whose timelines are drawn; the tables cover all ranks."""
MAX_FINDINGS = 20
MAX_BARS = 32
"""Ranks with a bar."""
SCRIPTS = ("data.js", "paint.js", "timeline.js", "hands.js", "tables.js", "page.js")
MAX_RANK_ROWS = 50_000
"""Rows of the table with one row per rank."""
PART_COLORS = dict(zip(PART_LABELS, ("compute", "communication", "memory", "other", "idle"), strict=True))
"""Part of the breakdown -> its colour in report.css."""
MAX_COST_ROWS = 600
"""Rows of a table with several rows per rank."""
_COST_COLUMNS = {"top-ops": "exclusive_ns", "kernel-breakdown": "total_ns"}
_TABLES = {
    "top-ops": (
        "Operators",
        "Exclusive: without the operators it calls, with its runtime calls. Device: the GPU activities it launches.",
    ),
    "kernel-breakdown": ("Kernels", "GPU activities by name; without a GPU, operators by self time."),
    "steps": (
        "Steps",
        "From the start to the end of a ProfilerStep; device: the GPU activities launched in it.",
    ),
    "comm-overlap": ("Communication", "Overlap with computation, for each step and the whole run."),
}


def write_page(
    job: Job, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS
) -> None:
    """Write the report of a linked run.

    Args:
        max_events: events drawn per rank; the longest of each track and time are drawn, and the page reports the number
            of events left out.
        max_ranks: ranks whose timelines are drawn, the first ones.
    """
    Path(path).write_text(render_page(job, max_events=max_events, max_ranks=max_ranks), encoding="utf-8")


def render_page(job: Job, *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS) -> str:
    """Return the report as HTML; see `write_page`."""
    summary = summarize_run(job)
    packed, notes = pack_timelines(job, max_events, max_ranks, summary.tables["critical-path"])
    name = _run_name(job)
    facts = json.dumps({"colors": COLORS})
    timelines = (
        f'<script type="text/plain" data-rank="{timeline.rank}">{base64.b64encode(timeline.data).decode()}</script>'
        for timeline in packed
    )
    return Page(
        title=f"{name} - etloom report" if name else "etloom report",
        heading=name or "Execution trace report",
        subtitle=_render_subtitle(job),
        summary=_render_summary(summary),
        sections=_render_sections(summary, len(job), _render_timeline(packed, notes)),
        scripts=SCRIPTS,
        data="\n".join((f'<script type="application/json" id="facts">{facts}</script>', *timelines)),
    ).render()


def _run_name(job: Job) -> str:
    """Return the name of the folder or file that was opened; for a file with several ranks, of the first one's file."""
    first = next((trace.meta.get("files") for trace in job.values()), None) or [""]
    return Path(str(job.meta.get("path") or first[0])).name


def _render_sections(summary: RunSummary, rank_count: int, timeline: str) -> list[Section]:
    """Return the sections with contents."""
    tables = summary.tables
    if "recorded" in tables:
        note = "Nodes of the execution traces by name."
        return [
            titled_section(
                "recorded-section",
                "Operators",
                render_table(_drop_empty_columns(tables["recorded"]), "recorded", "By name", note),
            ),
            _render_data_quality(summary),
        ]
    sections = [
        titled_section(
            "findings",
            "Findings",
            render_findings(tables["findings"], rank_count, MAX_FINDINGS),
            "Findings by cost, and what to do",
        ),
        titled_section("timeline", "Timeline", timeline),
        titled_section("breakdown", "Breakdown", _render_breakdown(summary), "Where the time went"),
        Section("critical-path-section", "Critical path", render_critical_path(tables["critical-path"])),
        Section(
            "ranks-section",
            "Ranks" if rank_count > 1 else "Collectives",
            render_rank_tables(tables, rank_count),
        ),
        *(
            Section(f"{name}-section", texts[0], _render_table_section(summary, name, *texts))
            for name, texts in _TABLES.items()
        ),
        _render_data_quality(summary),
    ]
    return [section for section in sections if section.html]


def _render_subtitle(job: Job) -> str:
    first = next(iter(job.values()), None)
    if first is None:
        return "no rank was read"
    devices = {
        str(device["name"])
        for device in first.meta.get("device_properties") or []
        if isinstance(device, dict) and device.get("name")
    }
    backend = (first.meta.get("distributed") or {}).get("backend")
    has_launches = any(trace.rows("launches") for trace in job.values())
    parts = [
        format_ranks(job),
        " and ".join(sorted(devices)) or ("" if has_launches or is_untimed(job) else "no device"),
        f"backend {backend}" if backend else "",
        " + ".join(map(str, first.meta.get("formats") or [])).replace("_", " "),
    ]
    return escape(" · ".join(filter(None, parts)))


def _render_summary(summary: RunSummary) -> str:
    items = "".join(
        f'<li class="{line.tone}"><span class="topic">{escape(line.topic)}</span>'
        f"<b>{_escape_unbroken(line.figure)}</b><span>{_escape_unbroken(line.text)}</span></li>"
        for line in summary.lines
    )
    by_reason: dict[str, list[str]] = {}
    for name, reason in summary.unanswered.items():
        by_reason.setdefault(reason, []).append(name)
    notes = "".join(_render_note(f"{', '.join(names)}: {reason}") for reason, names in by_reason.items())
    return f'<ul class="summary">{items}</ul>{notes}'


def _escape_unbroken(text: str) -> str:
    """Escape a text, without line breaks between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|s|ms|µs|ns|[kMG]?B)\b|%)", "\u00a0", escape(text))


def _render_note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _render_timeline(packed: list[PackedTimeline], notes: list[str]) -> str:
    if not packed:
        return "".join(map(_render_note, notes))
    occurring = frozenset().union(*(timeline.colours for timeline in packed))
    legend = _render_legend({name: label for code, (name, label) in enumerate(COLORS) if code in occurring})
    return fill_template(
        read_asset("timeline.html"),
        legend=legend,
        ranks=escape(format_ranks(timeline.rank for timeline in packed)),
        notes="".join(map(_render_note, notes)),
    )


def _render_legend(labels: Mapping[str, str]) -> str:
    return "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        f"{escape(label)}</li>"
        for name, label in labels.items()
    )


def _render_breakdown(summary: RunSummary) -> str:
    overview = summary.tables["overview"]
    timed = overview.drop_nulls("span_ns")
    parts = [part for part in PART_LABELS if (timed[f"{part}_pct"].max() or 0) > 0]  # type: ignore[operator]
    rows: list[tuple[str, Mapping[str, float]]] = [
        (f"rank {row['rank']}", {part: (row[f"{part}_pct"] or 0.0) / 100 for part in parts})
        for row in timed.head(MAX_BARS).iter_rows(named=True)
    ]
    basis = {
        "device": "GPU time, from the first kernel to the last.",
        "host": "Host time, since the traces contain no GPU activities: communication is time in a "
        "communication call or range, compute is time in another operator, idle is time in none.",
        "mixed": "GPU time for ranks with a GPU, host time for the others.",
        "none": "Unknown: no GPU activities and no operators.",
    }[summary.basis]
    if timed.height > MAX_BARS:
        basis += f" The first {MAX_BARS} of {timed.height:,} ranks; the table lists all."
    legend = _render_legend({PART_COLORS[part]: PART_LABELS[part] for part in parts})
    table = render_table(
        _drop_empty_columns(overview.drop(f"{part}_pct" for part in PART_LABELS if part not in parts)),
        "overview",
        "By rank",
        "Shares refer to the span; overlap refers to the communication.",
        limit=MAX_RANK_ROWS,
    )
    return (
        f'<div class="bars-head"><p class="soft">{basis}</p><ul class="legend">{legend}</ul></div>'
        f"{render_bars(rows, PART_COLORS, PART_LABELS)}{table}"
    )


def _render_table_section(summary: RunSummary, name: str, title: str, note: str) -> str:
    """Render a table; empty if the table is not informative."""
    frame = summary.tables[name]
    if frame.is_empty() or (name == "comm-overlap" and not frame["communication_ns"].sum()):
        return ""
    if name == "steps":
        times = [column for column in frame.columns if column.endswith(("start_ns", "end_ns"))]
        frame = frame.with_columns(pl.col(times) - pl.col("start_ns").min())
    if name == "top-ops" and frame.group_by("rank").len()["len"].max() == MAX_OPERATORS:
        note = f"{note} The first {MAX_OPERATORS} of each rank."
    if name in _COST_COLUMNS and frame.height > MAX_COST_ROWS:
        # With many ranks, the first ones would fill the table.
        frame = frame.sort(_COST_COLUMNS[name], "rank", descending=(True, False), maintain_order=True)
        note = f"{note} The costliest of all ranks first."
    table = render_table(
        _drop_empty_columns(frame), name, title, note, absent={"step": "all"}, limit=MAX_COST_ROWS
    )
    return f'<section id="{name}-section" aria-label="{title}">{table}</section>'


def _drop_empty_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Drop columns without information: all null, or the basis if there is only one."""
    dropped = [name for name in frame.columns if frame.height and frame[name].null_count() == frame.height]
    if "basis" in frame.columns and frame["basis"].n_unique() <= 1:
        dropped.append("basis")
    return frame.drop(dropped)


def _render_data_quality(summary: RunSummary) -> Section:
    order = pl.col("severity").replace_strict({"error": 0, "data_loss": 1, "info": 2}, default=3)
    stats = summary.stats.sort(order, "rank", "name")
    if len(summary.ranks) > MAX_LISTED_RANKS:
        stats = group_stats_by_name(stats)
    rows = render_table(
        stats,
        "stats",
        "Events that could not be read, were repaired or could not be linked",
        _note_if_empty(stats),
        absent={"rank": "run"},
    )
    links = summary.tables["link-quality"].filter(pl.col("total") > 0)
    linked = render_table(_drop_empty_columns(links), "link-quality", "Links") if links.height else ""
    return titled_section("quality", "Data quality", linked + rows, "Link quality and data quality")


def _note_if_empty(stats: pl.DataFrame) -> str:
    return "" if stats.height else "None: every event was read and linked unchanged."
