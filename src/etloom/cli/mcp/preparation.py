"""Computes results that questions about an opened run share, and likely answers, in the background.

It is a list of pieces of work; before each, questions go first. Kept are answers, which are short texts, and what the
questions share: the dependency graph, sums by rank, and the small results of analyses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from etloom.cli.mcp.tools import RunTools
from etloom.core.errors import EtloomError

if TYPE_CHECKING:
    from pathlib import Path

    from etloom.cli.mcp.opened_runs import OpenedRuns

_COSTLY = ("graph-quality", "slack", "slowdown")
"""Analyses that are prepared last."""
_MAX_SIMULATED_EVENTS = 300_000_000
"""Ranks times events up to which slowdown is prepared: it simulates all events twice for each rank."""


def prepare_run(runs: OpenedRuns, path: Path) -> None:
    """Compute shared results and likely answers of an opened run in advance; stop when the run is closed.

    Args:
        runs: the opened runs.
        path: of the run, opened.
    """
    with runs.turns.preparing():
        for work in _list_work(runs, str(path)):
            runs.turns.give_way()
            if not runs.is_open(path):
                return
            with suppress(EtloomError):  # the question that needs it reports it
                work()


def _list_work(runs: OpenedRuns, run: str) -> Iterator[Callable[[], object]]:
    """Yield functions that compute shared results and answers in advance, for the most likely questions first."""
    from etloom.api.shared_results import list_shared_work, prepare_predictions
    from etloom.core import registry

    tools, job = RunTools(runs), runs.get_job(run)
    yield partial(tools.open_run, run)
    yield from list_shared_work(job)
    yield from (partial(tool, run) for tool in (tools.summary, tools.findings))
    yield partial(tools.ask_process, run, prepare_predictions)
    yield partial(tools.predict, run)
    yield partial(tools.compare, run, run)
    names = [name for name in registry.list_plugins("analyses") if name not in _COSTLY]
    is_small = len(job) * sum(trace.rows("events") for trace in job.values()) <= _MAX_SIMULATED_EVENTS
    for name in (*names, *_COSTLY[: None if is_small else -1]):
        yield partial(tools.analyze, name, run)
