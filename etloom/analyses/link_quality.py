"""How completely the traces of the rank were woven together, and why what is loose is loose.

A row is a subject (host operators, kernels, collectives, ...) and how it was linked: how many there are,
how many are linked and not, the share in percent, and a note. A rank of which only one trace was read has
no operators to pair.
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
