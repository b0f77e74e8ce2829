"""Who holds the memory of a device at the peak, by line, module, operator or kind, and which free bytes they split.

A row per place, most bytes first, from a memory snapshot. The place of a block is where its request was recorded: the
innermost Python line outside of torch (by line), the innermost module or forward with its file, outside of modules the
function (by module), or the operator or backward node (by operator, if C++ frames were recorded). By kind it is what
the memory is for: parameters, gradients, optimizer, activations, buffers, communication or workspaces in a forecast of
etloom collect --fake-world, otherwise what the program set with torch.cuda.memory._set_memory_metadata. Blocks without
a stack are "allocated before the recording".

- requested_bytes: as the program asked for. bytes: of the allocator's blocks. pct: of all blocks in use.
- split_bytes: free bytes that cannot go back to the driver because of these blocks; those of a segment are shared
  equally by the blocks in use in it.

Units: B, percent.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.live_blocks import describe_blocks, sum_holders
from etloom.core.errors import UnknownName
from etloom.core.trace import Trace
from etloom.timeline.memory.program import PLACES, find_programs, parse_moment

SCOPE = "rank"
COLUMNS = {
    "device": pl.Int64,
    "place": pl.String,
    "blocks": pl.Int64,
    "requested_bytes": pl.Int64,
    "bytes": pl.Int64,
    "pct": pl.Float64,
    "split_bytes": pl.Int64,
}


def analyze(
    trace: Trace,
    *,
    by: Annotated[str, "line, module, operator or kind."] = "line",
    at: Annotated[
        str,
        "peak (most bytes in use), reserved-peak, end, oom (the first request that failed), or a time after the first "
        "entry, such as 1.5s.",
    ] = "peak",
    top: Annotated[int, "Number of rows per device, largest first."] = 20,
) -> pl.DataFrame:
    if by not in (*PLACES, "kind"):
        raise UnknownName("place", by, [*PLACES, "kind"], option="by")
    parse_moment(at)  # before the trace is asked for its history
    tables = []
    for program in find_programs(trace):
        simulation = program.run(stop=program.find_operation(at))
        holders = sum_holders(describe_blocks(trace, program, simulation, by))
        share = 100 * pl.col("bytes") / pl.col("bytes").sum()
        tables.append(holders.with_columns(pct=share, device=pl.lit(program.device, pl.Int64)).head(top))
    return conform_columns(pl.concat(tables), COLUMNS)
