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

from etloom.analyses._activity import answer, check_step, percent, steps
from etloom.analyses._queue import LANE, series
from etloom.errors import AnalysisError
from etloom.stacks import grouped, lane_codes
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


def analyze(trace: Trace, *, limit: int = 1024, step: int | None = None) -> pl.DataFrame:
    if limit < 1:
        raise AnalysisError(f"a queue of {limit} blocks nothing", remedy="limit is 1 or more")
    changes = series(trace)
    check_step(trace, step)
    marked = steps(trace)
    if step is not None:
        marked = marked.filter(pl.col("step") == step)
    times, lengths = changes["ts"].to_numpy(), changes["queue_length"].to_numpy()
    rows = []
    for lane in grouped(lane_codes(changes, LANE)):
        time, length = times[lane], lengths[lane]
        device, stream = changes.select(LANE).row(int(lane[0]))
        whole = [] if step is not None else [(None, int(time[0]), int(time[-1]))]
        for number, start, end in (*marked.iter_rows(), *whole):
            rows.append((number, device, stream, *_weighted(time, length, start, end, limit)))
    table = pl.DataFrame(
        rows,
        schema={
            **dict.fromkeys(("step", *LANE, "span_ns"), pl.Int64),
            "mean": pl.Float64,
            **dict.fromkeys(("median", "p95", "max", "empty_ns", "blocked_ns"), pl.Int64),
        },
        orient="row",
    )
    table = table.filter(pl.col("max").is_not_null()).with_columns(
        percent("empty_ns", "span_ns"), percent("blocked_ns", "span_ns")
    )
    return answer(table, COLUMNS).sort("step", *LANE, nulls_last=True)


def _weighted(
    time: np.ndarray, length: np.ndarray, start: int, end: int, limit: int
) -> tuple[int | float | None, ...]:
    """span, mean, median, p95, max, empty, blocked of a queue within [start, end); nulls where it has no time there."""
    first = max(int(np.searchsorted(time, start, side="right")) - 1, 0)
    last = int(np.searchsorted(time, end, side="left"))
    at = np.clip(np.append(time[first:last], min(end, int(time[-1]))), start, end)
    lasted, value = np.diff(at), length[first:last]
    value, lasted = value[lasted > 0], lasted[lasted > 0]
    span = int(lasted.sum())
    if not span:
        return (0, None, None, None, None, 0, 0)
    spent = np.bincount(value, lasted).astype(np.int64)  # ns at each length
    until = np.cumsum(spent)
    return (
        span,
        float(spent @ np.arange(spent.size) / span),
        *(int(np.searchsorted(until, q * span)) for q in (0.5, 0.95)),
        spent.size - 1,
        int(spent[0]),
        int(spent[limit:].sum()),
    )
