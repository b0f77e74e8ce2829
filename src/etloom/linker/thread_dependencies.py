"""Infer dependencies between threads: of backward on forward operators, and of work after a pause."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom._native import number_pairs
from etloom.core import arrays, categories, nesting
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.linker.placement import get_ids


def add_thread_dependencies(trace: Trace, *, threshold_us: float = 1000) -> Trace:
    """Return the Trace with the table `thread_dependencies`: operators that continue another thread's work.

    Args:
        trace: A Trace with depths.
        threshold_us: Pause of a thread, in microseconds, after which its next operator is assumed to depend on
            another thread.
    """
    events = trace.events
    backward, forward, unknown = match_forward_operators(events)
    after_pause, before = find_operators_after_pauses(events, round(1000 * threshold_us))
    frames = [
        pl.DataFrame({"event": get_ids(events, event), "after": get_ids(events, after)}).with_columns(
            pl.lit(kind, dtype=pl.Categorical).alias("kind")
        )
        for kind, event, after in (("fwd_bwd", backward, forward), ("thread", after_pause, before))
    ]
    handoffs = TABLES["thread_dependencies"].conform(pl.concat(frames).sort("event", "kind"))
    return trace.replace(thread_dependencies=handoffs).with_stats(
        [
            Stat(
                "link.backward_without_forward",
                "info",
                unknown,
                "no earlier operator has that sequence number",
            )
        ]
    )


def match_forward_operators(events: pl.DataFrame) -> tuple[np.ndarray, np.ndarray, int]:
    """Pair backward with forward operators; return the rows of both, and the number of unmatched backward operators.

    A backward operator has the sequence number of its forward one and PyTorch's own number of its thread, which is
    matched to the thread that has most of its sequence numbers. Of several forward operators of one sequence number
    (a composite and its parts) the last to begin before is taken.
    """
    operators = categories.mask_events(events, categories.OPERATOR_CATEGORIES)
    numbered = operators & (arrays.to_array(events["seq_id"], -1) >= 0)
    backward = numbered & (arrays.to_array(events["fwd_tid"], 0) > 0)
    if not backward.any():
        none = np.zeros(0, np.int64)
        return none, none, 0
    ours, theirs = np.flatnonzero(backward), np.flatnonzero(numbered & ~backward)
    times, depths = arrays.to_array(events["ts"], 0), arrays.to_array(events["depth"], -1)
    numbers, threads = arrays.to_array(events["seq_id"], -1), arrays.to_array(events["fwd_tid"], 0)
    theirs = theirs[arrays.sort_rows(times[theirs], depths[theirs])]
    tracks = nesting.track_codes(events.select("pid", "tid"))
    track = _find_forward_tracks(threads[ours], numbers[ours], tracks[theirs], numbers[theirs])
    both = number_pairs(np.append(tracks[theirs], track), np.append(numbers[theirs], numbers[ours]))
    last = arrays.find_in_group(both[: theirs.size], times[theirs], both[theirs.size :], times[ours])
    matched = last >= 0
    return ours[matched], theirs[last[matched]], int(np.count_nonzero(~matched))


def _find_forward_tracks(
    threads: np.ndarray, numbers: np.ndarray, tracks: np.ndarray, track_numbers: np.ndarray
) -> np.ndarray:
    """Return the track that has most sequence numbers of each backward operator's forward thread, -1 for none.

    Args:
        threads: PyTorch's number of the forward thread of each backward operator.
        numbers: The sequence number of each backward operator.
        tracks: The track of each forward operator.
        track_numbers: The sequence number of each forward operator.
    """
    _, needed, _ = arrays.find_values(number_pairs(numbers, threads))
    _, offered, _ = arrays.find_values(number_pairs(track_numbers, tracks))
    backward, forward = arrays.pair_equal(numbers[needed], track_numbers[offered])
    thread, track = threads[needed[backward]], tracks[offered[forward]]
    _, firsts, counts = arrays.find_values(number_pairs(thread, track))
    thread, track = thread[firsts], track[firsts]
    best = np.lexsort((track, -counts, thread))
    distinct, first, _ = arrays.find_values(thread[best])
    place = np.minimum(np.searchsorted(distinct, threads), max(distinct.size - 1, 0))
    if not distinct.size:
        return np.full(threads.size, -1)
    return np.where(distinct[place] == threads, track[best][first][place], -1)


def find_operators_after_pauses(events: pl.DataFrame, threshold_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of operators that begin after a pause of their thread, and of the operators that they depend on.

    That is the operator of another thread of the process that ended last before; of several at once the outermost.
    The first operator of a thread counts as after a pause. An annotation runs nothing, so it may be open during a
    pause; it may also end one.
    """
    standing = categories.mask_events(events, nesting.RECORD_FUNCTION_CATEGORIES) & arrays.is_present(
        events["depth"]
    )
    rows = np.flatnonzero(standing)
    starts = events["ts"].to_numpy()[rows]
    runs = categories.mask_events(events, categories.OPERATOR_CATEGORIES)[rows]
    ends = starts + np.where(runs, arrays.to_array(events["dur"], 0)[rows], 0)
    threads = arrays.take_rows(events.select("pid", "tid"), rows)
    tracks = nesting.track_codes(threads)
    depths = events["depth"].to_numpy()[rows]
    pid_by_track = np.zeros(int(tracks.max(initial=-1)) + 1, np.int64)
    pid_by_track[tracks] = arrays.to_array(threads["pid"], 0)
    pairs: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    after_pause = _starts_after_pause(tracks, starts, ends, threshold_ns)
    for pid in arrays.find_values(pid_by_track)[0]:
        of_process = (pid_by_track == pid)[tracks]
        pauses, ran = np.flatnonzero(of_process & after_pause), np.flatnonzero(of_process & runs)
        if not ran.size:
            continue
        by_end = ran[arrays.sort_rows(ends[ran], -starts[ran], tracks[ran], -depths[ran])]
        track = tracks[by_end]
        last = np.searchsorted(ends[by_end], starts[pauses], side="right") - 1
        # The last entry of another thread: that before the run of entries of one thread.
        edges = np.flatnonzero(np.diff(track, prepend=-1))
        run_start = edges[np.searchsorted(edges, last, side="right") - 1]
        last = np.where((last >= 0) & (track[last] == tracks[pauses]), run_start - 1, last)
        ok = last >= 0
        pairs.append((rows[pauses[ok]], rows[by_end[last[ok]]]))
    after, before = (np.concatenate(part) for part in zip(*pairs, strict=True))
    order = np.argsort(after, kind="stable")
    return after[order], before[order]


def _starts_after_pause(
    tracks: np.ndarray, starts: np.ndarray, ends: np.ndarray, threshold_ns: int
) -> np.ndarray:
    """Return a mask of the operators that begin more than a threshold (ns) after their track became idle.

    Operators are sorted by start; a track is idle when all its earlier operators have ended.
    """
    pauses = np.zeros(len(tracks), bool)
    for part in nesting.group_by_track(tracks):
        open_until = np.maximum.accumulate(ends[part])
        pauses[part] = np.concatenate([[True], starts[part[1:]] - open_until[:-1] > threshold_ns])
    return pauses
