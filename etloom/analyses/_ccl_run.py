"""A run as CCL-Bench's metrics ask of it, and how a metric of ranks becomes one of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import polars as pl

from etloom.analyses import collectives as together
from etloom.analyses._ccl_ranks import Rank, Unknown
from etloom.analyses._together import communications
from etloom.errors import EtloomError
from etloom.trace import Job

Answer = tuple[float, int]
"""A value, and how many ranks it is of."""
Metric = tuple[str, str, str, "Callable[[Run], Answer]"]
"""Name, unit, basis and what answers it, or raises Unknown."""


class Run:
    """A job, and what several metrics ask of it."""

    def __init__(self, job: Job, ranks: list[Rank]) -> None:
        self.job, self.ranks = job, ranks

    @property
    def card(self) -> dict[str, Any]:
        """The workload card. Raises Unknown where there is none."""
        card = self.job.meta.get("card")
        if not isinstance(card, dict):
            raise Unknown("there is no workload card beside the traces")
        return card

    @cached_property
    def parts(self) -> pl.DataFrame | str:
        """What each rank did of each communication, or why nothing is known of it."""
        try:
            return communications(self.job).comparable
        except EtloomError as error:
            return error.what

    def communications(self) -> pl.DataFrame:
        if isinstance(self.parts, str):
            raise Unknown(self.parts)
        return self.parts

    @cached_property
    def bandwidths(self) -> pl.DataFrame:
        """collective, group_size, bytes, bus bandwidth (GB/s) and time (ns) of each communication."""
        met = together.met(self.communications())
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


def of_ranks(question: Callable[[Rank], float]) -> Callable[[Run], Answer]:
    """The mean over the ranks of which the question can be answered."""

    def answer(run: Run) -> Answer:
        values = known(run.ranks, question)
        return sum(values) / len(values), len(values)

    return answer


def of_run(question: Callable[[Run], float]) -> Callable[[Run], Answer]:
    return lambda run: (question(run), len(run.ranks))


def known(ranks: Sequence[Rank], question: Callable[[Rank], float]) -> list[float]:
    """The answers of ranks. Raises the first Unknown where no rank has one."""
    values, why = [], Unknown("the run holds no rank")
    for rank in ranks:
        try:
            values.append(question(rank))
        except Unknown as unknown:
            why = unknown
    if not values:
        raise why
    return values


def of_two(ranks: Sequence[Rank], question: Callable[[Rank], float]) -> list[float]:
    """The answers of ranks that can be compared. Raises Unknown where under two have one."""
    values = known(ranks, question)
    if len(values) < 2:
        raise Unknown("it compares ranks, and one alone was recorded")
    return values


def share(part: float, whole: float, why: str) -> float:
    """Percent. Raises Unknown with this reason where the whole is 0."""
    if not whole:
        raise Unknown(why)
    return 100 * part / whole
