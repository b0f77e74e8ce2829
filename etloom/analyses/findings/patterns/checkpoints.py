"""Nothing runs while the host saves a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import BOTH, Finding, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import EMPTY
from etloom.core.text import count_noun

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    saves = view.saves
    hidden = view.busy if view.activity.basis == "device" else EMPTY
    cost = saves["dur"].to_numpy() - hidden.covered(saves["ts"], saves["end"])
    yield from sum_places(
        view,
        saves.select("step", "name", "end", start="ts", cost_ns=cost, event="id"),
        lambda row: f"nothing else runs while the host saves {count_noun(row['count'], 'checkpoint')}",
        confidence="high",
        advice="save less often; copy the state to the host and write it in a thread or process "
        "(torch.distributed.checkpoint.async_save)",
        tracks=BOTH,
        by="frame",
        hidden=hidden,
    )
