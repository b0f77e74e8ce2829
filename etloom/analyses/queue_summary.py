"""How long the queue of each stream was, weighted by time, and how long it stood at the launch limit.

A row is a stream in a step or (null step) in all: from its first launch to the start of its last work, within the
step. mean, median, p95 and max are of the queue's length over time: a length counts as long as it lasted. empty is
the time in which nothing waited, blocked the time in which at least ``limit`` launches did, where a further launch
stalls the host. See `queue-length` for the series.

limit: how many launches may wait on a stream before the next one blocks.

step: only the rows of this step.

Units: ns; percent of span; launches. Definitions: HolisticTraceAnalysis get_queue_length_summary, which weighs changes
instead of time, and get_time_spent_blocked_on_full_queue, which keeps only the last stream of a rank.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses._activity import answer, check_step, steps
from etloom.analyses._queue import LANE, series
from etloom.errors import AnalysisError
from etloom.stacks import by_lane, numbers
from etloom.trace import Trace

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
_IN_ALL = pl.Series([None], dtype=pl.Int64)


def analyze(trace: Trace, *, limit: int = 1024, step: int | None = None) -> pl.DataFrame:
    if limit < 1:
        raise AnalysisError(f"a queue of {limit} blocks nothing", remedy="limit is 1 or more")
    changes = series(trace)
    check_step(trace, step)
    marked = steps(trace)
    if step is not None:
        marked = marked.filter(pl.col("step") == step)
    time, length = changes["ts"].to_numpy(), changes["queue_length"].to_numpy()
    lanes = [numbers(changes[name], -1) for name in LANE]
    head = np.flatnonzero(np.append(True, np.logical_or.reduce([np.diff(lane) != 0 for lane in lanes])))
    tail = np.append(head[1:], time.size) - 1

    # A row is a step or, the last, all of the time; a column is a stream.
    start, end = (np.repeat(marked[name].to_numpy()[:, None], head.size, axis=1) for name in ("start", "end"))
    number = marked["step"]
    if step is None:
        start, end = np.vstack((start, time[head])), np.vstack((end, time[tail]))
        number = pl.concat((number, _IN_ALL))
    piece, window, lasted = _pieces(time, head, tail, start, end)
    there, weighted = _weighted(window, length[piece], lasted, limit)
    lane = {name: changes[name][head[there % head.size]] for name in LANE}
    table = pl.DataFrame({"step": number[there // head.size], **lane, **weighted})
    return answer(table, COLUMNS)


def _pieces(
    time: np.ndarray, head: np.ndarray, tail: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What lasted when: the change from which on (a row of ``time``), the window, and how long within it.

    The changes of a stream are from head to tail. A window [start, end) is of the stream of its column.
    """
    first, last = np.empty_like(start), np.empty_like(start)
    for at, (low, high) in enumerate(zip(head, tail, strict=True)):
        own = time[low : high + 1]
        first[:, at] = low + np.maximum(np.searchsorted(own, start[:, at], side="right") - 1, 0)
        last[:, at] = low + np.searchsorted(own, end[:, at])
    count = np.maximum(last - first, 0).ravel()
    window = np.repeat(np.arange(count.size), count)
    piece = np.arange(window.size) + np.repeat(first.ravel() - np.cumsum(count) + count, count)
    until = np.append(time[1:], 0)
    until[tail] = time[tail]
    lasted = np.minimum(until[piece], end.ravel()[window]) - np.maximum(time[piece], start.ravel()[window])
    some = lasted > 0
    return piece[some], window[some], lasted[some]


def _weighted(
    window: np.ndarray, length: np.ndarray, lasted: np.ndarray, limit: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The windows in which a queue had a length for some time, and what COLUMNS say of that."""
    order = by_lane(length)
    order = order[by_lane(window[order])]
    window, length, lasted = window[order], length[order], lasted[order]
    first = np.flatnonzero(np.diff(window, prepend=-1))
    count = np.diff(first, append=window.size)
    span = np.add.reduceat(lasted, first)
    until = np.cumsum(lasted)
    before = until[first] - lasted[first]
    median, p95 = (
        length[np.searchsorted(until, before + np.ceil(q * span).astype(np.int64))] for q in (0.5, 0.95)
    )
    empty, blocked = (np.add.reduceat(lasted * of, first) for of in (length == 0, length >= limit))
    return window[first], {
        "span_ns": span,
        "mean": np.add.reduceat(length * lasted, first) / span,
        "median": median,
        "p95": p95,
        "max": length[first + count - 1],
        "empty_ns": empty,
        "empty_pct": 100 * empty / span,
        "blocked_ns": blocked,
        "blocked_pct": 100 * blocked / span,
    }
