"""Input of CCL-Bench metrics on one rank: its kernels, its steps, and when each type of work ran."""

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
from etloom.core.steps import match_steps
from etloom.core.trace import Trace
from etloom.timeline.activity import Activity, compute_activity, find_steps, select_device_events

Span = tuple[int, int]

NO_SHAPES = "no shapes were recorded (record_shapes=True)"
_ENGINE = r"^execute_context_"
_BATCH = r"(?:^|: )run_batch$"


class MetricUnavailable(Exception):
    """The reason why a metric has no value, as one sentence."""


@dataclass(frozen=True)
class RankData:
    """Input of the CCL-Bench metrics from one rank: its kernels, steps and activity.

    Attributes:
        passes: All its steps in order.
        inner: Without the first and the last, if there are more than two.
    """

    rank: int
    trace: Trace
    work: pl.DataFrame  # kernels, memcpys and memsets, with kind and end
    times: Activity | None
    step_annotation: str | None  # annotation of its steps
    passes: list[Span]

    @property
    def inner(self) -> list[Span]:
        return self.passes[1:-1] if len(self.passes) > 2 else self.passes

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Kernels without memcpys and memsets; raises MetricUnavailable if there are none."""
        kernels = self.work.filter(
            ~pl.col("cat").is_in(list(kinds.MEMCPY_CATEGORIES | kinds.MEMSET_CATEGORIES))
        )
        if not kernels.height:
            raise MetricUnavailable("no kernels were recorded")
        return kernels

    @property
    def has_shapes(self) -> bool:
        return bool(self.trace.arguments.height or self.trace.tensors.height)

    @cached_property
    def bounds(self) -> dict[str, int] | str:
        """Total times (ns) of the compute-bound and the memory-bound operators, or the reason why they are unknown."""
        if not self.has_shapes:
            return NO_SHAPES
        try:
            table = roofline.analyze(self.trace, top=1 << 30).drop_nulls("bound")
        except EtloomError as error:
            return error.what
        return dict(table.group_by("bound").agg(pl.col("time_ns").sum()).rows())

    def activity(self) -> Activity:
        if self.times is None:
            raise MetricUnavailable("neither GPU activity nor operators were recorded")
        return self.times

    def windows(self) -> list[Span]:
        """Return the time intervals to measure: the inner steps or, without step annotations, the active time."""
        busy_span = self.activity().busy.span
        return self.inner or ([busy_span] if busy_span else [])

    def sum_step_work(self, work: pl.DataFrame) -> np.ndarray:
        """Return the total duration (ns) of the activities ``work`` that run in each interval of `windows`; activities
        that extend beyond the interval count in full."""
        bounds = np.array(self.windows(), np.int64).reshape(-1, 2)

        def before(times: str, at: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
            ordered = work.select(times, "dur").sort(times)
            sums = np.append(0, np.cumsum(ordered["dur"].to_numpy()))
            sums_at: np.ndarray = sums[np.searchsorted(ordered[times].to_numpy(), at, side=side)]
            return sums_at

        ran: np.ndarray = before("ts", bounds[:, 1], "left") - before("end", bounds[:, 0], "right")
        return ran

    def average_steps(self, question: Callable[[int, int], float | None]) -> float:
        """Return the mean of the values that ``question`` returns for the intervals of `windows`; raise
        MetricUnavailable if there are none."""
        values = [value for span in self.windows() if (value := question(*span)) is not None]
        if not values:
            raise MetricUnavailable("no such work ran in the selected steps")
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
    """Find the training steps; without any, the steps of an inference engine: vLLM's annotations or SGLang's step
    function."""
    annotated = [(start, end) for _, start, end in find_steps(trace).iter_rows()]
    if annotated and match_steps(trace.events["name"]).any():
        return "ProfilerStep", annotated
    events = trace.events
    for name, categories, pattern in (
        ("execute_context", kinds.ANNOTATION_CATEGORIES, _ENGINE),
        ("run_batch", kinds.PYTHON_CATEGORIES, _BATCH),
    ):
        is_pass = kinds.mask_events(events, categories) & arrays.match_text(
            events["name"],
            lambda text, pattern=pattern: text.str.contains(pattern),  # type: ignore[misc]
        )
        passes = events.filter(pl.Series(is_pass) & pl.col("dur").is_not_null()).sort("ts", "id")
        if passes.height:
            return name, passes.select("ts", end=pl.col("ts") + pl.col("dur")).rows()
    return None, []
