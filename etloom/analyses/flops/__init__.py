"""Floating-point operations, bytes and time of operators, computed from their shapes.

One row per operator. flops: multiplications and additions; bytes: minimum memory traffic. counted: number of its calls
that have a formula and known shapes, or whose cost follows from the forward operator of a backward one; covered_pct:
their share of the row's time. Unknown values are null, never guessed. time_ns: time in which GPU activity of a call
ran; with basis host: duration of the call; with basis none (execution trace only): unknown. Of nested operators the
outermost one with a formula is counted; communication is excluded. See docs/flops.md for the definitions.

by: operator, family (gemm, attention, ...; for kernels without a formula, by their names) or all (one row). step: only
this step. top: number of rows, longest time first.

Units: FLOP, B, ns, percent. Needs shapes: record_shapes=True, or the run's execution trace. Convention:
torch.utils.flop_counter's, except for the mask of causal attention and the groups of a convolution, which it ignores.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.flops.counting import count_calls
from etloom.analyses.helpers import check_top, conform_columns, filter_step, percent_of_total
from etloom.core.errors import UnknownName
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "family": pl.String,
    "name": pl.String,
    "basis": pl.String,
    "calls": pl.Int64,
    "counted": pl.Int64,
    "kernels": pl.Int64,
    "flops": pl.Int64,
    "bytes": pl.Int64,
    "time_ns": pl.Int64,
    "time_pct": pl.Float64,
    "covered_pct": pl.Float64,
}
_MAX_NAMES = 3
_MIN_PCT = 0.1
"""Number of operators without flops that a remark names, and their minimum share of the time."""
_GROUP_COLUMNS: dict[str, list[str]] = {"operator": ["family", "name"], "family": ["family"], "all": []}


def analyze(trace: Trace, *, by: str = "operator", step: int | None = None, top: int = 50) -> pl.DataFrame:
    if by not in _GROUP_COLUMNS:
        raise UnknownName("grouping", by, _GROUP_COLUMNS, option="by")
    check_top(top)
    calls = filter_step(trace, count_calls(trace), step)
    time, has_cost = pl.col("time_ns"), pl.col("known")
    table = (
        calls.group_by([*_GROUP_COLUMNS[by], "basis"])
        .agg(
            pl.len().alias("calls"),
            has_cost.sum().alias("counted"),
            pl.col("kernels").sum(),
            # A sum of nothing is unknown, not 0.
            *(
                pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)
                for name in ("flops", "bytes")
            ),
            pl.when(time.is_not_null().any()).then(time.sum()).alias("time_ns"),
            time.filter(has_cost).sum().alias("known_ns"),
        )
        .with_columns(
            percent_of_total("time_ns"),
            pl.when(time > 0).then(100 * pl.col("known_ns") / time).alias("covered_pct"),
            *(
                pl.lit(None, dtype=pl.String).alias(key)
                for key in ("family", "name")
                if key not in _GROUP_COLUMNS[by]
            ),
        )
    )
    table = conform_columns(table, COLUMNS)
    keys, descending = ("time_ns", "flops", "family", "name"), (True, True, False, False)
    return table.sort(keys, descending=descending, nulls_last=True).head(top)


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield notes for terminal output."""
    lacking = table.filter(pl.col("counted") < pl.col("calls")).with_columns(
        lost=pl.col("time_pct") * (1 - pl.col("covered_pct").fill_null(0) / 100) / table["rank"].n_unique(),
        lacks=pl.col("calls") - pl.col("counted"),
        who=pl.coalesce("name", pl.format("{} kernels without known operator", "family"))
        if table["name"].count()
        else pl.col("family"),
    )
    if lacking.is_empty():
        return
    names_table = lacking.group_by("who").agg(pl.col("lost", "lacks").sum())
    names_table = names_table.drop_nulls("who").sort(
        "lost", "lacks", "who", descending=(True, True, False), nulls_last=True
    )
    timed = lacking["lost"].count() > 0
    each = [
        f"{name} ({lost:.1f} %)" if timed else f"{name} ({lacks:,} calls)"
        for name, lost, lacks in names_table.head(_MAX_NAMES).iter_rows()
        if not timed or lost >= _MIN_PCT
    ]
    share = f", {lacking['lost'].sum():.1f} % of the time" if timed else ""
    examples = f": {', '.join(each)}{', ...' if names_table.height > _MAX_NAMES else ''}" if each else ""
    yield f"flops and bytes are unknown for {lacking['lacks'].sum():,} calls{share}{examples}"
