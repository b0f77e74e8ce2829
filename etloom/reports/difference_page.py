"""The HTML report that compares two runs: whether the second is slower, why, the steps of both, and tables.

It uses the page of the report of a run, is as self-contained, and escapes all text from traces.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

import polars as pl

from etloom.comparison import BY, Difference
from etloom.core.text import count_noun
from etloom.core.trace import Job
from etloom.formats.io.atomic_file import write_atomically
from etloom.reports.difference_sections import has_gpu_time, label_sides, render_explanation, render_steps
from etloom.reports.formatting import format_duration
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
