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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from etloom.analyses.helpers.rank_kinds import MIN_FLEET
from etloom.analyses.helpers.run_tables import ARRIVAL_ORDER
from etloom.comparison.source_lines import find_source_lines
from etloom.core.text import format_duration, format_ranks
from etloom.core.trace import Job
from etloom.formats.io.atomic_file import write_atomically
from etloom.reports.colors import COLORS
from etloom.reports.finding_text import PERCENT_BASES
from etloom.reports.fleet_map import measure_fleet, render_fleet_map
from etloom.reports.html_charts import render_bars, render_columns, render_legend
from etloom.reports.html_sections import render_critical_path, render_findings, render_rank_tables
from etloom.reports.html_tables import render_table
from etloom.reports.longest_calls import LongestCalls, list_longest_calls, pick_calls
from etloom.reports.memory_section import is_memory_only, render_memory
from etloom.reports.page import TIMELINE_SCRIPTS, Page, Section, fill_template, read_asset, titled_section
from etloom.reports.rank_spread import MAX_LISTED_RANKS, group_stats_by_name
from etloom.reports.roofline_section import render_roofline
from etloom.reports.step_section import MAX_COLUMNS, add_step_times, describe_step_basis, render_step_chart
from etloom.reports.summary import MAX_OPERATORS, RunSummary, is_untimed, summarize_run
from etloom.reports.time_shares import PART_COLORS, PART_LABELS
from etloom.reports.timeline_selection import OPEN_RANKS, Timelines, pack_timelines
from etloom.reports.what_if import render_simulation

MAX_EVENTS = 200_000
"""Events drawn per rank; about 5 bytes each in the file."""
MAX_RANKS = 64
"""Ranks whose timelines are drawn; the tables cover all ranks."""
MAX_FINDINGS = 20
MAX_BARS = 32
"""Ranks with a bar each; more ranks have a column each."""
MAX_FLEET_RANKS, MAX_FLEET_EVENTS = 16, 20_000
"""Ranks whose timelines are drawn, and events of each, of a run of more than MAX_RANKS ranks: the page of any number of
ranks is then a few MB."""
SCRIPTS = (
    *TIMELINE_SCRIPTS,
    "fleet.js",
    "memory.js",
    "what_if.js",
    "input.js",
    "tables.js",
    "details.js",
    "page.js",
)
SERVED_SCRIPTS = (*TIMELINE_SCRIPTS, "served.js", *SCRIPTS[len(TIMELINE_SCRIPTS) :])
"""Scripts of the page of a server."""
MAX_RANK_ROWS = 2_000
"""Rows of the table with one row per rank."""
MAX_COST_ROWS = 600
"""Rows of a table with several rows per rank."""
_ADD_RANK = (
    '<span class="buttons" id="add-rank"><input type="number" min="0" placeholder="Rank" aria-label="Rank">'
    '<button type="button">Add</button></span>\n'
)
_COST_COLUMNS = {"top-ops": "exclusive_ns", "kernel-breakdown": "total_ns"}
_TABLES = {
    "top-ops": (
        "Operators",
        "Exclusive: without the operators it calls, with its runtime calls. Device: the GPU activities launched by it "
        "and by the operators it calls.",
    ),
    "kernel-breakdown": ("Kernels", "GPU activities by name; without a GPU, operators by self time."),
    "steps": (
        "Steps",
        "Annotation: from the start to the end of a ProfilerStep on the host. Device: the GPU activities launched in "
        "it, whenever they ran.",
    ),
    "comm-overlap": (
        "Communication",
        "Overlap with computation, for each step (what ran during its annotation) and the whole run.",
    ),
}


def write_page(
    job: Job, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS, max_ranks: int = MAX_RANKS
) -> None:
    """Write the HTML report of a linked run to a file.

    Args:
        max_events: events drawn per rank; the longest of each track and time are drawn, and the page reports the number
            of events left out.
        max_ranks: ranks whose timelines are drawn, the first ones.
    """
    write_atomically(Path(path), render_page(job, max_events=max_events, max_ranks=max_ranks))


def render_page(
    job: Job,
    *,
    max_events: int = MAX_EVENTS,
    max_ranks: int = MAX_RANKS,
    select_timelines: Callable[[pl.DataFrame, Sequence[int]], Timelines] | None = None,
) -> str:
    """Return the HTML report of a linked run; see `write_page`.

    Args:
        select_timelines: for the page of a server: returns the timelines for a critical path by edge and the ranks that
            findings name.
    """
    summary = summarize_run(job)
    views = find_views(summary.tables["findings"].head(MAX_FINDINGS), job)
    hosts = dict(job.rank_facts.select("rank", "host").iter_rows())
    fleet = measure_fleet(summary.tables["temporal-breakdown"], hosts)
    named = list_named_ranks(views)
    if fleet is not None and fleet.is_fleet:
        named = list(dict.fromkeys((*fleet.notable_ranks, *named)))
    if len(job) > MAX_RANKS:
        max_events, max_ranks = min(max_events, MAX_FLEET_EVENTS), min(max_ranks, MAX_FLEET_RANKS)
    if select_timelines is None:
        select_timelines = partial(pack_timelines, job, max_events, max_ranks)
    timelines = select_timelines(summary.tables["critical-path"], named)
    drawn = list(job) if timelines.served else list(timelines.zeros)
    fleet_map = "" if fleet is None else render_fleet_map(fleet, hosts, drawn)
    memory = render_memory(job, timelines.zeros)
    name = _run_name(job)
    findings = render_findings(
        summary.tables["findings"],
        len(job),
        MAX_FINDINGS,
        [_encode_view(view, timelines) for view in views],
        find_source_lines(job),
    )
    graph = ""
    if is_memory_only(job):
        sections = [_wrap_memory(memory), _render_data_quality(summary)]
    else:
        timeline = _render_timeline(timelines)
        operators = summary.tables["top-ops-sum"]["name"].drop_nulls().to_list()
        what_if, graph = ("", "") if is_untimed(job) else render_simulation(job, name, operators)
        sections = _render_sections(
            summary,
            job,
            timelines.zeros,
            findings,
            fleet_map,
            timeline,
            memory,
            what_if,
            render_roofline(job),
        )
    return _assemble_page(job, timelines, _render_summary(summary), sections, graph)


def render_timeline_page(job: Job, timelines: Timelines) -> str:
    """Return the page of a server that has the timeline only: it can be shown before the summary is computed."""
    note = '<p class="soft" id="computing">The summary, the findings and the tables are being computed.</p>'
    return _assemble_page(
        job, timelines, note, [titled_section("timeline", "Timeline", _render_timeline(timelines))]
    )


def _assemble_page(
    job: Job, timelines: Timelines, summary: str, sections: Sequence[Section], graph: str = ""
) -> str:
    """Return the page of a run with these sections, the data of its timelines, and the graph of its what-if."""
    name = _run_name(job)
    facts = {"colors": COLORS, "open_ranks": OPEN_RANKS, "common_clock": timelines.common_clock}
    facts["zeros"] = {rank: str(zero) for rank, zero in timelines.zeros.items()}
    facts_text = json.dumps({**facts, "served": timelines.served})
    data = (
        f'<script type="text/plain" data-rank="{timeline.rank}">{base64.b64encode(timeline.data).decode()}</script>'
        for timeline in timelines.packed
    )
    return Page(
        title=f"{name} - etloom report" if name else "etloom report",
        heading=name or "Execution trace report",
        subtitle=_render_subtitle(job),
        summary=summary,
        sections=[section for section in sections if section.html],
        scripts=SCRIPTS if timelines.served is None else SERVED_SCRIPTS,
        data="\n".join((f'<script type="application/json" id="facts">{facts_text}</script>', graph, *data)),
        asks_server=timelines.served is not None,
    ).render()


def _encode_view(view: FindingView | None, timelines: Timelines) -> str:
    """Return a finding's timeline view as JSON, times in ns from the page's zero; empty if its rank is not drawn."""
    if view is None or view.rank not in timelines.zeros:
        return ""
    zero = timelines.zeros[view.rank]
    return json.dumps(
        {
            "rank": view.rank,
            "event": view.event,
            "start": view.start_ns - zero,
            "end": view.end_ns - zero,
            "peer": view.peer,
            "peer_event": view.peer_event,
            "late": view.late,
            "caption": view.caption,
        }
    )


def _run_name(job: Job) -> str:
    """Return the name of the opened folder or file; if it is unknown, that of the first file of the first rank."""
    first = next((trace.meta.get("files") for trace in job.values()), None) or [""]
    return Path(str(job.meta.get("path") or first[0])).name


def _render_sections(
    summary: RunSummary,
    job: Job,
    zeros: Mapping[int, int],
    findings: str,
    fleet_map: str,
    timeline: str,
    memory: str,
    what_if: str,
    roofline: str,
) -> list[Section]:
    """Return the sections of the report in order; some may be empty."""
    tables, rank_count = summary.tables, len(job)
    calls = {name: list_longest_calls(job, name, zeros) for name in _COST_COLUMNS}
    memory_sections = [_wrap_memory(memory)] if memory else []
    fleet_sections = [titled_section("fleet", "Heat map", fleet_map, "Ranks and steps")] if fleet_map else []
    if "recorded" in tables:
        note = "Nodes of the execution traces by name."
        return [
            titled_section(
                "recorded-section",
                "Operators",
                render_table(_drop_empty_columns(tables["recorded"]), "recorded", "By name", note),
            ),
            *memory_sections,
            _render_data_quality(summary),
        ]
    bases = _render_note(PERCENT_BASES) if tables["findings"].height else ""
    first = (
        titled_section("hangs-section", "Hang", _render_hangs(tables["hangs"]), "Calls that ranks wait in")
        if "hangs" in tables
        else titled_section("findings", "Findings", findings + bases, "Findings by cost, and what to do")
    )
    return [
        first,
        *(fleet_sections if rank_count >= MIN_FLEET else ()),
        titled_section("timeline", "Timeline", timeline),
        *memory_sections,
        titled_section("breakdown", "Breakdown", _render_breakdown(summary), "Where the time went"),
        *(fleet_sections if rank_count < MIN_FLEET else ()),
        Section(
            "critical-path-section", "Critical path", render_critical_path(tables["critical-path"], zeros)
        ),
        *([titled_section("what-if", "What if", what_if)] if what_if else []),
        Section(
            "ranks-section",
            "Ranks" if rank_count > 1 else "Collectives",
            render_rank_tables(tables, rank_count),
        ),
        *([titled_section("roofline-section", "Roofline", roofline)] if roofline else []),
        *(
            Section(
                f"{name}-section", texts[0], _render_table_section(summary, name, *texts, calls.get(name, {}))
            )
            for name, texts in _TABLES.items()
        ),
        _render_data_quality(summary),
    ]


def _wrap_memory(memory: str) -> Section:
    return titled_section("memory", "Memory", memory, "Memory of the caching allocator")


def _render_hangs(table: pl.DataFrame) -> str:
    note = "The first divergence of each group; later ones are consequences."
    return render_table(_drop_empty_columns(table), "hangs", "By group and number of the call", note)


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
    has_launches = job.rank_facts["launches"].sum() > 0
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
    """Escape a text for HTML, with non-breaking spaces between numbers and their units."""
    return re.sub(r"(?<=\d) (?=(?:%|s|ms|µs|ns|[kMG]?B)\b|%)", "\u00a0", escape(text))


def _render_note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _render_timeline(timelines: Timelines) -> str:
    packed, notes, served = timelines.packed, timelines.notes, timelines.served
    if not timelines.zeros:
        return "".join(map(_render_note, notes))
    occurring = frozenset().union(*(timeline.colors for timeline in packed)) if packed else range(len(COLORS))
    legend = render_legend({name: label for code, (name, label) in enumerate(COLORS) if code in occurring})
    return fill_template(
        read_asset("timeline.html"),
        legend=legend,
        controls=_ADD_RANK if served and served["count"] > len(served["ranks"]) else "",
        ranks=escape(format_ranks(served["ranks"] if served else timelines.zeros)),
        notes="".join(map(_render_note, notes)),
    )


def _render_breakdown(summary: RunSummary) -> str:
    tables = summary.tables
    overview = tables["overview"]
    timed = overview.drop_nulls("span_ns")
    parts = [part for part in PART_LABELS if (timed[f"{part}_pct"].max() or 0) > 0]  # type: ignore[operator]
    shares: list[tuple[str, Mapping[str, float]]] = [
        (f"rank {row['rank']}", {part: (row[f"{part}_pct"] or 0.0) / 100 for part in parts})
        for row in timed.head(MAX_COLUMNS).iter_rows(named=True)
    ]
    if timed.height <= MAX_BARS:
        chart = render_bars(shares, PART_COLORS, PART_LABELS)
    else:
        spans = timed["span_ns"].to_list()
        times = [
            (rank, {part: share * span for part, share in parts_of_rank.items()})
            for (rank, parts_of_rank), span in zip(shares, spans, strict=False)
        ]
        chart = render_columns(times, PART_COLORS, PART_LABELS, "Time of each rank by part")
    basis = {
        "device": "GPU time, from the first kernel to the last.",
        "host": "Host time, since the traces contain no GPU activities: communication is time in a "
        "communication call or range, compute is time in another operator, idle is time in none.",
        "mixed": "GPU time for ranks with a GPU, host time for the others.",
        "none": "Unknown: no GPU activities and no operators.",
    }[summary.basis]
    if timed.height > MAX_BARS:
        basis += " One column per rank."
    if timed.height > MAX_COLUMNS:
        basis += f" The first {MAX_COLUMNS:,} of {timed.height:,} ranks; the table lists all."
    legend = render_legend({PART_COLORS[part]: PART_LABELS[part] for part in parts})
    table = render_table(
        _drop_empty_columns(overview.drop(f"{part}_pct" for part in PART_LABELS if part not in parts)),
        "overview",
        "By rank",
        f"Shares refer to the span; overlap refers to the communication.{describe_step_basis(tables['steps'])}",
        limit=MAX_RANK_ROWS,
    )
    return (
        f'<div class="bars-head"><p class="soft">{basis}</p><ul class="legend">{legend}</ul></div>'
        f"{chart}{table}"
    )


def _render_table_section(summary: RunSummary, name: str, title: str, note: str, calls: LongestCalls) -> str:
    """Render an analysis table as an HTML section; empty without rows, or for comm-overlap without communication."""
    frame = summary.tables[name]
    if frame.is_empty() or (name == "comm-overlap" and not frame["communication_ns"].sum()):
        return ""
    if name == "steps":
        times = [column for column in frame.columns if column.endswith(("start_ns", "end_ns"))]
        note += describe_step_basis(frame)
        frame = add_step_times(frame).with_columns(pl.col(times) - pl.col("start_ns").min())
    if name == "top-ops" and (frame.group_by("rank").len()["len"] >= MAX_OPERATORS).any():
        note = f"{note} The first {MAX_OPERATORS} of each rank by exclusive time, and by device time."
    if name in _COST_COLUMNS and frame.height > MAX_COST_ROWS:
        # With many ranks, the first ones would fill the table.
        frame = frame.sort(_COST_COLUMNS[name], "rank", descending=(True, False), maintain_order=True)
        note = f"{note} The costliest of all ranks first."
    heading = "By rank and step" if name == "steps" else title
    table = render_table(
        _drop_empty_columns(frame),
        name,
        heading,
        note,
        absent={"step": "all"},
        limit=MAX_COST_ROWS,
        calls=pick_calls(frame.head(MAX_COST_ROWS), calls) if calls else (),
    )
    if name == "steps":
        table = f"<h2>Steps</h2>{render_step_chart(summary.tables['temporal-breakdown'])}{table}"
    if name in _COST_COLUMNS and len(summary.ranks) > 1:
        table = (
            f"{_render_sum_over_ranks(summary, name, title, calls)}<details><summary>{title} by rank</summary>"
            f"{table}</details>"
        )
    return f'<section id="{name}-section" aria-label="{title}">{table}</section>'


def _render_sum_over_ranks(summary: RunSummary, name: str, title: str, calls: LongestCalls) -> str:
    table = summary.tables[f"{name}-sum"]
    note = "Sum over all ranks, and the rank with the largest time."
    longest = pick_calls(table.head(MAX_COST_ROWS), calls)
    return render_table(
        _drop_empty_columns(table),
        f"{name}-sum",
        f"{title}, all ranks",
        note,
        limit=MAX_COST_ROWS,
        calls=longest,
    )


def _drop_empty_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Drop the columns that contain only nulls, and the column ``basis`` if all its values are equal."""
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
    linked = render_table(_drop_empty_columns(links), "link-quality", "Link quality") if links.height else ""
    return titled_section("quality", "Data quality", linked + rows, "Link quality and data quality")


def _note_if_empty(stats: pl.DataFrame) -> str:
    return "" if stats.height else "None: every event was read and linked unchanged."


# The part of the timeline to show for each finding: a time range, an event, and the ranks involved.
#
# A wait for another rank is shown with its cause: the wait on one rank, and on the other what it did meanwhile.

MIN_SHARE = 0.5
"""Share of a finding's time that a wait must cover for the finding to be about that wait."""


@dataclass(frozen=True)
class FindingView:
    """The part of the timeline to show for a finding: rank, time range, event and, for a wait, the other rank.

    Attributes:
        rank: The rank of the finding.
        event: Id of the event to select, null if none is known.
        start_ns: Start of the time to show, on the rank's clock.
        end_ns: Its end.
        peer: The rank that ``rank`` waits for, or that waits for it; None for neither.
        peer_event: Id of the event of the peer.
        late: The one of both that the other waits for.
        caption: What the timeline shows, one sentence.
    """

    rank: int
    event: int | None
    start_ns: int
    end_ns: int
    peer: int | None = None
    peer_event: int | None = None
    late: int | None = None
    caption: str = ""


def find_views(findings: pl.DataFrame, job: Job) -> list[FindingView | None]:
    """Return for each finding the part of the timeline to show; None if the finding has no start and end time."""
    collectives = ARRIVAL_ORDER.read(job)
    return [_find_view(row, collectives) for row in findings.iter_rows(named=True)]


def list_named_ranks(views: list[FindingView | None]) -> list[int]:
    """Return the distinct ranks that timeline views show, and their peer ranks, in the order of the views."""
    ranks = [rank for view in views if view for rank in (view.rank, view.peer) if rank is not None]
    return list(dict.fromkeys(ranks))


def _find_view(row: Mapping[str, Any], collectives: pl.DataFrame) -> FindingView | None:
    start, end = row.get("start_ns"), row.get("end_ns")
    if start is None or end is None:
        return None
    view = FindingView(row["rank"], row["event"], start, end)
    return next(_views_of_waits(view, collectives), view)


def _views_of_waits(view: FindingView, collectives: pl.DataFrame) -> Iterator[FindingView]:
    """Yield the timeline view of a finding with the other rank added, if it shows a wait between two ranks."""
    if collectives.is_empty():
        return
    parts = collectives.filter(pl.col("rank") == view.rank)
    waited_until = pl.min_horizontal(pl.col("own_start") + pl.col("wait"), "own_end")
    covered = pl.min_horizontal(waited_until, pl.lit(view.end_ns)) - pl.max_horizontal(
        "own_start", pl.lit(view.start_ns)
    )
    waits = parts.with_columns(covered=covered).filter(
        pl.col("covered") > MIN_SHARE * (view.end_ns - view.start_ns)
    )
    if waits.height:
        wait = waits.sort("covered", descending=True).row(0, named=True)
        late = _participant(collectives, wait["instance"], wait["size"] - 1)
        yield _with_peer(view, wait, late, wait, late)
        return
    # A rank that is late arrives at the end of the time.
    for arrival in parts.filter(
        (pl.col("own_start") == view.end_ns) & (pl.col("order") == pl.col("size") - 1)
    ).iter_rows(named=True):
        first = _participant(collectives, arrival["instance"], 0)
        wait_start = view.end_ns - (arrival["start"] - first["start"])
        yield _with_peer(
            replace(view, start_ns=min(view.start_ns, wait_start)), arrival, first, first, arrival
        )


def _participant(collectives: pl.DataFrame, instance: int, order: int) -> dict[str, Any]:
    return collectives.filter(instance=instance, order=order).row(0, named=True)


def _with_peer(
    view: FindingView,
    own: Mapping[str, Any],
    peer: Mapping[str, Any],
    waiting: Mapping[str, Any],
    late: Mapping[str, Any],
) -> FindingView:
    wait = format_duration(late["start"] - waiting["start"])
    return replace(
        view,
        event=own["event"],
        peer=peer["rank"],
        peer_event=peer["event"],
        late=late["rank"],
        caption=f"Rank {waiting['rank']} waits {wait} for rank {late['rank']} in {own['collective']}.",
    )
