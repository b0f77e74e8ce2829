"""What CCL-Bench's metrics look at on one rank: its kernels, its steps, when each kind of work ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl

from etloom.analyses import roofline
from etloom.core import arrays
from etloom.core import categories as kinds
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Trace
from etloom.timeline.activity import Activity, compute_activity, find_steps, select_device_events

Span = tuple[int, int]

NO_SHAPES = "no shapes were recorded (record_shapes=True)"
_ENGINE = r"^execute_context_"
_BATCH = r"(?:^|: )run_batch$"


class MetricUnavailable(Exception):
    """Why a metric has no value: one sentence."""


@dataclass(frozen=True)
class RankData:
    """One rank. passes: all its steps in order; inner: without the first and the last where there are over two."""

    rank: int
    trace: Trace
    work: pl.DataFrame  # kernels, copies and sets, with kind and end
    times: Activity | None
    marks: str | None  # what marks its steps
    passes: list[Span]

    @property
    def inner(self) -> list[Span]:
        return self.passes[1:-1] if len(self.passes) > 2 else self.passes

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Without copies and sets. Raises Unknown where there are none."""
        found = self.work.filter(
            ~pl.col("cat").is_in(list(kinds.MEMCPY_CATEGORIES | kinds.MEMSET_CATEGORIES))
        )
        if not found.height:
            raise MetricUnavailable("no kernels were recorded")
        return found

    @property
    def has_shapes(self) -> bool:
        return bool(self.trace.arguments.height or self.trace.tensors.height)

    @cached_property
    def bounds(self) -> dict[str, int] | str:
        """ns of the operators that compute and memory bound, or why that is not known."""
        if not self.has_shapes:
            return NO_SHAPES
        try:
            table = roofline.analyze(self.trace, top=1 << 30).drop_nulls("bound")
        except EtloomError as error:
            return error.what
        return dict(table.group_by("bound").agg(pl.col("time_ns").sum()).rows())

    def activity(self) -> Activity:
        if self.times is None:
            raise MetricUnavailable("neither device work nor operators were recorded")
        return self.times

    def windows(self) -> list[Span]:
        """The inner steps; without any mark of steps, all the time in which something ran."""
        whole = self.activity().busy.span
        return self.inner or ([whole] if whole else [])

    def work_of_steps(self, work: pl.DataFrame) -> np.ndarray:
        """ns of the work that runs at some time in each of `windows`, each piece whole."""
        bounds = np.array(self.windows(), np.int64).reshape(-1, 2)

        def before(times: str, at: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
            ordered = work.select(times, "dur").sort(times)
            sums = np.append(0, np.cumsum(ordered["dur"].to_numpy()))
            found: np.ndarray = sums[np.searchsorted(ordered[times].to_numpy(), at, side=side)]
            return found

        ran: np.ndarray = before("ts", bounds[:, 1], "left") - before("end", bounds[:, 0], "right")
        return ran

    def mean_of_steps(self, question: Callable[[int, int], float | None]) -> float:
        """The mean over `windows` of what is known there. Raises Unknown where nothing is."""
        values = [value for span in self.windows() if (value := question(*span)) is not None]
        if not values:
            raise MetricUnavailable("nothing of it ran in the steps that count")
        return sum(values) / len(values)


def build_rank_data(number: int, trace: Trace) -> RankData:
    columns = ("id", "cat", "name", "kind", "device", "ts", "dur")
    work = select_device_events(trace).select(columns).with_columns(end=pl.col("ts") + pl.col("dur"))
    try:
        times = compute_activity(trace)
    except AnalysisError:
        times = None
    marks, passes = _find_steps(trace)
    return RankData(number, trace, work, times, marks, passes)


def _find_steps(trace: Trace) -> tuple[str | None, list[Span]]:
    """Training steps, else the passes of an inference engine: vLLM's annotations, SGLang's function."""
    marked = [(start, end) for _, start, end in find_steps(trace).iter_rows()]
    if marked:
        return "ProfilerStep", marked
    events = trace.events
    for name, categories, pattern in (
        ("execute_context", kinds.ANNOTATION_CATEGORIES, _ENGINE),
        ("run_batch", kinds.PYTHON_CATEGORIES, _BATCH),
    ):
        fits = arrays.is_in(events["cat"], categories) & arrays.match_text(
            events["name"],
            lambda text, pattern=pattern: text.str.contains(pattern),  # type: ignore[misc]
        )
        found = events.filter(pl.Series(fits) & pl.col("dur").is_not_null()).sort("ts", "id")
        if found.height:
            return name, found.select("ts", end=pl.col("ts") + pl.col("dur")).rows()
    return None, []
