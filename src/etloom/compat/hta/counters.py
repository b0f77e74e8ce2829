"""HTA's methods about queue length, memcpy bandwidth, hardware counters, and trace files with counter tracks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Flag, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import api
from etloom.analyses.cupti_counters import RANGE_CATEGORY, match_launches
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.compat.hta.frames import US, RunAccess, add_frame_index, frame_to_pandas, import_pandas
from etloom.core import categories
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline import activity

if TYPE_CHECKING:
    import pandas as pd

BLOCKS = 1024
"""Launches that may wait on a stream before the next one blocks."""
SUFFIX = "_with_counters"
CUDA_SASS_INSTRUCTION_COUNTER_FLOPS = {
    f"smsp__sass_thread_inst_executed_op_{operation}_pred_on.sum": 2 if operation.endswith("fma") else 1
    for operation in ("ffma", "fmul", "fadd", "hfma", "hmul", "hadd", "dfma", "dmul", "dadd")
}
"""FLOPs of one instruction that each hardware counter counts: a fused multiply-add is two."""


class TimeSeriesTypes(Flag):
    """The kinds of counters that `Counters.generate_trace_with_counters` adds to a trace file."""

    QUEUE_LENGTH = auto()
    MEMCPY_BANDWIDTH = auto()


class Counters(RunAccess):
    """The methods of TraceAnalysis about queue length, memcpy bandwidth and hardware counters of kernels."""

    def get_queue_length_time_series(self, ranks: Sequence[int] | None = None) -> dict[int, pd.DataFrame]:
        """Return {rank: ts (us), pid, tid, stream, queue_length}, with a row per launch and per start of GPU activity.

        Rows are ordered by stream and indexed by event. Ranks without GPU activity are skipped.
        """
        frames = {}
        for rank, trace in self._with_device(ranks):
            table = add_frame_index(trace, _queue(trace)).select(
                "index", (pl.col("ts") - self.t.zero) / US, "pid", "tid", "stream", "queue_length"
            )
            frames[rank] = frame_to_pandas(table).set_index("index")
        return frames

    def get_queue_length_summary(self, ranks: Sequence[int] | None = None) -> pd.DataFrame | None:
        """Return statistics of the queue length by rank and stream, a sample per change, not weighted by time.

        They are count, mean, std, min, quartiles and max. None if no rank has GPU activity.
        """
        return self.get_queue_length_summary_from_time_series(self.get_queue_length_time_series(ranks))

    def get_queue_length_summary_from_time_series(
        self, queue_length_dict: Mapping[int, pd.DataFrame]
    ) -> pd.DataFrame | None:
        """Return statistics of the queue length by rank and stream, from the result of get_queue_length_time_series."""
        return _describe_series(queue_length_dict, "stream", "queue_length")

    def get_time_spent_blocked_on_full_queue(
        self, queue_length_dict: Mapping[int, pd.DataFrame], max_queue_length: int = BLOCKS
    ) -> pd.DataFrame:
        """Return the time (us, and share of the rank's) with ``max_queue_length`` or more queued activities, by stream.

        Columns: rank, stream, duration_at_max_queue_length, relative_duration_at_max_queue_length. Streams that do not
        reach that length are omitted.
        """
        rows = []
        for rank, series in queue_length_dict.items():
            span = self.t.get_trace_duration(rank)
            for stream, samples in series.groupby("stream"):
                lasted = samples["ts"].shift(-1) - samples["ts"]
                full = samples["queue_length"] >= max_queue_length
                if full.any():
                    blocked = float(lasted[full].sum())
                    rows.append((rank, stream, blocked, blocked / span if span else 0.0))
        names = ("duration_at_max_queue_length", "relative_duration_at_max_queue_length")
        table = import_pandas().DataFrame(rows, columns=["rank", "stream", *names])
        return table.astype({"rank": int, "stream": int, **dict.fromkeys(names, float)})

    def get_memory_bw_time_series(self, ranks: Sequence[int] | None = None) -> dict[int, pd.DataFrame]:
        """Return {rank: ts (us), pid, name, memory_bw_gbps}, with a row per change of a memcpy direction's bandwidth.

        Rows are ordered by direction. Ranks without memcpys of known bandwidth are skipped.
        """
        frames = {}
        for rank, trace in self._select_ranks(ranks):
            if (table := _bandwidth(trace)) is not None:
                ts = (pl.col("ts") - self.t.zero) / US
                frames[rank] = frame_to_pandas(table.select(ts, "pid", "name", "memory_bw_gbps"))
        return frames

    def get_memory_bw_summary(self, ranks: Sequence[int] | None = None) -> pd.DataFrame | None:
        """Return statistics of the non-zero memcpy bandwidths (GB/s) by rank and direction; None if no rank has any.

        They are count, mean, std, min, quartiles and max.
        """
        series = self.get_memory_bw_time_series(ranks)
        return _describe_series(
            {rank: frame[frame["memory_bw_gbps"] > 0] for rank, frame in series.items()},
            "name",
            "memory_bw_gbps",
        )

    def generate_trace_with_counters(
        self,
        time_series: TimeSeriesTypes | None = None,
        ranks: Sequence[int] | None = None,
        output_suffix: str = SUFFIX,
    ) -> None:
        """Write, next to each rank's file, its trace with counter tracks of queue length and memcpy bandwidth.

        There is a counter per stream ("Queue Length (stream 7)") and per memcpy direction ("Memcpy DtoD"); by default
        both. An existing file of that name is replaced.
        """
        selected = ~TimeSeriesTypes(0) if time_series is None else time_series
        for rank, trace in self._select_ranks(ranks):
            samples = []
            if TimeSeriesTypes.QUEUE_LENGTH in selected and activity.has_device_events(trace):
                stream_name = pl.format("Queue Length (stream {})", "stream")
                samples.append(_samples(_queue(trace), stream_name, "Queue Length", "queue_length"))
            copied = _bandwidth(trace) if TimeSeriesTypes.MEMCPY_BANDWIDTH in selected else None
            if copied is not None:
                samples.append(_samples(copied, pl.col("name"), "Memcpy BW", "memory_bw_gbps"))
            full_trace = self.full_job[rank]
            counters = pl.concat((full_trace.counters, *samples)).with_columns(
                id=pl.int_range(pl.len(), dtype=pl.UInt32)
            )
            target = _sibling_path(self._source(rank), output_suffix or SUFFIX)
            api.export(full_trace.replace(None, counters=counters), target, "chrome")

    def get_cupti_counter_data_with_operators(self, ranks: Sequence[int] | None = None) -> list[pd.DataFrame]:
        """Return a frame per rank with a row per measured kernel: its hardware counters and the operators around it.

        Columns: the columns of a trace (name and cat as text), the counters, index_runtime (index of the launch call),
        op_stack (the operators around the launch call, outermost first), top_level_op and bottom_level_op ("" without
        operators). Ranks without counters are left out.

        Raises AnalysisError where kernels cannot be joined to launches by their order.
        """
        frames = []
        for rank, trace in self._select_ranks(ranks):
            measured = trace.events.filter(pl.col("cat") == RANGE_CATEGORY).sort("ts", "id")
            if measured.height:
                frames.append(self._measured(rank, trace, measured))
        return frames

    def _measured(self, rank: int, trace: Trace, measured: pl.DataFrame) -> pd.DataFrame:
        launches = match_launches(trace, measured)
        table = (
            self.t.get_trace(rank)
            .loc[add_frame_index(trace, measured)["index"].to_list()]
            .reset_index(drop=True)
        )
        texts = self.t.symbol_table.sym_table
        for column in ("name", "cat"):
            table[column] = [texts[int(number)] for number in table[column]]
        values = [_numbers(text) for text in measured["args"].cast(pl.String)]
        for counter in dict.fromkeys(name for row in values for name in row):
            table[counter] = [row.get(counter) for row in values]
        table["index_runtime"] = add_frame_index(trace, launches)["index"].to_numpy()
        stacks = list(_operators_around(trace, launches))
        table["op_stack"] = import_pandas().Series(stacks, dtype=object)
        table["top_level_op"] = [stack[0] if stack else "" for stack in stacks]
        table["bottom_level_op"] = [stack[-1] if stack else "" for stack in stacks]
        return table


def _queue(trace: Trace) -> pl.DataFrame:
    """Return the changes of the queue length (launched, not yet started activities) of each stream; ts in ns.

    Columns: id, ts, pid, tid (of the device), stream, queue_length; ordered by stream.
    """
    work = select_launched_work(trace, "id", "launch", "launch_ts", "ts", "pid", "tid", "device", "stream")
    work = work.drop_nulls("launch_ts")
    joins = pl.min_horizontal("launch_ts", "ts")
    changes = pl.concat(
        (
            work.with_columns(id="launch", ts=joins, by=pl.lit(1, pl.Int64)),
            work.with_columns(by=pl.lit(-1, pl.Int64)),
        )
    ).sort("device", "stream", "ts", "by", descending=(False, False, False, True), maintain_order=True)
    length = pl.col("by").cum_sum().over("device", "stream")
    return changes.select("id", "ts", "pid", "tid", "stream", queue_length=length)


def _bandwidth(trace: Trace) -> pl.DataFrame | None:
    """Return a row per change of the memcpy bandwidth: ts (ns), pid of the device, name (direction), memory_bw_gbps.

    None if the trace has no memcpys, or neither their sizes nor their bandwidths.
    """
    try:
        table = api.analyze(trace, "memory-bandwidth").sort("name", "ts_ns", maintain_order=True)
    except AnalysisError:
        return None
    pid = activity.select_device_events(trace, "pid")["pid"].mode().sort()[0]
    return table.select(ts="ts_ns", pid=pl.lit(pid), name="name", memory_bw_gbps=pl.last())


def _samples(table: pl.DataFrame, name: pl.Expr, series: str, value: str) -> pl.DataFrame:
    """Convert samples (ts, pid, and the column ``value``) to rows of the table ``counters`` with the name ``name``."""
    return table.select(
        pl.lit(None, pl.UInt32).alias("id"),
        "ts",
        pl.col("pid").cast(pl.Int64),
        name.cast(pl.Categorical).alias("name"),
        pl.lit(series, pl.Categorical).alias("series"),
        pl.col(value).cast(pl.Float64).alias("value"),
    )


def _sibling_path(source: Path, suffix: str) -> Path:
    """Return the path for a trace with counters, next to the trace: a.json.gz -> a_with_counters.json.gz."""
    name, dot, rest = source.name.partition(".json")
    if dot and rest in ("", ".gz"):
        return source.with_name(f"{name}{suffix}.json{rest}")
    return source.with_name(f"{source.name.split('.')[0]}{suffix}.json.gz")


def _numbers(text: str | None) -> dict[str, Any]:
    """Return the hardware counters of a kernel, {name: number}, from the JSON text of its event arguments."""
    values = json.loads(text) if text else {}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def _operators_around(trace: Trace, launches: pl.DataFrame) -> Iterator[list[str]]:
    """Yield for each launch the names of the operators that enclose it, outermost first."""
    events = trace.events
    operators = events.filter(pl.col("cat").is_in(sorted(categories.OPERATOR_CATEGORIES)))
    operator_names = dict(operators.select("id", pl.col("name").cast(pl.String)).iter_rows())
    parent = dict(events.drop_nulls("parent").select("id", "parent").iter_rows())
    for event in launches["id"]:
        ancestors = []
        while (event := parent.get(event)) is not None:
            ancestors.append(event)
        yield [operator_names[ancestor] for ancestor in reversed(ancestors) if ancestor in operator_names]


def _describe_series(series: Mapping[int, pd.DataFrame], by: str, value: str) -> pd.DataFrame | None:
    """Return pandas statistics of the column ``value`` by rank and ``by``; two levels of columns, as in HTA."""
    parts = {rank: frame.groupby(by)[[value]].describe() for rank, frame in series.items()}
    return import_pandas().concat(parts, names=["rank"]) if parts else None
