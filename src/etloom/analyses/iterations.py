"""Iterations of inference engines (vLLM, SGLang, TensorRT-LLM, xDiT, diffusers): phase, batch, times, gaps.

One row per iteration and rank, in order of time; a training step (ProfilerStep#N) counts as one without a phase.

- engine: by the names of operators, modules, frames and kernels. Annotations do not identify it, since forks and tools
  copy their form: without other names it is "a serving engine".
- phase: prefill, decode, mixed or denoise; requests and tokens of the batch. They come from the name of the iteration,
  else phase from the functions in it and tokens from the indices of its first embedding; null if unknown.
- launch: graph (device graphs ran at least 90 % of its GPU time), eager (none), or partial. graph_pct: that share.
- host_ns: duration on the host. scheduler_ns: time on the host between the end of the iteration before and its start.
- device_ns: time in which GPU activity that it launched ran. idle_ns: from the end of the iteration's GPU activity to
  the first one of the next iteration, 0 if they overlap.
- first_token_ns (prefill and mixed): from the start on the host to the end of the GPU activity. It excludes waiting in
  a queue, so it is a lower bound of TTFT. per_token_ns (decode and mixed): from the end of the GPU activity of the
  iteration before; TPOT of the requests that both computed.
- skew_ns: delay of the rank's first GPU activity after that of the earliest rank in the same iteration; null for one
  rank, or if the clocks of the ranks are not comparable. Iterations whose names contain no number are the same on
  two ranks if most of their first GPU activities are nearest to each other.

Units: ns, percent. docs/serving.md describes the names; --names adds others, --step-name selects events.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl

from etloom.analyses.helpers import conform_columns, explain_unmatched_name, require_linked
from etloom.core import arrays, categories
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.intervals import Intervals
from etloom.core.iterations import (
    Iteration,
    find_engine,
    find_iterations,
    find_step_events,
    has_step_numbers,
)
from etloom.core.known_names import SERVING
from etloom.core.nesting import find_innermost
from etloom.core.schema import parse_distinct
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import select_launched_events

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "step": pl.Int64,
    "engine": pl.String,
    "phase": pl.String,
    "requests": pl.Int64,
    "tokens": pl.Int64,
    "launch": pl.String,
    "graph_pct": pl.Float64,
    "start_ns": pl.Int64,
    "host_ns": pl.Int64,
    "scheduler_ns": pl.Int64,
    "device_ns": pl.Int64,
    "idle_ns": pl.Int64,
    "first_token_ns": pl.Int64,
    "per_token_ns": pl.Int64,
    "kernels": pl.Int64,
    "skew_ns": pl.Int64,
}
GRAPH_PCT = 90.0
_PHASE_FUNCTIONS = {
    "prefill": r"(?:^|[ ._])(?:forward_extend|forward_prefill|_forward_prefill|run_batch_prefill)$",
    "decode": r"(?:^|[ ._])(?:forward_decode|_forward_decode)$",
}


def analyze(job: Job) -> pl.DataFrame:
    tables = [
        measure_iterations(trace).with_columns(rank=pl.lit(rank, pl.Int64)) for rank, trace in job.items()
    ]
    table = pl.concat(tables)
    if not table.height:
        raise explain_unmatched_name(next(iter(job.values()))) or AnalysisError(
            "the run contains no iterations of a known engine, and no steps",
            remedy="specify which events are the iterations: --step-name REGEX, or --names FILE.yaml (docs/serving.md)",
        )
    comparable = len(job) > 1 and all(trace.meta.get("clock") == "epoch" for trace in job.values())
    if comparable:
        has_numbers = all(
            has_step_numbers(trace.events, trace.meta.get("step_name")) for trace in job.values()
        )
        same = table["step"] if has_numbers else _number_across_ranks(table)
        start = pl.col("device_start")
        skew = pl.when(pl.len().over("iteration") > 1).then(start - start.min().over("iteration"))
        table = table.with_columns(iteration=same).with_columns(skew_ns=skew)
    else:
        table = table.with_columns(skew_ns=None)
    return conform_columns(table, COLUMNS)


def _number_across_ranks(table: pl.DataFrame) -> pl.Series:
    """Return a number for each iteration that is the same on all ranks, where each rank counts from 0.

    The recordings may begin with different iterations. So all numbers of a rank are shifted by one amount: that with
    which most of its iterations have the number of the first rank's iteration that is nearest in time on the GPU.
    """
    numbers = table["step"].to_numpy().copy()
    ranks, starts = table["rank"].to_numpy(), arrays.to_array(table["device_start"], -1)
    first: np.ndarray | None = None
    for rank in np.unique(ranks):
        rows = np.flatnonzero((ranks == rank) & (starts >= 0))
        if first is None or not rows.size:
            first = rows if first is None and rows.size else first
            continue
        ordered = first[np.argsort(starts[first])]
        after = np.searchsorted(starts[ordered], starts[rows]).clip(1, max(ordered.size - 1, 1))
        before = after - 1
        after = np.minimum(after, ordered.size - 1)
        is_before = np.abs(starts[rows] - starts[ordered[before]]) <= np.abs(
            starts[ordered[after]] - starts[rows]
        )
        nearest = numbers[ordered[np.where(is_before, before, after)]]
        shifts, counts = np.unique(nearest - numbers[rows], return_counts=True)
        numbers[ranks == rank] += shifts[counts.argmax()]
    return pl.Series(numbers)


def measure_iterations(trace: Trace) -> pl.DataFrame:
    """Return the iterations of a rank: `COLUMNS` without rank and skew, plus device_start and device_end (ns)."""
    require_linked(trace)
    steps = find_step_events(trace.events, trace.meta.get("step_name")).drop_nulls("step")
    steps = steps.sort("ts").unique("step", keep="first", maintain_order=True)
    table = _describe(trace, steps).join(_measure_device(trace), on="step", how="left", maintain_order="left")
    since_previous = pl.col("device_end") - pl.col("device_end").shift(1)
    gap = pl.col("device_start").shift(-1) - pl.col("device_end")
    is_prefill, is_decode = (
        pl.col("phase").is_in(["prefill", "mixed"]),
        pl.col("phase").is_in(["decode", "mixed"]),
    )
    return table.with_columns(
        start_ns="ts",
        host_ns=pl.col("end") - pl.col("ts"),
        scheduler_ns=(pl.col("ts") - pl.col("end").shift(1)).clip(0),
        idle_ns=gap.clip(0),
        first_token_ns=pl.when(is_prefill).then(pl.col("device_end") - pl.col("ts")),
        per_token_ns=pl.when(is_decode & (since_previous >= 0)).then(since_previous),
        launch=pl.when(pl.col("device_ns") > 0).then(
            pl.when(pl.col("graph_pct") >= GRAPH_PCT)
            .then(pl.lit("graph"))
            .when(pl.col("graph_pct") > 0)
            .then(pl.lit("partial"))
            .otherwise(pl.lit("eager"))
        ),
    )


def _describe(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Add the columns engine, phase, requests and tokens to the steps of an inference engine."""
    rows, iterations = find_iterations(trace.events)
    by_row = dict(zip(rows.tolist(), iterations, strict=True))
    parsed = [by_row.get(row) or Iteration("") for row in steps["row"]]
    if any(iteration.engine == SERVING for iteration in parsed) and (engine := find_engine(trace.events)):
        parsed = [replace(item, engine=engine) if item.engine == SERVING else item for item in parsed]
    phases = _infer_phases(trace, steps)
    tokens = _infer_tokens(trace, steps)
    return steps.with_columns(
        pl.Series("engine", [iteration.engine or None for iteration in parsed], dtype=pl.String),
        pl.Series(
            "phase",
            [item.phase or phase for item, phase in zip(parsed, phases, strict=True)],
            dtype=pl.String,
        ),
        pl.Series("requests", [iteration.requests for iteration in parsed], dtype=pl.Int64),
        pl.Series(
            "tokens",
            [
                inferred if item.tokens is None else item.tokens
                for item, inferred in zip(parsed, tokens, strict=True)
            ],
            dtype=pl.Int64,
        ),
    )


def _infer_phases(trace: Trace, steps: pl.DataFrame) -> list[str | None]:
    """Return the phase of each step (prefill, decode or mixed), inferred from the Python functions that ran in it."""
    events = trace.events
    ran = {phase: np.zeros(steps.height, np.bool_) for phase in _PHASE_FUNCTIONS}
    python = categories.mask_events(events, categories.PYTHON_CATEGORIES)
    for phase, pattern in _PHASE_FUNCTIONS.items():
        is_function = arrays.match_text(events["name"], pattern, python)
        rows = np.flatnonzero(is_function)
        at = find_innermost(steps["ts"], steps["end"], events["ts"].to_numpy()[rows])
        ran[phase][at[at >= 0]] = True
    both = ran["prefill"] & ran["decode"]
    return [
        "mixed" if mixed else "prefill" if prefill else "decode" if decode else None
        for mixed, prefill, decode in zip(both, ran["prefill"], ran["decode"], strict=True)
    ]


def _infer_tokens(trace: Trace, steps: pl.DataFrame) -> list[int | None]:
    """Return the number of tokens in each step: the indices of its first embedding, also if a device graph replays
    that."""
    events = trace.events
    embeddings = events.select("id", "ts", "step").filter(
        pl.Series(arrays.is_in(events["name"], ("aten::embedding",)))
    )
    arguments = trace.arguments.select("dims", id="event").join(embeddings, on="id", how="semi")
    sizes = parse_distinct(arguments, "dims", _count_indices, pl.Int64, alias="tokens")
    of_id = sizes.select("id", "tokens").drop_nulls()
    eager = embeddings.join(of_id, on="id").select("step", "ts", "tokens")
    launched = trace.launches.filter(pl.col("captured").is_not_null()).join(
        of_id, left_on="operator", right_on="id"
    )
    work = events.select("step", "ts", device_event="id")
    replayed = launched.join(work, on="device_event").select("step", "ts", "tokens")
    first = pl.concat([eager, replayed]).drop_nulls("step").sort("ts").unique("step", keep="first")
    return steps.join(first.select("step", "tokens"), on="step", how="left", maintain_order="left")[
        "tokens"
    ].to_list()


def _count_indices(dims: list[list[int]]) -> int:
    """Return the number of indices of an embedding call (its second argument); raise ValueError or TypeError if it has
    none."""
    if len(dims) < 2 or not isinstance(dims[1], list):
        raise ValueError("the embedding has no argument of indices")
    return math.prod(dims[1])


def _measure_device(trace: Trace) -> pl.DataFrame:
    """Return step, device_start, device_end, device_ns, graph_pct and kernels of the GPU activity of each step."""
    work = select_launched_events(trace, "step", "ts", "end", "dur", "launch").drop_nulls("step")
    calls = take_rows(trace.events["name"], rows_of_ids(trace.events, work["launch"]))
    in_graph = arrays.match_text(calls, categories.GRAPH_LAUNCH)
    graph_ns = pl.col("dur").filter(pl.col("in_graph")).sum()
    sums = (
        work.with_columns(pl.Series("in_graph", in_graph))
        .group_by("step")
        .agg(
            pl.col("ts").min().alias("device_start"),
            pl.col("end").max().alias("device_end"),
            pl.when(pl.col("dur").sum() > 0).then(100 * graph_ns / pl.col("dur").sum()).alias("graph_pct"),
            pl.len().cast(pl.Int64).alias("kernels"),
            "ts",
            "end",
        )
    )
    busy = [
        Intervals.of(np.array(starts), np.array(ends)).total
        for starts, ends in sums.select("ts", "end").iter_rows()
    ]
    return sums.drop("ts", "end").with_columns(pl.Series("device_ns", busy, dtype=pl.Int64))
