"""Align the kernels of a graph replay with the calls of a capture by kernel name, where the alignment is certain.

The alignment is a longest common subsequence within a band. Where kernels are missing, repeated or in another order,
several longest ones may exist; a kernel is only aligned if all of them agree on its call, and near such a place, if
no alternative with up to `MAX_ALTERNATIVE_EDITS` fewer matches disagrees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
