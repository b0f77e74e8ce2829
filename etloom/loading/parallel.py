"""Ranks side by side, as many as memory holds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etloom.core.memory import available_memory
from etloom.core.trace import Trace
from etloom.loading.file_reading import estimate_text_bytes

MEMORY_FACTOR = 1.5
"""What reading and linking a rank takes at most, in bytes for each byte of text (measured: 0.5 to 1.1)."""


def max_parallel_ranks(files: Mapping[int, Sequence[Path]], jobs: int) -> int:
    """How many ranks can be read at a time, at most ``jobs``, so that the largest of them together fit in memory."""
    if jobs == 1:
        return 1
    sizes = (sum(estimate_text_bytes(path) for path in paths if path.is_file()) for paths in files.values())
    largest = sorted((size * MEMORY_FACTOR for size in sizes), reverse=True)[:jobs]
    room = available_memory()
    return max(1, sum(total <= room for total in itertools.accumulate(largest)))


def run_in_parallel(
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
