"""Find decode iterations of an inference engine that run eagerly although others replay a device graph.

Decode iterations of an inference engine that run eagerly although others replay a device graph.

Cost: the idle time between their kernels.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, format_times
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import union

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.iterations.is_empty():
        return
    table = view.iterations.filter(pl.col("phase") == "decode")
    eager = table.filter(pl.col("launch") == "eager")
    if not eager.height or not (table["launch"] == "graph").any():
        return
    spans = eager.select("device_start", "device_end").rows()
    gaps = [view.busy.gaps(start, end) for start, end in spans]
    lost = union(gaps)
    if not lost.total:
        return
    i = max(range(len(gaps)), key=lambda number: gaps[number].total)
    requests = eager["requests"].drop_nulls().unique().sort().to_list()
    batches = f" (batches of {', '.join(map(str, requests[:8]))})" if requests else ""
    yield Finding(
        f"decode runs eagerly {format_times(eager.height)}{batches} and the GPU idles between its kernels, where "
        f"{(table['launch'] == 'graph').sum():,} other iterations replay a device graph",
        lost.total,
        "medium",
        "capture graphs of these batch sizes too (vLLM cudagraph_capture_sizes, SGLang --cuda-graph-bs), or pad to the "
        "next one",
        lost,
        HOST,
        eager.height,
        step=eager["step"][i],
        start_ns=spans[i][0],
        end_ns=spans[i][1],
        in_steps_ns=(lost & view.step_intervals).total,
    )
