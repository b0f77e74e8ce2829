"""The report: one HTML file that holds everything it shows and asks the network for nothing.

The template, the style and the scripts are files beside this one, put together when a report is written. What
a trace says reaches the page in two ways only: as escaped text (tables.py, and `escape` here) and as base64
(timeline.py). The page's policy allows the very style and script that are written here, by their hashes, and
nothing else; trusted types keep the script itself from making markup of text.
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
from etloom.core.version import __version__
from etloom.reports import untimed_summary
from etloom.reports.colors import COLORS
from etloom.reports.html_sections import render_critical_path, render_findings, render_rank_tables
from etloom.reports.html_tables import render_bars, render_table
from etloom.reports.page import content_security_policy, fill_template, read_asset
from etloom.reports.rank_spread import MAX_LISTED_RANKS, group_stats_by_name
from etloom.reports.summary import MAX_OPERATORS, PART_LABELS, RunSummary, summarize_run
from etloom.reports.timeline_data import PackedTimeline
from etloom.reports.timeline_selection import pack_timelines

MAX_EVENTS = 200_000
"""Events drawn of a rank; about 8 bytes each in the file."""
MAX_RANKS = 64
"""Ranks whose timelines are drawn; all ranks stand in the tables."""
MAX_FINDINGS = 20
MAX_BARS = 32
"""Ranks with a bar of their own."""
SCRIPTS = ("data.js", "paint.js", "timeline.js", "hands.js", "tables.js", "page.js")
MAX_RANK_ROWS = 50_000
"""Rows of the table that has one a rank."""
PART_COLORS = dict(zip(PART_LABELS, ("compute", "communication", "memory", "other", "idle"), strict=True))
"""Part of the breakdown -> its colour in report.css."""
MAX_COST_ROWS = 600
"""Rows of a table that has several a rank."""
_COST_COLUMNS = {"top-ops": "exclusive_ns", "kernel-breakdown": "total_ns"}
_TABLES = {
    "top-ops": (
        "Operators",
        "Own: self (without what the operator calls) and its runtime calls. Device: the work it causes there.",
    ),
    "kernel-breakdown": ("Kernels", "Device work by name; without a device, operators by self time."),
    "steps": ("Steps", "From the start to the end of a ProfilerStep; device: the work launched in it."),
    "comm-overlap": ("Communication", "How much of it computation hides, of each step and of the whole."),
}


def write_page(
    job: Job, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS
) -> None:
    """Write the report of a linked run.

    max_events: events drawn of a rank; of more, the longest of each lane and time stay, and the page says how many
    are left out. max_ranks: ranks whose timelines are drawn, the first ones.
    """
    Path(path).write_text(render_page(job, max_events=max_events, max_ranks=max_ranks), encoding="utf-8")


def render_page(job: Job, *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS) -> str:
    """The page as text; see `write`."""
    found = summarize_run(job)
    packed, notes = pack_timelines(job, max_events, max_ranks, found.tables["critical-path"])
    css, script = read_asset("report.css"), "\n".join(map(read_asset, SCRIPTS))
    name = _run_name(job)
    sections = _render_sections(found, len(job), _render_timeline(packed, notes))
    return fill_template(
        read_asset("template.html"),
        csp=content_security_policy(css, script),
        title=escape(f"{name} - etloom report" if name else "etloom report"),
        heading=escape(name or "Execution trace report"),
        subtitle=_render_subtitle(job),
        css=css,
        verdict=_render_summary(found),
        links="".join(f'<a href="#{one}">{title}</a>' for one, title, _ in sections),
        sections="\n".join(inside for _, _, inside in sections),
        version=escape(__version__),
        facts=json.dumps({"colours": COLORS}),
        ranks="\n".join(
            f'<script type="text/plain" data-rank="{one.rank}">{base64.b64encode(one.data).decode()}</script>'
            for one in packed
        ),
        script=script,
    )


def _run_name(job: Job) -> str:
    """The folder or file that was opened; of a file with several ranks, which have none together, the first's."""
    first = next((trace.meta.get("files") for trace in job.values()), None) or [""]
    return Path(str(job.meta.get("path") or first[0])).name


def _render_sections(found: RunSummary, of_ranks: int, timeline: str) -> list[tuple[str, str, str]]:
    """(id, what the links call it, the section) of all that there is something to say about."""
    tables = found.tables
    if "recorded" in tables:
        note = "Nodes of the execution traces by name."
        return [
            _titled_section(
                "recorded-section",
                "Operators",
                render_table(_drop_empty_columns(tables["recorded"]), "recorded", "By name", note),
            ),
            _render_data_quality(found),
        ]
    made = [
        _titled_section(
            "findings",
            "Findings",
            render_findings(tables["findings"], of_ranks, MAX_FINDINGS),
            "What costs time, and what to do",
        ),
        _titled_section("timeline", "Timeline", timeline),
        _titled_section("breakdown", "Breakdown", _render_breakdown(found), "Where the time went"),
        ("critical-path-section", "Critical path", render_critical_path(tables["critical-path"])),
        ("ranks-section", "Ranks" if of_ranks > 1 else "Collectives", render_rank_tables(tables, of_ranks)),
        *(
            (f"{name}-section", texts[0], _render_table_section(found, name, *texts))
            for name, texts in _TABLES.items()
        ),
        _render_data_quality(found),
    ]
    return [one for one in made if one[2]]


def _titled_section(name: str, link: str, inside: str, title: str | None = None) -> tuple[str, str, str]:
    """A section under a title, which is what the links call it where nothing else is said."""
    return (
        name,
        link,
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title or link)}</h2>\n'
        f"{inside}\n</section>",
    )


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
    worked = any(trace.rows("launches") for trace in job.values())
    parts = [
        format_ranks(job),
        " and ".join(sorted(devices)) or ("" if worked or untimed_summary.is_untimed(job) else "no device"),
        f"backend {backend}" if backend else "",
        " + ".join(map(str, first.meta.get("formats") or [])).replace("_", " "),
    ]
    return escape(" · ".join(filter(None, parts)))


def _render_summary(found: RunSummary) -> str:
    items = "".join(
        f'<li class="{sentence.tone}"><span class="topic">{escape(sentence.topic)}</span>'
        f"<b>{_escape_unbroken(sentence.figure)}</b><span>{_escape_unbroken(sentence.text)}</span></li>"
        for sentence in found.sentences
    )
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.unanswered.items():
        by_reason.setdefault(reason, []).append(name)
    notes = "".join(_render_note(f"{', '.join(names)}: {reason}") for reason, names in by_reason.items())
    return f'<ul class="verdict">{items}</ul>{notes}'


def _escape_unbroken(text: str) -> str:
    """The text escaped, no line of it broken between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|s|ms|µs|ns|[kMG]?B)\b|%)", "\u00a0", escape(text))


def _render_note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _render_timeline(packed: list[PackedTimeline], notes: list[str]) -> str:
    if not packed:
        return "".join(map(_render_note, notes))
    used = frozenset().union(*(one.colours for one in packed))
    legend = _render_legend({name: label for code, (name, label) in enumerate(COLORS) if code in used})
    return fill_template(
        read_asset("timeline.html"),
        legend=legend,
        ranks=escape(format_ranks(one.rank for one in packed)),
        notes="".join(map(_render_note, notes)),
    )


def _render_legend(labels: Mapping[str, str]) -> str:
    return "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        f"{escape(label)}</li>"
        for name, label in labels.items()
    )


def _render_breakdown(found: RunSummary) -> str:
    overview = found.tables["overview"]
    known = overview.drop_nulls("span_ns")
    parts = [part for part in PART_LABELS if (known[f"{part}_pct"].max() or 0) > 0]  # type: ignore[operator]
    rows: list[tuple[str, Mapping[str, float]]] = [
        (f"rank {row['rank']}", {part: (row[f"{part}_pct"] or 0.0) / 100 for part in parts})
        for row in known.head(MAX_BARS).iter_rows(named=True)
    ]
    basis = {
        "device": "Of the device, from the first kernel to the last.",
        "host": "Of the host's operators, since the traces hold no device work: communication is time in a "
        "communication call or range, compute is time in another operator, idle is time in none.",
        "mixed": "Of the device where a rank has one, else of the host's operators.",
        "none": "Not known: no device work and no operators.",
    }[found.basis]
    if known.height > MAX_BARS:
        basis += f" The first {MAX_BARS} of {known.height:,} ranks; the table holds all."
    legend = _render_legend({PART_COLORS[part]: PART_LABELS[part] for part in parts})
    table = render_table(
        _drop_empty_columns(overview.drop(f"{part}_pct" for part in PART_LABELS if part not in parts)),
        "overview",
        "By rank",
        "Shares are of the span; overlap is of the communication.",
        limit=MAX_RANK_ROWS,
    )
    return (
        f'<div class="bars-head"><p class="soft">{basis}</p><ul class="legend">{legend}</ul></div>'
        f"{render_bars(rows, PART_COLORS, PART_LABELS)}{table}"
    )


def _render_table_section(found: RunSummary, name: str, title: str, note: str) -> str:
    """A table; nothing of one that has nothing to say."""
    frame = found.tables[name]
    if frame.is_empty() or (name == "comm-overlap" and not frame["communication_ns"].sum()):
        return ""
    if name == "steps":
        times = [column for column in frame.columns if column.endswith(("start_ns", "end_ns"))]
        frame = frame.with_columns(pl.col(times) - pl.col("start_ns").min())
    if name == "top-ops" and frame.group_by("rank").len()["len"].max() == MAX_OPERATORS:
        note = f"{note} The first {MAX_OPERATORS} of each rank."
    if name in _COST_COLUMNS and frame.height > MAX_COST_ROWS:
        # Of many ranks the first ones would fill the table.
        frame = frame.sort(_COST_COLUMNS[name], "rank", descending=(True, False), maintain_order=True)
        note = f"{note} The costliest of all ranks first."
    table = render_table(
        _drop_empty_columns(frame), name, title, note, absent={"step": "all"}, limit=MAX_COST_ROWS
    )
    return f'<section id="{name}-section" aria-label="{title}">{table}</section>'


def _drop_empty_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame without the columns that say nothing: all null, or the basis where there is only one."""
    silent = [name for name in frame.columns if frame.height and frame[name].null_count() == frame.height]
    if "basis" in frame.columns and frame["basis"].n_unique() <= 1:
        silent.append("basis")
    return frame.drop(silent)


def _render_data_quality(found: RunSummary) -> tuple[str, str, str]:
    order = pl.col("severity").replace_strict({"error": 0, "data_loss": 1, "info": 2}, default=3)
    stats = found.stats.sort(order, "rank", "name")
    if len(found.ranks) > MAX_LISTED_RANKS:
        stats = group_stats_by_name(stats)
    rows = render_table(
        stats,
        "stats",
        "What could not be read, was repaired or could not be linked",
        _note_if_empty(stats),
        absent={"rank": "run"},
    )
    links = found.tables["link-quality"].filter(pl.col("total") > 0)
    linked = render_table(_drop_empty_columns(links), "link-quality", "Links") if links.height else ""
    return _titled_section("quality", "Quality", linked + rows, "Link quality, and what was lost or repaired")


def _note_if_empty(stats: pl.DataFrame) -> str:
    return "" if stats.height else "Nothing: every event was read and linked as it is."
