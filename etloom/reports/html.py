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

import etloom
from etloom.ranks import in_words
from etloom.reports import untimed
from etloom.reports.drawn import timelines
from etloom.reports.many import MANY, by_name
from etloom.reports.page import asset, fill, policy
from etloom.reports.palette import COLOURS
from etloom.reports.sections import findings, path, ranks
from etloom.reports.tables import html_table, svg_bars
from etloom.reports.timeline import Packed
from etloom.reports.verdict import MOST_OPERATORS, PARTS, Verdict, verdict
from etloom.trace import Job

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
FILLS = dict(zip(PARTS, ("compute", "communication", "memory", "other", "idle"), strict=True))
"""Part of the breakdown -> its colour in report.css."""
MOST_COSTLY = 600
"""Rows of a table that has several a rank."""
_COST = {"top-ops": "own_ns", "kernel-breakdown": "total_ns"}
_TABLES = {
    "top-ops": (
        "Operators",
        "Own: self (without what the operator calls) and its runtime calls. Device: the work it causes there.",
    ),
    "kernel-breakdown": ("Kernels", "Device work by name; without a device, operators by self time."),
    "steps": ("Steps", "From the start to the end of a ProfilerStep; device: the work launched in it."),
    "comm-overlap": ("Communication", "How much of it computation hides, of each step and of the whole."),
}


def write(
    job: Job, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS
) -> None:
    """Write the report of a linked run.

    max_events: events drawn of a rank; of more, the longest of each lane and time stay, and the page says how many
    are left out. max_ranks: ranks whose timelines are drawn, the first ones.
    """
    Path(path).write_text(render(job, max_events=max_events, max_ranks=max_ranks), encoding="utf-8")


def render(job: Job, *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS) -> str:
    """The page as text; see `write`."""
    found = verdict(job)
    packed, notes = timelines(job, max_events, max_ranks, found.tables["critical-path"])
    css, script = asset("report.css"), "\n".join(map(asset, SCRIPTS))
    name = _name(job)
    sections = _sections(found, len(job), _timeline(packed, notes))
    return fill(
        asset("template.html"),
        csp=policy(css, script),
        title=escape(f"{name} - etloom report" if name else "etloom report"),
        heading=escape(name or "Execution trace report"),
        subtitle=_subtitle(job),
        css=css,
        verdict=_sentences(found),
        links="".join(f'<a href="#{one}">{title}</a>' for one, title, _ in sections),
        sections="\n".join(inside for _, _, inside in sections),
        version=escape(etloom.__version__),
        facts=json.dumps({"colours": COLOURS}),
        ranks="\n".join(
            f'<script type="text/plain" data-rank="{one.rank}">{base64.b64encode(one.data).decode()}</script>'
            for one in packed
        ),
        script=script,
    )


def _name(job: Job) -> str:
    """The folder or file that was opened; of a file with several ranks, which have none together, the first's."""
    first = next((trace.meta.get("files") for trace in job.values()), None) or [""]
    return Path(str(job.meta.get("path") or first[0])).name


def _sections(found: Verdict, of_ranks: int, timeline: str) -> list[tuple[str, str, str]]:
    """(id, what the links call it, the section) of all that there is something to say about."""
    tables = found.tables
    if "recorded" in tables:
        note = "Nodes of the execution traces by name."
        return [
            _block(
                "recorded-section",
                "Operators",
                html_table(_telling(tables["recorded"]), "recorded", "By name", note),
            ),
            _quality(found),
        ]
    made = [
        _block(
            "findings",
            "Findings",
            findings(tables["findings"], of_ranks, MAX_FINDINGS),
            "What costs time, and what to do",
        ),
        _block("timeline", "Timeline", timeline),
        _block("breakdown", "Breakdown", _breakdown(found), "Where the time went"),
        ("critical-path-section", "Critical path", path(tables["critical-path"])),
        ("ranks-section", "Ranks" if of_ranks > 1 else "Collectives", ranks(tables, of_ranks)),
        *((f"{name}-section", texts[0], _section(found, name, *texts)) for name, texts in _TABLES.items()),
        _quality(found),
    ]
    return [one for one in made if one[2]]


def _block(name: str, link: str, inside: str, title: str | None = None) -> tuple[str, str, str]:
    """A section under a title, which is what the links call it where nothing else is said."""
    return (
        name,
        link,
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title or link)}</h2>\n'
        f"{inside}\n</section>",
    )


def _subtitle(job: Job) -> str:
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
        in_words(job),
        " and ".join(sorted(devices)) or ("" if worked or untimed.is_untimed(job) else "no device"),
        f"backend {backend}" if backend else "",
        " + ".join(map(str, first.meta.get("formats") or [])).replace("_", " "),
    ]
    return escape(" · ".join(filter(None, parts)))


def _sentences(found: Verdict) -> str:
    items = "".join(
        f'<li class="{sentence.tone}"><span class="topic">{escape(sentence.topic)}</span>'
        f"<b>{_held(sentence.figure)}</b><span>{_held(sentence.text)}</span></li>"
        for sentence in found.sentences
    )
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.unanswered.items():
        by_reason.setdefault(reason, []).append(name)
    notes = "".join(_note(f"{', '.join(names)}: {reason}") for reason, names in by_reason.items())
    return f'<ul class="verdict">{items}</ul>{notes}'


def _held(text: str) -> str:
    """The text escaped, no line of it broken between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|s|ms|µs|ns|[kMG]?B)\b|%)", "\u00a0", escape(text))


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _timeline(packed: list[Packed], notes: list[str]) -> str:
    if not packed:
        return "".join(map(_note, notes))
    used = frozenset().union(*(one.colours for one in packed))
    legend = _legend({name: label for code, (name, label) in enumerate(COLOURS) if code in used})
    return fill(
        asset("timeline.html"),
        legend=legend,
        ranks=escape(in_words(one.rank for one in packed)),
        notes="".join(map(_note, notes)),
    )


def _legend(labels: Mapping[str, str]) -> str:
    return "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        f"{escape(label)}</li>"
        for name, label in labels.items()
    )


def _breakdown(found: Verdict) -> str:
    overview = found.tables["overview"]
    known = overview.drop_nulls("span_ns")
    parts = [part for part in PARTS if (known[f"{part}_pct"].max() or 0) > 0]  # type: ignore[operator]
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
    legend = _legend({FILLS[part]: PARTS[part] for part in parts})
    table = html_table(
        _telling(overview.drop(f"{part}_pct" for part in PARTS if part not in parts)),
        "overview",
        "By rank",
        "Shares are of the span; overlap is of the communication.",
        limit=MAX_RANK_ROWS,
    )
    return (
        f'<div class="bars-head"><p class="soft">{basis}</p><ul class="legend">{legend}</ul></div>'
        f"{svg_bars(rows, FILLS, PARTS)}{table}"
    )


def _section(found: Verdict, name: str, title: str, note: str) -> str:
    """A table; nothing of one that has nothing to say."""
    frame = found.tables[name]
    if frame.is_empty() or (name == "comm-overlap" and not frame["communication_ns"].sum()):
        return ""
    if name == "steps":
        times = [column for column in frame.columns if column.endswith(("start_ns", "end_ns"))]
        frame = frame.with_columns(pl.col(times) - pl.col("start_ns").min())
    if name == "top-ops" and frame.group_by("rank").len()["len"].max() == MOST_OPERATORS:
        note = f"{note} The first {MOST_OPERATORS} of each rank."
    if name in _COST and frame.height > MOST_COSTLY:
        # Of many ranks the first ones would fill the table.
        frame = frame.sort(_COST[name], "rank", descending=(True, False), maintain_order=True)
        note = f"{note} The costliest of all ranks first."
    table = html_table(_telling(frame), name, title, note, absent={"step": "all"}, limit=MOST_COSTLY)
    return f'<section id="{name}-section" aria-label="{title}">{table}</section>'


def _telling(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame without the columns that say nothing: all null, or the basis where there is only one."""
    silent = [name for name in frame.columns if frame.height and frame[name].null_count() == frame.height]
    if "basis" in frame.columns and frame["basis"].n_unique() <= 1:
        silent.append("basis")
    return frame.drop(silent)


def _quality(found: Verdict) -> tuple[str, str, str]:
    order = pl.col("severity").replace_strict({"error": 0, "data_loss": 1, "info": 2}, default=3)
    stats = found.stats.sort(order, "rank", "name")
    if len(found.ranks) > MANY:
        stats = by_name(stats)
    rows = html_table(
        stats,
        "stats",
        "What could not be read, was repaired or could not be linked",
        _none(stats),
        absent={"rank": "run"},
    )
    links = found.tables["link-quality"].filter(pl.col("total") > 0)
    linked = html_table(_telling(links), "link-quality", "Links") if links.height else ""
    return _block("quality", "Quality", linked + rows, "Link quality, and what was lost or repaired")


def _none(stats: pl.DataFrame) -> str:
    return "" if stats.height else "Nothing: every event was read and linked as it is."
