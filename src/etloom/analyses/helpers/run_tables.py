"""Tables about a run that a store saves next to its answers, so that later queries need not open any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.analyses.answers import find_stored_table
from etloom.collectives import match_collectives
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job
from etloom.timeline.activity import find_unknown_time, find_window


@dataclass(frozen=True)
class RunTable:
    """A table about a whole run that a store saves next to its answers.

    Attributes:
        name: in a store.
        schema: its columns.
        compute: returns the table of a linked run.
        has_nulls: False if no value is ever null.
        rows: their number, if it is the same of every run.

    A stored table that does not fit is damaged, and is computed again.
    """

    name: str
    schema: Mapping[str, Any]
    compute: Callable[[Job], pl.DataFrame]
    has_nulls: bool = True
    rows: int | None = None

    def read(self, job: Job) -> pl.DataFrame:
        """Return the table of a run: the stored one if the run is from a store, else computed once.

        Raises:
            AnalysisError: the run does not allow it.
        """
        stored = find_stored_table(job, self.name, self.schema)
        return stored if stored is not None and self._fits(stored) else job.compute_once(self.compute)

    def _fits(self, stored: pl.DataFrame) -> bool:
        has_lost_values = not self.has_nulls and any(stored.null_count().row(0))
        return not has_lost_values and self.rows in (None, stored.height)


def _list_windows(job: Job) -> pl.DataFrame:
    rows = []
    for rank, trace in job.items():
        try:
            window = find_window(trace)
        except AnalysisError:
            continue
        if window is not None:
            rows.append((rank, *window, find_unknown_time(trace)))
    return pl.DataFrame(rows, schema=WINDOWS.schema, orient="row")


def _order_arrivals(job: Job) -> pl.DataFrame:
    if len(job) < 2:
        return pl.DataFrame(schema=ARRIVAL_ORDER.schema)
    parts = match_collectives(job).comparable.filter(pl.col("instance").is_not_null())
    ordered = parts.with_columns(
        order=pl.col("start").rank("ordinal").over("instance") - 1, size=pl.len().over("instance")
    ).filter(pl.col("size") > 1)
    return ordered.select(pl.col(name).cast(dtype) for name, dtype in ARRIVAL_ORDER.schema.items())


WINDOWS = RunTable(
    "windows", dict.fromkeys(("rank", "start", "end", "unknown_ns"), pl.Int64), _list_windows, has_nulls=False
)
"""The time in which each rank should be busy (`find_window`), on its own clock, and how long it is unknown at its start
whether it was (`find_unknown_time`); no row for a rank without activity."""
ARRIVAL_ORDER = RunTable(
    "arrival-order",
    {
        **dict.fromkeys(("rank", "event", "instance"), pl.Int64),
        "collective": pl.String,
        **dict.fromkeys(("start", "own_start", "own_end", "awaited", "wait", "order", "size"), pl.Int64),
    },
    _order_arrivals,
)
"""Participations in collectives of several ranks, with ``order`` of arrival, from 0, and ``size``, their ranks;
``awaited``: the arrival that the rank waits for, null if it waits for none."""
