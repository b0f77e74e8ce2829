"""The class TraceAnalysis of Holistic Trace Analysis (HTA), implemented with etloom's analyses.

Times are in us, as in HTA. ``visualize`` draws in notebooks, see `charts`; ``image_renderer`` is accepted and ignored.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import api
from etloom.compat.hta import charts
from etloom.compat.hta.critical_path import CriticalPath
from etloom.compat.hta.frames import US, HtaTrace, drop_last_step, frame_to_pandas
from etloom.compat.hta.run_access import group_small_names, summarize_durations
from etloom.compat.hta.trace_files import TraceFiles, resolve_trace_files
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Job
from etloom.linker.selection import select_part
from etloom.timeline.activity import select_device_events

if TYPE_CHECKING:
    import pandas as pd


class TraceAnalysis(CriticalPath):
    """HTA's view of a run, read from ``trace_files`` ({rank: file}, or files) or from all traces in ``trace_dir``.

    Relative names of ``trace_files`` that do not exist are those of ``trace_dir``.

    ``t`` is the `HtaTrace`, ``job`` etloom's.

    As in HTA, host events from the start of the last ProfilerStep on are dropped unless include_last_profiler_step.
    Raises as `etloom.open`.
    """

    def __init__(
        self,
        trace_files: TraceFiles | None = None,
        trace_dir: str | PathLike[str] = ".",
        include_last_profiler_step: bool | None = False,
    ) -> None:
        job = api.open(resolve_trace_files(trace_files, trace_dir))
        self.full_job = job
        self.job: Job = job if include_last_profiler_step else job.map(drop_last_step)
        self.t = HtaTrace(self.job)

    def get_comm_comp_overlap(self, visualize: bool = True) -> pd.DataFrame:
        """Return rank and comp_comm_overlap_pctg, the share of communication that overlaps computation, in percent.

        NaN without communication.
        """
        rows = self._over_all_steps("comm-overlap")
        frame = frame_to_pandas(rows.select("rank", comp_comm_overlap_pctg=pl.col("overlap_pct").round(2)))
        if visualize:
            title = "Communication that computation overlaps, percent"
            charts.show_bars(frame, title, x="rank", y="comp_comm_overlap_pctg")
        return frame

    def get_profiler_steps(self) -> list[int]:
        """Return the numbers of the steps that any rank recorded, ascending."""
        try:
            return sorted(self._ask("steps")["step"].unique().to_list())
        except AnalysisError:
            return []  # no rank marks one

    def get_temporal_breakdown(self, visualize: bool = True) -> pd.DataFrame:
        """Return idle, compute and other busy time of each rank's device, in us and in percent of its span."""
        rows = self._over_all_steps("temporal-breakdown")
        span = pl.col("span_ns")
        parts = {
            "idle": pl.col("idle_ns"),
            "compute": pl.col("compute_ns"),
            "non_compute": span - pl.col("compute_ns") - pl.col("idle_ns"),
        }
        frame = frame_to_pandas(
            rows.select(
                "rank",
                *((part / US).alias(f"{name}_time(us)") for name, part in parts.items()),
                (span / US).alias("kernel_time(us)"),
                *((100 * part / span).round(2).alias(f"{name}_time_pctg") for name, part in parts.items()),
            )
        )
        if visualize:
            shares = [f"{name}_time_pctg" for name in parts]
            charts.show_shares(frame, "Time of the device", x="rank", parts=shares, y="percent")
        return frame

    def get_gpu_kernel_breakdown(
        self,
        visualize: bool = True,
        duration_ratio: float = 0.8,
        num_kernels: int = 10,
        include_memory_kernels: bool = True,
        image_renderer: str = "",
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return two tables: time by combination of concurrent kernel types, and statistics by kernel name, in us.

        Columns: kernel_type, sum, percentage; and name, sum (us), max (us), min (us), stddev, mean (us), kernel_type,
        rank.

        The statistics of "others" are of its kernels; HTA computes them from the sums. Where there are more than
        num_kernels names of a kind and rank, those beyond them and beyond duration_ratio of its time are "others".
        """
        combined = self._ask("kernel-overlap")
        if not include_memory_kernels:
            parts = pl.col("kinds").str.split(" + ").list.set_difference(["memory"])
            combined = combined.with_columns(kinds=parts.list.join(" + ")).filter(pl.col("kinds") != "")
        combined = combined.group_by("kinds", maintain_order=True).agg(pl.col("time_ns").sum())
        by_kind = combined.select(
            kernel_type=pl.col("kinds").map_elements(_overlapping, pl.String),
            sum=pl.col("time_ns") / US,
            percentage=(100.0 * pl.col("time_ns") / pl.col("time_ns").sum()).round(1),
        ).sort("sum", descending=True)
        types = frame_to_pandas(by_kind)
        kernels = frame_to_pandas(self._kernels(duration_ratio, num_kernels, include_memory_kernels))
        if visualize:
            charts.show_bars(types, "Time by kernel type, us", x="kernel_type", y="sum")
            charts.show_bars(
                kernels, "Time by kernel", x="name", y="sum (us)", color="kernel_type", rows="rank"
            )
        return types, kernels

    def get_potential_stragglers(
        self,
        profiler_steps: list[int] | None = None,
        num_candidates: int = 2,
        visualize: bool = False,
        straggler_identification_impl: Any = None,
    ) -> list[int]:
        """Return the ranks that delay the others most, at most ``num_candidates`` (below 1 means 1, as in HTA).

        HTA looks at one kernel of ncclKernel's older names; here each communication counts, on one clock.
        profiler_steps: only communications that began in these steps. Raises UnknownName for another, and
        AnalysisError where the ranks cannot be compared.
        """
        steps = self.get_profiler_steps()
        for step in profiler_steps or []:
            if step not in steps:
                raise UnknownName("step", str(step), map(str, steps))
        runs = (
            [self.job]
            if not profiler_steps
            else [select_part(self.job, step=step) for step in profiler_steps]
        )
        late = pl.concat(api.analyze(run, "stragglers").select("rank", "delay_ns") for run in runs)
        summed = late.group_by("rank").agg(pl.col("delay_ns").sum()).filter(pl.col("delay_ns") > 0)
        summed = summed.sort("delay_ns", "rank", descending=(True, False))
        if visualize:
            frame = frame_to_pandas(summed.select("rank", delay=pl.col("delay_ns") / US))
            charts.show_bars(frame, "Delay of other ranks, us", x="rank", y="delay")
        worst: list[int] = summed["rank"].to_list()
        return worst[: max(num_candidates, 1)]

    def _kernels(self, ratio: float, max_names: int, memory: bool) -> pl.DataFrame:
        kinds = ["COMMUNICATION", "COMPUTATION", *(["MEMORY"] if memory else [])]
        parts = []
        for rank, trace in self.job.items():
            work = select_device_events(trace, "name", "dur", "kind").with_columns(
                pl.col("name").cast(pl.String)
            )
            for kind in kinds:
                durations = work.filter(pl.col("kind") == kind.lower())
                summary = summarize_durations(group_small_names(durations, ratio, max_names), "name")
                parts.append(summary.with_columns(kernel_type=pl.lit(kind), rank=pl.lit(rank, pl.Int64)))
        return pl.concat(parts).sort("kernel_type", "name", "rank")

    def _ask(self, name: str, **options: Any) -> pl.DataFrame:
        return api.analyze(self.job, name, **options)

    def _over_all_steps(self, name: str) -> pl.DataFrame:
        """Return the result of an analysis over all steps together, without the rows of single steps."""
        return self._ask(name).filter(pl.col("step").is_null())


def _overlapping(kinds: str) -> str:
    """Convert etloom's text of concurrent kernel types to HTA's, such as COMPUTATION overlapping COMMUNICATION."""
    order = ("computation", "communication", "memory", "other")
    return (
        " overlapping ".join(sorted(kinds.split(" + "), key=order.index))
        .upper()
        .replace("OVERLAPPING", "overlapping")
    )
