"""The one noun: a Trace holds the tables of one rank, a Job the Traces of all ranks.

Neither is ever changed: a verb returns a new one that shares the columns it did not touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import polars as pl

from etloom.errors import DataLoss, EtloomError, UnknownName
from etloom.schema import SEVERITIES, TABLES

T = TypeVar("T")


class Trace:
    """The tables of one rank (see `etloom.schema.TABLES`) and what is known about the run.

    A table is an attribute: ``trace.events``; one that the file does not hold is empty. ``meta`` holds what is said
    once: ``rank``, ``world_size``, ``files``, ``formats``, ``clock`` ("epoch" | "relative"), ``base_ns``,
    ``schema_version``, ``device_properties``, ``distributed`` and the rest of the file's own header under ``header``.
    """

    __slots__ = ("_tables", "meta")

    def __init__(
        self, tables: Mapping[str, pl.DataFrame] | None = None, meta: Mapping[str, Any] | None = None
    ) -> None:
        checked: dict[str, pl.DataFrame] = {}
        for name, frame in (tables or {}).items():
            if name not in TABLES:
                raise UnknownName("table", name, TABLES)
            checked[name] = TABLES[name].conform(frame)
        self._tables: Mapping[str, pl.DataFrame] = MappingProxyType(checked)
        self.meta: Mapping[str, Any] = MappingProxyType(dict(meta or {}))

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self.table(name)
        except UnknownName as error:
            raise AttributeError(str(error)) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TABLES]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {frame.height:,}" for name, frame in self._tables.items() if frame.height)
        return f"<Trace rank {self.rank}: {sizes or 'empty'}>"

    @property
    def rank(self) -> int | None:
        return self.meta.get("rank")

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The tables this trace holds, by name; `table` also gives the absent ones, empty."""
        return self._tables

    def table(self, name: str) -> pl.DataFrame:
        """One table by name, empty where the trace has none. Raises UnknownName."""
        if name not in TABLES:
            raise UnknownName("table", name, TABLES)
        frame = self._tables.get(name)
        return TABLES[name].empty() if frame is None else frame

    def replace(self, meta: Mapping[str, Any] | None = None, **tables: pl.DataFrame) -> Trace:
        """A Trace with these tables and meta entries put in; the rest is shared."""
        return Trace({**self._tables, **tables}, {**self.meta, **(meta or {})})

    def count(self, name: str, count: int, example: str | None = None, severity: str = "info") -> Trace:
        """A Trace with one more row of stats; the same Trace when count is 0."""
        return self.with_stats([(name, severity, count, example)])

    def with_stats(self, rows: list[tuple[str, str, int, str | None]]) -> Trace:
        """A Trace with more rows of stats: (name, severity, count, example); rows that count 0 are left out."""
        rows = [row for row in rows if row[2]]
        if not rows:
            return self
        assert all(row[1] in SEVERITIES for row in rows)
        more = pl.DataFrame(rows, schema=TABLES["stats"].schema, orient="row")
        return self.replace(stats=pl.concat([self.table("stats"), more]))

    def query(self, sql: str) -> pl.DataFrame:
        """The answer to an SQL SELECT over the tables. Raises EtloomError for SQL that polars refuses."""
        return _query({name: self.table(name) for name in TABLES}, sql)

    def check_lossless(self) -> None:
        """Raise DataLoss when something was lost or is in error; this is what --strict asks."""
        bad = self.table("stats").filter(pl.col("severity") != "info")
        if bad.height:
            first = bad.row(0, named=True)
            raise DataLoss(
                f"{first['name']}: {first['count']} ({first['example']})"
                + (f" and {bad.height - 1} more kinds of loss" if bad.height > 1 else ""),
                where=f"rank {self.rank}",
                remedy="leave --strict out to go on with what was read",
            )


class Job(Mapping[int, Trace]):
    """The Traces of a run by rank, and what is said once of the whole run (``meta``)."""

    __slots__ = ("_traces", "meta")

    def __init__(self, traces: Mapping[int, Trace], meta: Mapping[str, Any] | None = None) -> None:
        self._traces = {rank: traces[rank] for rank in sorted(traces)}
        self.meta: Mapping[str, Any] = MappingProxyType(dict(meta or {}))

    def __getitem__(self, rank: int) -> Trace:
        return self._traces[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    def __repr__(self) -> str:
        return f"<Job: ranks {', '.join(map(str, self._traces))}>"

    @property
    def ranks(self) -> list[int]:
        return list(self._traces)

    def map(self, verb: Callable[[Trace], Trace]) -> Job:
        """A Job of verb(trace) for every rank."""
        return Job({rank: verb(trace) for rank, trace in self._traces.items()}, self.meta)

    def table(self, name: str) -> pl.DataFrame:
        """A table of all ranks under each other, with a ``rank`` column first."""
        return by_rank(self, lambda trace: trace.table(name))

    def query(self, sql: str) -> pl.DataFrame:
        """The answer to an SQL SELECT over the tables of all ranks, each with a ``rank`` column."""
        return _query({name: self.table(name) for name in TABLES if f"{name}" in sql}, sql)

    def check_lossless(self) -> None:
        for trace in self._traces.values():
            trace.check_lossless()


def by_rank(job: Job, question: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    """The answers of all ranks under each other, with a ``rank`` column first."""
    frames = [
        question(trace).select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
        for rank, trace in job.items()
    ]
    return pl.concat(frames) if frames else pl.DataFrame()


def _query(tables: Mapping[str, pl.DataFrame], sql: str) -> pl.DataFrame:
    try:
        answer = pl.SQLContext(dict(tables), eager=True).execute(sql)
    except pl.exceptions.PolarsError as error:
        raise EtloomError(
            f"the query was refused: {error}", remedy=f"tables: {', '.join(sorted(TABLES))}"
        ) from None
    if not isinstance(answer, pl.DataFrame):
        raise EtloomError("the query is no SELECT")
    return answer
