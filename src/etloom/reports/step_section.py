"""The steps on the page: the chart, and the time of each step with its base."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from etloom.analyses.helpers.step_times import STEP_BASES, measure_step_times
from etloom.reports.html_charts import render_columns, render_legend
from etloom.reports.time_shares import PART_COLORS, PART_LABELS

MAX_COLUMNS = 2000
"""Columns of a chart."""


def add_step_times(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with the time of each (null: unknown), as in the summary, next to that of its annotation."""
    times, measured = measure_step_times(steps)
    named = steps.rename({"dur_ns": "annotation_ns"})
    if measured == "annotation":
        return named
    joined = named.join(times, on=("rank", "step"), how="left", maintain_order="left")
    return joined.select("rank", "step", "start_ns", step_time_ns="time_ns").hstack(
        named.drop("rank", "step", "start_ns")
    )


def describe_step_basis(steps: pl.DataFrame) -> str:
    """Return a sentence on what the time of a step is, on the page; empty without steps."""
    if steps.is_empty():
        return ""
    return f" Step time, as in the summary: {STEP_BASES[measure_step_times(steps)[1]]}."


def render_step_chart(times: pl.DataFrame) -> str:
    """Render a chart with a stacked column per step: parts of its time, mean over ranks; empty below two steps."""
    steps = (
        times.drop_nulls("step").group_by("step").agg(pl.col(f"{part}_ns").mean() for part in PART_LABELS)
    ).sort("step")
    if steps.height < 2:
        return ""
    parts = [part for part in PART_LABELS if steps[f"{part}_ns"].sum()]
    columns: list[tuple[str, Mapping[str, float]]] = [
        (f"step {row['step']}", {part: row[f"{part}_ns"] for part in parts})
        for row in steps.head(MAX_COLUMNS).iter_rows(named=True)
    ]
    numbers = steps["step"].head(MAX_COLUMNS).to_list()
    legend = render_legend({PART_COLORS[part]: PART_LABELS[part] for part in parts})
    note = (
        "One column per step, mean over the ranks: the time of its annotation on the host, and what ran then. "
        "A click shows the step on the timeline."
    )
    if steps.height > MAX_COLUMNS:
        note += f" The first {MAX_COLUMNS:,} of {steps.height:,} steps."
    return (
        f'<div class="bars-head"><p class="soft">{note}</p><ul class="legend">{legend}</ul></div>'
        f"{render_columns(columns, PART_COLORS, PART_LABELS, 'Time of each step by part', numbers)}"
    )
