"""Floating-point operations, bytes and time of operators, computed from their shapes.

One row per operator. flops: multiplications and additions; bytes: minimum memory traffic. counted: number of its calls
that have a formula and known shapes, or whose cost follows from the forward operator of a backward one; covered_pct:
their share of the row's time; assumed: what these costs assume, because it was not recorded. Unknown values are null.
time_ns: time in which GPU activity of a call ran; with basis host: duration of the call; with basis none (execution
trace only): unknown. Of nested operators the outermost one with a formula is counted; communication is excluded. See
docs/flops.md for the definitions.

Units: FLOP, B, ns, percent. Needs shapes: record_shapes=True, or the run's execution trace. Convention:
torch.utils.flop_counter's, except for the mask of causal attention and the groups of a convolution, which it ignores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import polars as pl

from etloom.analyses.flops.counting import count_calls
from etloom.analyses.helpers import Step, check_top, conform_columns, filter_step, percent_of_total
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
    "assumed": pl.String,
}
_MAX_NAMES = 3
_MIN_PCT = 0.1
"""Number of operators without flops that a remark names, and their minimum share of the time."""
_GROUP_COLUMNS: dict[str, list[str]] = {"operator": ["family", "name"], "family": ["family"], "all": []}


def analyze(
    trace: Trace,
    *,
    by: Annotated[
        str,
        "operator, family (gemm, attention, ...; for kernels without a formula, by their names) or all "
        "(one row).",
    ] = "operator",
    step: Step = None,
    top: Annotated[int, "Number of rows, longest time first."] = 50,
) -> pl.DataFrame:
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
            pl.col("assumed").drop_nulls().unique().sort().str.join("; ").replace("", None),
        )
        .with_columns(
            percent_of_total("time_ns"),
            pl.when(time > 0).then(100.0 * pl.col("known_ns") / time).alias("covered_pct"),
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
    """Yield a note for the terminal on calls with unknown flops and their share of the time."""
    uncovered = table.filter(pl.col("counted") < pl.col("calls")).with_columns(
        uncounted_pct=pl.col("time_pct")
        * (1 - pl.col("covered_pct").fill_null(0) / 100)
        / table["rank"].n_unique(),
        uncounted=pl.col("calls") - pl.col("counted"),
        label=pl.coalesce("name", pl.format("{} kernels without known operator", "family"))
        if table["name"].count()
        else pl.col("family"),
    )
    if uncovered.is_empty():
        return
    by_label = uncovered.group_by("label").agg(pl.col("uncounted_pct", "uncounted").sum())
    by_label = by_label.drop_nulls("label").sort(
        "uncounted_pct", "uncounted", "label", descending=(True, True, False), nulls_last=True
    )
    timed = uncovered["uncounted_pct"].count() > 0
    each = [
        f"{name} ({uncounted_pct:.1f} %)" if timed else f"{name} ({uncounted:,} calls)"
        for name, uncounted_pct, uncounted in by_label.head(_MAX_NAMES).iter_rows()
        if not timed or uncounted_pct >= _MIN_PCT
    ]
    share = f", {uncovered['uncounted_pct'].sum():.1f} % of the time" if timed else ""
    examples = f": {', '.join(each)}{', ...' if by_label.height > _MAX_NAMES else ''}" if each else ""
    yield f"flops and bytes are unknown for {uncovered['uncounted'].sum():,} calls{share}{examples}"
