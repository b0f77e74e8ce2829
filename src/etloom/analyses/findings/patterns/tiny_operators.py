"""Find loops of operators that compute so little that the host's overhead dominates.

Loops of 64 or more operators that usually take less than 50 µs, few kinds of them, many times. Only on runs
without a GPU.

Cost: all but one operator of each loop.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, describe_place, sum_places
from etloom.analyses.findings.operator_runs import find_operator_runs
from etloom.analyses.findings.patterns.parameter_loops import find_parameter_loops, mask_updates
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"
MAX_READ_SHARE = 1 / 16
"""If more of the operators read a value, item-calls reports the loop."""


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis == "device":
        return
    runs = find_operator_runs(view).filter(pl.col("reads") < MAX_READ_SHARE * pl.col("count"))
    runs = runs.filter(~mask_updates(runs, view.compute_once(find_parameter_loops)))
    count = int(runs["count"].sum())
    yield from sum_places(
        view,
        runs.drop("count", "reads", "read_name", "read_event"),
        lambda row: f"loops of {count:,} tiny operators{describe_place(row, 'name', ', mostly ')}",
        confidence="medium",
        advice="compute on whole tensors instead of elements or single parameters (batched operators, torch.stack, "
        "foreach or fused optimizers), or torch.compile the loop",
        tracks=HOST,
        by="name",
    )
