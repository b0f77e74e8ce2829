"""Models of a job in which each operation takes either its recorded time or an ideal time computed from its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import polars as pl

from etloom.analyses.helpers.pipeline_schedule import FloatArray, Mask, build_patterns
from etloom.core.trace import Job


class WhatIfModel(Protocol):
    """Operations (``size`` of them) with recorded and ideal durations, and the step times that follow from these.

    ``steps``: the step numbers. ``span_ns``: the recorded time of each step (ns), in the same order.
    """

    size: int
    steps: list[int]
    span_ns: FloatArray

    def list_items(self, kind: str) -> Mapping[str, Mask]:
        """Return a mask of each item's operations, by item name; ``kind`` of items: type, worker, stage or data
        rank."""

    def simulate(self, keep: Sequence[Mask]) -> FloatArray:
        """Return the simulated time of each step (ns) for each mask of operations, as an array (masks x steps).

        Operations in the mask take their recorded time, the others the time of their peers.
        """


class OperationModel:
    """The what-if model of a pipeline operation trace (`etloom.analyses.helpers.pipeline_schedule`)."""

    def __init__(self, job: Job) -> None:
        self._patterns = build_patterns(job)
        self._operations = pl.concat(pattern.operations for pattern in self._patterns)
        self._ideal_ns = self._compute_ideal()
        self.size = self._operations.height
        steps = np.concatenate([pattern.steps for pattern in self._patterns])
        self._order = np.argsort(steps)
        self.steps = [int(step) for step in steps[self._order]]
        self.span_ns = np.concatenate([pattern.span_ns for pattern in self._patterns])[self._order]

    def _compute_ideal(self) -> FloatArray:
        """Return the ideal duration of each operation (ns): the mean of all operations of its type, or the median of
        transfers."""
        ideal = np.zeros(self._operations.height)
        recorded = [
            (pattern.operations["type"].to_numpy(), pattern.recorded_ns) for pattern in self._patterns
        ]
        for type, is_transfer in self._operations.select("type", "transfer").unique().iter_rows():
            times = np.concatenate([times[types == type].ravel() for types, times in recorded])
            rows = (self._operations["type"] == type).to_numpy()
            ideal[rows] = np.median(times) if is_transfer else times.mean()
        return ideal

    def list_items(self, kind: str) -> dict[str, Mask]:
        """Return a mask of each item's operations, by item name; see `WhatIfModel.list_items`."""
        column = {"type": "type", "worker": "rank", "stage": "stage", "data rank": "data_rank"}[kind]
        values = self._operations[column]
        if kind == "type":  # both ends of a message are one transfer
            values = values.str.replace("-(send|recv)$", "-pp-comm")
        return {str(value): (values == value).to_numpy() for value in values.unique().sort().to_list()}

    def simulate(self, keep: Sequence[Mask]) -> FloatArray:
        """Return the simulated time of each step, ns, for each mask of operations that take their recorded time."""
        masks = np.array(keep, bool).reshape(len(keep), self.size)
        times, low = [], 0
        for pattern in self._patterns:
            high = low + pattern.operations.height
            times.append(pattern.simulate(masks[:, low:high], self._ideal_ns[low:high]))
            low = high
        return np.asarray(np.concatenate(times, axis=1)[:, self._order])
