"""HTA's TraceAnalysis: its methods that answer with a table, over etloom's analyses.

Times are in us, as HTA's. ``visualize`` is taken and draws nothing: `etloom report` draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import api
from etloom.compat.hta.critical_path import CriticalPath
from etloom.compat.hta.frames import US, HtaTrace, frame, without_last_step
from etloom.errors import AnalysisError
from etloom.trace import Job

if TYPE_CHECKING:
    import pandas as pd


class TraceAnalysis(CriticalPath):
    """``trace_dir``: a folder of traces; ``trace_files``: {rank: file}. ``t`` is the `HtaTrace`, ``job`` etloom's.

    As in HTA, what the host did from the start of the last ProfilerStep on is left out unless
    include_last_profiler_step. Raises as `etloom.open`.
    """

    def __init__(
        self,
        trace_files: Mapping[int, str] | None = None,
        trace_dir: str | PathLike[str] = ".",
        include_last_profiler_step: bool = False,
    ) -> None:
        job = api.open(trace_files if trace_files is not None else trace_dir)
        self.job: Job = job if include_last_profiler_step else job.map(without_last_step)
        self.t = HtaTrace(self.job)

    def get_comm_comp_overlap(self, visualize: bool = True) -> pd.DataFrame:
        """rank, comp_comm_overlap_pctg: of the communication, in percent; NaN without any."""
        rows = self._whole("comm-overlap")
        return frame(rows.select("rank", comp_comm_overlap_pctg=pl.col("overlap_pct").round(2)))

    def get_profiler_steps(self) -> list[int]:
        """The steps that some rank recorded, in order."""
        return sorted(self._ask("steps")["step"].unique().to_list())

    def get_temporal_breakdown(self, visualize: bool = True) -> pd.DataFrame:
        """Of each rank: idle, compute and other busy time of the device, us and percent of the span."""
        rows = self._whole("temporal-breakdown")
        span = pl.col("span_ns")
        parts = {
            "idle": pl.col("idle_ns"),
            "compute": pl.col("compute_ns"),
            "non_compute": span - pl.col("compute_ns") - pl.col("idle_ns"),
        }
        return frame(
            rows.select(
                "rank",
                *((part / US).alias(f"{name}_time(us)") for name, part in parts.items()),
                (span / US).alias("kernel_time(us)"),
                *((100 * part / span).round(2).alias(f"{name}_time_pctg") for name, part in parts.items()),
            )
        )

    def get_gpu_kernel_breakdown(
        self,
        visualize: bool = True,
        duration_ratio: float = 0.8,
        num_kernels: int = 10,
        include_memory_kernels: bool = True,
        image_renderer: str = "",
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(by kind of what ran together: kernel_type, sum, percentage; by kernel: name, sum (us), ...).

        The statistics of "others" are of its kernels; HTA takes them of their sums. num_kernels names of each kind and
        rank are listed, unless fewer make up duration_ratio of its time.
        """
        combined = (
            self._ask("kernel-overlap").group_by("kinds", maintain_order=True).agg(pl.col("time_ns").sum())
        )
        by_kind = combined.select(
            kernel_type=pl.col("kinds").map_elements(_overlapping, pl.String),
            sum=pl.col("time_ns") / US,
            percentage=(100 * pl.col("time_ns") / pl.col("time_ns").sum()).round(1),
        ).sort("sum", descending=True)
        return frame(by_kind), frame(self._kernels(duration_ratio, num_kernels, include_memory_kernels))

    def get_potential_stragglers(
        self,
        profiler_steps: list[int] | None = None,
        num_candidates: int = 2,
        visualize: bool = False,
        straggler_identification_impl: Any = None,
    ) -> list[int]:
        """The ranks that delay the others most, at most num_candidates. Empty where none could be compared.

        HTA looks at one kernel of ncclKernel's older names; here each communication counts, on one clock.
        """
        try:
            rows = api.analyze(self.job, "stragglers")
        except AnalysisError:
            return []
        late: list[int] = rows.filter(pl.col("delay_ns") > 0)["rank"].head(num_candidates).to_list()
        return late

    def _kernels(self, ratio: float, most: int, memory: bool) -> pl.DataFrame:
        from etloom.activity import device_work

        parts = []
        for rank, trace in self.job.items():
            work = device_work(trace).filter(pl.col("kind").is_in(["computation", "communication", "memory"]))
            if not memory:
                work = work.filter(pl.col("kind") != "memory")
            work = work.with_columns(kind=pl.col("kind").cast(pl.String), name=pl.col("name").cast(pl.String))
            sums = (
                work.group_by("kind", "name")
                .agg(pl.col("dur").sum().alias("total"))
                .sort("kind", "total", "name", descending=(False, True, False))
            )
            place = pl.int_range(pl.len()).over("kind")
            before = (pl.col("total").cum_sum() - pl.col("total")).over("kind")
            listed = (place < most) & (before < ratio * pl.col("total").sum().over("kind"))
            named = sums.with_columns(shown=pl.when(listed).then("name").otherwise(pl.lit("others")))
            own = work.join(named.select("kind", "name", "shown"), on=["kind", "name"])
            parts.append(own.select("kind", "shown", "dur", rank=pl.lit(rank, pl.Int64)))
        dur = pl.col("dur") / US
        return (
            pl.concat(parts)
            .group_by("rank", "kind", "shown", maintain_order=True)
            .agg(
                dur.sum().alias("sum (us)"),
                dur.max().alias("max (us)"),
                dur.min().alias("min (us)"),
                dur.std().alias("stddev"),
                dur.mean().alias("mean (us)"),
            )
            .sort("rank", "kind", "sum (us)", descending=(False, False, True))
            .select(
                *(pl.col("shown").alias("name"), "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)"),
                pl.col("kind").str.to_uppercase().alias("kernel_type"),
                "rank",
            )
        )

    def _ask(self, name: str, **options: Any) -> pl.DataFrame:
        return api.analyze(self.job, name, **options)

    def _whole(self, name: str) -> pl.DataFrame:
        """The rows over all steps."""
        return self._ask(name).filter(pl.col("step").is_null())


def _overlapping(kinds: str) -> str:
    """HTA's words for kinds that ran together: COMPUTATION overlapping COMMUNICATION."""
    order = ("computation", "communication", "memory", "other")
    return (
        " overlapping ".join(sorted(kinds.split(" + "), key=order.index))
        .upper()
        .replace("OVERLAPPING", "overlapping")
    )
