"""Split steps into segments at each begin or end of an event of the main thread, and classify the segments by kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from etloom.core import categories
from etloom.core.arrays import match_text
from etloom.core.iterations import find_step_events
from etloom.core.steps import STEP_PATTERN
from etloom.core.trace import Trace
from etloom.timeline.activity import find_steps

MIN_STEPS = 5
_MAX_KEY = 2**62


@dataclass(frozen=True)
class StepSegments:
    step: NDArray[np.int64]  # 0, 1, ...
    kinds: tuple[NDArray[np.int64], ...]  # the finest first
    ns: NDArray[np.int64]
    steps: int
    fastest: int  # step, ns
    median: float  # step, ns


def split_steps(trace: Trace) -> StepSegments | None:
    """Split the steps of a trace into `StepSegments` on the thread with the step annotations.

    None with fewer than MIN_STEPS steps.
    """
    windows = find_steps(trace)
    if windows.height < MIN_STEPS:
        return None
    events = trace.events.filter(pl.col("depth").is_not_null() & pl.col("dur").is_not_null())
    steps = trace.events["id"][find_step_events(trace.events, trace.meta.get("step_name"))["row"]]
    annotations = events.filter(pl.col("id").is_in(steps.implode()))
    if annotations.is_empty():
        return None  # the annotations are not on a call stack
    pid, tid = annotations.select("pid", "tid").row(0)
    events = events.filter(pl.col("pid").eq_missing(pid) & pl.col("tid").eq_missing(tid))
    waits = categories.mask_events(events, categories.RUNTIME_CATEGORIES) | match_text(
        events["name"], categories.COMMUNICATION_CALL
    )
    name = pl.col("name").cast(pl.String).str.replace(STEP_PATTERN, "").cast(pl.Categorical).to_physical()
    shapes = trace.arguments.select(pl.col("dims").to_physical(), id="event").unique("id", keep="first")
    events = events.join(shapes, on="id", how="left", maintain_order="left").select(
        "ts",
        "dur",
        pl.col("depth").cast(pl.Int64),
        name=name,
        waits=pl.Series(waits),
        dims=pl.col("dims").cast(pl.Int64).fill_null(-1),
    )
    ends = pl.concat(
        (
            events.select("name", "dims", "waits", at="ts", opens=pl.lit(True), order="depth"),
            events.select(
                *("name", "dims", "waits"),
                at=pl.col("ts") + pl.col("dur"),
                opens=pl.lit(False),
                order=-pl.col("depth"),
            ),
        )
    ).sort("at", "opens", "order")
    numbered = windows.with_row_index("number").select("number", "end", at="start")
    cut = (
        ends.with_columns(
            ns=pl.col("at").shift(-1) - pl.col("at"),
            to=pl.col("name").shift(-1),
            to_dims=pl.col("dims").shift(-1),
            to_opens=pl.col("opens").shift(-1),
        )
        .join_asof(numbered.sort("at"), on="at")
        .filter(pl.col("at") < pl.col("end"))
        .drop_nulls()
    )
    times = (windows["end"] - windows["start"]).to_numpy()
    return StepSegments(
        cut["number"].to_numpy().astype(np.int64),
        _classify_segments(cut),
        cut["ns"].to_numpy(),
        windows.height,
        int(times.min()),
        float(np.median(times)),
    )


def _classify_segments(cut: pl.DataFrame) -> tuple[NDArray[np.int64], ...]:
    """Return the kind of each segment as a number, in four classifications from the finest to the coarsest.

    By the calls at its ends, their shapes, its place among such segments of its step and their count; without the
    count; without the place; without shapes.
    """
    calls = _number_groups(*(cut[name] for name in ("name", "opens", "to", "to_opens")))
    shaped = _number_groups(calls, cut["dims"], cut["to_dims"])
    by_step = cut.select(step="number").with_columns(kind=shaped)
    place, often = by_step.select(
        pl.int_range(pl.len()).over("step", "kind").alias("place"),
        pl.len().over("step", "kind").alias("often"),
    )
    in_line = _number_groups(shaped, place)
    waits = (cut["waits"] & cut["opens"]).to_numpy()
    anywhere = np.where(waits, in_line, -1)
    return (
        _number_groups(in_line, often),
        in_line,
        _number_groups(shaped, anywhere),
        _number_groups(calls, anywhere),
    )


def _number_groups(*columns: ArrayLike) -> NDArray[np.int64]:
    """Number the distinct combinations of values of integer columns from 0; return the number of each row."""
    number, size = np.zeros(1, dtype=np.int64), 1
    for column in columns:
        values = np.asarray(column).astype(np.int64)
        values = values - values.min(initial=0)
        span = int(values.max(initial=0)) + 1
        if size * span > _MAX_KEY:
            number = np.unique(number, return_inverse=True)[1]
            size = int(number.max(initial=0)) + 1
        number, size = number * span + values, size * span
    return pl.Series(number).rank("dense").to_numpy().astype(np.int64) - 1
