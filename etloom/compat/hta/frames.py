"""A Job as HTA's Trace: pandas frames of events with names as numbers, and the table that says the names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import kinds, stacks
from etloom.errors import EtloomError, UnknownName
from etloom.trace import Job, Trace

if TYPE_CHECKING:
    import pandas as pd

US = 1e3


def pandas() -> Any:
    """The pandas module. Raises EtloomError where it is not installed."""
    try:
        import pandas
    except ImportError:
        raise EtloomError("pandas is not installed", remedy='pip install "etloom[pandas]"') from None
    return pandas


def frame(table: pl.DataFrame) -> pd.DataFrame:
    """A polars table as a pandas one, with numpy columns and NaN for null, as HTA's are."""
    pandas()
    return table.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String)).to_pandas()


class SymbolTable:
    """The names and categories of a job as numbers: ``sym_table[number]`` is a text, ``sym_index[text]`` its number."""

    def __init__(self, texts: list[str]) -> None:
        self.sym_table = texts
        self.sym_index = {text: number for number, text in enumerate(texts)}

    def get_sym_table(self) -> list[str]:
        return self.sym_table

    def get_sym_id_map(self) -> dict[str, int]:
        return self.sym_index

    def add_symbols_to_trace_df(self, trace_df: pd.DataFrame, col: str) -> None:
        """Put the texts in place of the numbers of a column, in the frame itself."""
        trace_df[col] = [self.sym_table[int(number)] for number in trace_df[col]]


class HtaTrace:
    """What ``TraceAnalysis(...).t`` is: ``get_trace(rank)``, ``get_all_traces()``, ``symbol_table``, ``traces``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        texts = pl.concat(
            [trace.events[name].cast(pl.String) for trace in job.values() for name in ("name", "cat")]
        )
        self.symbol_table = SymbolTable([*sorted(texts.drop_nulls().unique()), ""])
        first = [trace.events["ts"].min() for trace in job.values() if trace.events.height]
        self.zero: int = min(first, default=0)  # type: ignore[type-var, assignment]
        self.min_ts = self.zero / US
        self.traces: dict[int, pd.DataFrame] = {rank: self._frame(trace) for rank, trace in job.items()}

    def get_ranks(self) -> list[int]:
        return sorted(self.traces)

    def get_trace(self, rank: int) -> pd.DataFrame:
        """The frame of a rank itself, not a copy. Raises UnknownName."""
        if rank not in self.traces:
            raise UnknownName("rank", str(rank), map(str, self.traces))
        return self.traces[rank]

    def get_all_traces(self) -> dict[int, pd.DataFrame]:
        return self.traces

    def get_trace_duration(self, rank: int) -> float:
        """us."""
        events = self.job[rank].events
        span: int = events.select(
            (pl.col("ts") + pl.col("dur").fill_null(0)).max() - pl.col("ts").min()
        ).item()
        return span / US

    def _frame(self, trace: Trace) -> pd.DataFrame:
        """HTA's columns that etloom has: -1 where HTA writes it for nothing, times in us from the job's first event."""
        events = timed(trace)
        row = events.select("id").with_row_index("row")
        launched = trace.launches.drop_nulls(["launch", "device_event"]).unique("device_event", keep="first")
        partner = pl.concat(
            (
                launched.select(id="device_event", other="launch"),
                launched.unique("launch", keep="first").select(id="launch", other="device_event"),
            )
        ).join(row.select(other="id", partner="row"), on="other")
        kernels = trace.kernels.select("event", "bytes", memory_bw_gbps="bandwidth").unique(
            "event", keep="first"
        )
        number = self.symbol_table.sym_index
        joined = events.join(
            partner.select("id", "partner"), on="id", how="left", maintain_order="left"
        ).join(kernels, left_on="id", right_on="event", how="left", maintain_order="left")
        has_correlation = pl.col("correlation").is_not_null()
        table = joined.select(
            index=pl.col("id").cast(pl.Int64),
            cat=pl.col("cat").cast(pl.String).fill_null("").replace_strict(number, return_dtype=pl.Int64),
            name=pl.col("name").cast(pl.String).fill_null("").replace_strict(number, return_dtype=pl.Int64),
            pid="pid",
            tid="tid",
            ts=(pl.col("ts") - self.zero) / US,
            dur=pl.col("dur") / US,
            stream=pl.col("stream").fill_null(-1),
            correlation=pl.col("correlation").fill_null(-1),
            bytes=pl.col("bytes").fill_null(-1),
            memory_bw_gbps=pl.col("memory_bw_gbps").fill_null(0.0),
            external_id=pl.col("external_id").fill_null(-1),
            index_correlation=pl.coalesce(
                pl.col("partner").cast(pl.Int64), pl.when(has_correlation).then(0), -1
            ),
            iteration=pl.col("step").fill_null(-1),
            end=(pl.col("ts") - self.zero + pl.col("dur")) / US,
        )
        made = frame(table)
        made.index = made["index"].to_numpy()
        return made


def timed(trace: Trace) -> pl.DataFrame:
    """Events that last: HTA keeps no others."""
    return trace.events.filter(pl.col("dur").is_not_null())


def without_last_step(trace: Trace) -> Trace:
    """What HTA keeps by default of a trace of two steps and more: not the host's part of the last step, nor what that
    launched."""
    starts = trace.events.filter(stacks.among(trace.events["cat"], kinds.ANNOTATIONS)).with_columns(
        number=pl.col("name").cast(pl.String).str.extract(kinds.STEP).cast(pl.Int64)
    )
    starts = starts.drop_nulls("number").sort("number")
    if starts["number"].n_unique() < 2:
        return trace
    last = starts["ts"][-1]
    device = stacks.among(trace.events["cat"], kinds.DEVICE)
    dropped = trace.events.filter(~pl.Series(device) & (pl.col("ts") >= last))["id"]
    launched = trace.launches.filter(pl.col("launch").is_in(dropped.implode()))["device_event"]
    gone = pl.concat((dropped, launched)).unique()
    kept = trace.events.filter(~pl.col("id").is_in(gone.implode()))
    launches = trace.launches.filter(~pl.col("device_event").is_in(gone.implode()))
    return trace.replace(None, events=kept, launches=launches)
