"""HTA's methods about kernel launches and idle time of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from etloom import api
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.compat.hta import charts
from etloom.compat.hta.frames import US, frame_to_pandas, import_pandas
from etloom.compat.hta.run_access import RunAccess
from etloom.core.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

_STREAM = ("device", "stream")
_CAUSES = ("host_wait", "kernel_wait", "other")


class Device(RunAccess):
    """The methods of TraceAnalysis about GPU activity."""

    def get_cuda_kernel_launch_stats(
        self,
        ranks: Sequence[int] | None = None,
        runtime_cutoff: int = 50,
        launch_delay_cutoff: int = 100,
        include_memory_events: bool = True,
        visualize: bool = True,
    ) -> dict[int, pd.DataFrame]:
        """Return {rank: correlation, cpu_duration, gpu_duration, launch_delay (us)} with a row per GPU activity.

        The cutoffs, in us, are those of the charts.
        """
        frames = {}
        for rank, trace in self._select_ranks(ranks):
            work = select_launched_work(trace, "correlation", "launch_ts", "launch_end", "ts", "dur", "kind")
            work = work.drop_nulls("launch_ts").sort("launch_ts", maintain_order=True)
            if not include_memory_events:
                work = work.filter(pl.col("kind") != "memory")
            delay = pl.max_horizontal(pl.col("ts") - pl.col("launch_end"), 0)
            frames[rank] = frame_to_pandas(
                work.select(
                    pl.col("correlation").fill_null(-1),
                    cpu_duration=(pl.col("launch_end") - pl.col("launch_ts")) / US,
                    gpu_duration=pl.col("dur") / US,
                    launch_delay=delay / US,
                )
            )
            if visualize:
                for column, above in (
                    ("cpu_duration", runtime_cutoff),
                    ("launch_delay", launch_delay_cutoff),
                ):
                    title = f"Rank {rank}: {column} above {above} us"
                    charts.show_histogram(frames[rank], title, column=column, above=above)
        return frames

    def get_idle_time_breakdown(
        self,
        ranks: Sequence[int] | None = None,
        streams: Sequence[int] | None = None,
        visualize: bool = True,
        visualize_pctg: bool = True,
        show_idle_interval_stats: bool = False,
        consecutive_kernel_delay: int = 30,
    ) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        """Return each stream's idle time by cause, in us and as share of its idle time; and statistics of the gaps.

        Columns: rank, stream, idle_category, idle_time, idle_time_ratio. The statistics are None unless requested.

        streams: of all streams if empty or None; work that states no stream is left out. consecutive_kernel_delay: us.
        """
        rows, gaps = [], []
        for rank, trace in self._select_ranks(ranks):
            table = api.analyze(trace, "idle-time", consecutive_kernel_delay=1000 * consecutive_kernel_delay)
            table = table.drop_nulls("stream")  # HTA leaves out activities that name no stream
            table = table.filter(pl.col("step").is_null())
            rank_gaps = _gaps(trace, 1000 * consecutive_kernel_delay)
            selected = pl.col("stream").is_in(list(streams)) if streams else pl.col("stream").is_not_null()
            table, rank_gaps = table.filter(selected), rank_gaps.filter(selected)
            named = pl.lit(rank, pl.Int64).alias("rank")
            rows.append(
                table.select(
                    named,
                    "stream",
                    idle_category="cause",
                    idle_time=pl.col("idle_ns") / US,
                    idle_time_ratio=(pl.col("idle_pct") / 100).round(2),
                )
            )
            gaps.append(rank_gaps.with_columns(named))
        breakdown = frame_to_pandas(pl.concat(rows))
        if visualize:
            value = "idle_time_ratio" if visualize_pctg else "idle_time"
            title = "Idle time of streams"
            charts.show_bars(breakdown, title, x="stream", y=value, color="idle_category", rows="rank")
        if not show_idle_interval_stats:
            return breakdown, None
        every = frame_to_pandas(pl.concat(gaps))
        stats = every.groupby(["cause", "rank", "stream"])["gap"].describe()
        if every.empty:  # pandas drops the levels of the index
            stats.index = import_pandas().MultiIndex.from_frame(every[["cause", "rank", "stream"]])
        stats = stats.reset_index(["rank", "stream"]).rename_axis("idle_category")
        return breakdown, stats.sort_values(["rank", "stream"], kind="stable")


def _gaps(trace: Trace, delay: int) -> pl.DataFrame:
    """Return the idle gaps between GPU activities of each stream, as in idle-time: stream, cause, gap (us)."""
    work = select_launched_work(trace, *_STREAM, "ts", "dur", "launch_ts")
    before = (pl.col("ts") + pl.col("dur")).cum_max().shift(1).over(*_STREAM)
    causes = pl.Enum(_CAUSES)
    return (
        work.with_columns(before=before)
        .with_columns(gap=pl.col("ts") - pl.col("before"))
        .filter(pl.col("gap") > 0)
        .select(
            "stream",
            cause=pl.when(pl.col("launch_ts") > pl.col("before"))
            .then(pl.lit("host_wait"))
            .when(pl.col("gap") < delay)
            .then(pl.lit("kernel_wait"))
            .otherwise(pl.lit("other"))
            .cast(causes),
            gap=pl.col("gap") / US,
        )
    )
