"""Opening a run: find the traces of each rank, read them side by side, link them, keep the outcome in the cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etloom import cache, linker, readers
from etloom.errors import ReadError
from etloom.exports import parquet
from etloom.trace import Job, Trace

Progress = Callable[[Path, int], None]
Stat = tuple[str, str, int, str | None]

WORTH_KEEPING_S = 0.5
"""What took less to read and link is not worth a cache entry."""


SPILL_BYTES = 10**9
"""A Kineto file of more than so many bytes unpacked is turned into Parquet part by part."""
_USUAL_PACKING = 12  # times that gzip and zstd shrink a trace


def is_large(path: Path) -> bool:
    """Whether a file is a Kineto trace of which the tables should not all be in memory at once."""
    if not path.is_file() or readers.format_of(path) != "kineto":
        return False
    return path.stat().st_size * (_USUAL_PACKING if readers.is_packed(path) else 1) > SPILL_BYTES


def spill(path: Path, out: Path, progress: Progress | None = None) -> None:
    """Turn a Kineto file into a folder of Parquet, part by part. Raises ReadError, LimitError, EtloomError."""
    with parquet.appearing(out) as folder:
        meta = readers.spill(path, folder, progress=partial(progress, path) if progress else None)
        parquet.write_meta(folder, "trace", meta)


def open_folder(
    folder: Path,
    rank_pattern: str | None = None,
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    use_cache: bool = True,
) -> Job:
    """The linked Job of the traces in a folder. Raises ReadError, LimitError, LinkError."""
    found = readers.discover(folder, rank_pattern)
    files = [path for paths in found.ranks.values() for path in paths]
    if len(files) == 1:
        job = open_file(files[0], progress=progress, use_cache=use_cache)
        if len(job) == 1:
            # The rank is what discovery says: the file itself need not know it.
            (rank,), (trace,) = found.ranks, job.values()
            job = Job({rank: trace.replace(meta={"rank": rank})}, job.meta)
    else:
        job = open_ranks(found.ranks, progress=progress, jobs=jobs, use_cache=use_cache)
    meta: dict[str, Any] = {"path": str(folder)}
    meta |= {key: said for key, said in (("card", found.card), ("run", found.run)) if said is not None}
    return job.replace(meta=meta).with_stats(found.stats)


def open_file(path: Path, *, progress: Progress | None = None, use_cache: bool = True) -> Job:
    """The linked Job of one file, which may hold several ranks. A file that does not say its rank is of rank 0."""
    key = cache.key_of([path]) if use_cache else None
    kept = cache.load(key)
    if kept is not None:
        return Job({kept.rank or 0: kept}, {"path": str(path)})
    start = time.monotonic()
    whole = readers.read(path, progress=partial(progress, path) if progress else None)
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
) -> Job:
    """The linked Job of the given files of each rank, ``jobs`` ranks at a time (default: one a CPU).

    Reading and joining run outside the interpreter's lock, so threads are enough, and at most ``jobs`` ranks are
    half-read at a time.
    """

    def open_rank(rank: int) -> Trace:
        paths = files[rank]
        key = cache.key_of(paths, rank=rank) if use_cache else None
        kept = cache.load(key)
        if kept is not None:
            return kept
        start = time.monotonic()
        trace = linker.link(*(_one_rank(path, progress) for path in paths))
        if time.monotonic() - start > WORTH_KEEPING_S:
            cache.keep(key, trace)
        return trace

    traces = _side_by_side(open_rank, list(files), jobs or os.cpu_count() or 1)
    job = Job({rank: trace.replace(meta={"rank": rank}) for rank, trace in traces.items()})
    return job.with_stats(_disagreements(traces))


def _side_by_side(work: Callable[[int], Trace], ranks: Sequence[int], jobs: int) -> dict[int, Trace]:
    """work(rank) of every rank in ``jobs`` threads, in the order of ranks. Raises what work raised first.

    The threads are daemons, so that Ctrl-C need not wait for a read that hangs, as an executor's would.
    """
    left = iter(ranks)
    done: dict[int, Trace] = {}
    raised: list[Exception] = []

    def run() -> None:
        for rank in left:  # an iterator over a sequence gives each item to one thread
            if raised:
                return
            try:
                done[rank] = work(rank)
            except Exception as error:  # raised again below
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
    trace = readers.read(path, progress=partial(progress, path) if progress else None)
    if isinstance(trace, Job):
        raise ReadError("holds several ranks", where=path, remedy="open it on its own")
    return trace


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
