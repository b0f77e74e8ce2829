"""Processing of ranks in parallel threads, as many as memory allows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etloom.core.memory import available_memory
from etloom.core.trace import Trace
from etloom.loading.file_reading import estimate_text_bytes

MEMORY_FACTOR = 1.5
"""Upper bound of the memory for reading and linking a rank per byte of its text (measured: 0.5 to 1.1)."""


def max_parallel_ranks(files: Mapping[int, Sequence[Path]], jobs: int) -> int:
    """Return the number of ranks to read at a time: at most ``jobs``; the largest ones must fit in memory together."""
    if jobs == 1:
        return 1
    sizes = (sum(estimate_text_bytes(path) for path in paths if path.is_file()) for paths in files.values())
    largest = sorted((size * MEMORY_FACTOR for size in sizes), reverse=True)[:jobs]
    available = available_memory()
    return max(1, sum(total <= available for total in itertools.accumulate(largest)))


def run_in_parallel(
    work: Callable[[int], Trace | None], ranks: Sequence[int], jobs: int
) -> dict[int, Trace | None]:
    """Return work(rank) of every rank, in the order of ranks, computed in ``jobs`` threads.

    The first exception of a thread is raised again. The threads are daemons: unlike those of an executor, they do not
    make Ctrl-C wait for a read that hangs.
    """
    remaining = iter(ranks)
    results: dict[int, Trace | None] = {}
    raised: list[BaseException] = []

    def run() -> None:
        for rank in remaining:  # an iterator over a sequence gives each item to one thread
            if raised:
                return
            try:
                results[rank] = work(rank)
            except BaseException as error:  # raised again below
                raised.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(jobs, len(ranks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)  # with a timeout: polars makes waiting for a lock ignore Ctrl-C
    if raised:
        raise raised[0]
    return {rank: results[rank] for rank in ranks}
