"""A Job as HTA's Trace: pandas frames of events with numbers instead of names, and the table of these
names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom.compat.hta.kernel_names import shorten_kernel_name
from etloom.core import arrays, categories
from etloom.core.errors import EtloomError
from etloom.core.steps import parse_step
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace

if TYPE_CHECKING:
    import pandas as pd

US = 1e3
UNTIMED_CATEGORY = "Trace"
"""The category of the profiler's own span, which HTA leaves out."""
_FACTS = {
    "kernels": {"bytes": "bytes", "memory_bw_gbps": "bandwidth"},
    "syncs": {"wait_on_stream": "wait_stream", "wait_on_cuda_event_record_corr_id": "record_correlation"},
    "arguments": {"input_dims": "dims", "input_type": "types", "input_strides": "strides"},
    "frames": {"python_id": "python_id", "python_parent_id": "python_parent_id"},
    "comms": {
        "collective_name": "collective",
        "in_msg_nelems": "in_nelems",
        "out_msg_nelems": "out_nelems",
        "msg_dtype": "dtype",
        "group_size": "group_size",
        "in_split_size": "in_split",
        "out_split_size": "out_split",
    },
}
"""For each table with details of events: name of HTA's column -> name of ours."""
_ABSENT: dict[str, Any] = {
    **dict.fromkeys(("memory_bw_gbps",), 0.0),
    **dict.fromkeys(("in_msg_nelems", "out_msg_nelems", "group_size"), 0),
    **dict.fromkeys(("collective_name", "msg_dtype"), ""),
    **dict.fromkeys(("in_split_size", "out_split_size"), "[]"),
}
"""What HTA writes for nothing, where it is not -1."""
_LISTS = ("input_dims", "input_type", "input_strides")
_FIRST = (
    "index",
    "cat",
    "name",
    "pid",
    "tid",
    "ts",
    "dur",
    "stream",
    "correlation",
    "bytes",
    "memory_bw_gbps",
)
_NUMBERED = ("wait_on_stream", "wait_on_cuda_event_record_corr_id")
_THEN = ("external_id", "python_id", "python_parent_id")
_COMMUNICATION = (
    "collective_name",
    "in_msg_nelems",
    "out_msg_nelems",
    "msg_dtype",
    "group_size",
    "process_rank",
)
_LAST = ("in_split_size", "out_split_size", "index_correlation", "iteration", "end")
COLUMNS = (*_FIRST, *_NUMBERED, *_LISTS, *_THEN, *_COMMUNICATION, *_LAST)
"""Of a frame, in HTA's order."""


def import_pandas() -> Any:
    """The pandas module. Raises EtloomError where it is not installed."""
    try:
        import pandas
    except ImportError:
        raise EtloomError("pandas is not installed", remedy="pip install pandas") from None
    return pandas


def frame_to_pandas(table: pl.DataFrame) -> pd.DataFrame:
    """A polars table as a pandas one, with numpy columns and NaN for null, as HTA's are."""
    import_pandas()
    return table.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String)).to_pandas()


def flatten_column_names(df: pd.DataFrame) -> None:
    """Join the levels of a frame's column names with "_", in the frame itself."""
    if df.columns.nlevels > 1:
        df.columns = ["_".join(names).rstrip("_") for names in df.columns]


def find_profiler_file(trace: Trace) -> Path:
    """Return the file with the profiler's events of a rank."""
    files = dict(zip(reversed(trace.meta["formats"]), reversed(trace.meta["files"]), strict=False))
    files.pop("execution_trace", None)
    return Path(next(reversed(files.values())))


class SymbolTable:
    """The names and categories of a job as numbers: ``sym_table[number]`` is a text, ``sym_index[text]`` its
    number."""

    def __init__(self, texts: list[str]) -> None:
        self.sym_table = texts
        self.sym_index = {text: number for number, text in enumerate(texts)}

    def get_sym_table(self) -> list[str]:
        return self.sym_table

    def get_sym_id_map(self) -> dict[str, int]:
        return self.sym_index

    def find_matches(self, patterns: Sequence[str]) -> list[int]:
        """Return the numbers of the texts that contain one of the patterns, which HTA takes as plain text too."""
        return [self.sym_index[text] for text in self.find_matched_symbols(patterns)]

    def find_matched_symbols(self, patterns: Sequence[str]) -> list[str]:
        """Return the texts that contain one of the patterns."""
        return [text for text in self.sym_table if any(pattern in text for pattern in patterns)]

    def add_symbols_to_trace_df(self, trace_df: pd.DataFrame, col: str) -> None:
        """Replace the numbers of a column by their texts, in the frame itself."""
        trace_df[col] = [self.sym_table[int(number)] for number in trace_df[col]]


class HtaTrace:
    """The frames of a run, ``TraceAnalysis(...).t``: ``get_trace(rank)``, ``get_all_traces()``, ``symbol_table``,
    ``traces``, ``trace_files``."""

    is_parsed = True

    def __init__(self, job: Job) -> None:
        self.job = job
        texts = pl.concat(
            [trace.events[name].cast(pl.String) for trace in job.values() for name in ("name", "cat")]
        )
        self.symbol_table = SymbolTable([*sorted(texts.drop_nulls().unique()), ""])
        starts = (timed_events(trace)["ts"].min() for trace in job.values())
        self.zero = min((start for start in starts if isinstance(start, int)), default=0)
        self.min_ts = self.zero / US
        self.traces: dict[int, pd.DataFrame] = {rank: self._frame(trace) for rank, trace in job.items()}

    @property
    def trace_files(self) -> dict[int, str]:
        """The file with the profiler's events of each rank."""
        return {rank: str(find_profiler_file(trace)) for rank, trace in self.job.items()}

    @property
    def meta_data(self) -> dict[int, dict[str, Any]]:
        """The profiler's file of each rank without its events: schemaVersion, deviceProperties, ..."""
        content = {}
        for rank, trace in self.job.items():
            content[rank] = dict(trace.meta.get("header") or {})
            if properties := trace.meta.get("device_properties"):
                content[rank]["deviceProperties"] = properties
            if distributed := trace.meta.get("distributed"):
                content[rank]["distributedInfo"] = distributed
        return content

    def get_ranks(self) -> list[int]:
        return sorted(self.traces)

    def get_iterations(self, rank: int | None = None) -> list[int]:
        """The steps of a rank, by default the first, in order."""
        steps = self.get_trace(self._first(rank))["iteration"].unique()
        return sorted(int(step) for step in steps if step >= 0)

    def get_trace(self, rank: int) -> pd.DataFrame:
        """The frame of a rank itself, not a copy. Raises AnalysisError."""
        if rank not in self.traces:
            raise unknown_rank_error(rank, self.traces)
        return self.traces[rank]

    def get_all_traces(self) -> dict[int, pd.DataFrame]:
        return self.traces

    def get_trace_duration(self, rank: int | None = None) -> float:
        """Time from the first start to the last end of a rank (default: the first), in us."""
        table = self.get_trace(self._first(rank))
        return float(table["end"].max() - table["ts"].min()) if len(table) else 0.0

    def decode_symbol_ids(self, use_shorten_name: bool = True) -> None:
        """Add the texts of names and categories to every frame: s_name, s_cat."""
        texts = self.symbol_table.sym_table
        for table in self.traces.values():
            for column in ("name", "cat"):
                table[f"s_{column}"] = [texts[int(number)] for number in table[column]]
            if use_shorten_name:
                table["s_name"] = [shorten_kernel_name(name) for name in table["s_name"]]

    def _first(self, rank: int | None) -> int:
        return self.get_ranks()[0] if rank is None else rank

    def _frame(self, trace: Trace) -> pd.DataFrame:
        """HTA's columns with its values for missing entries; times in us from the job's first event."""
        events = timed_events(trace).join(frame_indices(trace), on="id").sort("index")
        for name, columns in _FACTS.items():
            facts = trace.table(name).unique("event", keep="first", maintain_order=True)
            facts = facts.select("event", *(pl.col(ours).alias(hta) for hta, ours in columns.items()))
            events = events.join(facts, left_on="id", right_on="event", how="left", maintain_order="left")
        events = events.join(_partners(trace), on="id", how="left", maintain_order="left")
        number = self.symbol_table.sym_index
        table = events.with_columns(
            *(
                pl.col(name).cast(pl.String).replace_strict(number, return_dtype=pl.Int64)
                for name in ("cat", "name")
            ),
            index=pl.col("index").cast(pl.Int64),
            ts=(pl.col("ts") - self.zero) / US,
            dur=pl.col("dur") / US,
            process_rank=pl.col("args").cast(pl.String).str.extract(r'"Rank": ?(\d+)').cast(pl.Int64),
            index_correlation=pl.coalesce(
                pl.col("partner").cast(pl.Int64), pl.when(pl.col("correlation").is_not_null()).then(0)
            ),
            iteration="step",
            end=(pl.col("ts") - self.zero + pl.col("dur")) / US,
        )
        frame = frame_to_pandas(table.select(_or_absent(table, name) for name in COLUMNS))
        for name in _LISTS:
            lists = {text: text if text == "-1" else json.loads(text) for text in frame[name].unique()}
            frame[name] = import_pandas().Series([lists[text] for text in frame[name]], dtype=object)
        frame.index = frame["index"].to_numpy()
        return frame


def timed_events(trace: Trace) -> pl.DataFrame:
    """Return the events that HTA keeps: those with a category and a duration."""
    is_timed = pl.col("dur").is_not_null() & pl.col("cat").is_not_null() & (pl.col("cat") != UNTIMED_CATEGORY)
    return trace.events.filter(is_timed)


def frame_indices(trace: Trace) -> pl.DataFrame:
    """Return id and index: the position of each event in the file, as HTA counts, or its id if positions are
    not unique."""
    is_captured = arrays.is_in(trace.events["cat"], categories.CAPTURED)
    events = trace.events.filter(~pl.Series(is_captured)).select("id", index="position")
    has_positions = not events["index"].null_count() and not events["index"].is_duplicated().any()
    return events if has_positions else events.select("id", index="id")


def drop_last_step(trace: Trace) -> Trace:
    """Return the trace as HTA keeps it by default: if it has several steps, without the host events of the
    last step and the GPU activity launched there."""
    starts = trace.events.filter(
        arrays.is_in(trace.events["cat"], categories.ANNOTATION_CATEGORIES)
    ).with_columns(number=parse_step())
    starts = starts.drop_nulls("number").sort("number")
    if starts["number"].n_unique() < 2:
        return trace
    last = starts["ts"][-1]
    device = arrays.is_in(trace.events["cat"], categories.DEVICE_CATEGORIES)
    dropped = trace.events.filter(~pl.Series(device) & (pl.col("ts") >= last))["id"]
    launched = trace.launches.filter(pl.col("launch").is_in(dropped.implode()))["device_event"]
    dropped_ids = pl.concat((dropped, launched)).unique()
    events = trace.events.filter(~pl.col("id").is_in(dropped_ids.implode()))
    launches = trace.launches.filter(~pl.col("device_event").is_in(dropped_ids.implode()))
    return trace.replace(None, events=events, launches=launches)


def _partners(trace: Trace) -> pl.DataFrame:
    """Return id and partner: for a launch call the index of its (first) GPU activity, for a GPU activity that
    of its launch."""
    index = frame_indices(trace).rename({"id": "other", "index": "partner"})
    launched = trace.launches.drop_nulls(["launch", "device_event"]).unique("device_event", keep="first")
    pairs = pl.concat(
        (
            launched.select(id="device_event", other="launch"),
            launched.unique("launch", keep="first").select(id="launch", other="device_event"),
        )
    )
    return pairs.unique("id", keep="first").join(index, on="other").select("id", "partner")


def _or_absent(table: pl.DataFrame, name: str) -> pl.Expr:
    """Return a column with HTA's value for missing entries in place of null."""
    column = pl.col(name)
    if table.schema[name] == pl.Categorical:
        column = column.cast(pl.String)
        return column.fill_null(str(_ABSENT.get(name, -1)))
    if table.schema[name].is_integer():
        column = column.cast(pl.Int64)
    return column.fill_null(_ABSENT.get(name, -1))
