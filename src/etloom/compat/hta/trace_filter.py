"""HTA's ``hta.common.trace_filter``: callable filters of the frames of `HtaTrace`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etloom.compat.hta.frames import SymbolTable

if TYPE_CHECKING:
    import pandas as pd

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
