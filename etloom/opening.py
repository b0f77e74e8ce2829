"""Opening a run: find the traces of each rank, read them side by side, link them, keep the outcome in the cache."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from etloom import cache, linker, readers
from etloom.errors import EtloomError, ReadError
from etloom.exports import parquet
from etloom.readers import parquet as parquet_reader
from etloom.trace import Job, Trace

Progress = Callable[[Path, int], None]
"""Called with a file and a number of bytes read of it, and first of all with 0 for every file that will be read."""
Stat = tuple[str, str, int, str | None]

WORTH_KEEPING_S = 0.5
"""What took less to read and link is not worth a cache entry."""


MEMORY_FACTOR = 1.5
"""What reading and linking a rank takes at most, in bytes for each byte of text (measured: 0.5 to 1.1)."""

SPILL_BYTES = 10**9
"""A Kineto file of more than so many bytes unpacked is turned into Parquet part by part."""
_EVENT_BYTES = 350  # text of a usual event
_USUAL_PACKING = 12  # times that gzip and zstd shrink a trace


def is_large(path: Path) -> bool:
    """Whether a file is a Kineto trace of which the tables should not all be in memory at once."""
    return path.is_file() and readers.format_of(path) == "kineto" and _text_bytes(path) > SPILL_BYTES


def _text_bytes(path: Path) -> int:
    """About how long a file is once unpacked."""
    return path.stat().st_size * (_USUAL_PACKING if readers.is_packed(path) else 1)


def spill(path: Path, out: Path, progress: Progress | None = None) -> None:
    """Turn a Kineto file into a folder of Parquet, part by part. Raises ReadError, LimitError, EtloomError."""
    with parquet.appearing(out) as folder:
        with _panics_of(path):
            meta = readers.spill(path, folder, progress=partial(progress, path) if progress else None)
        parquet.write_meta(folder, "trace", meta)


def open_folder(
    folder: Path,
    rank_pattern: str | None = None,
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    use_cache: bool = True,
    lazy: bool = False,
) -> Job:
    """The linked Job of the traces in a folder. A file that cannot be read is a row of stats, while others can.

    lazy: as for `open_file`. Raises ReadError where nothing can be read, LinkError.
    """
    found = readers.discover(folder, rank_pattern)
    files = [path for paths in found.ranks.values() for path in paths]
    if len(files) == 1:
        job = open_file(files[0], progress=progress, use_cache=use_cache, lazy=lazy)
        if len(job) == 1:
            # The rank is what discovery says: the file itself need not know it.
            (rank,), (trace,) = found.ranks, job.values()
            job = Job({rank: trace.replace(meta={"rank": rank})}, job.meta, job.own_stats)
    else:
        options: dict[str, Any] = {"progress": progress, "jobs": jobs, "use_cache": use_cache, "lazy": lazy}
        job = open_ranks(found.ranks, keep_going=True, **options)
    meta: dict[str, Any] = {"path": str(folder)}
    meta |= {key: said for key, said in (("card", found.card), ("run", found.run)) if said is not None}
    return job.replace(meta=meta).with_stats(found.stats)


def open_file(
    path: Path, *, progress: Progress | None = None, use_cache: bool = True, lazy: bool = False
) -> Job:
    """The linked Job of one file, which may hold several ranks. A file that does not say its rank is of rank 0.

    lazy: leave the tables of our own Parquet where they are; turn a Kineto file that `is_large` into that, and leave it
    unlinked, which takes all of it in memory. Raises ReadError, LimitError.
    """
    lazy = lazy and path.exists()
    if lazy and readers.format_of(path) == "parquet":
        saved = parquet_reader.read(path, lazy=True)
        job = saved if isinstance(saved, Job) else Job({saved.rank or 0: saved}, {"path": str(path)})
        job = job.map(lambda trace: trace if _too_many(trace) else _linked(trace))
        return job.with_stats(_not_linked(job))
    if lazy and is_large(path):
        trace = _left_on_disk(path, progress, use_cache)
        job = Job({trace.rank or 0: trace}, {"path": str(path)})
        return job.with_stats(_not_linked(job))
    key = cache.key_of([path]) if use_cache else None
    kept = cache.load(key)
    if kept is not None:
        return Job({kept.rank or 0: kept}, {"path": str(path)})
    start = time.monotonic()
    whole = _read(path, progress)
    with _panics_of(path):
        if isinstance(whole, Job):
            return whole.map(_linked)
        trace = _linked(whole)
    if time.monotonic() - start > WORTH_KEEPING_S:
        cache.keep(key, trace)
    return Job({trace.rank or 0: trace}, {"path": str(path)})


def open_ranks(
    files: Mapping[int, Sequence[Path]],
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    use_cache: bool = True,
    keep_going: bool = False,
    lazy: bool = False,
) -> Job:
    """The linked Job of the given files of each rank, ``jobs`` ranks at a time (default: one a CPU).

    Reading and joining run outside the interpreter's lock, so threads are enough. Fewer are read at a time where
    ``jobs`` of them might take more memory than there is. keep_going: go on without the files that cannot be read, each
    a row of stats; a rank of which none can be read is left out. lazy: as for `open_file`, where a rank has one file.

    Raises ReadError, LimitError (with keep_going only where nothing at all can be read), LinkError.
    """
    unread: dict[Path, EtloomError] = {}

    def open_rank(rank: int) -> Trace | None:
        paths = files[rank]
        if lazy and len(paths) == 1 and is_large(paths[0]):
            return _left_on_disk(paths[0], progress, use_cache)
        key = cache.key_of(paths, rank=rank) if use_cache else None
        kept = cache.load(key)
        if kept is not None:
            for path in paths:
                _tell(progress, path, path.stat().st_size)
            return kept
        start = time.monotonic()
        parts = []
        for path in paths:
            try:
                parts.append(_one_rank(path, progress))
            except EtloomError as error:
                if not keep_going:
                    raise
                unread[path] = error
        if not parts:
            return None
        with _panics_of(paths[0]):
            trace = linker.link(*parts)
        if len(parts) == len(paths) and time.monotonic() - start > WORTH_KEEPING_S:
            cache.keep(key, trace)
        return trace

    for path in itertools.chain(*files.values()):
        _tell(progress, path, 0)
    opened = _side_by_side(open_rank, list(files), at_a_time(files, jobs or os.cpu_count() or 1))
    traces = {rank: trace for rank, trace in opened.items() if trace is not None}
    failures = [unread[path] for paths in files.values() for path in paths if path in unread]
    if failures and not traces:
        also = f"; nor can {len(failures) - 1} more" if len(failures) > 1 else ""
        raise ReadError(f"{failures[0].what}{also}", where=failures[0].where, remedy=failures[0].remedy)
    job = Job({rank: trace.replace(meta={"rank": rank}) for rank, trace in traces.items()})
    stats: list[Stat] = [("job.unreadable_file", "error", 1, str(error)) for error in failures]
    return job.with_stats(stats + _disagreements(traces) + _not_linked(job))


def at_a_time(files: Mapping[int, Sequence[Path]], jobs: int) -> int:
    """How many ranks can be read at a time, at most ``jobs``, so that the largest of them together fit in memory."""
    if jobs == 1:
        return 1
    sizes = (sum(_text_bytes(path) for path in paths if path.is_file()) for paths in files.values())
    largest = sorted((size * MEMORY_FACTOR for size in sizes), reverse=True)[:jobs]
    room = available_memory()
    return max(1, sum(total <= room for total in itertools.accumulate(largest)))


def available_memory() -> int:
    """The bytes that may be used without swapping, as far as the system says."""
    with contextlib.suppress(OSError):
        if match := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()):
            return int(match[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _side_by_side(
    work: Callable[[int], Trace | None], ranks: Sequence[int], jobs: int
) -> dict[int, Trace | None]:
    """work(rank) of every rank in ``jobs`` threads, in the order of ranks. Raises what work raised first.

    The threads are daemons, so that Ctrl-C need not wait for a read that hangs, as an executor's would.
    """
    left = iter(ranks)
    done: dict[int, Trace | None] = {}
    raised: list[BaseException] = []

    def run() -> None:
        for rank in left:  # an iterator over a sequence gives each item to one thread
            if raised:
                return
            try:
                done[rank] = work(rank)
            except BaseException as error:  # raised again below
                raised.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(jobs, len(ranks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)  # not for ever: polars makes waiting for a lock deaf to Ctrl-C
    if raised:
        raise raised[0]
    return {rank: done[rank] for rank in ranks}


def _one_rank(path: Path, progress: Progress | None) -> Trace:
    trace = _read(path, progress)
    if isinstance(trace, Job):
        raise ReadError("holds several ranks", where=path, remedy="open it on its own")
    return trace


def _left_on_disk(path: Path, progress: Progress | None, use_cache: bool) -> Trace:
    """A large Kineto file as Parquet: linked if another verb has kept it so, else as it is."""
    linked, spilled = (
        (cache.key_of([path]), cache.key_of([path], form="parts")) if use_cache else (None, None)
    )
    return cache.on_disk([linked, spilled], lambda folder: spill(path, folder, progress))


def _too_many(trace: Trace) -> bool:
    rows = trace.scan("events").select(pl.len()).collect().item()
    return bool(rows * _EVENT_BYTES > SPILL_BYTES)


def _not_linked(job: Job) -> list[Stat]:
    ranks = [rank for rank, trace in job.items() if not trace.meta.get("linked")]
    example = (
        "too large to be joined while it is read: parent, depth and step of events, launches, handoffs and waits are "
        "empty; etloom link PATH --out RUN.parquet joins it, in memory"
    )
    return [("job.not_linked", "info", len(ranks), example)]


def _read(path: Path, progress: Progress | None) -> Trace | Job:
    told = 0

    def tell(count: int) -> None:
        nonlocal told
        told += count
        _tell(progress, path, count)

    with _panics_of(path):
        trace = readers.read(path, progress=tell)
    if path.is_file():
        tell(path.stat().st_size - told)  # of all of it, by the readers that cannot tell
    return trace


def _tell(progress: Progress | None, path: Path, count: int) -> None:
    if progress is not None:
        progress(path, count)


@contextlib.contextmanager
def _panics_of(path: Path) -> Iterator[None]:
    """Raise ReadError with the file's name where polars panics, which is no Exception and names nothing."""
    try:
        yield
    except pl.exceptions.PanicException as error:
        reason = str(error).partition("\n")[0]
        raise ReadError(f"polars failed on it: {reason}", where=path, remedy="please report it") from error


def _linked(trace: Trace) -> Trace:
    return trace if trace.meta.get("linked") else linker.link(trace)


def _disagreements(traces: Mapping[int, Trace]) -> list[Stat]:
    """What the files say of their rank and world against where they stand."""
    stats: list[Stat] = []
    wrong = [(rank, trace.rank) for rank, trace in traces.items() if trace.rank not in (None, rank)]
    if wrong:
        example = f"a file in the place of rank {wrong[0][0]} says it is rank {wrong[0][1]}"
        stats.append(("job.rank_disagrees", "error", len(wrong), example))
    worlds = {world for trace in traces.values() if (world := trace.meta.get("world_size")) is not None}
    if len(worlds) > 1:
        stats.append(("job.world_size_disagrees", "error", len(worlds), f"world sizes {sorted(worlds)}"))
    elif worlds and max(worlds) > len(traces):
        stats.append(
            ("job.missing_ranks", "info", max(worlds) - len(traces), f"of a world of {max(worlds)} ranks")
        )
    return stats
