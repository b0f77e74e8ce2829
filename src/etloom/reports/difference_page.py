"""The HTML report that compares runs: whether a later one is slower, why, their timelines and steps, and tables.

It uses the page of the report of a run, is as self-contained, and escapes all text from traces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import Any

import polars as pl

from etloom.comparison import BY, Difference, tabulate_runs
from etloom.core.text import count_noun, format_duration
from etloom.core.trace import Job
from etloom.formats.io.atomic_file import write_atomically
from etloom.reports.colors import COLORS
from etloom.reports.difference_steps import render_steps
from etloom.reports.difference_timelines import CHANGE_COLORS, ComparedTimelines, pack_runs
from etloom.reports.formatting import choose_column_format
from etloom.reports.html_charts import render_legend
from etloom.reports.html_tables import render_table
from etloom.reports.page import TIMELINE_SCRIPTS, Page, Section, fill_template, read_asset, titled_section
from etloom.reports.source_code import render_changed_functions
from etloom.reports.time_shares import PART_LABELS

SCRIPTS = (
    *TIMELINE_SCRIPTS,
    "input.js",
    "tables.js",
    "details.js",
    "difference.js",
)
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


def write_page(differences: Difference | Sequence[Difference], path: str | os.PathLike[str]) -> None:
    """Write the HTML report of the difference between linked runs to a file; see `render_page`."""
    write_atomically(Path(path), render_page(differences))


def render_page(differences: Difference | Sequence[Difference]) -> str:
    """Return the HTML report of the difference between two runs, or of several runs from one that all begin with."""
    if isinstance(differences, Difference):
        differences = [differences]
    jobs = [differences[0].before, *(difference.after for difference in differences)]
    names = _name_runs(jobs)
    is_pair = len(names) == 2
    sides = (
        ["before", "after"]
        if is_pair
        else [f"{ascii_uppercase[i : i + 1] or i}: {name}" for i, name in enumerate(names)]
    )
    changed = differences[0].table("rank")["rank"].drop_nulls().to_list()  # the most first
    timelines = pack_runs(jobs, all(difference.stepped for difference in differences), changed)
    changes = "".join(
        ("" if is_pair else f"<h3>{escape(side)}</h3>") + render_explanation(difference)
        for side, difference in zip(sides[1:], differences, strict=True)
    )
    if is_pair:
        tables = {by: differences[0].table(by) for by in BY if by != "step"}
        table_sections = [_render_table_section(by, table) for by, table in tables.items() if table.height]
    else:
        runs = dict(zip(sides, jobs, strict=True))
        tables = {by: tabulate_runs(runs, by) for by in BY if by != "step"}
        table_sections = [_render_runs_section(by, table) for by, table in tables.items() if table.height]
    sections = [
        titled_section("explained", "What changed", changes, "What explains the difference"),
        *([] if timelines is None else [_render_timelines(timelines)]),
        titled_section("steps", "Steps", render_steps(differences, sides), "Steps of the runs"),
        *_render_code_sections(differences, sides),
        *table_sections,
    ]
    facts = {"colors": [*COLORS, *CHANGE_COLORS], "change_colors": len(CHANGE_COLORS), "common_clock": False}
    return Page(
        title=f"{' and '.join(names)} - etloom diff",
        heading=" → ".join(names) if is_pair else ", ".join(sides),
        subtitle=escape(
            " · ".join(f"{side}: {_describe_run(job)}" for side, job in zip(sides, jobs, strict=True))
        ),
        summary=_render_summary(differences[0]) if is_pair else _render_verdicts(sides, differences),
        sections=sections,
        scripts=SCRIPTS,
        data=f'<script type="application/json" id="facts">{json.dumps(facts)}</script>'
        + ("" if timelines is None else timelines.data),
    ).render()


def _render_code_sections(differences: Sequence[Difference], sides: Sequence[str]) -> list[Section]:
    """Return the section of the source lines that differ from those of the first run, if any do."""
    changes = {
        side: html
        for side, difference in zip(sides[1:], differences, strict=True)
        if (html := render_changed_functions(difference.changed_functions))
    }
    heads = {side: "" if len(sides) == 2 else f"<h3>{escape(side)}</h3>" for side in changes}
    html = "".join(heads[side] + text for side, text in changes.items())
    return [titled_section("code", "Code", html, "Functions whose source lines changed")] if html else []


def _name_runs(jobs: Sequence[Job]) -> list[str]:
    """Return a name for each run: the last 1 to 3 parts of its path, as many as distinguish them."""
    paths = [Path(str(job.meta.get("path") or f"run {i + 1}")) for i, job in enumerate(jobs)]
    for depth in (1, 2, 3):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return ["before", "after"] if len(jobs) == 2 else [f"run {i + 1}" for i in range(len(jobs))]


def _render_timelines(timelines: ComparedTimelines) -> Section:
    """Render the section with the timelines of one rank of all runs, and the controls of rank, step and colors."""
    ranks = "".join(f"<option>{rank}</option>" for rank in timelines.ranks)
    controls = (
        f'<label>Rank <select id="compare-rank" data-state="r">{ranks}</select></label>'
        '<label>Step <select id="compare-step" data-state="k"></select></label>'
        '<label>Colors <select id="compare-colors" data-state="c"><option>change</option><option>category</option>'
        "</select></label>"
    )
    html = fill_template(
        read_asset("timeline.html"),
        legend=render_legend(timelines.legend),
        controls=controls,
        ranks="one rank of all runs",
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in timelines.notes),
    )
    note = (
        '<p class="soft">All runs on one axis, at whose zero the step begins. Operators, modules and kernels are '
        "compared with those below the same callers in the other run, as by <code>--by tree</code>: mean time per step "
        "of this rank, with all that is inside.</p>"
    )
    return titled_section("timeline", "Timelines", note + html)


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
    notes = "".join(map(_render_note, difference.notes))
    return f'<ul class="summary fitting">{items}</ul>{notes}'


def _render_note(note: str) -> str:
    """Render a note on a comparison; what `--by rank` shows is a table of the page."""
    text = escape(note).replace("see --by rank", 'see <a href="#rank-section">Ranks</a>')
    return f'<p class="note">{text}</p>'


def _render_verdicts(sides: Sequence[str], differences: Sequence[Difference]) -> str:
    """Render a tile for each run after the first one, and the notes on the comparisons."""
    items, notes = [], []
    for side, difference in zip(sides[1:], differences, strict=True):
        tone, headline = _summarize_step_time(difference)
        items.append(
            f'<li class="{tone}"><span class="topic">{escape(side)}</span><b>{escape(headline)}</b>'
            f"<span>{escape(difference.verdict)}</span></li>"
        )
        notes += [_render_note(f"{side}: {note}") for note in difference.notes]
    return f'<ul class="summary fitting">{"".join(items)}</ul>{"".join(notes)}'


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
        .filter(pl.any_horizontal(pl.col(sides) != 0))
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


def _render_runs_section(by: str, table: pl.DataFrame) -> Section:
    """Render a table with a column of times for each run."""
    title, note = _TABLE_TITLES[by]
    if by == "category":
        table = table.with_columns(pl.col(by).cast(pl.String).replace(PART_LABELS))
    html = render_table(table, by, title, note, limit=MAX_ROWS, absent={by: f"no {by}"})
    return Section(
        f"{by}-section", title, f'<section id="{by}-section" aria-label="{title}">{html}</section>'
    )


# HTML sections that compare two runs: time categories of a step, and the largest changes.

CHANGES_PER_GROUPING = {"operator": 6, "collective": 3}
"""Number of changes listed per grouping, if above MIN_CHANGE_SHARE."""
MIN_CHANGE_SHARE = 0.03


def render_explanation(difference: Difference) -> str:
    """Render the waterfall of the mean step by category, and the largest changes."""
    rows = [
        row
        for by, limit in CHANGES_PER_GROUPING.items()
        for row in _largest_changes(by, difference.table(by), limit)
    ]
    top = max((abs(change) for _, _, change, _ in rows), default=1)
    items = "".join(_render_change(*row, top) for row in rows)
    note = (
        '<p class="soft">Per step and rank. The categories above partition the step; operators and collectives '
        "show the same time by its cause.</p>"
    )
    changes_html = f'<ol class="findings">{items}</ol>' if items else '<p class="soft">Nothing changed.</p>'
    return f"{_render_waterfall(difference)}{note}{changes_html}"


def list_causes(difference: Difference) -> list[tuple[str, int, int]]:
    """Return (cause, before, after) of each part of the mean step, ns; the changes sum to that of the mean step.

    Parts are the categories; what the mean of the step times contains besides them is a part of its own.
    """
    table = difference.table("category")
    parts = [
        (PART_LABELS.get(name, name), before, after)
        for name, before, after in table.select("category", "before_ns", "after_ns").iter_rows()
        if before or after
    ]
    means = [round(fmean(times)) if times else 0 for times in difference.step_times]
    before, after = means[0] - sum(part[1] for part in parts), means[1] - sum(part[2] for part in parts)
    # Each part is rounded to ns.
    is_partition = max(abs(before), abs(after)) <= len(parts)
    return parts if is_partition else [*parts, ("outside of the categories", before, after)]


def _render_waterfall(difference: Difference) -> str:
    """Draw how the changes of the parts lead from the mean step before to the mean step after."""
    parts = list_causes(difference)
    if not parts:
        return ""
    table = difference.table("category")
    texts = choose_column_format(table, "change_ns")
    shares = {
        PART_LABELS.get(name, name): share
        for name, share in table.select("category", "share_pct").iter_rows()
    }
    unit = texts.header.rpartition(" ")[2].strip("()")
    first, last = sum(before for _, before, _ in parts), sum(after for *_, after in parts)
    rows, total = [("before", 0, first, "compute")], first
    for label, before, after in sorted(parts, key=lambda part: -abs(part[2] - part[1])):
        if change := after - before:
            rows.append((label, total, total + change, "worse" if change > 0 else "better"))
            total += change
    rows.append(("after", 0, last, "compute"))
    ends = [end for _, start, stop, _ in rows[1:-1] for end in (start, stop)] or [first]
    # A change of a few percent is drawn on a cut axis.
    origin = max(0, min(ends) - (max(ends) - min(ends)) // 2) if max(ends) > min(ends) else 0
    scale = 70 / max(max(ends) - origin, 1)
    bars = []
    for label, start, end, color in rows:
        is_change = color != "compute"
        left, right = sorted((max(start, origin), max(end, origin)))
        size = end - start
        text = f"{'+' if is_change and size > 0 else ''}{texts.text(size)} {unit}"
        if is_change and shares.get(label) is not None:
            text += f" · {shares[label]:.0f} % of it"
        x, width = scale * (left - origin), max(scale * (right - left), 0.15)
        bars.append(
            f'<li><span>{escape(label)}</span><svg role="img" height="22" data-ns="{size}" '
            f'aria-label="{escape(f"{label}: {text}")}"><title>{escape(f"{label}: {size:,} ns")}</title>'
            f'<rect class="{color}" x="{x:.2f}%" width="{width:.2f}%" height="20" y="1"/>'
            f'<text x="{x + width:.2f}%" dx="6" y="15">{escape(text)}</text></svg></li>'
        )
    cut = f" The bars begin at {format_duration(origin)}." if origin else ""
    mean = "mean step" if difference.stepped else "run"
    note = f"From the {mean} before to that after, by cause: the changes sum to {last - first:+,} ns.{cut}"
    return f'<p class="soft">{escape(note)}</p><ul class="bars waterfall">{"".join(bars)}</ul>'


Change = tuple[str, Mapping[str, Any], int, str]


def _largest_changes(by: str, table: pl.DataFrame, limit: int) -> list[Change]:
    """Return up to ``limit`` of a table's largest changes: grouping, row, change (ns), column prefix."""
    stem = "device_" if has_gpu_time(table) else ""
    gross = float(table[f"{stem}change_ns"].abs().sum())
    return [
        (by, row, row[f"{stem}change_ns"], stem)
        for row in table.head(limit).iter_rows(named=True)
        if abs(row[f"{stem}change_ns"]) > MIN_CHANGE_SHARE * gross
    ]


def has_gpu_time(table: pl.DataFrame) -> bool:
    return "device_before_ns" in table.columns and bool(
        table["device_before_ns"].sum() and table["device_after_ns"].sum()
    )


def _render_change(by: str, row: Mapping[str, Any], change: int, stem: str, top: int) -> str:
    name = row[by] if row[by] is not None else f"no {by}"
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
    side = "worse" if change > 0 else "better"
    sign = "+" if change > 0 else "-"
    return (
        f'<li><div class="cost"><b>{sign}{escape(format_duration(abs(change)))}</b>'
        f'<svg viewBox="0 0 100 5" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{side}" width="{max(1, 100 * abs(change) / max(top, 1)):.1f}" height="5"/></svg></div>'
        f'<div><p class="what">{escape(str(name))}{escape(size)}</p>'
        f'<p class="soft">{escape(subject)} · {escape(sides)}{escape(calls)}{escape(presence)}</p></div></li>'
    )
