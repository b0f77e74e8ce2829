"""Device work with the call that launched it and the operator around that call."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.activity import device_work, of_rank
from etloom.errors import AnalysisError
from etloom.stacks import row_of, taken
from etloom.trace import Trace

Rows = NDArray[np.int64]


def launched(trace: Trace, *columns: str) -> pl.DataFrame:
    """Device work by start, with these columns: of events; kind, end; and of its launch call, null where that lies
    outside the trace: launch (id), api, launch_ts, launch_end, operator (id).

    Raises AnalysisError for a trace without device work, and for one that is not linked.
    """
    if not trace.meta.get("linked"):
        raise AnalysisError(
            "the trace is not linked", where=of_rank(trace), remedy="etloom.link(trace), or etloom.open"
        )
    own = {*columns, "ts", "dur"} & {*trace.events.columns, "kind"}
    work = device_work(trace, *own)
    if not work.height:
        raise AnalysisError(
            "the trace holds no device work",
            where=of_rank(trace),
            remedy="record it with the profiler's CUDA activity",
        )
    pair, call = trace.once(_calls)
    said = taken(trace.events.select("name", "ts", "dur"), call)
    found = {
        "launch": lambda: taken(trace.launches["launch"], pair),
        "operator": lambda: taken(trace.launches["operator"], pair),
        "api": lambda: said["name"],
        "launch_ts": lambda: said["ts"],
        "launch_end": lambda: said["ts"] + said["dur"].fill_null(0),
        "end": lambda: work["ts"] + work["dur"],
    }
    table = pl.DataFrame({name: found[name]() if name in found else work[name] for name in columns})
    return table if work["ts"].is_sorted() else table[np.argsort(work["ts"].to_numpy(), kind="stable")]


def _calls(trace: Trace) -> tuple[Rows, Rows]:
    """Of each piece of device work the row of launches that tells its launch, the first of several, and the row of
    events of the call; -1 where the call lies outside the trace."""
    work, launches = device_work(trace, "id"), trace.launches
    pair = np.full(work.height, -1, dtype=np.int64)
    of = row_of(work, launches["device_event"])
    told = np.flatnonzero(of >= 0)[::-1]
    pair[of[told]] = told
    call = row_of(trace.events, taken(launches["launch"], pair))
    pair[call < 0] = -1
    return pair, call
