"""CCL-Bench's metrics of what ranks do together: bandwidths, volumes, counts, and a line through the times."""

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
        found = run.bandwidths.filter(pl.col("collective") == collective)
        if not found.height:
            raise MetricUnavailable(f"no {collective} was recorded")
        middle = found["bus"].median()
        if middle is None:
            raise MetricUnavailable(f"of no {collective} the size and the group are known")
        return float(middle)  # type: ignore[arg-type]

    return question


def _volume(collective: str) -> Callable[[RunData], Answer]:
    def answer(run: RunData) -> Answer:
        own = run.communications().filter(pl.col("collective") == collective)
        if not own.height:
            raise MetricUnavailable(f"no {collective} was recorded")
        if own["bytes"].null_count() == own.height:
            raise MetricUnavailable(f"of no {collective} the size is known")

        def question(rank: RankData) -> float:
            mine = own.filter(pl.col("rank") == rank.rank)
            begin, finish, size = (mine[name].to_numpy() for name in ("own_start", "own_end", "bytes"))
            size = np.nan_to_num(size)
            return rank.mean_of_steps(
                lambda start, end: float(size[(begin < end) & (finish > start)].sum() / 1e9)
            )

        return mean_over_ranks(question)(run)

    return answer


def _hockney(which: int) -> Callable[[RunData], float]:
    """alpha (us) or bandwidth (GB/s) by least squares over all-reduces."""

    def question(run: RunData) -> float:
        found = run.bandwidths.filter(
            (pl.col("collective") == "all_reduce") & (pl.col("group_size") > 1) & (pl.col("time") > 0)
        ).drop_nulls()
        sizes = (found["bytes"] / found["group_size"]).to_numpy()
        if len(np.unique(sizes)) < 2:
            raise MetricUnavailable("it takes all-reduces of two sizes")
        times = (found["time"] / (2 * (found["group_size"] - 1))).to_numpy()
        slope, alpha = np.polyfit(sizes, times, 1)
        if slope <= 0 or alpha < 0:
            raise MetricUnavailable(
                "the times of all-reduces lie on no line of latency and bandwidth above 0"
            )
        return float(alpha / 1e3) if which == 0 else float(1 / slope)

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
