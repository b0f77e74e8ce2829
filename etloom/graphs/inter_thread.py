"""Threads that work in turns: one rests exactly while another, until then at rest, works."""

from __future__ import annotations

import numpy as np

from etloom.graphs.algorithms import EdgeKind, Int64Array
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.host_threads import HostThreads

MIN_REST_NS = 50_000
"""A shorter rest is not taken for a wait."""

_BACKWARD = r"^autograd::engine::evaluate_function"


def find_rests(built: HostThreads, still: Mask) -> Int64Array:
    """The places at which a rest of more than REST_NS ends. Asked before any piece is taken for a wait."""
    places = np.flatnonzero(still)
    return places[built.time[places] - built.time[places - 1] > MIN_REST_NS]


def add_inter_thread_edges(
    draft: GraphDraft, events: EventArrays, built: HostThreads, still: Mask, gaps: Int64Array
) -> int:
    """Add the edges between threads that work in turns, and turn their rests into waits; returns how many.

    Thread M rests from a to b. Thread B has points in that time and was at rest before the first of them, f; so
    f waited for a. If B is at rest after its last point until b as well, or is the autograd engine's, which
    reports back from inside an operator, b waited for that last point.
    """
    n = len(built.time)
    first = np.flatnonzero(built.owner == -2)
    bounds = np.append(first, n)
    pids = events.pid[built.row[first]]
    backward = events.names.like(_BACKWARD)[built.row]
    # After the last point of a thread it is at rest.
    after = np.append(still[1:] | (built.owner[1:] == -2), True)
    before = still | (built.owner == -2)
    found = []
    for m in range(len(first)):
        own = gaps[(gaps >= bounds[m]) & (gaps < bounds[m + 1])]
        for b in range(len(first)):
            if b == m or pids[b] != pids[m] or not own.size:
                continue
            low, high = bounds[b], bounds[b + 1]
            times = built.time[low:high]
            f = low + np.searchsorted(times, built.time[own - 1], side="left")
            last = low + np.searchsorted(times, built.time[own], side="right") - 1
            ok = f <= last
            ok[ok] = before[f[ok]] & (after[last[ok]] | backward[low:high].any())
            found.append((own[ok], f[ok], last[ok]))
    if not found:
        return 0
    gap, f, last = (np.concatenate(part) for part in zip(*found, strict=True))
    built.waits(np.unique(np.concatenate([gap, f[built.owner[f] != -2]])), 0)
    pairs = np.concatenate([np.stack([gap - 1, f]), np.stack([last, gap])], axis=1)
    kind = np.repeat([EdgeKind.HANDOFF, EdgeKind.RETURN], len(gap))
    # Seen from both threads it is the same pair: as the thread that began first sees it.
    pairs, chosen = np.unique(pairs, axis=1, return_index=True)
    draft.edges(kind[chosen], built.base + pairs[0], built.base + pairs[1], 0)
    return len(gap)
