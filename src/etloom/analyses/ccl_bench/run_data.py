"""Input of CCL-Bench metrics on a run, and functions that combine metric values of ranks into a value of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import polars as pl

from etloom.analyses import collectives as together
from etloom.analyses.ccl_bench.rank_data import MetricUnavailable, RankData
from etloom.analyses.helpers.matched_communication import match_communications
from etloom.core.errors import EtloomError
from etloom.core.trace import Job

Answer = tuple[float, int]
"""A value, and the number of ranks it covers."""
Metric = tuple[str, str, str, "Callable[[RunData], Answer]"]
"""Name, unit, basis, and the function that computes it or raises MetricUnavailable."""


class RunData:
    """Input of the CCL-Bench metrics from a whole run, shared by several metrics."""

    def __init__(self, job: Job, ranks: list[RankData]) -> None:
        self.job, self.ranks = job, ranks

    @property
    def card(self) -> dict[str, Any]:
        """The workload card; raises MetricUnavailable if there is none."""
        card = self.job.meta.get("card")
        if not isinstance(card, dict):
            raise MetricUnavailable("no workload card in the folder of the traces")
        return card

    @cached_property
    def parts(self) -> pl.DataFrame | str:
        """The communications of all ranks on comparable clocks, or the reason why there are none."""
        try:
            return match_communications(self.job).comparable
        except EtloomError as error:
            return error.what

    def communications(self) -> pl.DataFrame:
        if isinstance(self.parts, str):
            raise MetricUnavailable(self.parts)
        return self.parts

    @cached_property
    def bandwidths(self) -> pl.DataFrame:
        """Sizes, bus bandwidths (``bus``, GB/s) and times (ns) of the run's communications; one row per
        communication."""
        instances = together.summarize_instances(self.communications())
        time = pl.coalesce("transfer_ns", "duration_ns")
        # A rank recorded alone has no transfer time: use its whole duration.
        with_bandwidth = instances.with_columns(
            bus=pl.coalesce(
                "bus_gb_per_s",
                pl.when(time > 0).then(pl.coalesce("moved", pl.col("bytes") * pl.col("factor")) / time),
            ),
            time=time,
        )
        return with_bandwidth.select("collective", "group_size", "bytes", "bus", "time")


def mean_over_ranks(question: Callable[[RankData], float]) -> Callable[[RunData], Answer]:
    """Return a metric of the run: the mean of a metric of ranks over the ranks for which it is known."""

    def answer(run: RunData) -> Answer:
        values = collect_values(run.ranks, question)
        return sum(values) / len(values), len(values)

    return answer


def from_run(question: Callable[[RunData], float]) -> Callable[[RunData], Answer]:
    return lambda run: (question(run), len(run.ranks))


def collect_values(ranks: Sequence[RankData], question: Callable[[RankData], float]) -> list[float]:
    """Evaluate a metric on each rank, and return the known values; raise MetricUnavailable if no rank has any."""
    values, reason = [], MetricUnavailable("the run contains no rank")
    for rank in ranks:
        try:
            values.append(question(rank))
        except MetricUnavailable as unknown:
            reason = unknown
    if not values:
        raise reason
    return values


def collect_comparable(ranks: Sequence[RankData], question: Callable[[RankData], float]) -> list[float]:
    """Evaluate a metric on each rank, and return the values; raise MetricUnavailable if fewer than two are known."""
    values = collect_values(ranks, question)
    if len(values) < 2:
        raise MetricUnavailable("requires at least two ranks")
    return values


def compute_percent(part: float, total: float, reason: str) -> float:
    """Return 100 x part / total; raise MetricUnavailable with the reason ``reason`` if the total is 0."""
    if not total:
        raise MetricUnavailable(reason)
    return 100 * part / total
