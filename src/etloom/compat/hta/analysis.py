"""The class TraceAnalysis of Holistic Trace Analysis (HTA), implemented with etloom's analyses.

Times are in us, as in HTA. ``visualize`` draws in notebooks, see `charts`; ``image_renderer`` is accepted and ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import api
from etloom.analyses.annotations import ON_DEVICE
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.analyses.kernel_sequences import find_occurrences
from etloom.compat.hta import charts, overlays
from etloom.compat.hta.counters import Counters
from etloom.compat.hta.critical_path import CriticalPath
from etloom.compat.hta.frames import (
    US,
    HtaTrace,
    add_frame_index,
    drop_last_step,
    frame_to_pandas,
    import_pandas,
    shorten_kernel_name,
)
from etloom.compat.hta.trace import TraceFiles, resolve_trace_files
from etloom.core import categories, nesting
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.paths import expand_home
from etloom.core.trace import Job, Trace
from etloom.linker.selection import select_part
from etloom.timeline.activity import select_device_events

if TYPE_CHECKING:
    import pandas as pd

_STREAM = ("device", "stream")
_KERNEL_CATEGORIES = (
    categories.DEVICE_CATEGORIES - categories.MEMCPY_CATEGORIES - categories.MEMSET_CATEGORIES
)
_DRAWN_ROWS = 20
_log = logging.getLogger(__name__)
_PATTERN_COLUMNS = {
    "pattern": pl.String,
    "count": pl.Int64,
    "GPU kernel duration (us)": pl.Float64,
    "CPU op duration (us)": pl.Float64,
}
_PARTS = {
    "idle": pl.col("idle_ns"),
    "compute": pl.col("compute_ns"),
    "non_compute": pl.col("span_ns") - pl.col("compute_ns") - pl.col("idle_ns"),
}
_ANSWERS: dict[str, dict[str, pl.Expr]] = {
    "comm-overlap": {"rank": pl.col("rank"), "comp_comm_overlap_pctg": pl.col("overlap_pct").round(2)},
    "temporal-breakdown": {
        "rank": pl.col("rank"),
        **{f"{name}_time(us)": part / US for name, part in _PARTS.items()},
        "kernel_time(us)": pl.col("span_ns") / US,
        **{f"{name}_time_pctg": (100 * part / pl.col("span_ns")).round(2) for name, part in _PARTS.items()},
    },
    "idle-time": {
        "stream": pl.col("stream"),
        "idle_category": pl.col("cause"),
        "idle_time": pl.col("idle_ns") / US,
        "idle_time_ratio": (pl.col("idle_pct") / 100).round(2),
    },
    "operator-delays": {
        "aten_op_name": pl.col("operator"),
        "kernel_sequence": pl.col("kernels"),
        "occurrence_count": pl.col("count"),
        "avg_aten_op_launch_delay": pl.col("launch_delay_ns") / US,
        "avg_runtime_delay": pl.col("runtime_delay_ns") / US,
    },
}
"""Analysis -> HTA's column -> expression over the columns of the analysis."""


class TraceAnalysis(Counters, CriticalPath):
    """HTA's view of a run, read from ``trace_files`` ({rank: file}, or files) or from all traces in ``trace_dir``.

    A relative name in ``trace_files`` that does not exist is looked up in ``trace_dir``.

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
        frame = frame_to_pandas(_ask(self.job, "comm-overlap"))
        if visualize:
            title = "Communication that computation overlaps, percent"
            charts.show_bars(frame, title, x="rank", y="comp_comm_overlap_pctg")
        return frame

    def get_profiler_steps(self) -> list[int]:
        """Return the numbers of the steps that any rank recorded, ascending."""
        try:
            return sorted(api.analyze(self.job, "steps")["step"].unique().to_list())
        except AnalysisError:
            return []  # no rank marks one

    def get_temporal_breakdown(self, visualize: bool = True) -> pd.DataFrame:
        """Return idle, compute and other busy time of each rank's device, in us and in percent of its span."""
        frame = frame_to_pandas(_ask(self.job, "temporal-breakdown"))
        if visualize:
            shares = [f"{name}_time_pctg" for name in _PARTS]
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
        combined = api.analyze(self.job, "kernel-overlap")
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
            delay = 1000 * consecutive_kernel_delay
            table = _ask(trace, "idle-time", consecutive_kernel_delay=delay)
            selected = pl.col("stream").is_in(list(streams)) if streams else pl.col("stream").is_not_null()
            named = pl.lit(rank, pl.Int64).alias("rank")
            rows.append(table.filter(selected).select(named, *table.columns))
            gaps.append(_gaps(trace, delay).filter(selected).with_columns(named))
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

    def get_aten_op_kernels_and_delay(
        self, ranks: Sequence[int] | None = None, sort_by: Sequence[str] | None = None
    ) -> dict[int, pd.DataFrame]:
        """Return {rank: ATen operators with the kernels they launch, number of calls, and mean launch delays in us}.

        Columns: aten_op_name, kernel_sequence, occurrence_count, avg_aten_op_launch_delay, avg_runtime_delay.

        Covers kernels (of MTIA all device events), not memcpy and memset. sort_by: columns, the greatest first; by
        default occurrence_count.
        """
        frames = {}
        for rank, trace in self._select_ranks(ranks):
            table = _ask(_kernels_only(trace), "operator-delays")
            table = table.filter(pl.col("aten_op_name").str.starts_with("aten::"))
            order = sort_by or ["occurrence_count"]
            frames[rank] = frame_to_pandas(table.sort(*order, descending=True, maintain_order=True))
            title = f"Rank {rank}: operators and their kernels"
            charts.show_bars(frames[rank].head(_DRAWN_ROWS), title, x="aten_op_name", y="occurrence_count")
        return frames

    def get_frequent_cuda_kernel_sequences(
        self,
        operator_name: str,
        output_dir: str | PathLike[str] | None = None,
        min_pattern_len: int = 3,
        rank: int = 0,
        top_k: int = 5,
        visualize: bool = False,
        compress_other_kernels: bool = True,
    ) -> pd.DataFrame:
        """Return the kernel sequences that an operator launches, with count and times, the most frequent first.

        Columns: pattern ("operator|kernel|kernel"), count, GPU kernel duration (us), CPU op duration (us).

        Writes output_dir/overlaid_<name of the trace>, unless output_dir is omitted: the trace in which the events of
        the top_k patterns have an argument ``Patterns`` ({pattern: count}), to search for. With
        compress_other_kernels all other events are named by a number, which the file's ``symbols`` lists, and have no
        arguments. As in HTA, an operator that the rank lacks is logged and gives an empty frame.
        """
        ((_, trace),) = self._select_ranks([rank])
        try:
            occurrences = find_occurrences(trace, operator_name, min_pattern_len)
        except AnalysisError as error:
            _log.error("%s", error)
            return frame_to_pandas(pl.DataFrame(schema=_PATTERN_COLUMNS))
        calls = occurrences.with_columns(
            pattern=pl.concat_list(
                "operator", pl.col("name").list.eval(pl.element().cast(pl.String))
            ).list.join("|")
        )
        table = (
            calls.group_by("pattern")
            .agg(
                pl.len().cast(pl.Int64).alias("count"),
                (pl.col("kernel_ns").sum() / US).alias("GPU kernel duration (us)"),
                (pl.col("host_ns").sum() / US).alias("CPU op duration (us)"),
            )
            .sort("count", "pattern", descending=(True, False))
        )
        if output_dir:
            frequent = calls.join(table.head(top_k).select("pattern", "count"), on="pattern")
            numbers = self.t.symbol_table.sym_index if compress_other_kernels else None
            target = expand_home(output_dir) / overlays.overlay_path(self._source(rank), "overlaid")
            api.export(overlays.add_sequences(trace, frequent, numbers), target, "chrome")
        frame = frame_to_pandas(table)
        if visualize:
            charts.show_bars(
                frame.head(top_k), "Sequences of kernels", x="pattern", y="GPU kernel duration (us)"
            )
        return frame

    def get_gpu_user_annotation_breakdown(
        self,
        use_gpu_annotation: bool = True,
        visualize: bool = True,
        duration_ratio: float = 0.8,
        num_kernels: int = 1000,
        allowlist_patterns: Sequence[str] | None = None,
        image_renderer: str | None = None,
    ) -> pd.DataFrame | None:
        """Return the total, longest, shortest and mean duration of annotations (us), by name and rank.

        Columns: name, sum (us), max (us), min (us), stddev, mean (us), rank. None without annotations.

        Names beyond num_kernels, and beyond duration_ratio of the rank's time, are "others", whose statistics are of
        its annotations. Names that contain one of the texts allowlist_patterns keep their own row.
        """
        selected = [ON_DEVICE] if use_gpu_annotation else sorted(categories.ANNOTATION_CATEGORIES)
        parts = []
        for rank, trace in self.job.items():
            marks = trace.events.filter(pl.col("cat").is_in(selected) & pl.col("dur").is_not_null())
            marks = marks.select(pl.col("name").cast(pl.String), "dur")
            grouped = group_small_names(marks, duration_ratio, num_kernels, allowlist_patterns or ())
            summary = summarize_durations(grouped, "name").sort("name")
            parts.append(summary.with_columns(rank=pl.lit(rank, pl.Int64)))
        table = pl.concat(parts)
        if table.is_empty():
            return None
        frame = frame_to_pandas(table)
        if visualize:
            charts.show_bars(frame, "Time by annotation", x="name", y="sum (us)", rows="rank")
        return frame

    def get_gpu_kernels_with_user_annotations(
        self,
        rank: int,
        expand_names: bool = True,
        shorten_names: bool = True,
        *,
        shortern_names: bool | None = None,
    ) -> pd.DataFrame | None:
        """Return a rank's frame of GPU activity with ``user_annotation``, the innermost annotation around the launch.

        It is a number, -1 for none; expand_names adds the texts s_name, s_cat and s_user_annotation.

        Numbered from 0, with ``end`` after ``dur``. None for a trace whose devices show no annotations.
        """
        ((_, trace),) = self._select_ranks([rank])
        if not trace.events.select((pl.col("cat") == ON_DEVICE).any()).item():
            return None
        table = self.t.get_trace(rank)
        work = add_frame_index(trace, select_launched_work(trace, "id", "launch"))
        annotation_rows = nesting.find_nearest_ancestor(
            rows_of_ids(trace.events, trace.events["parent"]),
            categories.mask_events(trace.events, categories.ANNOTATION_CATEGORIES),
            rows_of_ids(trace.events, work["launch"]),
        )
        innermost = take_rows(trace.events["name"], annotation_rows).cast(pl.String)
        names = dict(zip(work["index"].to_list(), innermost.to_list(), strict=True))
        rows = table[table["index"].isin(list(names))].copy()
        number = self.t.symbol_table.sym_index
        texts = [names[at] for at in rows["index"].tolist()]
        rows["user_annotation"] = [-1 if text is None else number[text] for text in texts]
        if expand_names:
            symbols = self.t.symbol_table.sym_table
            for column in ("name", "cat"):
                rows[f"s_{column}"] = [symbols[int(value)] for value in rows[column]]
            if shorten_names if shortern_names is None else shortern_names:
                rows["s_name"] = [shorten_kernel_name(name) for name in rows["s_name"]]
            rows["s_user_annotation"] = ["" if text is None else text for text in texts]
        rows.insert(rows.columns.get_loc("dur") + 1, "end", rows.pop("end"))
        return rows.reset_index(drop=True)

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


def _ask(run: Job | Trace, name: str, **options: Any) -> pl.DataFrame:
    """Return the answer of an analysis with HTA's columns (`_ANSWERS`), without the rows of single steps."""
    table = api.analyze(run, name, **options)
    if "step" in table.columns:
        table = table.filter(pl.col("step").is_null())
    return table.select(**_ANSWERS[name])


def _overlapping(kinds: str) -> str:
    """Convert etloom's text of concurrent kernel types to HTA's, such as COMPUTATION overlapping COMMUNICATION."""
    order = ("computation", "communication", "memory", "other")
    return (
        " overlapping ".join(sorted(kinds.split(" + "), key=order.index))
        .upper()
        .replace("OVERLAPPING", "overlapping")
    )


def _gaps(trace: Trace, delay: int) -> pl.DataFrame:
    """Return the idle gaps between GPU activities of each stream, as in idle-time: stream, cause, gap (us)."""
    work = select_launched_work(trace, *_STREAM, "ts", "dur", "launch_ts")
    before = (pl.col("ts") + pl.col("dur")).cum_max().shift(1).over(*_STREAM)
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
            .cast(pl.Enum(("host_wait", "kernel_wait", "other"))),
            gap=pl.col("gap") / US,
        )
    )


def _kernels_only(trace: Trace) -> Trace:
    """Return the trace without the launches of memcpys and memsets."""
    events = trace.events
    kernels = events.filter(categories.mask_events(events, _KERNEL_CATEGORIES))["id"]
    return trace.replace(
        None, launches=trace.launches.filter(pl.col("device_event").is_in(kernels.implode()))
    )


def summarize_durations(table: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return statistics of ``dur`` (ns) by ``by``: sum (us), max (us), min (us), stddev (in us), mean (us)."""
    dur = pl.col("dur") / 1e3
    return table.group_by(*by, maintain_order=True).agg(
        dur.sum().alias("sum (us)"),
        dur.max().alias("max (us)"),
        dur.min().alias("min (us)"),
        dur.std().fill_null(0.0).alias("stddev"),
        dur.mean().alias("mean (us)"),
    )


def group_small_names(
    times: pl.DataFrame, ratio: float, max_names: int, always_shown: Sequence[str] = ()
) -> pl.DataFrame:
    """Return name and dur of each row; beyond ``max_names`` names, those with little time become "others".

    Small are those beyond ``max_names`` and those beyond ``ratio`` of the time, unless they contain one of the texts
    of ``always_shown``.
    """
    sums = (
        times.group_by("name")
        .agg(pl.col("dur").sum().alias("total"))
        .sort("total", "name", descending=(True, False))
    )
    if sums.height <= max_names:
        return times.select("name", "dur")
    before = pl.col("total").cum_sum() - pl.col("total")
    below_limit = (pl.int_range(pl.len()) < max_names) & (before < ratio * pl.col("total").sum())
    is_shown = (pl.col("name").str.contains(text, literal=True) for text in always_shown)
    labels = sums.select(
        "name",
        shown=pl.when(pl.any_horizontal(below_limit, *is_shown)).then("name").otherwise(pl.lit("others")),
    )
    return times.join(labels, on="name").select(name="shown", dur="dur")
