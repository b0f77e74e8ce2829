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
from collections.abc import Mapping
from html import escape
from pathlib import Path

import polars as pl

import etloom
from etloom.reports.page import asset, fill, policy
from etloom.reports.palette import COLOURS
from etloom.reports.sections import findings, path, ranks
from etloom.reports.tables import html_table, svg_bars
from etloom.reports.text import count
from etloom.reports.timeline import Packed, pack
from etloom.reports.verdict import PARTS, Verdict, verdict
from etloom.trace import Job, Trace

MAX_EVENTS = 200_000
"""Events drawn of a rank; about 8 bytes each in the file."""
MAX_DRAWN = 1_200_000
"""Events drawn of all ranks together: what a browser opens in a blink and a mail carries."""
MAX_RANKS = 64
"""Ranks whose timelines are drawn; all ranks stand in the tables."""
MAX_FINDINGS = 20
FEW = 4
"""Ranks each of which may have a note of its own."""
MAX_BARS = 32
"""Ranks with a bar of their own."""
SCRIPTS = ("data.js", "paint.js", "timeline.js", "hands.js", "tables.js", "page.js")
MAX_RANK_ROWS = 50_000
"""Rows of the table that has one a rank."""
FILLS = dict(zip(PARTS, ("compute", "communication", "memory", "other", "idle"), strict=True))
"""Part of the breakdown -> its colour in report.css."""
MOST_COSTLY = 600
"""Rows of a table that has several a rank."""
_COST = {"top-ops": "self_ns", "kernel-breakdown": "total_ns"}
_TABLES = {
    "top-ops": (
        "Operators",
        "By self time: without what the operator calls. Device: the device work it causes.",
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
    packed, notes = _timelines(job, max_events, max_ranks, found.tables["critical-path"])
    css, script = asset("report.css"), "\n".join(map(asset, SCRIPTS))
    together = ranks(found.tables)
    name = str(job.meta.get("path") or "")
    return fill(
        asset("template.html"),
        csp=policy(css, script),
        title=escape(f"{Path(name).name} - etloom report" if name else "etloom report"),
        heading=escape(Path(name).name or "Execution trace report"),
        subtitle=_subtitle(job),
        css=css,
        verdict=_sentences(found),
        findings=findings(found.tables["findings"], len(job), MAX_FINDINGS),
        path=path(found.tables["critical-path"]),
        together=together,
        timeline=_timeline(packed, notes),
        breakdown=_breakdown(found),
        links="".join(f'<a href="#{name}-section">{title}</a>' for name, title in _sections(found, together)),
        tables="".join(_section(found, name, *texts) for name, texts in _tables(found).items()),
        quality=_quality(found),
        version=escape(etloom.__version__),
        facts=json.dumps({"colours": COLOURS}),
        ranks="\n".join(
            f'<script type="text/plain" data-rank="{one.rank}">{base64.b64encode(one.data).decode()}</script>'
            for one in packed
        ),
        script=script,
    )


def _tables(found: Verdict) -> dict[str, tuple[str, str]]:
    """The tables that have something to say."""
    hidden = set() if found.tables["comm-overlap"]["communication_ns"].sum() else {"comm-overlap"}
    return {name: texts for name, texts in _TABLES.items() if name not in hidden}


def _sections(found: Verdict, together: str) -> list[tuple[str, str]]:
    """(name, title) of the sections below the breakdown."""
    path_ = [("critical-path", "Critical path")] if found.tables["critical-path"].height else []
    between = [("ranks", "Ranks")] if together else []
    return [*path_, *between, *((name, title) for name, (title, _) in _tables(found).items())]


def _subtitle(job: Job) -> str:
    first = next(iter(job.values()), None)
    if first is None:
        return "no rank was read"
    devices = {
        str(device.get("name")) for device in first.meta.get("device_properties") or [] if device.get("name")
    }
    backend = (first.meta.get("distributed") or {}).get("backend")
    worked = any(trace.launches.height for trace in job.values())
    parts = [
        f"rank {', '.join(map(str, job.ranks[:8]))}{', ...' if len(job) > 8 else ''}",
        " and ".join(sorted(devices)) or ("" if worked else "no device"),
        f"backend {backend}" if backend else "",
        " + ".join(map(str, first.meta.get("formats") or [])).replace("_", " "),
    ]
    return escape(" · ".join(filter(None, parts)))


def _sentences(found: Verdict) -> str:
    items = "".join(
        f'<li class="{sentence.tone}"><span class="topic">{escape(sentence.topic)}</span>'
        f"<b>{escape(sentence.figure)}</b><span>{escape(sentence.text)}</span></li>"
        for sentence in found.sentences
    )
    notes = "".join(_note(f"{name}: {reason}") for name, reason in found.unanswered.items())
    return f'<ul class="verdict">{items}</ul>{notes}'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _timelines(
    job: Job, max_events: int, max_ranks: int, critical: pl.DataFrame
) -> tuple[list[Packed], list[str]]:
    """The packed ranks, and what a reader of the page must be told about what they leave out."""
    drawn = {rank: trace for rank, trace in job.items() if trace.events.height}
    notes = []
    if empty := [rank for rank in job if rank not in drawn]:
        notes.append(f"No profiler events were read of rank {_some(empty)}: there is no timeline to draw.")
    if len(drawn) > max_ranks:
        rest = list(drawn)[max_ranks:]
        notes.append(
            f"The timelines of {count(len(rest), 'rank')} ({_some(rest)}) are left out; the tables cover them."
        )
        drawn = dict(list(drawn.items())[:max_ranks])
    origins = _origins(drawn)
    if len(set(origins.values())) > 1:
        notes.append("The ranks share no clock: each timeline starts at its own zero.")
    most = min(max_events, MAX_DRAWN // max(1, len(drawn)))
    packed = [
        pack(
            trace,
            rank=rank,
            origin=origins[rank],
            max_events=most,
            critical=critical.filter(pl.col("rank") == rank)["event"].drop_nulls(),
        )
        for rank, trace in drawn.items()
    ]
    for total, left_out, crowded, who in _summed(packed):
        if left_out:
            notes.append(
                f"{who}: {left_out:,} of {total:,} events are left out of the timeline; "
                "the longest of each lane and time are drawn. The tables count all."
            )
        if crowded:
            notes.append(f"{who}: {crowded:,} events overlap so many others that they share a row.")
    return packed, notes


def _summed(packed: list[Packed]) -> list[tuple[int, int, int, str]]:
    """(events, left out, crowded, of whom): a rank each, or of many ranks their sum."""
    if len(packed) <= FEW:
        return [(one.total, one.left_out, one.crowded, f"Rank {one.rank}") for one in packed]
    total, left_out, crowded = (
        sum(of) for of in zip(*((p.total, p.left_out, p.crowded) for p in packed), strict=True)
    )
    return [(total, left_out, crowded, f"All {len(packed):,} ranks together")]


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8:,} more" if len(ranks) > 8 else "")


def _origins(traces: Mapping[int, Trace]) -> dict[int, int]:
    """The time that is zero on the page, per rank: the earliest of all where the ranks share a clock.

    They do where each file says its base and the ranks ran at one time: else a rank would be a speck far from the
    others.
    """
    bounds = pl.col("ts").min().alias("from"), pl.col("ts").max().alias("to")
    spans = {rank: trace.events.select(bounds).row(0) for rank, trace in traces.items()}
    starts = {rank: start for rank, (start, _) in spans.items()}
    if not spans:
        return {}
    absolute = all(trace.meta.get("clock") == "epoch" for trace in traces.values())
    together = max(starts.values()) <= min(end for _, end in spans.values())
    if absolute and together:
        return dict.fromkeys(spans, min(starts.values()))
    return starts


def _timeline(packed: list[Packed], notes: list[str]) -> str:
    if not packed:
        return "".join(map(_note, notes))
    used = frozenset().union(*(one.colours for one in packed))
    legend = _legend({name: label for code, (name, label) in enumerate(COLOURS) if code in used})
    return fill(
        asset("timeline.html"),
        legend=legend,
        ranks=escape(f"rank {_some([one.rank for one in packed])}"),
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
    frame = found.tables[name]
    if name == "steps":
        times = [column for column in frame.columns if column.endswith(("start_ns", "end_ns"))]
        frame = frame.with_columns(pl.col(times) - pl.col("start_ns").min())
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


def _quality(found: Verdict) -> str:
    order = pl.col("severity").replace_strict({"error": 0, "data_loss": 1, "info": 2}, default=3)
    stats = found.stats.sort(order, "rank", "name")
    rows = html_table(
        stats,
        "stats",
        "What could not be read, was repaired or could not be linked",
        _none(stats),
        absent={"rank": "run"},
    )
    return html_table(_telling(found.tables["link-quality"]), "link-quality", "Links") + rows


def _none(stats: pl.DataFrame) -> str:
    return "" if stats.height else "Nothing: every event was read and linked as it is."
