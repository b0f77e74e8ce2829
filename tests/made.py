"""Traces made by hypothesis: every table of the schema, with any values its columns may hold."""

from __future__ import annotations

from typing import Any

import polars as pl
from hypothesis import strategies as st

from etloom.core.schema import SEVERITIES, TABLES, Column
from etloom.core.trace import Job, Trace

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def _values(dtype: Any) -> st.SearchStrategy[Any]:
    if dtype in (pl.Categorical, pl.String):
        return TEXT
    if dtype == pl.Boolean:
        return st.booleans()
    if dtype == pl.Float64:
        return st.floats()
    low, high = (pl.select(bound(dtype)).item() for bound in (lambda t: t().min(), lambda t: t().max()))
    return st.integers(low, high)


def _of(column: Column) -> st.SearchStrategy[Any]:
    return st.integers(0, 2**31 - 1) if column.name == "id" else _values(column.dtype)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, pl.DataFrame]:
    found = {}
    for name in draw(st.lists(st.sampled_from(sorted(TABLES)), unique=True, max_size=4)):
        height = draw(st.integers(0, 4))
        columns = {
            column.name: pl.Series(
                draw(st.lists(st.none() | _of(column), min_size=height, max_size=height)),
                dtype=pl.String if column.dtype == pl.Categorical else column.dtype,
            )
            for column in TABLES[name].columns
        }
        if name == "stats":
            columns["severity"] = pl.Series([SEVERITIES[row % 3] for row in range(height)], dtype=pl.String)
        found[name] = pl.DataFrame(columns)
    return found


traces = st.builds(Trace, tables(), st.dictionaries(TEXT, JSON, max_size=3))
jobs = st.builds(
    Job,
    st.dictionaries(st.integers(0, 10**6), traces, max_size=3),
    st.dictionaries(TEXT, JSON, max_size=3),
    st.lists(st.tuples(TEXT, st.sampled_from(SEVERITIES), st.integers(1, 9), st.none() | TEXT), max_size=2),
)
