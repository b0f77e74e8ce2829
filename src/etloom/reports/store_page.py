"""The page of a store: its runs as a table, each a link to its page, and their mean steps as a chart."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

import polars as pl

from etloom.core.text import count_noun
from etloom.reports.html_charts import render_columns
from etloom.reports.html_tables import render_table
from etloom.reports.page import Page, titled_section

MAX_DRAWN_RUNS = 500
"""Runs in the chart, the last ones."""


def render_runs(name: str, runs: pl.DataFrame) -> str:
    """Return the page of a store.

    Args:
        name: the name of the store.
        runs: the runs, as `etloom.store_list` returns them.
    """
    timed = runs.drop_nulls("step_ns").select("run", "step_ns").rows()
    chart = ""
    if len(timed) > 1:
        columns = [(run, {"step": ns}) for run, ns in timed[-MAX_DRAWN_RUNS:]]
        note = '<p class="soft">Mean step of each run, in the order in which they were added.</p>'
        chart = (
            f"{note}{render_columns(columns, {'step': 'step'}, {'step': 'step'}, 'Mean step of each run')}"
        )
    stale = runs.filter(~pl.col("is_current")).height
    notes = ""
    if stale:
        notes = (
            f'<p class="note">{count_noun(stale, "run")} stored by another version of etloom: pages take longer to '
            f"appear until <code>etloom store refresh {escape(name)}</code>.</p>"
        )
    table = render_table(
        _choose_columns(runs),
        "store-runs",
        "Runs",
        "The oldest first. Change: of the mean step, from the run before. etloom diff A B compares two runs.",
        absent={"change_pct": "-", "hosts": "unknown"},
        limit=runs.height,
        links={run: f"{quote(run)}/" for run in runs["run"]},
    )
    return Page(
        title=f"{name} - etloom",
        heading=name,
        subtitle=f"store of {count_noun(runs.height, 'run')}",
        summary="",
        sections=[titled_section("runs", "Runs", f"{chart}{notes}{table}", "Runs of the store")],
        scripts=("tables.js", "runs.js"),
        asks_server=True,
    ).render()


def _choose_columns(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the columns that the page shows, with the change of the mean step from the run before."""
    steps = pl.col("step_ns")
    before = steps.forward_fill().shift()
    return runs.select(
        "run",
        "ranks",
        pl.when(pl.col("hosts") > 0).then("hosts"),
        "events",
        mean_step_ns=steps,
        change_pct=pl.when(before > 0).then(100 * (steps / before - 1)),
        added=pl.col("added").str.slice(0, 16).str.replace("T", " "),
        stored_by=pl.format("etloom {}", "etloom"),
        source="source",
    ).rename({"added": "added (UTC)"})
