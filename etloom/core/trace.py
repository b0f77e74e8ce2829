"""The one noun: a Trace holds the tables of one rank, a Job the Traces of all ranks.

Neither is ever changed: a verb returns a new one that shares the columns it did not touch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import polars as pl

from etloom.core.errors import DataLoss, UnknownName
from etloom.core.schema import SEVERITIES, TABLES, Stat
from etloom.core.sql import run_query
from etloom.core.text import format_ranks

_Result = TypeVar("_Result")


class Trace:
    """The tables of one rank (see `etloom.core.schema.TABLES`) and what is known about the run.

    A table is an attribute: ``trace.events``; one that the file does not hold is empty. ``meta`` holds what
    is said once: ``rank``, ``world_size``, ``files``, ``formats``, ``clock`` ("epoch" | "relative"),
    ``base_ns``, ``schema_version``, ``device_properties``, ``distributed`` and the rest of the file's own
    header under ``header``.
    """

    __slots__ = ("_answers", "_meta", "_tables")
    engine: ClassVar[Literal["in-memory", "streaming"]] = "in-memory"
    """By which of polars' engines a query of what `scan` gives is answered."""

    def __init__(
        self, tables: Mapping[str, pl.DataFrame] | None = None, meta: Mapping[str, Any] | None = None
    ) -> None:
        checked: dict[str, pl.DataFrame] = {}
        for name, frame in (tables or {}).items():
            if name not in TABLES:
                raise UnknownName("table", name, TABLES)
            # A clone shares the data (it costs a microsecond), so that nothing done to the frame in place
            # afterwards, here or in `table`, reaches the one that is held.
            checked[name] = TABLES[name].conform(frame).clone()
        self._tables = checked
        self._answers: dict[tuple[Any, ...], Any] = {}
        self._meta = MappingProxyType(dict(meta or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return Trace, (self._tables, dict(self._meta))

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
    def meta(self) -> Mapping[str, Any]:
        return self._meta

    @property
    def rank(self) -> int | None:
        return self._meta.get("rank")

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The tables this trace holds, by name; `table` also gives the absent ones, empty."""
        return MappingProxyType({name: frame.clone() for name, frame in self._tables.items()})

    def table(self, name: str) -> pl.DataFrame:
        """One table by name, empty where the trace has none. Raises UnknownName."""
        if name not in TABLES:
            raise UnknownName("table", name, TABLES)
        frame = self._tables.get(name)
        return TABLES[name].empty() if frame is None else frame.clone()

    def scan(self, name: str) -> pl.LazyFrame:
        """One table by name, to be read as far as it is asked for. Raises UnknownName."""
        return self.table(name).lazy()

    def rows(self, name: str) -> int:
        """How many rows a table has, which is told without reading one that lies on disk. Raises UnknownName."""
        return int(self.scan(name).select(pl.len()).collect(engine=self.engine).item())

    def compute_once(self, question: Callable[..., _Result], *about: Hashable) -> _Result:
        """question(trace, *about), worked out when it is first asked for and kept as long as the trace is.

        For what many questions need and is small beside the tables. Nobody changes an answer.
        """
        asked = question, *about
        try:
            answer: _Result = self._answers[asked]
        except KeyError:
            answer = self._answers[asked] = question(self, *about)
        return answer

    def replace(self, meta: Mapping[str, Any] | None = None, **tables: pl.DataFrame) -> Trace:
        """A Trace with these tables and meta entries put in; the rest is shared."""
        return Trace({**self._tables, **tables}, {**self.meta, **(meta or {})})

    def count(self, name: str, count: int, example: str | None = None, severity: str = "info") -> Trace:
        """A Trace with one more row of stats; the same Trace when count is 0."""
        return self.with_stats([Stat(name, severity, count, example)])

    def with_stats(self, rows: Sequence[Stat]) -> Trace:
        """A Trace with more rows of stats: (name, severity, count, example); rows of count 0 are left out."""
        more = _build_stats(rows)
        return self.replace(stats=pl.concat([self.table("stats"), more])) if more.height else self

    def query(self, sql: str) -> pl.DataFrame:
        """The answer to an SQL SELECT over the tables; text columns are strings.

        Raises UnknownName for a table or column that is not there, EtloomError for SQL that polars refuses or that
        would read a file (see `etloom.core.sql`).
        """
        return run_query(self.scan, sql, self.engine)

    def check_lossless(self) -> None:
        """Raise DataLoss when something was lost or is in error; this is what --strict asks."""
        _check_lossless(self.table("stats"), f"rank {self.rank}")


class Job(Mapping[int, Trace]):
    """The Traces of a run by rank, and what is said once of the whole run (``meta``)."""

    __slots__ = ("_answers", "_meta", "_own_stats", "_traces")

    def __init__(
        self,
        traces: Mapping[int, Trace],
        meta: Mapping[str, Any] | None = None,
        stats: pl.DataFrame | Sequence[Stat] = (),
    ) -> None:
        """stats: rows that concern the run as a whole, such as a rank that is missing."""
        self._traces = {rank: traces[rank] for rank in sorted(traces)}
        self._meta = MappingProxyType(dict(meta or {}))
        self._own_stats = _build_stats(stats)
        self._answers: dict[Callable[[Job], Any], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (self._traces, dict(self._meta), self._own_stats)

    def __getitem__(self, rank: int) -> Trace:
        try:
            return self._traces[rank]
        except KeyError:
            raise KeyError(f"there is no rank {rank!r}; the job holds {format_ranks(self)}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    def __repr__(self) -> str:
        return f"<Job: {format_ranks(self)}>"

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._meta

    @property
    def ranks(self) -> list[int]:
        return list(self._traces)

    @property
    def stats(self) -> pl.DataFrame:
        """The stats of the run and of all ranks, with a ``rank`` column first: null for those of the run."""
        return self.table("stats")

    @property
    def run_stats(self) -> pl.DataFrame:
        """The stats that concern the run as a whole."""
        return self._own_stats.clone()

    def replace(self, meta: Mapping[str, Any]) -> Job:
        """A Job of the same traces with these meta entries put in."""
        return Job(self._traces, {**self._meta, **meta}, self._own_stats)

    def with_stats(self, rows: Sequence[Stat]) -> Job:
        """A Job with more stats of the run as a whole; rows that count 0 are left out."""
        return Job(self._traces, self._meta, pl.concat([self._own_stats, _build_stats(rows)]))

    def map(self, verb: Callable[[Trace], Trace]) -> Job:
        """A Job of verb(trace) for every rank; the same Job where that is every trace itself."""
        traces = {rank: verb(trace) for rank, trace in self._traces.items()}
        if all(traces[rank] is trace for rank, trace in self._traces.items()):
            return self
        return Job(traces, self._meta, self._own_stats)

    def compute_once(self, question: Callable[[Job], _Result]) -> _Result:
        """question(job), worked out when it is first asked for and kept as long as the job is: see `Trace.once`."""
        if question not in self._answers:
            self._answers[question] = question(self)
        answer: _Result = self._answers[question]
        return answer

    def table(self, name: str) -> pl.DataFrame:
        """A table of all ranks under each other, with a ``rank`` column first. Raises UnknownName."""
        if name not in TABLES:
            raise UnknownName("table", name, TABLES)
        return self._scan(name).collect()

    def query(self, sql: str) -> pl.DataFrame:
        """The answer to an SQL SELECT over the tables of all ranks, each with a ``rank`` column first.

        Raises as `Trace.query`.
        """
        lazy = any(trace.engine == "streaming" for trace in self._traces.values())
        return run_query(self._scan, sql, "streaming" if lazy else "in-memory")

    def check_lossless(self) -> None:
        """Raise DataLoss when something was lost or is in error, in the run as a whole or in any rank."""
        _check_lossless(self._own_stats, "the run")
        for trace in self._traces.values():
            trace.check_lossless()

    def _scan(self, name: str) -> pl.LazyFrame:
        whole = self._own_stats if name == "stats" else TABLES[name].empty()
        tables = [(None, whole.lazy()), *((rank, trace.scan(name)) for rank, trace in self._traces.items())]
        return pl.concat(
            frame.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all()) for rank, frame in tables
        )


def _build_stats(rows: pl.DataFrame | Sequence[Stat]) -> pl.DataFrame:
    """A stats table; rows that count 0 are left out."""
    if isinstance(rows, pl.DataFrame):
        return TABLES["stats"].conform(rows).clone()
    assert all(severity in SEVERITIES for _, severity, _, _ in rows)
    return pl.DataFrame([row for row in rows if row[2]], schema=TABLES["stats"].schema, orient="row")


def _check_lossless(stats: pl.DataFrame, where: str) -> None:
    bad = stats.filter(pl.col("severity") != "info")
    if bad.height:
        first = bad.row(0, named=True)
        more = f" and {bad.height - 1} more kind{'s' * (bad.height > 2)} of loss" if bad.height > 1 else ""
        raise DataLoss(
            f"{first['name']}: {first['count']} ({first['example']}){more}",
            where=where,
            remedy="leave --strict out to go on with what was read",
        )


def concat_ranks(job: Job, question: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    """The answers of all ranks under each other, with a ``rank`` column first."""
    frames = [
        question(trace).select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
        for rank, trace in job.items()
    ]
    return pl.concat(frames) if frames else pl.DataFrame()
