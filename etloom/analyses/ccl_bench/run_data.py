"""A run as CCL-Bench's metrics ask of it, and how a metric of ranks becomes one of the run."""

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
"""A value, and how many ranks it is of."""
Metric = tuple[str, str, str, "Callable[[RunData], Answer]"]
"""Name, unit, basis and what answers it, or raises Unknown."""


class RunData:
    """A job, and what several metrics ask of it."""

    def __init__(self, job: Job, ranks: list[RankData]) -> None:
        self.job, self.ranks = job, ranks

    @property
    def card(self) -> dict[str, Any]:
        """The workload card. Raises Unknown where there is none."""
        card = self.job.meta.get("card")
        if not isinstance(card, dict):
            raise MetricUnavailable("there is no workload card beside the traces")
        return card

    @cached_property
    def parts(self) -> pl.DataFrame | str:
        """What each rank did of each communication, or why nothing is known of it."""
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
        """collective, group_size, bytes, bus bandwidth (GB/s) and time (ns) of each communication."""
        met = together.summarize_instances(self.communications())
        time = pl.coalesce("transfer_ns", "duration_ns")
        # A rank that was recorded alone has no transfer: its whole time stands for it.
        alone = met.with_columns(
            bus=pl.coalesce(
                "bus_gb_per_s",
                pl.when(time > 0).then(pl.coalesce("moved", pl.col("bytes") * pl.col("factor")) / time),
            ),
            time=time,
        )
        return alone.select("collective", "group_size", "bytes", "bus", "time")


def mean_over_ranks(question: Callable[[RankData], float]) -> Callable[[RunData], Answer]:
    """The mean over the ranks of which the question can be answered."""

    def answer(run: RunData) -> Answer:
        values = collect_known(run.ranks, question)
        return sum(values) / len(values), len(values)

    return answer


def from_run(question: Callable[[RunData], float]) -> Callable[[RunData], Answer]:
    return lambda run: (question(run), len(run.ranks))


def collect_known(ranks: Sequence[RankData], question: Callable[[RankData], float]) -> list[float]:
    """The answers of ranks. Raises the first Unknown where no rank has one."""
    values, why = [], MetricUnavailable("the run holds no rank")
    for rank in ranks:
        try:
            values.append(question(rank))
        except MetricUnavailable as unknown:
            why = unknown
    if not values:
        raise why
    return values


def collect_comparable(ranks: Sequence[RankData], question: Callable[[RankData], float]) -> list[float]:
    """The answers of ranks that can be compared. Raises Unknown where under two have one."""
    values = collect_known(ranks, question)
    if len(values) < 2:
        raise MetricUnavailable("it compares ranks, and one alone was recorded")
    return values


def compute_percent(part: float, whole: float, why: str) -> float:
    """Percent. Raises Unknown with this reason where the whole is 0."""
    if not whole:
        raise MetricUnavailable(why)
    return 100 * part / whole
