"""The events of a Job as HTA's Trace: pandas frames with numbers for names, and the table of numbers and names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.core.steps import parse_step
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import has_device_events

if TYPE_CHECKING:
    import pandas as pd

US = 1e3
MEMORY_OPERATIONS = ("Memcpy", "Memset", "hipMemcpy", "hipMemset")
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
    "memory_bw_gbps": 0.0,
    **dict.fromkeys(("in_msg_nelems", "out_msg_nelems", "group_size"), 0),
    **dict.fromkeys(("collective_name", "msg_dtype"), ""),
    **dict.fromkeys(("in_split_size", "out_split_size"), "[]"),
}
"""Column -> HTA's value for an absent one; it is -1 in other columns."""
_LISTS = tuple(_FACTS["arguments"])
COLUMNS = (
    *("index", "cat", "name", "pid", "tid", "ts", "dur", "stream", "correlation", "bytes", "memory_bw_gbps"),
    *_FACTS["syncs"],
    *_LISTS,
    *("external_id", *_FACTS["frames"]),
    *("collective_name", "in_msg_nelems", "out_msg_nelems", "msg_dtype", "group_size", "process_rank"),
    *("in_split_size", "out_split_size", "index_correlation", "iteration", "end"),
)
"""Of a frame, in HTA's order."""


def import_pandas() -> Any:
    """Import and return pandas. Raises EtloomError if it is not installed."""
    try:
        import pandas
    except ImportError:
        raise EtloomError("pandas is not installed", remedy="pip install pandas") from None
    return pandas


def frame_to_pandas(table: pl.DataFrame) -> pd.DataFrame:
    """Convert a polars table to a pandas frame with numpy columns and NaN for null, as in HTA."""
    import_pandas()
    return table.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String)).to_pandas()


def flatten_column_names(df: pd.DataFrame) -> None:
    """Join the levels of a frame's column names with "_"; changes the frame in place."""
    if df.columns.nlevels > 1:
        df.columns = ["_".join(names).rstrip("_") for names in df.columns]


def shorten_kernel_name(name: str) -> str:
    """Return the bare name of a kernel, without template arguments, parameters and return type.

    Names of memcpys and memsets, and names without "<" and "(" (of annotations and operators), stay as they are.
    """
    if name.startswith(MEMORY_OPERATIONS) or not ("<" in name or "(" in name):
        return name
    chars, depth = [], 0
    for char in name.replace("(anonymous namespace)::", "").replace("->", ""):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            chars.append(char)
    words = "".join(chars).split()
    return words[-1] if words else name


def find_profiler_file(trace: Trace) -> Path:
    """Return the path of the file with the profiler's events of a rank."""
    files = dict(zip(reversed(trace.meta["formats"]), reversed(trace.meta["files"]), strict=False))
    files.pop("execution_trace", None)
    return Path(next(reversed(files.values())))


class SymbolTable:
    """Numbers for the names and categories of a job: ``sym_table[number]`` is a text, ``sym_index`` the inverse."""

    def __init__(self, texts: list[str]) -> None:
        self.sym_table = texts
        self.sym_index = {text: number for number, text in enumerate(texts)}

    def get_sym_table(self) -> list[str]:
        return self.sym_table

    def get_sym_id_map(self) -> dict[str, int]:
        return self.sym_index

    def find_matches(self, patterns: Sequence[str]) -> list[int]:
        """Return the numbers of the texts that contain any of the patterns; patterns are plain text, as in HTA."""
        return [self.sym_index[text] for text in self.find_matched_symbols(patterns)]

    def find_matched_symbols(self, patterns: Sequence[str]) -> list[str]:
        """Return the texts that contain any of the patterns; patterns are plain text."""
        return [text for text in self.sym_table if any(pattern in text for pattern in patterns)]

    def add_symbols_to_trace_df(self, trace_df: pd.DataFrame, col: str) -> None:
        """Replace the numbers in a column of a frame by their texts, in place."""
        trace_df[col] = [self.sym_table[int(number)] for number in trace_df[col]]


class HtaTrace:
    """The events of a run as a pandas frame per rank, like HTA's Trace; available as ``TraceAnalysis(...).t``.

    Members: ``get_trace(rank)``, ``get_all_traces()``, ``symbol_table``, ``traces``, ``trace_files``.
    """

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
        """The path of the profiler's file of each rank: {rank: path}."""
        return {rank: str(find_profiler_file(trace)) for rank, trace in self.job.items()}

    @property
    def meta_data(self) -> dict[int, dict[str, Any]]:
        """The header of the profiler's file of each rank: schemaVersion, deviceProperties, ..., without events."""
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
        """Return the step numbers of a rank (default: the first rank), ascending."""
        steps = self.get_trace(self._first(rank))["iteration"].unique()
        return sorted(int(step) for step in steps if step >= 0)

    def get_trace(self, rank: int) -> pd.DataFrame:
        """Return the pandas frame of a rank's events, not a copy of it. Raises AnalysisError for an unknown rank."""
        if rank not in self.traces:
            raise unknown_rank_error(rank, self.traces)
        return self.traces[rank]

    def get_all_traces(self) -> dict[int, pd.DataFrame]:
        return self.traces

    def get_trace_duration(self, rank: int | None = None) -> float:
        """Return the time from the first start to the last end of a rank's events (default: the first rank), in us."""
        table = self.get_trace(self._first(rank))
        return float(table["end"].max() - table["ts"].min()) if len(table) else 0.0

    def decode_symbol_ids(self, use_shorten_name: bool = True) -> None:
        """Add the columns s_name and s_cat, the texts of names and categories, to the frame of every rank."""
        texts = self.symbol_table.sym_table
        for table in self.traces.values():
            for column in ("name", "cat"):
                table[f"s_{column}"] = [texts[int(number)] for number in table[column]]
            if use_shorten_name:
                table["s_name"] = [shorten_kernel_name(name) for name in table["s_name"]]

    def _first(self, rank: int | None) -> int:
        return self.get_ranks()[0] if rank is None else rank

    def _zero_ns(self, trace: Trace) -> int:
        """Return the time (ns, in the tables of the rank) that is 0 in its frame."""
        return self.zero

    def _frame(self, trace: Trace) -> pd.DataFrame:
        """Return the events of a rank as a frame with HTA's columns; times in us from the job's first event."""
        events = timed_events(trace).join(frame_indices(trace), on="id").sort("index")
        for name, columns in _FACTS.items():
            facts = trace.table(name).unique("event", keep="first", maintain_order=True)
            facts = facts.select("event", *(pl.col(ours).alias(hta) for hta, ours in columns.items()))
            events = events.join(facts, left_on="id", right_on="event", how="left", maintain_order="left")
        events = events.join(_partners(trace), on="id", how="left", maintain_order="left")
        number, zero = self.symbol_table.sym_index, self._zero_ns(trace)
        table = events.with_columns(
            *(
                pl.col(name).cast(pl.String).replace_strict(number, return_dtype=pl.Int64)
                for name in ("cat", "name")
            ),
            index=pl.col("index").cast(pl.Int64),
            ts=(pl.col("ts") - zero) / US,
            dur=pl.col("dur") / US,
            process_rank=pl.col("args").cast(pl.String).str.extract(r'"Rank": ?(\d+)').cast(pl.Int64),
            index_correlation=pl.coalesce(
                pl.col("partner").cast(pl.Int64), pl.when(pl.col("correlation").is_not_null()).then(0)
            ),
            iteration="step",
            end=(pl.col("ts") - zero + pl.col("dur")) / US,
        )
        frame = frame_to_pandas(table.select(_or_absent(table, name) for name in COLUMNS))
        for name in _LISTS:
            lists = {text: text if text == "-1" else json.loads(text) for text in frame[name].unique()}
            frame[name] = import_pandas().Series([lists[text] for text in frame[name]], dtype=object)
        frame.index = frame["index"].to_numpy()
        return frame


class RunAccess:
    """The run of a TraceAnalysis: the analyzed part (``job``), the whole run (``full_job``), and its frames (``t``)."""

    job: Job
    full_job: Job
    t: HtaTrace

    def _select_ranks(self, ranks: Sequence[int] | None) -> list[tuple[int, Trace]]:
        """Return (rank, trace) for the ``ranks``, or for the first rank if there are none. Raises AnalysisError."""
        for rank in ranks or []:
            if rank not in self.job:
                raise unknown_rank_error(rank, self.job)
        return [(rank, self.job[rank]) for rank in (ranks or self.job.ranks[:1])]

    def _with_device(self, ranks: Sequence[int] | None) -> list[tuple[int, Trace]]:
        """Return (rank, trace) as `_select_ranks`, but without ranks that have no GPU activity, as in HTA."""
        return [(rank, trace) for rank, trace in self._select_ranks(ranks) if has_device_events(trace)]

    def _source(self, rank: int) -> Path:
        """Return the path of the file with the profiler's events of a rank."""
        return find_profiler_file(self.full_job[rank])


def timed_events(trace: Trace) -> pl.DataFrame:
    """Return the events that HTA reads: those with a duration and a category other than Trace."""
    is_timed = pl.col("dur").is_not_null() & pl.col("cat").is_not_null() & (pl.col("cat") != UNTIMED_CATEGORY)
    return trace.events.filter(is_timed)


def frame_indices(trace: Trace) -> pl.DataFrame:
    """Return id and index of each event: its position in the file, as in HTA, or its id if positions are not unique."""
    is_captured = categories.mask_events(trace.events, categories.CAPTURED)
    events = trace.events.filter(~pl.Series(is_captured)).select("id", index="position")
    has_positions = not events["index"].null_count() and not events["index"].is_duplicated().any()
    return events if has_positions else events.select("id", index="id")


def add_frame_index(trace: Trace, table: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``index``: the index, in the frame of the rank, of the event whose id is in ``id``."""
    return table.join(frame_indices(trace), on="id", how="left", maintain_order="left")


def drop_last_step(trace: Trace) -> Trace:
    """Return the trace without the host events from the last step on, and the GPU activity launched by them.

    HTA drops them by default. A trace with fewer than two steps is returned unchanged.
    """
    starts = trace.events.filter(
        categories.mask_events(trace.events, categories.ANNOTATION_CATEGORIES)
    ).with_columns(number=parse_step())
    starts = starts.drop_nulls("number").sort("number")
    if starts["number"].n_unique() < 2:
        return trace
    last = starts["ts"][-1]
    device = categories.mask_events(trace.events, categories.DEVICE_CATEGORIES)
    dropped = trace.events.filter(~pl.Series(device) & (pl.col("ts") >= last))["id"]
    launched = trace.launches.filter(pl.col("launch").is_in(dropped.implode()))["device_event"]
    dropped_ids = pl.concat((dropped, launched)).unique()
    events = trace.events.filter(~pl.col("id").is_in(dropped_ids.implode()))
    launches = trace.launches.filter(~pl.col("device_event").is_in(dropped_ids.implode()))
    return trace.replace(None, events=events, launches=launches)


def _partners(trace: Trace) -> pl.DataFrame:
    """Return id and partner (frame index): a launch call's first GPU activity, or a GPU activity's launch call."""
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
    """Return an expression for a column in which HTA's value for missing entries, such as -1, replaces null."""
    column = pl.col(name)
    if table.schema[name] == pl.Categorical:
        column = column.cast(pl.String)
        return column.fill_null(str(_ABSENT.get(name, -1)))
    if table.schema[name].is_integer():
        column = column.cast(pl.Int64)
    return column.fill_null(_ABSENT.get(name, -1))
