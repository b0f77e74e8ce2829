"""CCL-Bench metrics of collectives: bandwidths, volumes, counts, and a linear fit of the times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from etloom.analyses.ccl_bench.rank_data import MetricUnavailable, RankData
from etloom.analyses.ccl_bench.run_data import Answer, Metric, RunData, from_run, mean_over_ranks

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


def _calls(run: RunData) -> float:
    parts = run.communications()
    return parts.height / len(run.ranks)


def _bandwidth(collective: str) -> Callable[[RunData], float]:
    def question(run: RunData) -> float:
        matching = run.bandwidths.filter(pl.col("collective") == collective)
        if not matching.height:
            raise MetricUnavailable(f"no {collective} was recorded")
        median = matching["bus"].median()
        if median is None:
            raise MetricUnavailable(f"size and group are unknown for all {collective}")
        return float(median)  # type: ignore[arg-type]

    return question


def _volume(collective: str) -> Callable[[RunData], Answer]:
    def answer(run: RunData) -> Answer:
        participations = run.communications().filter(pl.col("collective") == collective)
        if not participations.height:
            raise MetricUnavailable(f"no {collective} was recorded")
        if participations["bytes"].null_count() == participations.height:
            raise MetricUnavailable(f"the size is unknown for all {collective}")

        def question(rank: RankData) -> float:
            rank_participations = participations.filter(pl.col("rank") == rank.rank)
            begin, finish, size = (
                rank_participations[name].to_numpy() for name in ("own_start", "own_end", "bytes")
            )
            size = np.nan_to_num(size)
            return rank.average_steps(
                lambda start, end: float(size[(begin < end) & (finish > start)].sum() / 1e9)
            )

        return mean_over_ranks(question)(run)

    return answer


def _hockney(coefficient: int) -> Callable[[RunData], float]:
    """Return a fit of alpha (us) or bandwidth (GB/s) to the all-reduces, by least squares."""

    def question(run: RunData) -> float:
        all_reduces = run.bandwidths.filter(
            (pl.col("collective") == "all_reduce") & (pl.col("group_size") > 1) & (pl.col("time") > 0)
        ).drop_nulls()
        sizes = (all_reduces["bytes"] / all_reduces["group_size"]).to_numpy()
        if len(np.unique(sizes)) < 2:
            raise MetricUnavailable("requires all-reduces of at least two sizes")
        times = (all_reduces["time"] / (2 * (all_reduces["group_size"] - 1))).to_numpy()
        slope, alpha = np.polyfit(sizes, times, 1)
        if slope <= 0 or alpha < 0:
            raise MetricUnavailable("the all-reduce times do not fit a positive latency and bandwidth")
        return float(alpha / 1e3) if coefficient == 0 else float(1 / slope)

    return question


METRICS: tuple[Metric, ...] = (
    *(
        (f"bandwidth_utilization_{name}", "GB/s", "trace", from_run(_bandwidth(collective)))
        for name, collective in _COLLECTIVES.items()
    ),
    *(
        (f"collective_vol_{name}", "GB", "steps", _volume(collective))
        for name, collective in _COLLECTIVES.items()
    ),
    ("coll_call_num", "calls", "trace", from_run(_calls)),
    ("hockney_alpha", "us", "trace", from_run(_hockney(0))),
    ("hockney_bandwidth", "GB/s", "trace", from_run(_hockney(1))),
)
