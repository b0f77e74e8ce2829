"""Find time in which nothing else runs because the host saves a checkpoint.

`torch.save` and distributed checkpoints, if Python stacks were recorded, while no kernel runs. Also on runs
without a GPU.

Cost: that time, and late launches after them.
Confidence: high.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import BOTH, Finding, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.arrays import take_rows
from etloom.core.intervals import EMPTY
from etloom.core.text import count_noun

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    saves = view.saves
    if saves.is_empty():
        return
    # Copies to the host are part of the save.
    hidden = view.busy_computing if view.activity.basis == "device" else EMPTY
    cost = saves["dur"].to_numpy() - hidden.covered(saves["ts"], saves["end"])
    rows = saves.select("step", "name", "end", start="ts", cost_ns=cost, event="id")
    # The device works off its queue during a save; what the host launches late afterwards is due to it.
    late = view.select_gaps("save").filter("is_late_effect")
    last = np.searchsorted(saves["ts"].to_numpy(), late["start"].to_numpy(), side="right") - 1
    late = late.select("start", "end", "cost_ns").hstack(
        take_rows(rows.select("step", "name", "event"), np.maximum(last, 0))
    )
    yield from sum_places(
        view,
        pl.concat([rows, late.select(rows.columns)], how="vertical_relaxed"),
        lambda row: f"nothing else runs while the host saves {count_noun(saves.height, 'checkpoint')}",
        confidence="high",
        advice="save less often; copy the state to the host and write it in a thread or process "
        "(torch.distributed.checkpoint.async_save)",
        tracks=BOTH,
        by="frame",
        hidden=hidden,
    )
