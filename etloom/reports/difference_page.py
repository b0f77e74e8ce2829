"""The page of two runs: whether one is slower, what explains it, the steps of both, and every table with its bars.

Put together as the report is (html.py), and as closed: it asks the network for nothing, and what traces say comes in as
escaped text.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

import polars as pl

from etloom.comparison import BY, Difference
from etloom.core.trace import Job
from etloom.core.version import __version__
from etloom.reports.difference_sections import has_gpu_time, label_sides, render_explanation, render_steps
from etloom.reports.formatting import count_noun, format_duration
from etloom.reports.html_tables import render_table
from etloom.reports.page import content_security_policy, fill_template, read_asset
from etloom.reports.summary import PART_LABELS

SCRIPTS = ("tables.js", "difference.js")
MAX_ROWS = 300
_TABLE_TITLES = {
    "category": (
        "Where the time went",
        "Parts of the step; a later part holds only what no earlier one covers.",
    ),
    "family": ("Families", "Device work by what it computes, whatever its kernels are called."),
    "operator": (
        "Operators",
        "Own time, on the host and of the device work that each launched itself.",
    ),
    "kernel": ("Kernels", "Device work by name, sums of durations: work at one time counts twice."),
    "collective": (
        "Collectives",
        "The shortest time of a rank in each, the wait for the last rank, and the transfer.",
    ),
}


def write_page(found: Difference, path: str | os.PathLike[str]) -> None:
    """Write the page of a difference between two linked runs."""
    Path(path).write_text(render_page(found), encoding="utf-8")


def render_page(found: Difference) -> str:
    """The page as text."""
    css, script = read_asset("report.css"), "\n".join(map(read_asset, SCRIPTS))
    names = _name_runs(found)
    tables = {by: table for by in BY if by != "step" and (table := found.table(by)).height}
    return fill_template(
        read_asset("difference.html"),
        csp=content_security_policy(css, script),
        title=escape(f"{names[0]} and {names[1]} - etloom diff"),
        heading=escape(f"{names[0]} → {names[1]}"),
        subtitle=escape(f"before: {_describe_run(found.before)} · after: {_describe_run(found.after)}"),
        css=css,
        verdict=_render_summary(found),
        explained=render_explanation(found, tables),
        steps=render_steps(found),
        links="".join(f'<a href="#{by}-section">{_TABLE_TITLES[by][0]}</a>' for by in tables),
        tables="".join(_render_table_section(by, table) for by, table in tables.items()),
        version=escape(__version__),
        script=script,
    )


def _name_runs(found: Difference) -> list[str]:
    """A name for each run, with as much of its path as tells them apart."""
    paths = [Path(str(job.meta.get("path") or side)) for job, side in label_sides(found)]
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


def _render_summary(found: Difference) -> str:
    steps = found.table("step")
    what = "step" if found.stepped else "run"
    row = steps.row(by_predicate=pl.col("measure") == "step time", named=True) if steps.height else {}
    tone, headline = _summarize_step_time(found)
    tiles = [(tone, f"A {what}", headline, found.verdict)]
    for side in ("before", "after"):
        if row.get(side) is not None:
            text = f"median of {count_noun(row[f'values_{side}'], what)}"
            tiles.append(("plain", side.capitalize(), format_duration(row[side]), text))
    if quiet := found.quiet:
        tiles.append(
            (
                "plain",
                "At its quietest",
                f"{quiet.percent:+.1f} %",
                f"90 % interval {quiet.low:+.1f} to {quiet.high:+.1f} %: what a step takes when nothing disturbs it, "
                f"{format_duration(quiet.before)} before, {format_duration(quiet.after)} after",
            )
        )
    for other in steps.filter(pl.col("measure") != "step time").iter_rows(named=True):
        if other["change"] and other["unit"] == "B":
            change = f"{other['change'] / 1e6:+,.1f} MB"
            tiles.append(("plain", "Peak memory", change, f"now {other['after'] / 1e6:,.1f} MB"))
    items = "".join(
        f'<li class="{tone}"><span class="topic">{escape(topic)}</span><b>{escape(figure)}</b>'
        f"<span>{escape(text)}</span></li>"
        for tone, topic, figure, text in tiles
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in found.notes)
    return f'<ul class="verdict fitting">{items}</ul>{notes}'


def _summarize_step_time(found: Difference) -> tuple[str, str]:
    shift = found.step_time
    if shift is None:
        return "plain", "not known"
    if not shift.is_known:
        return "warn", "too few steps"
    if not shift.is_clear:
        return "plain", "no clear change"
    return ("bad", f"{shift.percent:+.1f} %") if shift.percent > 0 else ("good", f"{shift.percent:+.1f} %")


def _render_table_section(by: str, table: pl.DataFrame) -> str:
    title, note = _TABLE_TITLES[by]
    of_device = has_gpu_time(table)
    bar = "device_change_ns" if of_device else "change_ns"
    sides = [name for name in table.columns if name.endswith(("before_ns", "after_ns", "change_ns"))]
    counts = [name for name in table.columns if name.startswith("count_")]
    main = [
        name
        for name in sides
        if name.startswith("device_") == of_device and not name.startswith(("wait", "transfer"))
    ]
    first = [name for name in table.columns if name not in (*sides, *counts, "change_pct", "share_pct")]
    order = [*first, *main, "change_pct", "share_pct", *counts, *(name for name in sides if name not in main)]
    silent = [
        name
        for name in order
        if table[name].null_count() == table.height or (name in sides and not (table[name] != 0).any())
    ]
    whole = [pl.col(name).cast(pl.Int64) for name in counts if (table[name] % 1 == 0).all()]
    shown = (
        table.select(order)
        .with_columns(whole)
        .filter(pl.max_horizontal(main) > 0)
        .drop(name for name in silent if name != bar)
    )
    net = int(table[bar].sum())
    if table["share_pct"].null_count() < table.height:
        note += f" Share: of the change of the sum, {'+' if net > 0 else '-'}{format_duration(abs(net))}."
    if by == "category":
        shown = shown.with_columns(pl.col(by).cast(pl.String).replace(PART_LABELS))
    absent = {by: f"no {by}", "change_pct": "-", "share_pct": "-"}
    html = render_table(shown, by, title, note, limit=MAX_ROWS, bar=bar, absent=absent)
    return f'<section id="{by}-section" aria-label="{title}">{html}</section>'
