"""Frequent kernel sequences launched by operators, most time first: candidates for fusion.

Covers the calls whose name contains ``operator``, without those inside another such call. All kernels launched inside
the call count; those of its backward only if autograd runs it inside the call. One row per pattern: the operator's name
and the names of its kernels in order of start. count: number of calls with exactly this pattern. kernel_ns: sum of the
kernel durations; host_ns: sum of the call durations.

Units: ns. Definition: HolisticTraceAnalysis get_frequent_cuda_kernel_sequences, except that HTA takes only the calls at
the smallest nesting depth at which the name occurs, and here each call counts that is not inside another matching call.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import check_top, conform_columns, filter_step
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import AnalysisError
from etloom.core.steps import match_steps
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
EMPTY_MESSAGE = "no operator launched at least --min-length kernels"
COLUMNS = {
    "pattern": pl.List(pl.String),
    "kernel_count": pl.Int64,
    "count": pl.Int64,
    "kernel_ns": pl.Int64,
    "host_ns": pl.Int64,
}


def analyze(
    trace: Trace,
    *,
    operator: Annotated[
        str,
        'Part of the name of an operator, annotation or Python frame, such as "aten::linear", "forward" '
        'or "nn.Module: Attention"; default: every outermost operator.',
    ] = "",
    min_length: Annotated[int, "Minimum number of kernels in a pattern."] = 3,
    top: Annotated[int, "Number of rows."] = 20,
    step: Annotated[int | None, "Only calls in this step."] = None,
) -> pl.DataFrame:
    check_top(top)
    table = (
        filter_step(trace, find_occurrences(trace, operator, min_length), step)
        .group_by("operator", "sequence", maintain_order=True)
        .agg(
            pl.col("name", "length").first(),
            pl.len().alias("count"),
            pl.col("kernel_ns").sum(),
            pl.col("host_ns").sum(),
        )
        .sort("kernel_ns", "operator", descending=(True, False), maintain_order=True)
        .head(top)
        .with_columns(
            pattern=pl.concat_list("operator", pl.col("name").list.eval(pl.element().cast(pl.String))),
            kernel_count="length",
        )
    )
    return conform_columns(table, COLUMNS)


def find_occurrences(trace: Trace, operator: str, min_length: int) -> pl.DataFrame:
    """Return one row per operator call that launched a kernel sequence, by the start of its first kernel.

    Returns:
        call (row of the events), operator, name (of its kernels), sequence (the same as numbers), length, kernel_ns,
        host_ns, step.
    """
    work = select_launched_work(trace, "launch", "name", "dur").drop_nulls("launch")
    events = trace.events
    call_categories = (
        categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES | categories.PYTHON_CATEGORIES
        if operator
        else categories.OPERATOR_CATEGORIES
    )
    calls = categories.mask_events(events, call_categories) & arrays.is_present(events["depth"])
    calls &= ~match_steps(events["name"])
    if operator:
        calls &= arrays.match_text(events["name"], lambda name: name.str.contains(operator, literal=True))
    if not calls.any():
        raise AnalysisError(
            f"no operator name contains {operator!r}" if operator else "the trace contains no operators",
            where=describe_rank(trace),
            remedy="see top-ops for names" if operator else "see kernel-breakdown for its kernels",
        )
    parent = rows_of_ids(events, events["parent"])
    outermost = calls & (nesting.find_nearest_ancestor(parent, calls, parent) < 0)
    at = nesting.find_nearest_ancestor(parent, outermost, rows_of_ids(events, work["launch"]))
    below = work.with_columns(pl.Series("call", at)).filter(pl.Series(at >= 0))
    occurrences = below.group_by("call", maintain_order=True).agg(
        pl.col("name"), pl.col("dur").sum().alias("kernel_ns")
    )
    rows = occurrences["call"].to_numpy()
    return occurrences.with_columns(
        operator=events["name"][rows].cast(pl.String),
        host_ns=events["dur"][rows],
        step=events["step"][rows],
        length=pl.col("name").list.len(),
        sequence=pl.col("name").list.eval(pl.element().to_physical()),
    ).filter(pl.col("length") >= min_length)
