"""Opening a run: find the traces of each rank, read them side by side, link them, keep the outcome in the cache."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from etloom import formats, linker
from etloom.core.errors import EtloomError, ReadError
from etloom.core.memory import available_memory
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats import parquet as parquet_reader
from etloom.formats.parquet import writer as parquet_writer
from etloom.loading import cache, consistency, file_reading, large_files, parallel
from etloom.loading.file_reading import Progress
from etloom.loading.rank_discovery import discover_ranks
from etloom.loading.resident_tables import ResidentTables

__all__ = ["LoadOptions", "Progress"]

_TABLE_BYTES_PER_TEXT_BYTE = 0.6
"""What the tables of a linked rank take, in bytes for each byte of text (measured: 0.4 to 0.6)."""
_TABLE_BYTES_PER_PARQUET_BYTE = 10
"""And for each byte of our Parquet (measured: 9)."""
MIN_SECONDS_TO_CACHE = 0.5
"""What took less to read and link is not worth a cache entry."""


@dataclass(frozen=True)
class LoadOptions:
    """How runs are opened.

    jobs: ranks read at a time (default: one a CPU), fewer where memory would not hold them; reading and linking run
    outside the interpreter's lock, so threads are enough. lazy: leave the tables of our own Parquet where they are;
    turn a large Kineto file into that, and leave it unlinked, which takes all of it in memory. room: bytes of tables to
    hold in memory at a time (default: half of what is left); those of a run of several ranks that may take more lie on
    disk, see `shelf`. linking: options of `linker.link` other than its defaults.
    """

    progress: Progress | None = None
    jobs: int | None = None
    use_cache: bool = True
    lazy: bool = False
    room: int | None = None
    linking: Mapping[str, Any] = field(default_factory=dict)

    def folder(self, folder: Path, rank_pattern: str | None = None) -> Job:
        """The linked Job of the traces in a folder. A file that cannot be read is a row of stats, while others can.

        Raises ReadError where nothing can be read, LinkError.
        """
        found = discover_ranks(folder, rank_pattern)
        paths = [path for of_rank in found.ranks.values() for path in of_rank]
        if len(paths) == 1:
            job = self.file(paths[0])
            if len(job) == 1:
                # The rank is what discovery says: the file itself need not know it.
                (rank,), (trace,) = found.ranks, job.values()
                said = consistency.check_ranks({rank: trace})
                job = Job({rank: trace.replace(meta={"rank": rank})}, job.meta, job.run_stats).with_stats(
                    said
                )
        else:
            job = self.ranks(found.ranks, keep_going=True)
        meta: dict[str, Any] = {"path": str(folder)}
        meta |= {key: said for key, said in (("card", found.card), ("run", found.run)) if said is not None}
        # Where the files state the world, what is missing of it has been said.
        known = "job.missing_ranks" in job.run_stats["name"]
        stats = [row for row in found.stats if not (known and row[0] == "job.missing_ranks")]
        return _add_rank_stats(job, found.rank_stats).replace(meta=meta).with_stats(stats)

    def file(self, path: Path) -> Job:
        """The linked Job of one file, which may hold several ranks. A file that does not say its rank is of rank 0.

        Raises ReadError, LimitError, LinkError.
        """
        if self.lazy and path.exists() and formats.detect_format(path) == "parquet":
            saved = parquet_reader.read(path, lazy=True)
            job = _as_job(saved, path)
            job = job.map(
                lambda trace: trace if large_files.has_too_many_events(trace) else self._linked(trace)
            )
            return job.with_stats(large_files.count_unlinked(job))
        if self.lazy and large_files.is_large(path):
            job = _as_job(self._left_on_disk(path), path)
            return job.with_stats(large_files.count_unlinked(job))
        if (saved_run := self._saved_run(path)) is not None:
            return saved_run
        key = self._key([path])
        if (kept := cache.load_entry(key)) is not None:
            return _as_job(kept, path)
        start = time.monotonic()
        whole = file_reading.read_file(path, self.progress)
        with file_reading.convert_panics(path):
            if isinstance(whole, Job):
                return whole.map(self._linked)
            trace = consistency.flag_missing_gpu_events(self._linked(whole))
        _cache_if_slow(key, trace, start)
        return _as_job(trace, path)

    def ranks(self, of_rank: Mapping[int, Sequence[Path]], *, keep_going: bool = False) -> Job:
        """The linked Job of the given files of each rank.

        keep_going: go on without the files that cannot be read, each a row of stats; a rank of which none can be read
        is left out. Raises ReadError, LimitError (with keep_going only where nothing at all can be read), LinkError.
        """
        for path in itertools.chain(*of_rank.values()):
            file_reading.report_progress(self.progress, path, 0)
        unread: dict[Path, EtloomError] | None = {} if keep_going else None
        shelf = self._shelf(of_rank) if len(of_rank) > 1 else None
        opened = parallel.run_in_parallel(
            lambda rank: self._rank(rank, of_rank[rank], unread, shelf),
            list(of_rank),
            parallel.max_parallel_ranks(of_rank, self.jobs or os.cpu_count() or 1),
        )
        traces = {rank: trace for rank, trace in opened.items() if trace is not None}
        failed = unread or {}
        failures = {rank: [failed[path] for path in of_rank[rank] if path in failed] for rank in of_rank}
        if failed and not traces:
            first, *more = itertools.chain(*failures.values())
            also = f"; nor can {len(more)} more" if more else ""
            raise ReadError(f"{first.what}{also}", where=first.where, remedy=first.remedy)
        job = Job({rank: trace.replace(meta={"rank": rank}) for rank, trace in traces.items()})
        rows: dict[int, list[Stat]] = {
            rank: [Stat("job.unreadable_file", "error", 1, str(error)) for error in errors]
            for rank, errors in failures.items()
        }
        return _add_rank_stats(job, rows).with_stats(
            [*consistency.check_ranks(traces), *large_files.count_unlinked(job)]
        )

    def _saved_run(self, path: Path) -> Job | None:
        """A run of several ranks that was saved linked and whose tables may take more memory than they should."""
        if self.linking or not path.is_dir() or formats.detect_format(path) != "parquet":
            return None
        packed = sum(file.stat().st_size for file in path.glob("rank=*/*.parquet"))
        if packed * _TABLE_BYTES_PER_PARQUET_BYTE <= self._room():
            return None
        saved = parquet_reader.read(path, lazy=True)
        if not isinstance(saved, Job) or not all(trace.meta.get("linked") for trace in saved.values()):
            return None
        shelf = ResidentTables(self._room())
        return saved.map(lambda trace: _make_evictable(shelf, trace))

    def _room(self) -> int:
        return available_memory() // 2 if self.room is None else self.room

    def _shelf(self, of_rank: Mapping[int, Sequence[Path]]) -> ResidentTables | None:
        """Where the tables of all these may take more memory than they should, a shelf for them."""
        text = sum(
            file_reading.estimate_text_bytes(path)
            for path in itertools.chain(*of_rank.values())
            if path.is_file()
        )
        return ResidentTables(self._room()) if text * _TABLE_BYTES_PER_TEXT_BYTE > self._room() else None

    def _rank(
        self,
        rank: int,
        paths: Sequence[Path],
        unread: dict[Path, EtloomError] | None,
        shelf: ResidentTables | None,
    ) -> Trace | None:
        """The linked Trace of the files of one rank, on the shelf if there is one. What cannot be read goes into
        ``unread``, if it is there."""
        if self.lazy and len(paths) == 1 and large_files.is_large(paths[0]):
            return self._left_on_disk(paths[0])
        key = self._key(paths, rank=rank)
        if (kept := cache.open_entry(key) if shelf else cache.load_entry(key)) is not None:
            for path in paths:
                file_reading.report_progress(self.progress, path, path.stat().st_size)
            return _make_evictable(shelf, kept)
        start = time.monotonic()
        parts = []
        for path in paths:
            try:
                parts.append(file_reading.read_single_rank(path, self.progress))
            except EtloomError as error:
                if unread is None:
                    raise
                unread[path] = error
        if not parts:
            return None
        with file_reading.convert_panics(paths[0]):
            trace = consistency.flag_missing_gpu_events(linker.link(*parts, **self.linking))
        trace = trace.with_stats(consistency.check_processes(parts))
        whole = len(parts) == len(paths)
        if shelf is not None:
            write = partial(parquet_writer.write, trace)
            return _make_evictable(shelf, cache.open_or_create([key if whole else None], write))
        if whole:
            _cache_if_slow(key, trace, start)
        return trace

    def _linked(self, trace: Trace) -> Trace:
        """A Trace that was saved linked stays as it is, unless it is to be linked otherwise."""
        asis = trace.meta.get("linked") and not self.linking
        return trace if asis else linker.link(trace, **self.linking)

    def _left_on_disk(self, path: Path) -> Trace:
        return consistency.flag_missing_gpu_events(
            large_files.open_on_disk(path, self.progress, self.use_cache, self.linking)
        )

    def _key(self, paths: Sequence[Path], **options: Any) -> str | None:
        return cache.entry_key(paths, **options, **self.linking) if self.use_cache else None


def _as_job(whole: Trace | Job, path: Path) -> Job:
    return whole if isinstance(whole, Job) else Job({whole.rank or 0: whole}, {"path": str(path)})


def _add_rank_stats(job: Job, of_ranks: Mapping[int, Sequence[Stat]]) -> Job:
    """The job with more stats of its ranks, and those of a rank that it has not as stats of the run."""
    traces = {rank: trace.with_stats(of_ranks.get(rank, ())) for rank, trace in job.items()}
    rest = [row for rank, rows in of_ranks.items() if rank not in job for row in rows]
    return Job(traces, job.meta, job.run_stats).with_stats(rest)


def _make_evictable(shelf: ResidentTables | None, trace: Trace) -> Trace:
    """The trace on the shelf, but for what all verbs ask of each rank."""
    if shelf is None or not trace.loaders:
        return trace
    return shelf.add(trace).replace(stats=trace.table("stats"))


def _cache_if_slow(key: str | None, trace: Trace, start: float) -> None:
    if time.monotonic() - start > MIN_SECONDS_TO_CACHE:
        cache.store_entry(key, trace)
