"""HTA's ``hta.common.timeline`` and ``hta.analyzers.timeline``: frames of events as charts, drawn with Altair.

Like other charts they appear in notebooks that have Altair; ``save_path`` writes a file anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from etloom.compat.hta.call_graph import HOST
from etloom.compat.hta.charts import draw_timeline
from etloom.compat.hta.frames import HtaTrace, SymbolTable, import_pandas, shorten_kernel_name
from etloom.core.errors import InvalidValue

if TYPE_CHECKING:
    import pandas as pd

ANNOTATION_STREAM = 0
"""The stream that HTA gives to events of the host which are aligned with their kernels."""
_HOVER_COLUMNS = ("trace", "rank", "iteration", "stream", "cat", "index")
_START, _END, _TASK = "calibrated_start_global", "calibrated_end_global", "task"


class PlotFormat(Enum):
    """Output of a chart: the text of an HTML page, the notebook, or only the file of ``save_path``."""

    HTML = "html"
    Inline = "inline"
    File = "file"


@dataclass
class TimelinePlotSetting:
    """Settings of a chart. Events shorter than ``short_events_display_duration`` (us) are drawn as long as that if
    ``amplify_short_events``."""

    amplify_short_events: bool = True
    short_events_display_duration: float = 1000
    plot_format: PlotFormat = PlotFormat.Inline


class Timeline:
    """The events of a frame, those that a filter selects, as a chart with a line per rank, stream or depth."""

    def __init__(
        self,
        timeline_events: pd.DataFrame,
        symbol_table: SymbolTable | None,
        filter_func: Filter | None = None,
        setting: TimelinePlotSetting | None = None,
        hover_columns: Sequence[str] | None = None,
    ) -> None:
        self.setting, self.hover_columns = setting or TimelinePlotSetting(), hover_columns
        if filter_func is not None:
            timeline_events = filter_func(timeline_events, symbol_table)
        self.timeline_events = prepare_timeline_events(timeline_events, self.setting, symbol_table)

    def plot(self, title: str, save_path: str | None = None) -> str | None:
        return plot_events_timeline(title, self.timeline_events, self.setting, self.hover_columns, save_path)


def prepare_timeline_events(
    df: pd.DataFrame,
    setting: TimelinePlotSetting | None = None,
    symbol_table: SymbolTable | None = None,
    hover_columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return the events with names as texts, their line (task), and start and end in us from the first event.

    Raises:
        InvalidValue: the frame lacks name, ts or dur.
    """
    if missing := {"name", "ts", "dur"} - set(df.columns):
        raise InvalidValue(f"the frame has no column {', '.join(sorted(missing))}", remedy="pass events")
    setting = setting or TimelinePlotSetting()
    events = df.copy()
    for column in ("name", "cat") if symbol_table is not None else ():
        if column in events and events[column].dtype.kind in "iu":
            events[column] = [symbol_table.sym_table[number] for number in events[column]]  # type: ignore[union-attr]
    events["name"] = [shorten_kernel_name(str(name)) for name in events["name"]]
    least = setting.short_events_display_duration if setting.amplify_short_events else 0.0
    events[_START] = events["ts"] - events["ts"].min()
    events[_END] = events[_START] + events["dur"].clip(lower=least)
    events[_TASK] = _name_tasks(events)
    return events.sort_values([_TASK, "ts"], kind="stable")


def plot_events_timeline(
    title: str,
    events: pd.DataFrame,
    setting: TimelinePlotSetting | None = None,
    hover_columns: Sequence[str] | None = None,
    output_image_path: str | None = None,
) -> str | None:
    """Draw prepared events; return the chart as HTML if the setting asks for it.

    Raises:
        EtloomError: Altair is needed and not installed, or the file cannot be written.
    """
    plot_format = (setting or TimelinePlotSetting()).plot_format
    hover = [column for column in ("name", "dur", *(hover_columns or _HOVER_COLUMNS)) if column in events]
    return draw_timeline(
        events[list(dict.fromkeys([_START, _END, _TASK, *hover]))],
        title,
        x=(_START, _END),
        y=_TASK,
        color="name",
        show=plot_format is PlotFormat.Inline,
        as_html=plot_format is PlotFormat.HTML,
        path=output_image_path,
    )


def align_module_with_kernels(
    events_df: pd.DataFrame,
    module_list: Sequence[str],
    sym_table: SymbolTable | None = None,
    include_original_cpu_events: bool = False,
) -> pd.DataFrame:
    """Return GPU activity, and the named events of the host moved to the time of their kernels, as stream 0.

    Args:
        events_df: a frame with the columns of a CallGraph.
        module_list: texts that names contain.
        sym_table: if names are numbers.
        include_original_cpu_events: keep the events of the host, too.

    Raises:
        ValueError: the frame lacks these columns.
    """
    if missing := {"first_kernel_start", "kernel_span", "num_kernels"} - set(events_df.columns):
        raise ValueError(f"the frame has no columns {sorted(missing)}; construct a CallGraph first")
    is_host = events_df["stream"] == HOST
    if sym_table is not None and events_df["name"].dtype.kind in "iu":
        is_named = events_df["name"].isin(sym_table.find_matches(module_list))
    else:
        names = events_df["name" if events_df["name"].dtype.kind not in "iu" else "s_name"].astype(str)
        is_named = names.map(lambda name: any(text in name for text in module_list))
    moved = events_df[is_host & is_named & (events_df["num_kernels"] > 0)].copy()
    moved["ts"], moved["dur"] = moved["first_kernel_start"], moved["kernel_span"]
    moved["stream"] = ANNOTATION_STREAM
    originals = events_df if include_original_cpu_events else events_df[~is_host]
    return import_pandas().concat([originals, moved], ignore_index=True)


def plot_timeline_gpu_kernels(
    title: str,
    df: pd.DataFrame,
    symbol_table: SymbolTable | None,
    ranks: Sequence[int] | None = None,
    iterations: Sequence[int] | None = None,
    streams: Sequence[int] | None = None,
    duration_threshold: float = 1000,
) -> None:
    """Draw the GPU activity of a frame of one or several ranks (column rank); None: of all.

    Events shorter than ``duration_threshold`` (us) are drawn as long as that.
    """
    df = df[df["stream"] != HOST]
    for column, chosen in (("rank", ranks), ("iteration", iterations), ("stream", streams)):
        if chosen is not None:
            df = df[df[column].isin(chosen)]
    setting = TimelinePlotSetting(short_events_display_duration=duration_threshold)
    Timeline(df, symbol_table, setting=setting).plot(title)


def plot_timeline_gpu_kernels_from_trace(
    title: str,
    trace_data: HtaTrace,
    ranks: Sequence[int] | None = None,
    iterations: Sequence[int] | None = None,
    streams: Sequence[int] | None = None,
    duration_threshold: float = 1000,
) -> None:
    """Draw the GPU activity of a trace, as `plot_timeline_gpu_kernels`."""
    frames = {rank: trace_data.get_trace(rank) for rank in trace_data.get_ranks()}
    df = import_pandas().concat(frames, names=["rank", "row"]).reset_index()
    symbols = trace_data.symbol_table
    plot_timeline_gpu_kernels(title, df, symbols, ranks, iterations, streams, duration_threshold)


def _name_tasks(events: pd.DataFrame) -> pd.Series:
    """Return the line of each event: its rank and trace if there are several, and its stream, or depth on the host."""
    host = (
        "host"
        if "depth" not in events
        else "host level " + events["depth"].astype(int).astype(str).str.zfill(3)
    )
    task = import_pandas().Series(host, index=events.index)
    if "stream" in events:
        labels = "stream " + events["stream"].astype(int).astype(str).str.zfill(3)
        labels[events["stream"] == ANNOTATION_STREAM] = "annotations, or stream 000"
        task = task.where(events["stream"] == HOST, labels)
    for column in ("rank", "trace"):
        if column in events and events[column].nunique() > 1:
            task = f"{column} " + events[column].astype(str) + " " + task
    return task


# HTA's ``hta.common.trace_filter``: callable filters of the frames of `HtaTrace`.

_log = logging.getLogger(__name__)


class Filter:
    """Selects rows of a frame: ``filter(df)``, or ``filter(df, symbol_table)`` for names that are numbers.

    A filter of one's own overrides ``mask`` or, as with HTA, ``__call__``.
    """

    column = ""
    """The column that the filter requires; a frame without it is returned unchanged, with a warning."""

    def __call__(self, df: pd.DataFrame, symbol_table: SymbolTable | None = None) -> pd.DataFrame:
        if self.column and self.column not in df.columns:
            _log.warning("the frame has no column %r: it is not filtered", self.column)
            return df
        return df.loc[self.mask(df, symbol_table)]

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        """Return whether each row is selected; here all are."""
        import pandas as pd

        return pd.Series(True, index=df.index)


class IterationFilter(Filter):
    """Selects the events of iterations by their numbers."""

    column = "iteration"

    def __init__(self, iterations: int | list[int]) -> None:
        self.iterations = _as_list(iterations, "iterations")

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        return df["iteration"].isin(self.iterations)


class IterationIndexFilter(Filter):
    """Selects the events of iterations by their positions among the iterations of the frame."""

    column = "iteration"

    def __init__(self, iteration_index: int | list[int]) -> None:
        self.iteration_index = _as_list(iteration_index, "iteration_index")

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        numbers = sorted(number for number in df["iteration"].unique() if number >= 0)
        if not numbers:
            return df["iteration"] == df["iteration"]
        return df["iteration"].isin([numbers[i] for i in self.iteration_index if 0 <= i < len(numbers)])


class FirstIterationFilter(IterationIndexFilter):
    """Selects the events of the first iteration."""

    def __init__(self) -> None:
        super().__init__(0)


class RankFilter(Filter):
    """Selects the events of ranks, in a frame with a column rank."""

    column = "rank"

    def __init__(self, ranks: int | list[int]) -> None:
        self.ranks = _as_list(ranks, "ranks")

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        return df["rank"].isin(self.ranks)


class TimeRangeFilter(Filter):
    """Selects the events that lie between two times, in us."""

    column = "ts"

    def __init__(self, time_range: tuple[float, float]) -> None:
        if not isinstance(time_range, tuple) or len(time_range) != 2 or time_range[0] > time_range[1]:
            raise ValueError(f"expected a tuple of start and end, ascending, got {time_range!r}")
        self.time_start, self.time_end = time_range

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        return df["ts"].ge(self.time_start) & (df["ts"] + df["dur"]).le(self.time_end)


class NameFilter(Filter):
    """Selects the events whose name matches a regular expression from its beginning."""

    def __init__(
        self, name_pattern: str, symbol_table: SymbolTable | None = None, name_column: str | None = None
    ) -> None:
        self.name_pattern, self.symbol_table, self.name_column = name_pattern, symbol_table, name_column

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        table = symbol_table or self.symbol_table
        column = self.name_column or ("s_name" if table is None and "s_name" in df.columns else "name")
        names = df[column]
        if table is not None and column == "name":
            names = names.map(dict(enumerate(table.sym_table)))
        return names.astype(str).str.match(self.name_pattern)


class GPUKernelFilter(Filter):
    """Selects the activities of the GPU, also those of stream 0, which HTA leaves out."""

    column = "stream"

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        return df["stream"] >= 0


class CPUOperatorFilter(Filter):
    """Selects the events of the host."""

    column = "stream"

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        return df["stream"] == -1


class CompositeFilter(Filter):
    """Applies several filters one after the other."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        for one in filters:
            if not isinstance(one, Filter):
                raise TypeError(f"expected filters, got {type(one).__name__}")
        self.filters = list(filters)

    def __call__(self, df: pd.DataFrame, symbol_table: SymbolTable | None = None) -> pd.DataFrame:
        for one in self.filters:
            df = one(df, symbol_table)
        return df

    def mask(self, df: pd.DataFrame, symbol_table: SymbolTable | None) -> pd.Series[bool]:
        return df["index"].isin(self(df, symbol_table)["index"])


def _as_list(numbers: Any, name: str) -> list[int]:
    """Return a number or a list of numbers as a list. Raises TypeError, as in HTA."""
    if not isinstance(numbers, (int, list)):
        raise TypeError(f"expected a number or a list of numbers as {name}, got {type(numbers).__name__}")
    return [numbers] if isinstance(numbers, int) else numbers
