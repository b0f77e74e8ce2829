"""The timelines of several runs on one axis: which ranks are drawn, and how operators and kernels changed.

Events are matched as by `etloom diff --by tree`: by the names of their callers, on the ranks that are drawn.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etloom.comparison.call_trees import Key, NodeTimes, measure_ranks
from etloom.core.text import count_noun
from etloom.core.trace import Job, Trace
from etloom.reports.colors import COLORS
from etloom.reports.timeline_selection import find_first_work, find_origins, pack_timeline

MAX_EVENTS = 200_000
"""Events drawn of all ranks and runs together."""
MAX_RANKS = 8
"""Ranks to choose from."""
MAX_MATCHED_EVENTS = 500_000
"""Larger ranks are drawn without the changes of their operators."""
CHANGE_COLORS = (
    ("slower-2", "slower, by more than 30 %"),
    ("slower-1", "slower, by more than 3 %"),
    ("unchanged", "within 3 %"),
    ("faster-1", "faster, by more than 3 %"),
    ("faster-2", "faster, by more than 30 %"),
    ("alone", "in one run only"),
    ("unmatched", "not compared"),
)
"""(name of the color in report.css, label in the legend), as difference.js chooses them."""


Compared = tuple[int, int, bool]
"""Times of an operator or activity before and after, ns, and whether they are those of the operator around it."""


class ComparedTimelines(NamedTuple):
    """The timelines of several runs: the elements with their data, the legend by color, the ranks, and notes."""

    data: str
    legend: dict[str, str]
    ranks: list[int]
    notes: list[str]


def pack_runs(jobs: Sequence[Job], stepped: bool, order: Sequence[int] = ()) -> ComparedTimelines | None:
    """Pack the timelines of the ranks that all runs have; None if there are none.

    Args:
        jobs: linked runs.
        stepped: times are per step.
        order: ranks that come first.
    """
    listed = dict.fromkeys([*order, *jobs[0]])
    common = [rank for rank in listed if all(_has_events(job, rank) for job in jobs)]
    ranks = common[:MAX_RANKS]
    if not ranks:
        return None
    share = MAX_EVENTS // (len(ranks) * len(jobs))
    used: set[int] = set()
    omitted, elements = 0, []
    for rank in ranks:
        traces = [job[rank] for job in jobs]
        for run, (trace, changes) in enumerate(zip(traces, _match_events(traces, stepped), strict=True)):
            origins = find_origins({rank: trace})
            packed = pack_timeline(
                trace,
                rank=rank,
                origin=origins[rank],
                zero=find_first_work({rank: trace}, origins)[rank],
                max_events=share,
                changes=changes,
            )
            used |= packed.colors
            omitted += packed.omitted
            data = base64.b64encode(packed.data).decode()
            elements.append(f'<script type="text/plain" data-run="{run}" data-rank="{rank}">{data}</script>')
    notes = []
    if len(common) > len(ranks):
        notes.append(
            f"The timelines of {count_noun(len(common) - len(ranks), 'more common rank')} are omitted."
        )
    if omitted:
        notes.append(
            f"{omitted:,} events are omitted from the timelines; the longest of each track and time are drawn."
        )
    categories = {name: label for code, (name, label) in enumerate(COLORS) if code in used}
    return ComparedTimelines("\n".join(elements), {**dict(CHANGE_COLORS), **categories}, ranks, notes)


def _has_events(job: Job, rank: int) -> bool:
    return rank in job and job[rank].rows("events") > 0


def _match_events(traces: Sequence[Trace], stepped: bool) -> Iterator[tuple[dict[int, int], list[Compared]]]:
    """Yield for each run the place of each event in a list, and the list of `_compare`.

    The first run is compared with the second one, each further run with the first one.
    """
    if any(trace.rows("events") > MAX_MATCHED_EVENTS for trace in traces):
        yield from [({}, [])] * len(traces)
        return
    sides = measure_ranks(traces, stepped)
    for run, side in enumerate(sides):
        before, after = (sides[0], sides[1]) if run == 0 else (sides[0], side)
        keys = list(dict.fromkeys(side.keys.values()))
        number = {key: i for i, key in enumerate(keys)}
        places = {event: number[key] for event, key in side.keys.items()}
        yield places, [_compare(before, after, key) for key in keys]


def _compare(before: NodeTimes, after: NodeTimes, key: Key) -> Compared:
    """Return the times of a place in both runs, ns, -1 where it is absent, and whether they are of its operator.

    They are for an activity of one run only, if both runs have the operator that launched it.
    """
    caller: Key = (key[0], None)
    is_common = key in before.times and key in after.times
    of_caller = not is_common and caller in before.times and caller in after.times
    if of_caller:
        key = caller
    return round(before.times.get(key, -1)), round(after.times.get(key, -1)), of_caller
