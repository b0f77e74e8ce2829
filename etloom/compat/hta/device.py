"""HTA's questions about launches, queues, copies and idle streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import activity, api
from etloom.analyses._launched import launched
from etloom.compat.hta.frames import US, HtaTrace, frame, pandas
from etloom.errors import UnknownName
from etloom.trace import Job, Trace

if TYPE_CHECKING:
    import pandas as pd

BLOCKS = 1024
"""Launches that may wait on a stream before the next one blocks."""
_STREAM = ("device", "stream")
_CAUSES = ("host_wait", "kernel_wait", "other")


class Device:
    """The part of TraceAnalysis that asks what devices did."""

    job: Job
    t: HtaTrace

    def get_cuda_kernel_launch_stats(
        self,
        ranks: Sequence[int] | None = None,
        runtime_cutoff: int = 50,
        launch_delay_cutoff: int = 100,
        include_memory_events: bool = True,
        visualize: bool = True,
    ) -> dict[int, pd.DataFrame]:
        """{rank: correlation, cpu_duration, gpu_duration, launch_delay} of every piece of device work, us."""
        found = {}
        for rank, trace in self._asked(ranks):
            work = launched(trace, "correlation", "launch_ts", "launch_end", "ts", "dur", "kind")
            work = work.drop_nulls("launch_ts").sort("launch_ts", maintain_order=True)
            if not include_memory_events:
                work = work.filter(pl.col("kind") != "memory")
            delay = pl.max_horizontal(pl.col("ts") - pl.col("launch_end"), 0)
            found[rank] = frame(
                work.select(
                    pl.col("correlation").fill_null(-1),
                    cpu_duration=(pl.col("launch_end") - pl.col("launch_ts")) / US,
                    gpu_duration=pl.col("dur") / US,
                    launch_delay=delay / US,
                )
            )
        return found

    def get_queue_length_time_series(self, ranks: Sequence[int] | None = None) -> dict[int, pd.DataFrame]:
        """{rank: ts, pid, tid, stream, queue_length} after each launch and each start of work, by the event's index."""
        found = {}
        for rank, trace in self._asked(ranks):
            work = launched(trace, "id", "launch", "launch_ts", "ts", *_STREAM).drop_nulls("launch_ts")
            joins = pl.min_horizontal("launch_ts", "ts")
            changes = pl.concat(
                (
                    work.select(*_STREAM, id="launch", ts=joins, by=pl.lit(1)),
                    work.select(*_STREAM, "id", "ts", by=pl.lit(-1)),
                )
            ).sort("ts", "by", descending=(False, True), maintain_order=True)
            table = changes.with_columns(queue_length=pl.col("by").cum_sum().over(*_STREAM))
            table = table.join(
                trace.events.select("id", "pid", "tid"), on="id", how="left", maintain_order="left"
            )
            made = frame(
                table.select(
                    "id", (pl.col("ts") - self.t.zero) / US, "pid", "tid", "stream", pl.col("queue_length")
                )
            )
            found[rank] = made.set_index("id").rename_axis(None)
        return found

    def get_queue_length_summary(self, ranks: Sequence[int] | None = None) -> pd.DataFrame:
        """By rank and stream: count, mean, std, min, quartiles and max of the changes, unweighted by time."""
        return self.get_queue_length_summary_from_time_series(self.get_queue_length_time_series(ranks))

    def get_queue_length_summary_from_time_series(
        self, rank_series: Mapping[int, pd.DataFrame]
    ) -> pd.DataFrame:
        """The same, of what get_queue_length_time_series gave."""
        return _described(rank_series, "stream", "queue_length")

    def get_time_spent_blocked_on_full_queue(
        self, rank_series: Mapping[int, pd.DataFrame], max_queue_length: int = BLOCKS
    ) -> pd.DataFrame:
        """rank, stream, duration_at_max_queue_length (us), and that relative to the rank's time; of every stream."""
        rows = []
        for rank, series in rank_series.items():
            span = series["ts"].max() - series["ts"].min()
            for stream, own in series.groupby("stream"):
                lasted = own["ts"].shift(-1) - own["ts"]
                blocked = float(lasted[own["queue_length"] >= max_queue_length].sum())
                rows.append((rank, stream, blocked, blocked / span if span else 0.0))
        names = ("duration_at_max_queue_length", "relative_duration_at_max_queue_length")
        return pandas().DataFrame(rows, columns=["rank", "stream", *names])

    def get_memory_bw_time_series(self, ranks: Sequence[int] | None = None) -> dict[int, pd.DataFrame]:
        """{rank: ts, pid, name, memory_bw_gbps} whenever the bandwidth of a sort of copies changed."""
        found = {}
        for rank, trace in self._asked(ranks):
            table = api.analyze(trace, "memory-bandwidth").sort("ts_ns", "name", maintain_order=True)
            pid = activity.device_work(trace, "pid")["pid"].mode().sort()[0]
            found[rank] = frame(
                table.select(
                    ts=(pl.col("ts_ns") - self.t.zero) / US,
                    pid=pl.lit(pid),
                    name="name",
                    memory_bw_gbps="bandwidth",
                )
            )
        return found

    def get_memory_bw_summary(self, ranks: Sequence[int] | None = None) -> pd.DataFrame:
        """By rank and sort of copy: count, mean, std, min, quartiles and max of the changes that are not to 0."""
        series = self.get_memory_bw_time_series(ranks)
        return _described(
            {rank: one[one["memory_bw_gbps"] > 0] for rank, one in series.items()}, "name", "memory_bw_gbps"
        )

    def get_idle_time_breakdown(
        self,
        ranks: Sequence[int] | None = None,
        streams: Sequence[int] | None = None,
        visualize: bool = True,
        visualize_pctg: bool = True,
        show_idle_interval_stats: bool = False,
        consecutive_kernel_delay: int = 30,
    ) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        """(rank, stream, idle_category, idle_time in us, its share of the stream's; statistics of the gaps, if asked
        for). consecutive_kernel_delay: us."""
        rows, gaps = [], []
        for rank, trace in self._asked(ranks):
            table = api.analyze(trace, "idle-time", consecutive_kernel_delay=1000 * consecutive_kernel_delay)
            table = table.filter(pl.col("step").is_null())
            own = _gaps(trace, 1000 * consecutive_kernel_delay)
            if streams is not None:
                table, own = (one.filter(pl.col("stream").is_in(list(streams))) for one in (table, own))
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
            gaps.append(own.with_columns(named))
        breakdown = frame(pl.concat(rows))
        if not show_idle_interval_stats:
            return breakdown, None
        every = frame(pl.concat(gaps))
        stats = every.groupby(["cause", "rank", "stream"])["gap"].describe().reset_index(["rank", "stream"])
        return breakdown, stats.rename_axis("idle_category").sort_values(["rank", "stream"], kind="stable")

    def get_aten_op_kernels_and_delay(
        self, ranks: Sequence[int] | None = None, sort_by: Sequence[str] = ("occurrence_count",)
    ) -> dict[int, pd.DataFrame]:
        """{rank: aten_op_name, kernel_sequence, occurrence_count, avg_aten_op_launch_delay, avg_runtime_delay}, us."""
        found = {}
        for rank, trace in self._asked(ranks):
            table = api.analyze(trace, "operator-delays").filter(pl.col("operator").str.starts_with("aten::"))
            found[rank] = frame(
                table.select(
                    aten_op_name="operator",
                    kernel_sequence="kernels",
                    occurrence_count="count",
                    avg_aten_op_launch_delay=pl.col("launch_delay_ns") / US,
                    avg_runtime_delay=pl.col("runtime_delay_ns") / US,
                ).sort(*sort_by, descending=True, maintain_order=True)
            )
        return found

    def get_frequent_cuda_kernel_sequences(
        self,
        operator_name: str,
        output_dir: str = "",
        min_pattern_len: int = 3,
        rank: int = 0,
        top_k: int = 5,
        visualize: bool = False,
        compress_other_kernels: bool = True,
    ) -> pd.DataFrame:
        """pattern ("operator|kernel|kernel"), count, GPU kernel duration (us), CPU op duration (us); writes no file."""
        ((_, trace),) = self._asked([rank])
        options: dict[str, Any] = {"operator": operator_name, "min_length": min_pattern_len, "top": top_k}
        table = api.analyze(trace, "kernel-sequences", **options)
        return frame(
            table.select(
                pl.col("pattern").list.join("|"),
                "count",
                (pl.col("kernel_ns") / US).alias("GPU kernel duration (us)"),
                (pl.col("host_ns") / US).alias("CPU op duration (us)"),
            )
        )

    def _asked(self, ranks: Sequence[int] | None) -> list[tuple[int, Trace]]:
        """The traces of these ranks, of the first where none are named. Raises UnknownName."""
        for rank in ranks or []:
            if rank not in self.job:
                raise UnknownName("rank", str(rank), map(str, self.job))
        return [(rank, self.job[rank]) for rank in (ranks or self.job.ranks[:1])]


def _gaps(trace: Trace, delay: int) -> pl.DataFrame:
    """stream, cause, gap (us) of the gaps that idle-time sums up."""
    work = launched(trace, *_STREAM, "ts", "dur", "launch_ts")
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


def _described(series: Mapping[int, pd.DataFrame], by: str, value: str) -> pd.DataFrame:
    """A row a rank and group, with two levels of columns, as HTA's summaries."""
    parts = {rank: one.groupby(by)[[value]].describe() for rank, one in series.items()}
    return pandas().concat(parts, names=["rank"])
