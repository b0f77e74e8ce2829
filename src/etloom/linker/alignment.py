"""Align operators of an execution trace with profiler events by name and order, if no recorded id pairs them.

Ids are missing in traces recorded before 2023, and have no counterpart if the two tracers recorded different
iterations. Each thread of the execution trace is then searched in the profiler's threads, as one window of
consecutive operators:

1. position: the number of equal names at every offset of one sequence in the other, by a correlation of random signs;
2. extent: a shortest edit path from there (`etloom._native.edit_path`) gives the pairs of the window;
3. choice: windows that follow each other are iterations. The longest thread selects the iteration. Of every other
   thread, the window is taken that starts where the order of the nodes puts it.

score = pairs of one name and one depth / the longer of both sequences, over all threads. Correct pairs of recordings
reach 0.997, wrong ones at most 0.63 (docs/decisions/0012). Ranges of a backend (gloo:*) count on neither side: see
`backend_ranges`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from etloom._native import edit_path
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids, to_array
from etloom.linker.id_join import encode_names, is_linkable

MIN_SCORE = 0.9
"""Least score of an iteration that is linked."""

_MAX_START_SHIFT = 64  # the window may start this far from where the correlation puts it
_MAX_EDIT_SHARE = 0.25  # of a stretch; beyond it the window is given up
_MAX_EXACT_LENGTH = 64  # sequences up to this length are compared at every offset, which is exact
_NEIGHBOR_WINDOWS = 2  # windows before and after an iteration that may belong to it
_MAX_WINDOWS = 8  # tried of one thread, for every time that it fits into a track


@dataclass(frozen=True, eq=False)
class OperatorSequence:
    """The operators of one thread by start time: codes of their names, depths, and table rows."""

    key: int
    codes: np.ndarray
    depths: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Window:
    """A range of operators on a profiler thread that matches an execution-trace thread, with the paired rows."""

    track: int
    node: np.ndarray
    event: np.ndarray
    longer: int
    start: int  # time of the first paired event, ns
    diagonal: int  # how much further the track was than the thread, mostly

    @property
    def score(self) -> float:
        return len(self.node) / self.longer


@dataclass(eq=False)
class Iteration:
    """A position in the profile that matches the whole execution trace: one `Window` for each thread."""

    windows: list[Window] = field(default_factory=list)
    longer: int = 0

    @property
    def matched(self) -> int:
        return sum(len(window.node) for window in self.windows)

    @property
    def score(self) -> float:
        return self.matched / self.longer if self.longer else 0.0

    @property
    def node(self) -> np.ndarray:
        return np.concatenate([window.node for window in self.windows])

    @property
    def event(self) -> np.ndarray:
        return np.concatenate([window.event for window in self.windows])


def find_iterations(nodes: pl.DataFrame, events: pl.DataFrame) -> list[Iteration]:
    """Return the positions in the profile that match the execution trace, in order of time; includes poor matches."""
    node_codes, event_codes = encode_names(nodes, events)
    sequences = sorted(_node_sequences(nodes, node_codes), key=lambda thread: (-len(thread), thread.key))
    tracks = _event_sequences(events, event_codes)
    if not sequences or not tracks:
        return []
    starts = events["ts"].to_numpy()
    total = sum(len(thread) for thread in sequences)
    windows_by_thread: dict[int, list[Window]] = {}
    used: set[int] = set()
    for thread in sequences:
        offers = {
            track.key: _find_windows(thread, track, starts) for track in tracks if track.key not in used
        }
        best = max(
            (key for key, windows in offers.items() if windows),
            key=lambda key: max(len(window.node) for window in offers[key]),
            default=None,
        )
        if best is not None:
            used.add(best)
            windows_by_thread[thread.key] = offers[best]
    if not windows_by_thread:
        return []
    good = {key: _keep_nearly_best(windows) for key, windows in windows_by_thread.items()}
    long = [
        thread
        for thread in sequences
        if thread.key in windows_by_thread and 2 * len(thread) >= len(sequences[0])
    ]
    long = long or [thread for thread in sequences if thread.key in windows_by_thread]
    anchor = min(long, key=lambda thread: len(good[thread.key]))
    iterations = []
    for window in good[anchor.key]:
        iteration = Iteration([window], longer=total + window.longer - len(anchor))
        for thread in sequences:
            if thread.key in windows_by_thread and thread is not anchor:
                other = _choose_window(good[thread.key], window, starts)
                iteration.windows.append(other)
                iteration.longer += other.longer - len(thread)
        iterations.append(iteration)
    return iterations


def drop_overlapping(iterations: list[Iteration]) -> list[Iteration]:
    """Remove iterations that overlap a better match, and return the remaining ones by time."""
    selected: list[tuple[int, int, Iteration]] = []
    for iteration in sorted(iterations, key=lambda iteration: -iteration.matched):
        first, last = iteration.windows[0].event[[0, -1]].tolist()
        at = bisect_left(selected, first, key=lambda other: other[0])
        neighbors = selected[max(0, at - 1) : at + 1]
        if all(min(last, end) - max(first, begin) < 0.1 * (last - first) for begin, end, _ in neighbors):
            selected.insert(at, (first, last, iteration))
    return [iteration for _, _, iteration in selected]


def measure_resemblance(nodes: pl.DataFrame, events: pl.DataFrame) -> tuple[int, int]:
    """Count the operators of the longest execution-trace thread: those that match a profiler thread in order, and all.

    The longest thread of the execution trace is compared with every profiler thread at every offset; the maximum
    counts.
    """
    node_codes, event_codes = encode_names(nodes, events)
    thread = max(_node_sequences(nodes, node_codes), key=len, default=None)
    tracks = _event_sequences(events, event_codes)
    if thread is None or not tracks:
        return 0, 0 if thread is None else len(thread)
    return max(int(_count_agreements(thread.codes, track.codes).max()) for track in tracks), len(thread)


def _node_sequences(nodes: pl.DataFrame, codes: np.ndarray) -> list[OperatorSequence]:
    able = is_linkable(nodes) & ~find_backend_ranges(nodes)
    depths = _compute_depths(rows_of_ids(nodes, nodes["parent"]))
    tids = to_array(nodes["tid"], -1)
    return [
        OperatorSequence(int(tid), codes[rows], depths[rows], rows)
        for tid in np.unique(tids[able])
        for rows in [np.flatnonzero(able & (tids == tid))]
    ]


def _event_sequences(events: pl.DataFrame, codes: np.ndarray) -> list[OperatorSequence]:
    """Return the operators and annotations of each profiler thread, with depths that ignore other events.

    An execution trace does not contain other events either.
    """
    at = nesting.nest_events(events, nesting.RECORD_FUNCTION_CATEGORIES)
    rows = np.concatenate([at.entered, np.setdiff1d(at.detached, at.entered)])
    rows = rows[~find_backend_ranges(events)[rows]]
    rows = rows[np.argsort(events["ts"].to_numpy()[rows], kind="stable")]
    tracks = nesting.track_codes(events)[rows]
    order = np.argsort(tracks, kind="stable")
    edges = np.flatnonzero(np.diff(tracks[order])) + 1
    return [
        OperatorSequence(
            int(tracks[part[0]]), codes[rows[part]], at.depth[rows[part]].astype(np.int64), rows[part]
        )
        for part in np.split(order, edges)
        if part.size
    ]


def _compute_depths(parent: np.ndarray) -> np.ndarray:
    """Return the number of ancestors of each row, from the row of its parent (-1 or the row itself for a root)."""
    above = np.append(np.where(parent == np.arange(len(parent)), -1, parent), -1)
    depth = (above >= 0).astype(np.int64)
    while (above >= 0).any():
        depth += depth[above]
        above = above[above]
    return depth[:-1]


def _find_windows(thread: OperatorSequence, track: OperatorSequence, starts: np.ndarray) -> list[Window]:
    """Return the windows (ranges) of a profiler thread that contain most operators of an execution-trace thread.

    They may overlap.
    """
    size = max(int(thread.codes.max()), int(track.codes.max())) + 2
    common = np.minimum(
        np.bincount(thread.codes + 1, minlength=size), np.bincount(track.codes + 1, minlength=size)
    ).sum()
    if 2 * common < len(thread):
        return []
    windows = []
    for offset in _find_offsets(thread.codes, track.codes):
        i, j = edit_path(
            thread.codes, track.codes, int(offset), _same_place_distance(thread.codes), _MAX_EDIT_SHARE
        )
        if not i.size:
            continue
        longer = max(len(thread), int(j[-1] - j[0]) + 1)
        inside = thread.depths[i] - track.depths[j]
        level = np.bincount(inside - inside.min()).argmax() + inside.min()
        # An operator that one side lacks moves those inside it by one.
        same = (np.abs(inside - level) <= 1) | (track.depths[j] < 0)
        i, j = i[same], j[same]
        start, diagonal = int(starts[track.rows[j[0]]]), int(np.median(j - i))
        windows.append(Window(track.key, thread.rows[i], track.rows[j], longer, start, diagonal))
    return _keep_best_per_diagonal(windows, _same_place_distance(thread.codes))


def _keep_nearly_best(windows: list[Window]) -> list[Window]:
    most = max(len(window.node) for window in windows)
    return sorted(
        (window for window in windows if len(window.node) >= MIN_SCORE * most),
        key=lambda window: window.start,
    )


def _keep_best_per_diagonal(windows: list[Window], near: int) -> list[Window]:
    """Remove windows (matched ranges of operators) that are at nearly the same offset as a better match.

    Where operators are missing, two offsets lead to one position.
    """
    best: list[Window] = []
    for window in sorted(windows, key=lambda window: window.diagonal):
        if not best or window.diagonal - best[-1].diagonal > near:
            best.append(window)
        elif len(window.node) > len(best[-1].node):
            best[-1] = window
    return best


def _find_offsets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the offsets of sequence ``a`` in ``b`` at which locally the most operator names are equal, best first.

    A repetitive sequence also matches when shifted by its period; the other threads decide which shift is correct.
    So all such offsets are returned, up to a number that keeps the time linear.
    """
    n, near = len(a), _same_place_distance(a)
    equal = _count_agreements(a, b)
    blocks = -(-len(equal) // near)
    padded = np.pad(equal, (0, blocks * near - len(equal)), constant_values=-1).reshape(blocks, near)
    peaks = padded.argmax(axis=1) + near * np.arange(blocks)
    heights = equal[peaks]
    around = np.pad(heights, 1, constant_values=-1)
    is_separate = np.pad(np.diff(peaks), 1, constant_values=near) >= near
    is_peak = (is_separate[:-1] | (heights >= around[:-2])) & (is_separate[1:] | (heights > around[2:]))
    is_peak &= heights >= 0.5 * heights.max()
    peaks, heights = peaks[is_peak], heights[is_peak]
    most = _MAX_WINDOWS * (1 + len(b) // n)
    offsets: np.ndarray = peaks[np.argsort(-heights, kind="stable")[:most]] - (n - 1)
    return offsets


def _same_place_distance(codes: np.ndarray) -> int:
    """Return the difference of two offsets, in operators, up to which they count as the same position."""
    return max(1, min(_MAX_START_SHIFT, len(codes) // 2))


def _count_agreements(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the number of equal names at each offset of sequence a in b, from 1 - len(a) to len(b) - 1.

    Exact if a is short, otherwise approximate: each name gets a random sign. The product of two signs is 1 for equal
    names and 0 on average for others, so the correlation counts equal names with an error of about the square root of
    len(a).
    """
    n, m = len(a), len(b)
    if n <= _MAX_EXACT_LENGTH:
        counts = np.zeros(n + m - 1, np.int64)
        for at, code in enumerate(a):
            counts[n - 1 - at : n - 1 - at + m] += b == code
        return counts
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=max(a.max(), b.max()) + 2)
    size = 1 << (n + m - 2).bit_length()
    product = np.fft.rfft(signs[a[::-1] + 1], size) * np.fft.rfft(signs[b + 1], size)
    correlation: np.ndarray = np.rint(np.fft.irfft(product, size)[: n + m - 1])
    return correlation


def _choose_window(windows: list[Window], anchor: Window, starts: np.ndarray) -> Window:
    """Return the window (range of operators) of another thread that fits best to an iteration's nearby anchor window.

    Node ids give the order in which the operators of all threads began, so in the correct window each operator is
    preceded by as many operators of the anchor as in the execution trace. Of several such windows the nearest is
    chosen.

    Args:
        windows: Windows in order of time.
        anchor: The window of the thread that defines the iteration.
        starts: Start of each event, ns.
    """

    def misplaced(window: Window) -> tuple[int, int]:
        by_node = np.searchsorted(anchor.node, window.node)
        by_time = np.searchsorted(starts[anchor.event], starts[window.event])
        return int(np.abs(by_node - by_time).sum()), abs(window.start - anchor.start)

    at = bisect_left(windows, anchor.start, key=lambda window: window.start)
    return min(windows[max(0, at - _NEIGHBOR_WINDOWS) : at + _NEIGHBOR_WINDOWS], key=misplaced)


# Pair the ranges of a communication backend (gloo:all_reduce) in both traces by the operators around their start.
#
# Such a range begins on the caller's thread and often ends on a worker's. One of the two traces may list it on a thread
# where the other one does not, so alignment ignores these ranges, and each is searched here between the events of the
# operators that began before and after it on its thread.


def find_backend_ranges(table: pl.DataFrame) -> np.ndarray:
    """Return a mask of the rows that are ranges of a communication backend (such as gloo:all_reduce).

    ``table``: nodes or events.
    """
    return categories.match_names(table, categories.BACKEND_RANGE)


def pair_backend_ranges(
    nodes: pl.DataFrame, events: pl.DataFrame, node: np.ndarray, event: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pair backend ranges (gloo:*) of the execution trace with those of the profile; return the rows of both.

    ``node`` and ``event`` are the rows of the operators that are paired already.

    Ranges of one name between the starts of the same two operators of their thread are paired in order. A range
    before the first operator, or after all have ended, is not paired.
    """
    range_nodes = np.flatnonzero(find_backend_ranges(nodes))
    offered = np.flatnonzero(
        find_backend_ranges(events) & categories.mask_events(events, nesting.RECORD_FUNCTION_CATEGORIES)
    )
    tids, starts = arrays.to_array(nodes["tid"], -1), events["ts"].to_numpy()
    ends = starts + arrays.to_array(events["dur"], 0)
    pairs: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for tid in np.unique(tids[range_nodes]):
        pair_rows = np.flatnonzero(tids[node] == tid)
        pair_rows = pair_rows[np.argsort(node[pair_rows], kind="stable")]
        if not pair_rows.size:
            continue
        rows = range_nodes[tids[range_nodes] == tid]
        near = offered[starts[offered] <= ends[event[pair_rows]].max()]
        sides = [
            pl.DataFrame({"row": side, "name": table["name"][side].cast(pl.String), "place": place})
            .filter(pl.col("place") > 0)
            .with_columns(pl.int_range(pl.len()).over("name", "place").alias("number"))
            for table, side, place in (
                (nodes, rows, np.searchsorted(node[pair_rows], rows)),
                (events, near, np.searchsorted(starts[event[pair_rows]], starts[near], side="right")),
            )
        ]
        both = sides[0].join(sides[1], on=["name", "place", "number"], maintain_order="left")
        pairs.append((both["row"].to_numpy(), both["row_right"].to_numpy()))
        offered = np.setdiff1d(offered, pairs[-1][1])
    return np.concatenate([node_rows for node_rows, _ in pairs]), np.concatenate(
        [event_rows for _, event_rows in pairs]
    )
