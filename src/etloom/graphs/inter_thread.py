"""Find threads that alternate (while one works, another pauses), and add the dependencies between them to the graph."""

from __future__ import annotations

import numpy as np

from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.graphs.host_threads import HostThreads

MIN_REST_NS = 50_000
"""A shorter rest does not count as a wait."""

_BACKWARD = r"^autograd::engine::evaluate_function"


def find_rests(threads: HostThreads, idle: Mask) -> Int64Array:
    """Return the indices of the thread points at which a pause of more than `MIN_REST_NS` ends.

    Call it before any segment is marked as a wait.
    """
    places = np.flatnonzero(idle)
    return places[threads.time[places] - threads.time[places - 1] > MIN_REST_NS]


def add_inter_thread_edges(
    draft: GraphDraft, events: EventArrays, threads: HostThreads, idle: Mask, rests: Int64Array
) -> int:
    """Add edges between threads that alternate, and mark their pauses as waits; return the number of pauses.

    Thread M rests from time a to b. Thread B has points in that time, and rested before the first of them, f: so f
    waited for a. If B also rests from its last point until b, or is a thread of the autograd engine, which reports back
    from inside an operator, then b waited for that last point.
    """
    n = len(threads.time)
    first = np.flatnonzero(threads.owner == -2)
    bounds = np.append(first, n)
    pids = events.pid[threads.row[first]]
    backward = events.names.match_regex(_BACKWARD)[threads.row]
    # A thread is at rest after its last point.
    after = np.append(idle[1:] | (threads.owner[1:] == -2), True)
    before = idle | (threads.owner == -2)
    handoffs = []
    for m in range(len(first)):
        thread_rests = rests[(rests >= bounds[m]) & (rests < bounds[m + 1])]
        for b in range(len(first)):
            if b == m or pids[b] != pids[m] or not thread_rests.size:
                continue
            low, high = bounds[b], bounds[b + 1]
            times = threads.time[low:high]
            f = low + np.searchsorted(times, threads.time[thread_rests - 1], side="left")
            last = low + np.searchsorted(times, threads.time[thread_rests], side="right") - 1
            ok = f <= last
            ok[ok] = before[f[ok]] & (after[last[ok]] | backward[low:high].any())
            handoffs.append((thread_rests[ok], f[ok], last[ok]))
    if not handoffs:
        return 0
    gap, f, last = (np.concatenate(part) for part in zip(*handoffs, strict=True))
    threads.mark_waits(np.unique(np.concatenate([gap, f[threads.owner[f] != -2]])), 0)
    pairs = np.concatenate([np.stack([gap - 1, f]), np.stack([last, gap])], axis=1)
    kind = np.repeat([EdgeKind.HANDOFF, EdgeKind.RETURN], len(gap))
    # Both threads yield the same pair; keep that of the thread that began first.
    pairs, indices = np.unique(pairs, axis=1, return_index=True)
    draft.add_edges(kind[indices], threads.base + pairs[0], threads.base + pairs[1], 0)
    return len(gap)
