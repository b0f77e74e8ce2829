"""Find chains of different elementwise kernels in a row, each of which reads and writes memory again.

Three or more elementwise kernels in a row on a stream, of two names or more, outside of parameter-loops and
unfused-attention.

Cost: all but one of each chain.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding, describe_place, sum_places
from etloom.analyses.findings.patterns.parameter_loops import find_parameter_loops
from etloom.analyses.findings.patterns.unfused_attention import find_attention
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.findings.removed_work import list_launched
from etloom.core import arrays, nesting
from etloom.core.text import count_noun

ELEMENTWISE = r"elementwise_kernel|elementwise_kernel_manual_unroll|CUDAFunctor|multi_tensor_apply"
FUSED = r"multi_tensor_apply|^triton_"
WRITES_ONLY = r"FillFunctor"
"""Matches kernels that read nothing, so that fusing them with what comes before saves nothing."""
MIN_LENGTH = 3

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    yield from sum_places(
        view,
        _find_chains(view),
        lambda row: (
            f"{count_noun(row['count'], 'chain')} of {MIN_LENGTH}+ elementwise "
            f"kernels{describe_place(row, 'block')}; each kernel reads and writes memory once more"
        ),
        confidence="low",
        advice="fuse them: torch.compile, a fused optimizer or norm, or foreach operators",
        tracks=DEVICE,
        by="block",
    )


def _find_chains(view: RankView) -> pl.DataFrame:
    """Return the chains (consecutive elementwise kernels of a step and stream) as rows for `sum_places`."""
    kernels = view.kernels
    is_elementwise = (
        view.match_activities(kernels, ELEMENTWISE)
        & ~view.match_activities(kernels, f"{FUSED}|{WRITES_ONLY}")
    ).to_numpy()
    for find_regions in (find_parameter_loops, find_attention):  # these patterns report their kernels
        reported = list_launched(view, view.compute_once(find_regions))["event"]
        is_elementwise &= ~kernels["launch"].is_in(reported.implode()).fill_null(False).to_numpy()
    track = nesting.track_codes(kernels, ("device", "stream"))
    rows = nesting.order_by_track(track)
    step = arrays.to_array(kernels["step"], np.iinfo(np.int64).min)
    cut = np.ones(len(rows) + 1, np.bool_)
    if rows.size:
        cut[1:-1] = np.any(
            [column[rows[1:]] != column[rows[:-1]] for column in (is_elementwise, track, step)], axis=0
        )
    cuts = np.flatnonzero(cut)
    chains = np.flatnonzero(np.diff(cuts) >= MIN_LENGTH)
    chains = chains[is_elementwise[rows[cuts[chains]]]]
    # Equal kernels in a row may work on separate tensors: nothing shows that one reads what the other wrote.
    name = kernels["name"].to_physical().to_numpy()[rows]
    changes = np.concatenate(([0, 0], np.cumsum(name[1:] != name[:-1])))
    chains = chains[changes[cuts[chains + 1]] > changes[cuts[chains] + 1]]
    chains = chains[np.argsort(rows[cuts[chains]])]
    start, end = cuts[chains], cuts[chains + 1]
    until = np.concatenate(([0], np.cumsum(kernels["dur"].to_numpy()[rows])))
    # n passes over memory could be one.
    saved = (until[end] - until[start]) * (1 - 1 / (end - start))
    first: pl.DataFrame = kernels[rows[start]]
    return first.select(
        *("step", "stream", "name"),
        kernels["end"][rows[end - 1]],
        start="ts",
        cost_ns=pl.Series(saved).round().cast(pl.Int64),
        event="launch",
    )
