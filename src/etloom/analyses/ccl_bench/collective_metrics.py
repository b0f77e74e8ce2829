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


def _volume(*collectives: str) -> Callable[[RunData], Answer]:
    def answer(run: RunData) -> Answer:
        participations = run.communications().filter(pl.col("collective").is_in(collectives))
        names = " or ".join(collectives)
        if not participations.height:
            raise MetricUnavailable(f"no {names} was recorded")
        if participations["bytes"].null_count() == participations.height:
            raise MetricUnavailable(f"the size is unknown for all {names}")

        def question(rank: RankData) -> float:
            sizes = _issue_times(rank, participations.filter(pl.col("rank") == rank.rank))
            if not rank.inner:
                return int(sizes["bytes"].sum()) / 1e9
            in_steps: list[int] = [
                sizes.filter(pl.col("issued").is_between(start, end, closed="left"))["bytes"].sum()  # type: ignore[misc]
                for start, end in rank.inner
            ]
            if not any(in_steps) and sizes["bytes"].sum():
                raise MetricUnavailable(f"every {names} was issued outside the selected steps")
            return sum(in_steps) / len(in_steps) / 1e9

        return mean_over_ranks(question)(run)

    return answer


def _issue_times(rank: RankData, participations: pl.DataFrame) -> pl.DataFrame:
    """Return the bytes of each communication and the time at which the host issued it (ns); its kernel may run after
    the step's end."""
    calls = rank.trace.events.select(issuer="id", issued="ts")
    joined = participations.select("issuer", "bytes", start="own_start").join(calls, on="issuer", how="left")
    return joined.select("bytes", issued=pl.coalesce("issued", "start"))


def _mean_bandwidth(run: RunData) -> float:
    mean = run.bandwidths["bus"].mean()
    if mean is None:
        raise MetricUnavailable("size and group are unknown for all collectives")
    return float(mean)  # type: ignore[arg-type]


def _hockney(coefficient: int) -> Callable[[RunData], float]:
    """Fit all-reduce times to alpha + beta x bytes by least squares; return alpha (s), beta (s/B) or 1 / beta (B/s)."""

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
        return float((alpha / 1e9, slope / 1e9, 1e9 / slope)[coefficient])

    return question


METRICS: tuple[Metric, ...] = (
    *(
        (f"bandwidth_utilization_{name}_group_6", "GB/s", "trace", from_run(_bandwidth(collective)))
        for name, collective in _COLLECTIVES.items()
    ),
    *(
        (f"collective_vol_{name}_gb", "GB", "steps", _volume(collective))
        for name, collective in _COLLECTIVES.items()
    ),
    ("collective_vol_total_gb", "GB", "steps", _volume(*_COLLECTIVES.values())),
    ("coll_call_num", "calls", "trace", from_run(_calls)),
    ("avg_comm_bandwidth_GBps", "GB/s", "trace", from_run(_mean_bandwidth)),
    ("hockney_alpha_s", "s", "trace", from_run(_hockney(0))),
    ("hockney_beta_s_per_byte", "s/B", "trace", from_run(_hockney(1))),
    ("hockney_inverse_beta_Bps", "B/s", "trace", from_run(_hockney(2))),
)
