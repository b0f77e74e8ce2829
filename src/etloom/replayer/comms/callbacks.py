"""Callbacks that the caller of a multi-process replay provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RankWork:
    """Callbacks for a rank's work between communication calls: run the rank's operators, and describe its activity.

    Attributes:
        run_operators: Called with a node to run the operators before it, and with None at the end (`Runner`).
        describe: Returns what it is doing at the moment; None if nothing.
    """

    run_operators: Callable[[int | None], None] | None = None
    describe: Callable[[], str | None] = lambda: None


Prepare = Callable[[Callable[[str], None]], RankWork]


def _skip_preparation(report: Callable[[str], None]) -> RankWork:
    return RankWork()


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a multi-process replay: end this process, print a message, and prepare a rank.

    Attributes:
        end_process: Ends this process with a reason, when another process is gone. It must not return.
        notify: Called with messages for the user, on rank 0.
        prepare: Called on every rank when the plan is complete, with a function that reports its activity to the other
            ranks; returns what the rank does between calls.
    """

    end_process: Callable[[str], None]
    notify: Callable[[str], None] = lambda line: None
    prepare: Prepare = _skip_preparation
