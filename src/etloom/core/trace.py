"""Trace holds the tables of one rank, Job the Traces of all ranks of a run.

Neither is ever changed: a verb returns a new one that shares the columns it did not touch.
"""

from __future__ import annotations

import threading
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy  # noqa: F401 - before polars, which otherwise converts arrays half as fast
import polars as pl

from etloom.core.errors import AnalysisError, DataLoss, UnknownName
from etloom.core.meta import JobMeta, TraceMeta
from etloom.core.schema import SEVERITIES, TABLES, Stat
from etloom.core.table_attributes import TableAttributes
from etloom.core.text import count_noun, format_ranks

_Result = TypeVar("_Result")


class Results(dict[tuple[Any, ...], Any]):
    """Results of `Trace.compute_once` by function and arguments.

    Args:
        stored: results that need not be computed. They are looked up at each call: of many ranks they would fill the
            memory.
        track: called with these results, and with those of each Trace that has the same loaders; the owner of the
            loaders can so drop results together with tables.
    """

    __slots__ = ("__weakref__", "stored", "track")

    def __init__(
        self,
        stored: Mapping[tuple[Any, ...], Any] = MappingProxyType({}),
        track: Callable[[Results], object] | None = None,
    ) -> None:
        super().__init__()
        self.stored, self.track = stored, track
        if track is not None:
            track(self)

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        return self.stored[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.stored


class TableLoader(Protocol):
    """Loads one table of a Trace from where it is stored, with the columns of the schema."""

    def read(self) -> pl.DataFrame:
        """Return the whole table."""

    def scan(self) -> pl.LazyFrame:
        """Return the table as a query that reads only the rows and columns it needs."""

    def rows(self) -> int:
        """Return the number of rows without reading the table."""

    @property
    def is_loaded(self) -> bool:
        """True while the table is in memory."""


SMALL_ROWS = 50_000
"""Tables on disk with at most this number of rows are read as a whole: to query their files takes longer."""
COUNTED_TABLES = ("events", "nodes", "launches")
RANK_FACTS = {
    "rank": pl.Int64,
    "host": pl.String,
    "world_size": pl.Int64,
    **dict.fromkeys(COUNTED_TABLES, pl.Int64),  # rows of each table
}
"""Columns of `Job.rank_facts`."""


def are_in_memory(loaders: Iterable[TableLoader]) -> bool:
    """Return whether all tables are in memory, or together so small that a query may load them."""
    return sum(loader.rows() for loader in loaders if not loader.is_loaded) <= SMALL_ROWS


class StoredRun(Protocol):
    """A run in a store: its tables over all ranks, and answers that were computed when it was stored."""

    @property
    def rank_facts(self) -> pl.DataFrame:
        """One row per rank: host, world size and numbers of events, nodes and launches (see `Job.rank_facts`)."""
        ...

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table of all ranks, ``rank`` first, as a lazy query; stats without rows about the whole run."""

    def answer(self, name: str, options: Mapping[str, Any]) -> StoredAnswer | None:
        """Return the stored result of an analysis with the options ``options``; None if it was not stored."""

    def facts(self) -> dict[str, Any] | None:
        """Return the stored facts of the run (``etloom info``); None if they were not stored."""


class StoredRefusal(NamedTuple):
    """A stored reason why an analysis has no result for a rank (``rank`` None: for the job as a whole)."""

    rank: int | None
    problem: str
    remedy: str | None = None
    location: str | None = None

    def to_error(self) -> AnalysisError:
        """Return the stored reason as an error to raise or show."""
        return AnalysisError(self.problem, where=self.location, remedy=self.remedy)


class StoredAnswer(NamedTuple):
    """The stored result of an analysis: its table, and the reasons why ranks are missing from it.

    Attributes:
        table: the answer; for an analysis of ranks with ``rank`` first; empty without columns if none could answer.
        refusals: of each rank that could not answer; of rank None if the job could not.
    """

    table: pl.DataFrame
    refusals: tuple[StoredRefusal, ...] = ()


class Trace(TableAttributes):
    """The tables of one rank (see `etloom.core.schema.TABLES`) and facts about its recording.

    Each table is an attribute (``trace.events``); a table that the files lack is empty. ``meta`` holds the facts of
    the whole recording, see `etloom.core.meta.TraceMeta`.

    Args:
        tables: Tables in memory, by name; missing columns become null.
        meta: Facts about the recording.
        loaders: Loaders of the tables that are stored elsewhere, by name. Such a table is loaded at each access, so
            that it takes no memory in between; ``tables`` take precedence.
        results: Results of `compute_once` of the same tables.

    Raises:
        UnknownName: A table is not declared.
    """

    __slots__ = ("_loaders", "_meta", "_results", "_tables")

    def __init__(
        self,
        tables: Mapping[str, pl.DataFrame] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        loaders: Mapping[str, TableLoader] | None = None,
        results: Results | None = None,
    ) -> None:
        checked: dict[str, pl.DataFrame] = {}
        for name, frame in (tables or {}).items():
            _check_name(name)
            # A clone shares the data (it costs a microsecond), so that nothing done to the frame in place
            # afterwards, here or in `table`, reaches the one that is held.
            checked[name] = TABLES[name].conform(frame).clone()
        for name in loaders or ():
            _check_name(name)
        self._tables = checked
        self._loaders = {name: loader for name, loader in (loaders or {}).items() if name not in checked}
        self._results = Results() if results is None else results
        self._meta = MappingProxyType(dict(meta or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process may not see the files of the loaders, so a pickle holds all tables.
        return Trace, (dict(self.tables), dict(self._meta))

    if not TYPE_CHECKING:  # a type checker is to report an unknown table

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(str(UnknownName("table", name, TABLES)))

    def __repr__(self) -> str:
        if self._loaders:
            return f"<Trace rank {self.rank} on disk: {', '.join(self._loaders)}>"
        sizes = ", ".join(f"{name} {frame.height:,}" for name, frame in self._tables.items() if frame.height)
        return f"<Trace rank {self.rank}: {sizes or 'empty'}>"

    def _repr_html_(self) -> str:
        from etloom.core.notebook import render_trace

        return render_trace(self)

    @property
    def meta(self) -> TraceMeta:
        """Facts about the recording that no table holds (read-only)."""
        return cast(TraceMeta, self._meta)

    @property
    def rank(self) -> int | None:
        """The rank of the process, if it is known."""
        return self._meta.get("rank")

    @property
    def engine(self) -> Literal["in-memory", "streaming"]:
        """The polars engine for queries of `scan`: "streaming" if a large table is on disk, else "in-memory"."""
        return "in-memory" if are_in_memory(self._loaders.values()) else "streaming"

    @property
    def loaders(self) -> Mapping[str, TableLoader]:
        """The loaders of the tables that are not in memory, by name."""
        return MappingProxyType(self._loaders)

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The tables of this trace by name, all loaded; `table` also returns absent ones, which are empty."""
        return MappingProxyType({name: self.table(name) for name in (*self._loaders, *self._tables)})

    @property
    def table_names(self) -> tuple[str, ...]:
        """The names of the tables of this trace; none is loaded."""
        return (*self._loaders, *self._tables)

    def table(self, name: str) -> pl.DataFrame:
        """Return one table, empty if the trace has none.

        Raises:
            UnknownName: No table of this name is declared.
        """
        if (loader := self._loaders.get(name)) is not None:
            return loader.read()
        if (frame := self._tables.get(name)) is not None:
            return frame.clone()
        _check_name(name)
        return TABLES[name].empty()

    def scan(self, name: str) -> pl.LazyFrame:
        """Return one table as a query; if the table is not in memory, only the required parts are read.

        Raises:
            UnknownName: No table of this name is declared.
        """
        loader = self._loaders.get(name)
        return self.table(name).lazy() if loader is None else loader.scan()

    @property
    def is_snapshot(self) -> bool:
        """True if it is a memory snapshot without a profile; its only events may be annotations."""
        return list(self.meta.get("formats", ())) == ["memory_snapshot"]

    def rows(self, name: str) -> int:
        """Return the number of rows of a table, without loading it.

        Raises:
            UnknownName: No table of this name is declared.
        """
        loader = self._loaders.get(name)
        return self.table(name).height if loader is None else loader.rows()

    def compute_once(self, function: Callable[..., _Result], *arguments: Hashable) -> _Result:
        """Return ``function(trace, *arguments)``, computed at the first call and cached with the trace.

        Meant for results that several analyses need and that are small compared with the tables. Callers must not
        modify a result.
        """
        key = function, *arguments
        try:
            result: _Result = self._results[key]
        except KeyError:
            result = self._results[key] = function(self, *arguments)
        return result

    def has_result(self, function: Callable[..., Any], *arguments: Hashable) -> bool:
        """Return whether `compute_once` returns this result without computing it."""
        return (function, *arguments) in self._results

    @property
    def results(self) -> Results:
        """The results of `compute_once`; a Trace with the same tables may share them."""
        return self._results

    def with_stored_results(self, stored: Mapping[tuple[Any, ...], Any]) -> Trace:
        """Return a copy of the trace with results that `compute_once` returns instead of computing them.

        ``stored``: (function, arguments...) -> result, which may be loaded when it is looked up, at each call.
        """
        copy = self.replace()
        copy._results.stored = stored
        return copy

    def replace(self, meta: Mapping[str, Any] | None = None, **tables: pl.DataFrame) -> Trace:
        """Return a Trace with these tables and entries of meta replaced; the rest is shared."""
        replaced = Trace(
            tables,
            {**self._meta, **(meta or {})},
            loaders=self._loaders,
            results=Results(track=self._results.track),
        )
        replaced._tables = {**self._tables, **replaced._tables}  # those of this Trace are checked
        return replaced

    def count(self, name: str, count: int, example: str | None = None, severity: str = "info") -> Trace:
        """Return a Trace with one more row of stats; the same Trace if count is 0."""
        return self.with_stats([Stat(name, severity, count, example)])

    def with_stats(self, rows: Sequence[Stat]) -> Trace:
        """Return a Trace with more rows of stats; rows whose count is 0 are left out."""
        more = _build_stats(rows)
        return self.replace(stats=pl.concat([self.table("stats"), more])) if more.height else self

    def query(self, sql: str) -> pl.DataFrame:
        """Run an SQL SELECT over the tables; text columns of the result are strings.

        Raises:
            UnknownName: A table or column does not exist.
            EtloomError: polars refuses the query, or it would read a file (see `etloom.core.sql`).
        """
        from etloom.core.sql import run_query

        return run_query(self.scan, sql, self.engine)

    def check_lossless(self) -> None:
        """Raise DataLoss if stats of the trace report lost data or an error (--strict)."""
        _check_lossless(self.table("stats"), "the trace" if self.rank is None else f"rank {self.rank}")


class TracesOnDemand(Mapping[int, Trace]):
    """Mapping of rank to Trace that creates each Trace on first access, because a store may hold 10,000 ranks.

    Args:
        ranks: the ranks.
        make: returns the Trace of a rank.
    """

    __slots__ = ("_made", "_make", "_ranks")

    def __init__(self, ranks: Iterable[int], make: Callable[[int], Trace]) -> None:
        self._ranks = dict.fromkeys(sorted(ranks))
        self._make = make
        self._made: dict[int, Trace] = {}

    def __getitem__(self, rank: int) -> Trace:
        if rank not in self._ranks:
            raise KeyError(rank)
        trace = self._made.get(rank)
        return self._made.setdefault(rank, self._make(rank)) if trace is None else trace

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class Job(TableAttributes, Mapping[int, Trace]):
    """The Traces of a run by rank, and the facts about the run as a whole (``meta``).

    Each table is an attribute (``job.events``): the tables of all ranks concatenated, with a column ``rank`` first.

    Args:
        traces: The Trace of each rank.
        meta: Facts about the run, see `etloom.core.meta.JobMeta`.
        stats: Rows of stats that concern the run as a whole, such as a missing rank.
        stored: The stored run whose unchanged traces these are.
    """

    __slots__ = ("_locks", "_meta", "_results", "_run_stats", "_stored", "_traces")

    def __init__(
        self,
        traces: Mapping[int, Trace],
        meta: Mapping[str, Any] | None = None,
        stats: pl.DataFrame | Sequence[Stat] = (),
        stored: StoredRun | None = None,
    ) -> None:
        self._stored = stored
        on_demand = isinstance(traces, TracesOnDemand)
        self._traces = traces if on_demand else {rank: traces[rank] for rank in sorted(traces)}
        self._meta = MappingProxyType(dict(meta or {}))
        self._run_stats = _build_stats(stats)
        self._results: dict[tuple[Any, ...], Any] = {}
        self._locks: dict[tuple[Any, ...], threading.RLock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (dict(self._traces), dict(self._meta), self._run_stats)

    def __getitem__(self, rank: int) -> Trace:
        try:
            return self._traces[rank]
        except KeyError:
            raise KeyError(f"unknown rank {rank!r}; the job holds {format_ranks(self)}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    def __repr__(self) -> str:
        return f"<Job: {format_ranks(self)}>"

    def _repr_html_(self) -> str:
        from etloom.core.notebook import render_job

        return render_job(self)

    @property
    def meta(self) -> JobMeta:
        """Facts about the run that no table holds (read-only)."""
        return cast(JobMeta, self._meta)

    @property
    def stored(self) -> StoredRun | None:
        """The stored run that all traces belong to; None if they do not all come from one stored run."""
        return self._stored

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run, ascending."""
        return list(self._traces)

    @property
    def stats(self) -> pl.DataFrame:
        """The stats of the run (rank is null) and of all ranks."""
        return self.table("stats")

    @property
    def run_stats(self) -> pl.DataFrame:
        """The stats about the run as a whole; those of single ranks are not included."""
        return self._run_stats.clone()

    @property
    def rank_facts(self) -> pl.DataFrame:
        """One row of facts per rank (`RANK_FACTS`); for a stored run, read without opening the tables of its ranks."""
        return self.compute_once(_list_rank_facts)

    def replace(self, meta: Mapping[str, Any]) -> Job:
        """Return a Job of the same traces in which entries of meta are replaced."""
        return Job(self._traces, {**self._meta, **meta}, self._run_stats, self._stored)

    def with_stats(self, rows: Sequence[Stat]) -> Job:
        """Return a Job with more stats of the run as a whole; rows whose count is 0 are left out."""
        stats = pl.concat([self._run_stats, _build_stats(rows)])
        return Job(self._traces, self._meta, stats, self._stored)

    def map(self, verb: Callable[[Trace], Trace]) -> Job:
        """Return a Job with ``verb(trace)`` in place of each trace; this Job if ``verb`` changes no trace."""
        traces = {rank: verb(trace) for rank, trace in self._traces.items()}
        if all(traces[rank] is trace for rank, trace in self._traces.items()):
            return self
        return Job(traces, self._meta, self._run_stats)

    def map_on_demand(self, verb: Callable[[Trace], Trace]) -> Job:
        """Return a Job that computes ``verb(trace)`` when a trace is first accessed; ``stored`` is unchanged."""
        traces = TracesOnDemand(self._traces, lambda rank: verb(self._traces[rank]))
        return Job(traces, self._meta, self._run_stats, self._stored)

    def compute_once(self, function: Callable[..., _Result], *arguments: Hashable) -> _Result:
        """Return ``function(job, *arguments)``, computed on the first call and cached; see `Trace.compute_once`.

        Concurrent callers wait for the first computation.
        """
        key = function, *arguments
        if key not in self._results:
            with self._locks.setdefault(key, threading.RLock()):
                if key not in self._results:
                    self._results[key] = function(self, *arguments)
        result: _Result = self._results[key]
        return result

    def table(self, name: str) -> pl.DataFrame:
        """Return a table of all ranks concatenated, with a column ``rank`` first.

        Raises:
            UnknownName: No table of this name is declared.
        """
        _check_name(name)
        return self._scan(name).collect()

    def query(self, sql: str, *, max_rows: int | None = None) -> pl.DataFrame:
        """Run an SQL SELECT over the tables of all ranks, each with a column ``rank`` first.

        Args:
            sql: The query.
            max_rows: Return the first rows only, with little memory whatever the query joins; None: all.

        Raises:
            UnknownName: A table or column does not exist.
            EtloomError: polars refuses the query, or it would read a file (see `etloom.core.sql`).
        """
        from etloom.core.sql import run_query

        streaming = max_rows is not None or self._stored is not None
        streaming = streaming or not are_in_memory(
            [loader for trace in self._traces.values() for loader in trace.loaders.values()]
        )
        return run_query(self._scan, sql, "streaming" if streaming else "in-memory", max_rows)

    def check_lossless(self) -> None:
        """Raise DataLoss if stats of the run or of any rank report lost data or an error (--strict)."""
        _check_lossless(self._run_stats, "the run")
        for rank, trace in self._traces.items():
            _check_lossless(trace.table("stats"), f"rank {rank}")

    def _scan(self, name: str) -> pl.LazyFrame:
        run_table = self._run_stats if name == "stats" else TABLES[name].empty()
        tables: list[tuple[int | None, pl.LazyFrame]] = [(None, run_table.lazy())]
        if self._stored is None:
            tables += [(rank, trace.scan(name)) for rank, trace in self._traces.items()]
        frames = [
            frame.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all()) for rank, frame in tables
        ]
        return pl.concat(frames if self._stored is None else [*frames, self._stored.scan(name)])


def _list_rank_facts(job: Job) -> pl.DataFrame:
    if job.stored is not None:
        return job.stored.rank_facts
    rows = [
        (
            rank,
            trace.meta.get("host"),
            trace.meta.get("world_size"),
            *(trace.rows(name) for name in COUNTED_TABLES),
        )
        for rank, trace in job.items()
    ]
    return pl.DataFrame(rows, RANK_FACTS, orient="row", strict=False)


def concat_ranks(job: Job, function: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    """Call ``function(trace)`` for each rank; return the tables concatenated, with a column ``rank`` first."""
    frames = [
        function(trace).select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
        for rank, trace in job.items()
    ]
    return pl.concat(frames) if frames else pl.DataFrame()


def _check_name(name: str) -> None:
    if name not in TABLES:
        raise UnknownName("table", name, TABLES)


def _build_stats(rows: pl.DataFrame | Sequence[Stat]) -> pl.DataFrame:
    """Return rows of stats as a table; of a sequence, rows whose count is 0 are left out."""
    if isinstance(rows, pl.DataFrame):
        return TABLES["stats"].conform(rows).clone()
    assert all(severity in SEVERITIES for _, severity, _, _ in rows)
    counted = [row for row in rows if row[2]]
    if not counted:
        return TABLES["stats"].empty()
    return pl.DataFrame(counted, schema=TABLES["stats"].schema, orient="row")


def _check_lossless(stats: pl.DataFrame, where: str) -> None:
    losses = stats.filter(pl.col("severity") != "info")
    if losses.height:
        first = losses.row(0, named=True)
        others = losses.height - 1
        more = f" and {count_noun(others, 'more kind')} of loss" if others else ""
        raise DataLoss(
            f"{first['name']}: {first['count']} ({first['example']}){more}",
            where=where,
            remedy="omit --strict to use what could be read",
        )
