"""Share of events linked across the rank's traces, and why the rest could not be linked.

One row per subject (host operators, kernels, collectives, ...) and method of linking: the number of events, how many
are linked and unlinked, the share in percent, and a note. Host operators can only be paired if both an execution trace
and a profiler trace were read.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import conform_columns, require_linked
from etloom.core.trace import Trace
from etloom.linker.quality import summarize_links

SCOPE = "rank"
COLUMNS = {
    "subject": pl.String,
    "how": pl.String,
    "total": pl.Int64,
    "linked": pl.Int64,
    "unlinked": pl.Int64,
    "share_pct": pl.Float64,
    "note": pl.String,
}


def analyze(trace: Trace) -> pl.DataFrame:
    require_linked(trace)
    return conform_columns(summarize_links(trace), COLUMNS)
