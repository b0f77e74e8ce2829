"""Launch queue length of each stream, weighted by time, and the time spent at the launch limit.

One row per stream and step, and (null step) in total: from its first launch to the start of its last activity, within
the step. mean, median, p95 and max are statistics of the queue length, weighted by how long each length lasted. empty
is the time in which nothing was queued; blocked the time in which at least ``limit`` launches were queued, where
another launch blocks the host. See `queue-length` for the time series.

Units: ns; percent of span; launches. Definitions: HolisticTraceAnalysis get_queue_length_summary, which weights by
number of changes instead of time, and get_time_spent_blocked_on_full_queue, which keeps only the last stream of a rank.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import polars as pl

from etloom.analyses.helpers import Step, check_step, conform_columns
from etloom.analyses.helpers.launch_queue import compute_queue_changes
from etloom.core.errors import InvalidValue
from etloom.core.nesting import order_by_track
from etloom.core.trace import Trace
from etloom.timeline.activity import find_steps

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "device": pl.Int64,
    "stream": pl.Int64,
    "span_ns": pl.Int64,
    "mean": pl.Float64,
    "median": pl.Int64,
    "p95": pl.Int64,
    "max": pl.Int64,
    "empty_ns": pl.Int64,
    "empty_pct": pl.Float64,
    "blocked_ns": pl.Int64,
    "blocked_pct": pl.Float64,
}
_TOTAL_STEP = pl.Series([None], dtype=pl.Int64)


def analyze(
    trace: Trace,
    *,
    limit: Annotated[
        int, "Number of launches that may be queued on a stream before the next one blocks."
    ] = 1024,
    step: Step = None,
) -> pl.DataFrame:
    if limit < 1:
        raise InvalidValue(
            f"expected a limit of at least 1, got {limit}", remedy="specify 1 or more", option="limit"
        )
    queues = compute_queue_changes(trace)
    check_step(trace, step)
    steps = find_steps(trace)
    if step is not None:
        steps = steps.filter(pl.col("step") == step)
    head = queues.head
    tail = np.append(head[1:], queues.time.size) - 1

    # One row per step, the last for the whole time; one column per stream.
    start, end = (np.repeat(steps[name].to_numpy()[:, None], head.size, axis=1) for name in ("start", "end"))
    number = steps["step"]
    if step is None:
        start, end = np.vstack((start, queues.time[head])), np.vstack((end, queues.time[tail]))
        number = pl.concat((number, _TOTAL_STEP))
    piece, count, lasted = _split_windows(queues.time, head, tail, start, end)
    nonempty = np.flatnonzero(count)
    weighted = _compute_weighted_stats(count[nonempty], queues.length[piece], lasted, limit)
    track = queues.track_columns(head[nonempty % head.size])
    return conform_columns({"step": number[nonempty // head.size], **track, **weighted}, COLUMNS)


def _split_windows(
    time: np.ndarray, head: np.ndarray, tail: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split time windows into intervals in which the launch queue length of a stream is constant.

    Args:
        time: Times of the changes of all streams.
        head, tail: First and last change of each stream.
        start, end: Windows [start, end), one column per stream.

    Returns:
        The change that begins each piece (a row of ``time``), the number of pieces per window, and the duration of each
        piece within its window.
    """
    first, last = np.empty_like(start), np.empty_like(start)
    for at, (low, high) in enumerate(zip(head, tail, strict=True)):
        stream_times = time[low : high + 1]
        first[:, at] = low + np.maximum(np.searchsorted(stream_times, start[:, at], side="right") - 1, 0)
        last[:, at] = low + np.searchsorted(stream_times[:-1], end[:, at])
    first, last, start, end = first.ravel(), last.ravel(), start.ravel(), end.ravel()
    count = np.where(start < end, np.maximum(last - first, 0), 0)
    begin = np.cumsum(count) - count
    piece = np.repeat(first - begin, count)
    piece += np.arange(piece.size)
    duration = np.diff(time, append=0)[piece]
    # Only the first piece of a window may begin before it, and only the last may end after it.
    nonempty = np.flatnonzero(count)
    duration[begin[nonempty]] -= np.maximum(start[nonempty] - time[first[nonempty]], 0)
    duration[(begin + count)[nonempty] - 1] -= np.maximum(time[last[nonempty]] - end[nonempty], 0)
    return piece, count, duration


def _compute_weighted_stats(
    count: np.ndarray, length: np.ndarray, duration: np.ndarray, limit: int
) -> dict[str, np.ndarray]:
    """Return statistics (see COLUMNS) of the launch queue length in each time window, weighted by time.

    Args:
        count: Number of pieces per window, at least one.
        length, duration: Queue length and duration of each piece.
        limit: Queue length from which on launches block.
    """
    window = np.repeat(np.arange(count.size, dtype=np.min_scalar_type(count.size)), count)
    order = order_by_track(length)
    order = order[order_by_track(window[order])]
    length, duration = length[order], duration[order]
    first = np.cumsum(count) - count
    span = np.add.reduceat(duration, first)
    until = np.cumsum(duration)
    before = until[first] - duration[first]
    median, p95 = (
        length[np.searchsorted(until, before + np.ceil(q * span).astype(np.int64))] for q in (0.5, 0.95)
    )
    empty, blocked = (np.add.reduceat(duration * mask, first) for mask in (length == 0, length >= limit))
    return {
        "span_ns": span,
        "mean": np.add.reduceat(length * duration, first) / span,
        "median": median,
        "p95": p95,
        "max": length[first + count - 1],
        "empty_ns": empty,
        "empty_pct": 100 * empty / span,
        "blocked_ns": blocked,
        "blocked_pct": 100 * blocked / span,
    }
