"""How a replay on several processes ends and what is said of its figures."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from etloom.cli._guard import INTERRUPTED, say
from etloom.cli._output import Format, emit
from etloom.errors import EtloomError

if TYPE_CHECKING:
    import polars as pl

    from etloom.replayer.world import Place


def end(reason: Any) -> NoReturn:
    """Another process is gone: say so and end, since torch would wait for it. An interrupt is told by one alone."""
    from etloom.replayer.world import Place

    interrupted = ": interrupted at " in str(reason)
    if not interrupted or Place.here().rank == 0:
        say(str(reason))
    sys.stderr.flush()
    os._exit(INTERRUPTED if interrupted else 1)


@contextmanager
def ending(place: Place) -> Iterator[None]:
    """What fails on one of several processes ends this one at once: Python may take seconds to take torch down. Of an
    interrupt, which all get, the first says where it stood."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if place.rank == 0:
            say(
                f"{str(interrupt) or 'interrupted'}; there are no figures of a replay that does not come to its end"
            )
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    except EtloomError as error:
        if place.world == 1 or error.option is not None or os.environ.get("ETLOOM_DEBUG"):
            raise
        end(error)


def tell_sums(table: pl.DataFrame, format: Format | None) -> None:
    """Print what `results.sums` gives; people are told in the headers what is over all ranks and repeats."""
    from etloom.replayer.results import OVER_ALL

    emit(table.rename(OVER_ALL) if format in (None, Format.table) else table, format, None)


def load() -> float | None:
    """How many processes want to run on this host, a mean over the last minute; None where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def crowded(busy: float | None, device: str, threads: int, what: str = "latencies") -> str | None:
    """Why what was measured compares neither with the recording's nor with another replay's, if so: ranks share
    CPUs, or others were at work. busy: `load` before the replay. threads: of a rank."""
    from etloom.replayer.memory import beside

    cpus = os.cpu_count() or 1
    reasons = []
    if device == "cpu" and beside() * threads > cpus:
        each = f" with {threads} threads each" if threads > 1 else ""
        reasons.append(f"{beside()} ranks{each} share {cpus} CPUs")
    if busy is not None and busy > cpus:
        reasons.append(f"before the replay the load was {busy:.1f} on {cpus} CPUs")
    told = f"{what} hold waits for a CPU and compare neither with the recording's nor with another replay's"
    return f"{told}: {', and '.join(reasons)}" if reasons else None


def tell_passes(passes: pl.DataFrame) -> None:
    """How long a repeat took on the rank that took longest, and how much of it each rank waited; of how many."""
    by_rank = passes.group_by("rank", maintain_order=True).median()
    longest = by_rank.sort("span_ns", descending=True).row(0, named=True)
    waited = sorted(by_rank["exposed_ns"].to_list())
    repeats = passes["repeat"].n_unique()
    say(
        f"of {repeats} repeat{'s' * (repeats != 1)} on {by_rank.height} ranks: one took "
        f"{longest['span_ns'] / 1e6:,.3f} ms (median, rank {longest['rank']}), of which ranks waited "
        f"{waited[0] / 1e6:,.3f} to {waited[-1] / 1e6:,.3f} ms for communication"
    )
