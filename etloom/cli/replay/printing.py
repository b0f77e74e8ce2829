"""How a replay on several processes ends and what is said of its figures."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from etloom.cli.error_handling import EXIT_INTERRUPTED, print_message
from etloom.cli.output import Format, write_table
from etloom.core.errors import EtloomError

if TYPE_CHECKING:
    import polars as pl

    from etloom.replayer.comms.watchdog import Process


def end_process(reason: Any) -> NoReturn:
    """Another process is gone: say so and end, since torch would wait for it. An interrupt is told by one alone."""
    from etloom.replayer.comms.watchdog import Process

    interrupted = ": interrupted at " in str(reason)
    if not interrupted or Process.here().rank == 0:
        print_message(str(reason))
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED if interrupted else 1)


@contextmanager
def ending_together(place: Process) -> Iterator[None]:
    """What fails on one of several processes ends this one at once: Python may take seconds to take torch down. Of an
    interrupt, which all get, the first says where it stood."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if place.rank == 0:
            print_message(
                f"{str(interrupt) or 'interrupted'}; there are no figures of a replay that does not come to its end"
            )
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)
    except EtloomError as error:
        if place.world == 1 or error.option is not None or os.environ.get("ETLOOM_DEBUG"):
            raise
        end_process(error)


def print_summary(table: pl.DataFrame, format: Format | None) -> None:
    """Print what `results.sums` gives; people are told in the headers what is over all ranks and repeats."""
    from etloom.replayer.comms.results import TOTAL_HEADERS

    write_table(table.rename(TOTAL_HEADERS) if format in (None, Format.table) else table, format, None)


def load_average() -> float | None:
    """How many processes want to run on this host, a mean over the last minute; None where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def contention_warning(busy: float | None, device: str, threads: int, what: str = "latencies") -> str | None:
    """Why what was measured compares neither with the recording's nor with another replay's, if so: ranks share
    CPUs, or others were at work. busy: `load` before the replay. threads: of a rank."""
    from etloom.replayer.compute.memory_limits import ranks_on_host

    cpus = os.cpu_count() or 1
    reasons = []
    if device == "cpu" and ranks_on_host() * threads > cpus:
        each = f" with {threads} threads each" if threads > 1 else ""
        reasons.append(f"{ranks_on_host()} ranks{each} share {cpus} CPUs")
    if busy is not None and busy > cpus:
        reasons.append(f"before the replay the load was {busy:.1f} on {cpus} CPUs")
    told = f"{what} hold waits for a CPU and compare neither with the recording's nor with another replay's"
    return f"{told}: {', and '.join(reasons)}" if reasons else None


def print_passes(passes: pl.DataFrame) -> None:
    """How long a repeat took on the rank that took longest, and how much of it each rank waited; of how many."""
    by_rank = passes.group_by("rank", maintain_order=True).median()
    longest = by_rank.sort("span_ns", descending=True).row(0, named=True)
    waited = sorted(by_rank["exposed_ns"].to_list())
    repeats = passes["repeat"].n_unique()
    print_message(
        f"of {repeats} repeat{'s' * (repeats != 1)} on {by_rank.height} ranks: one took "
        f"{longest['span_ns'] / 1e6:,.3f} ms (median, rank {longest['rank']}), of which ranks waited "
        f"{waited[0] / 1e6:,.3f} to {waited[-1] / 1e6:,.3f} ms for communication"
    )
