"""Find tokenizers that run in the training or serving loop, while the device waits.

Frames and annotations of tokenizers, outside of data loaders, that launch nothing. Also on runs without a
GPU.

Cost: their time while the device runs nothing else; the gain is that without them.
Confidence: high.
"""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import Finding, format_times
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.findings.removed_work import sum_removed

SCOPE = "rank"
_ADVICE = (
    "tokenize before the loop and store the ids (datasets.map), or in workers of the DataLoader; use a fast tokenizer "
    "and whole batches"
)


def find(view: RankView) -> Iterator[Finding]:
    calls = view.tokenizer_calls
    regions = calls.select("end", "step", "name", start="ts", event="id", cost_ns="dur")
    title = f"the loop tokenizes text, {format_times(regions.height)}"
    yield from sum_removed(view, regions, title, confidence="high", advice=_ADVICE)
