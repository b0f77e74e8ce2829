"""Replays and captures of device graphs as sequences of kernels: rows, order and codes of kernel names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories, names
from etloom.core.arrays import match_text, rows_of_ids, to_array
from etloom.core.categories import CAPTURED_CALL, CAPTURED_GRAPH, CAPTURED_OPERATOR
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.trace import Trace
from etloom.linker.device_graphs.captures import API_CALL

Rows = NDArray[np.int64]

_MEMORY_CODES = {"memcpy": -3, "memset": -4}
_MEMORY_NAMES = {
    "memcpy": r"^(?:(?:cuda|cu|hip)\w*)?Memcpy|^Copy(?:Host|Device)To|rocclr_copyBuffer",
    "memset": r"^(?:(?:cuda|cu|hip)\w*)?Memset|^FillBuffer|rocclr_fillBuffer",
}


@dataclass(frozen=True)
class Replays:
    """The GPU activities of all graph replays of a trace, grouped by replay in order of launch.

    Attributes:
        launch: Row in events of the call that launched each replay.
        pairs: Rows of `launches` of all replays, those of one replay together and in order of its nodes.
        bounds: Replay i has pairs[bounds[i]:bounds[i + 1]].
        codes: Code of the kernel name of each of ``pairs``.
    """

    launch: Rows
    pairs: Rows
    bounds: Rows
    codes: Codes


@dataclass(frozen=True)
class Capture:
    """A captured graph: its name, batch size, calls in order, and the operator and kernel name of each call.

    Attributes:
        row: Row in events of its `captured_graph`.
        name: Its name.
        tokens: Batch size that its name states.
        calls: Rows in events of its calls, in order.
        operators: Row of the operator around each call, or -1.
        codes: Code of the kernel name of each call; `UNKNOWN` where the capture does not state it.
    """

    row: int
    name: str
    tokens: int | None
    calls: Rows
    operators: Rows
    codes: Codes


def list_replays(trace: Trace) -> Replays | None:
    """Return the graph replays of a trace with the table `launches`; None if there are none."""
    events, launches = trace.events, trace.launches
    call = rows_of_ids(events, launches["launch"])
    is_graph = categories.match_names(events, categories.GRAPH_LAUNCH)
    pairs = np.flatnonzero((call >= 0) & is_graph[call])
    if not pairs.size:
        return None
    device = rows_of_ids(events, launches["device_event"][pairs])
    pairs, device = pairs[device >= 0], device[device >= 0]
    order = np.lexsort((device, _node_order(trace, device), call[pairs]))
    pairs, device = pairs[order], device[order]
    launch, first = np.unique(call[pairs], return_index=True)
    return Replays(launch, pairs, np.append(first, pairs.size), encode_names(events)[device])


def list_captures(trace: Trace) -> list[Capture]:
    """Return the captured graphs of a trace, from its events of the category `captured_graph`."""
    events = trace.events
    graphs = np.flatnonzero(categories.mask_events(events, (CAPTURED_GRAPH,)))
    if not graphs.size:
        return []
    parent = rows_of_ids(events, events["parent"])
    calls = np.flatnonzero(categories.mask_events(events, (CAPTURED_CALL,)))
    calls = calls[~np.isin(calls, parent)]  # a driver call inside a runtime call is the node
    graph = find_nearest_ancestor(parent, categories.mask_events(events, (CAPTURED_GRAPH,)), calls)
    operators = find_nearest_ancestor(parent, categories.mask_events(events, (CAPTURED_OPERATOR,)), calls)
    codes = encode_names(events)
    captures = []
    for row in graphs.tolist():
        of_graph = graph == row
        name = str(events["name"][row])
        match = names.match_name("captures", name)
        captures.append(
            Capture(
                row,
                name,
                names.read_number(match, "tokens"),
                calls[of_graph],
                operators[of_graph],
                codes[calls[of_graph]],
            )
        )
    return captures


def encode_names(events: pl.DataFrame) -> Codes:
    """Return an integer code for the kernel name of each event.

    Equal for names that stand for the same graph node: all memcpys, all memsets.
    """
    codes = to_array(events["name"].to_physical(), UNKNOWN).astype(np.int64)
    calls = categories.mask_events(events, (CAPTURED_CALL,))
    unnamed = calls & match_text(events["name"], API_CALL)
    codes[unnamed] = UNKNOWN
    for kind, pattern in _MEMORY_NAMES.items():
        mask = match_text(events["name"], pattern)
        codes[mask] = _MEMORY_CODES[kind]
    return codes


def _node_order(trace: Trace, device: Rows) -> NDArray[np.int64]:
    """Return the sort key of GPU activities within a replay: the graph node id, or the start if ids are missing."""
    starts = to_array(trace.events["ts"], 0)[device]
    nodes = trace.kernels.select("graph_node_id", id="event").drop_nulls()
    if not nodes.height:
        return starts
    rows = rows_of_ids(nodes, trace.events["id"][device])
    return to_array(nodes["graph_node_id"], 0)[rows] if (rows >= 0).all() else starts


# Align the kernels of a graph replay with the calls of a capture by kernel name, where the alignment is certain.
#
# The alignment is a longest common subsequence within a band. Where kernels are missing, repeated or in another order,
# several longest ones may exist; a kernel is only aligned if all of them agree on its call, and near such a place, if
# no alternative with up to `MAX_ALTERNATIVE_EDITS` fewer matches disagrees.

Codes = NDArray[np.int64]

MIN_AGREEMENT = 0.9
"""Least share of the longer sequence that must match; below, the capture is of another graph."""
MAX_SUBSTITUTED = 0.01
"""Largest share of kernels that both sequences have and the other lacks, as with a capture of other shapes."""
MAX_ALTERNATIVE_EDITS = 2
NEIGHBORHOOD = 4
"""Kernels next to a difference that count as near."""
UNKNOWN = -1
"""Code of a call whose kernel is not known; it is not aligned by name."""
_NONE = np.int32(-(1 << 29))
_OUTSIDE = -2
"""Code of no kernel."""
_BATCH_CELLS = 1 << 21
"""Cells of the tables of the replays that are aligned together."""


def align_sequences(replays: NDArray[np.int64], capture: Codes) -> list[Codes | None]:
    """Align the kernels of replays with the calls of a capture; return each kernel's call, -1 if uncertain.

    A call is returned as its position in the capture.

    The replays are aligned together, since numpy works on the same row of all of them at once.

    Args:
        replays: Code of the name of each kernel; one row per replay, all of one length.
        capture: Code of the name of the kernel of each call.

    Returns:
        One item per replay; None if the sequences do not agree.
    """
    results: list[Codes | None] = [None] * len(replays)
    size = replays.shape[1]
    longer = max(size, capture.size)
    band = _choose_band(size, capture.size)
    if abs(size - capture.size) > band or not size:
        return results
    agreeing = [
        i for i, replay in enumerate(replays) if count_common(replay, capture) >= MIN_AGREEMENT * longer
    ]
    batch = max(1, _BATCH_CELLS // count_cells(size, capture.size))
    for first in range(0, len(agreeing), batch):
        rows = agreeing[first : first + batch]
        for row, result in zip(rows, _align_batch(replays[rows], capture, band), strict=True):
            results[row] = result
    return results


def count_cells(size: int, capture_size: int) -> int:
    """Return the size in cells of the alignment table for one replay; the run time is proportional to it."""
    return (size + 1) * (2 * _choose_band(size, capture_size) + 1)


def _choose_band(size: int, capture_size: int) -> int:
    return int((1 - MIN_AGREEMENT) * max(size, capture_size)) + 1


def _align_batch(replays: NDArray[np.int64], capture: Codes, band: int) -> list[Codes | None]:
    """Align replays of equal length with a capture; return each kernel's call by replay, None if too few kernels match.

    The axes of the arrays are kernel, replay, and diagonal of the band.
    """
    size = replays.shape[1]
    longer = max(size, capture.size)
    before = _prefix_matches(replays, capture, band)
    # after[i, :, k] counts matches of what follows replay[:i] and capture[:j], on the same diagonals as ``before``.
    shift = capture.size - size
    reverse = _prefix_matches(replays[:, ::-1], capture[::-1], band + abs(shift))
    width = 2 * band + 1
    columns = shift - (np.arange(width) - band) + band + abs(shift)
    columns_ok = (columns >= 0) & (columns < reverse.shape[2])
    after = np.where(columns_ok, reverse[::-1][:, :, np.clip(columns, 0, reverse.shape[2] - 1)], _NONE)
    best = before[-1, :, shift + band]
    at = np.arange(size)[:, None] + np.arange(width) - band
    inside = (at >= 0) & (at < capture.size)
    calls = np.where(inside, capture[np.clip(at, 0, max(capture.size - 1, 0))], _OUTSIDE)
    matched = np.where(replays.T[:, :, None] == calls[:, None, :], before[:-1] + after[1:] + 1, _NONE)
    # Skipping a kernel keeps j, so it moves one diagonal down.
    skipped = (before[:-1, :, 1:] + after[1:, :, :-1]).max(axis=2)
    certain = ((matched == best[:, None]).sum(axis=2) == 1) & (skipped < best)
    close = (matched >= best[:, None] - MAX_ALTERNATIVE_EDITS).sum(axis=2) > 1
    place = matched.argmax(axis=2)
    results: list[Codes | None] = []
    for i, matches in enumerate(best.tolist()):
        if matches < MIN_AGREEMENT * longer or min(size, capture.size) - matches > MAX_SUBSTITUTED * longer:
            results.append(None)
            continue
        position = np.where(certain[:, i], at[np.arange(size), place[:, i]], -1)
        results.append(np.where(close[:, i] & _near_difference(position, capture.size), -1, position))
    return results


def _prefix_matches(firsts: NDArray[np.int64], second: Codes, band: int) -> NDArray[np.int32]:
    """Return the longest common subsequence length of firsts[b, :i] and second[:i + k - band] at [i, b, k]."""
    width = 2 * band + 1
    diagonal = np.arange(width) - band
    count, size = firsts.shape
    matches = np.full((size + 1, count, width), _NONE, np.int32)
    matches[0][:, (diagonal >= 0) & (diagonal <= second.size)] = 0
    padded = np.concatenate([np.full(band + 1, _OUTSIDE), second, np.full(band + size + 1, _OUTSIDE)])
    columns_end = second.size + band
    for i, codes in enumerate(firsts.T, 1):
        row = matches[i]
        np.add(matches[i - 1], padded[i : i + width] == codes[:, None], out=row)
        np.maximum(row[:, :-1], matches[i - 1][:, 1:], out=row[:, :-1])
        np.maximum.accumulate(row, axis=1, out=row)
        # Only columns with 0 <= j <= second.size exist.
        first_column, end = max(0, band - i), max(0, min(width, columns_end - i + 1))
        row[:, :first_column] = _NONE
        row[:, end:] = _NONE
        if first_column < end and first_column == band - i:
            np.maximum(row[:, first_column], 0, out=row[:, first_column])
    return matches


def count_common(first: Codes, second: Codes) -> int:
    """Return the number of codes that two sequences share regardless of order, an upper bound of aligned matches."""
    size = int(max(first.max(initial=0), second.max(initial=0))) + 1
    counts = [np.bincount(codes[codes >= 0], minlength=size) for codes in (first, second)]
    return int(np.minimum(*counts).sum())


def _near_difference(position: Codes, size: int) -> NDArray[np.bool_]:
    """Return a mask of the kernels at most `NEIGHBORHOOD` kernels away from a difference between replay and capture."""
    follows = np.concatenate([[-1], position, [size]])
    breaks = np.diff(follows) != 1
    different = (position < 0) | breaks[:-1] | breaks[1:]
    near = np.convolve(different, np.ones(2 * NEIGHBORHOOD + 1), mode="same") > 0
    mask: NDArray[np.bool_] = near[: position.size]
    return mask
