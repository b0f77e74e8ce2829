"""Prints messages and tables of the replay commands, and ends a process when another process has failed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from etloom.cli.error_handling import EXIT_INTERRUPTED, print_message
from etloom.cli.output import Format, write_table
from etloom.core.errors import EtloomError
from etloom.core.text import count_noun
from etloom.replayer.launch_environment import Process, ranks_on_host

if TYPE_CHECKING:
    import polars as pl


def end_process(reason: str) -> NoReturn:
    """Print why another process ended, and end this process, because torch would wait forever for the ended process.

    An interrupt is reported by rank 0 only.
    """
    is_interrupt = ": interrupted at " in reason
    if not is_interrupt or Process.current().rank == 0:
        print_message(reason)
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED if is_interrupt else 1)


@contextmanager
def end_on_failure(process: Process) -> Iterator[None]:
    """End this process at once if it fails and there are several processes, without waiting for Python to exit.

    An interrupt, which all processes get, is reported by rank 0 with the call that it interrupted.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if process.rank == 0:
            print_message(f"{str(interrupt) or 'interrupted'}; an incomplete replay has no results")
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)
    except EtloomError as error:
        if process.world_size == 1 or error.option is not None or os.environ.get("ETLOOM_DEBUG"):
            raise
        end_process(str(error))


def print_summary(table: pl.DataFrame, format: Format | None) -> None:
    """Print the table of replayed calls; as text, its headers mark the columns that cover all ranks and repeats."""
    from etloom.replayer.comms.results import TOTAL_HEADERS

    write_table(table.rename(TOTAL_HEADERS) if format in (None, Format.table) else table, format, None)


def load_average() -> float | None:
    """Return the mean number of processes running or waiting on this host over the last minute; None if unknown."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def contention_warning(
    load: float | None, device: str, threads: int, measured: str = "latencies"
) -> str | None:
    """Return a warning if ranks shared CPUs or other processes ran, so that measured times are unreliable; else None.

    Args:
        load: `load_average` before the replay.
        threads: Threads of a rank.
        measured: Name of the measured times.
    """
    cpus, ranks = os.cpu_count() or 1, ranks_on_host()
    reasons = []
    if device == "cpu" and ranks * threads > cpus:
        threads_text = f" with {threads} threads each" if threads > 1 else ""
        reasons.append(f"{ranks} ranks{threads_text} share {cpus} CPUs")
    if load is not None and load > cpus:
        reasons.append(f"the load before the replay was {load:.1f} on {cpus} CPUs")
    if not reasons:
        return None
    consequence = "include waiting for a CPU and cannot be compared with the recording or with other replays"
    return f"{measured} {consequence}: {', and '.join(reasons)}"


def print_passes(passes: pl.DataFrame) -> None:
    """Print the median duration of a replay pass on the slowest rank, and the ranks' waiting time for communication."""
    by_rank = passes.group_by("rank", maintain_order=True).median()
    slowest = by_rank.sort("span_ns", descending=True).row(0, named=True)
    waits = sorted(by_rank["exposed_ns"].to_list())
    repeats = count_noun(passes["repeat"].n_unique(), "repeat")
    print_message(
        f"{repeats} on {by_rank.height} ranks: median {slowest['span_ns'] / 1e6:,.3f} ms on the slowest rank "
        f"({slowest['rank']}), of which ranks waited {waits[0] / 1e6:,.3f} to {waits[-1] / 1e6:,.3f} ms for "
        "communication"
    )
