"""Memory of PyTorch's caching allocator over time: reserved, in use and requested bytes, and fragmentation.

The requests of a memory snapshot are run through a simulation of the allocator, with the recorded settings. Rows are
moments: the peaks, and others evenly among the requests and frees.

- reserved_bytes: taken from the driver (torch.cuda.memory_reserved). allocated_bytes: blocks in use
  (memory_allocated), rounded up from requested_bytes, what the program asked for.
- free_bytes: reserved, but not in use. releasable_bytes of these could go back to the driver (empty_cache).
  split_bytes could not, because live blocks share their segments: only requests that fit into the gaps can use them.
  `etloom analyze memory-holders` names these blocks.
- event: peak_reserved, peak_allocated, peak_split, end, or null.

Units: B, ns.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.core.errors import InvalidValue
from etloom.core.trace import Trace
from etloom.timeline.memory.program import find_programs

SCOPE = "rank"
COLUMNS = {
    "device": pl.Int64,
    "operation": pl.Int64,
    "after_ns": pl.Int64,
    "event": pl.String,
    "reserved_bytes": pl.Int64,
    "allocated_bytes": pl.Int64,
    "requested_bytes": pl.Int64,
    "free_bytes": pl.Int64,
    "releasable_bytes": pl.Int64,
    "split_bytes": pl.Int64,
}


def analyze(trace: Trace, *, rows: Annotated[int, "Number of rows, besides the peaks."] = 20) -> pl.DataFrame:
    if rows < 0:
        raise InvalidValue(f"expected a number of rows, got {rows}", option="rows")
    tables = []
    for program in find_programs(trace):
        simulation = program.run()
        free = simulation.reserved - simulation.allocated
        split = free - simulation.releasable
        last = len(free) - 1
        names = {
            last: "end",
            int(split.argmax()): "peak_split",
            int(simulation.allocated.argmax()): "peak_allocated",
            simulation.reserved_peak: "peak_reserved",
        }
        at = np.union1d(np.linspace(0, last, rows).round().astype(np.int64), list(names))
        tables.append(
            pl.DataFrame(
                {
                    "device": np.full(len(at), program.device),
                    "operation": at,
                    "after_ns": program.time[at] - program.time.min(),
                    "event": [names.get(operation) for operation in at.tolist()],
                    "reserved_bytes": simulation.reserved[at],
                    "allocated_bytes": simulation.allocated[at],
                    "requested_bytes": simulation.requested[at],
                    "free_bytes": free[at],
                    "releasable_bytes": simulation.releasable[at],
                    "split_bytes": split[at],
                },
                schema_overrides={"event": pl.String},
            )
        )
    return conform_columns(pl.concat(tables), COLUMNS)
