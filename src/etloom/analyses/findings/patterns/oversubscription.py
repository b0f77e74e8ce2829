"""Find operators that are interrupted because more threads are running than the host has processors.

Two or more operators, each after its first call, that stall for half a millisecond or more and take three
times their usual time, or twice the upper quartile. Only on runs without a GPU.

Cost: the additional self time.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, compute_cost
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.helpers.operator_times import add_self_time
from etloom.core import categories
from etloom.core.intervals import Intervals

MIN_CALLS = 6
"""Number of calls with one name and shape from which their usual duration is inferred."""
MIN_RATIO, MIN_SPREAD = 3, 2
"""An interrupted call takes MIN_RATIO times the median of its duration, or MIN_SPREAD times the upper quartile."""
MIN_DELAY_NS = 500_000
"""An interrupted call takes this much longer: schedulers assign a processor to other threads for a millisecond or more.
"""
MIN_INTERRUPTED = 2

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    # With calls of the runtime it is a GPU job whose kernels were not recorded: its operators wait for the device.
    launches = categories.mask_events(view.trace.events, categories.RUNTIME_CATEGORIES).any()
    if view.activity.basis == "device" or launches:
        return
    calls = view.find_host_events("", categories.OPERATOR_CATEGORIES).filter(~categories.is_communication())
    # Self time, so that an interruption is counted once. Between its operators, the code of others (a hook, a library)
    # may do what only some calls need.
    is_outer = pl.col("id").is_in(view.trace.events["parent"].drop_nulls().unique().implode())
    calls = calls.filter(~is_outer | pl.col("name").cast(pl.String).str.starts_with("aten::"))
    signature = ("name", "dims")
    repeated = (
        add_self_time(view.trace, calls)
        .join(view.trace.arguments.select("event", "dims"), left_on="id", right_on="event", how="left")
        .with_columns(
            usual_ns=pl.col("self_ns").median().over(signature),
            most_ns=pl.col("self_ns").quantile(0.75, "lower").over(signature),
            calls_alike=pl.len().over(signature),
            turn=pl.int_range(pl.len()).over(signature),
        )
        .filter(pl.col("calls_alike") >= MIN_CALLS)
        .with_columns(start="ts", cost_ns=(pl.col("self_ns") - pl.col("usual_ns")).round().cast(pl.Int64))
    )
    # A first call may take long because it loads a library or chooses an algorithm.
    interrupted = repeated.filter(
        (pl.col("turn") > 0)
        & (pl.col("cost_ns") > MIN_DELAY_NS)
        & (
            (pl.col("self_ns") > MIN_RATIO * pl.col("usual_ns"))
            | (pl.col("self_ns") > MIN_SPREAD * pl.col("most_ns"))
        )
    )
    if interrupted.height < MIN_INTERRUPTED:
        return
    worst = interrupted.sort("cost_ns", descending=True, maintain_order=True).row(0, named=True)
    cost_ns, in_steps_ns = compute_cost(view, interrupted)
    each_ms = interrupted.select(pl.mean("cost_ns") / 1e6).item()
    yield Finding(
        f"{interrupted.height:,} operator calls are interrupted for {each_ms:.1f} ms each: more threads are running "
        "than there are processors, or another program uses them",
        cost_ns,
        "low",
        "assign each rank its own cores: OMP_NUM_THREADS = cores / ranks, torch.set_num_threads, numactl or "
        "torchrun's CPU binding; include the data loader's workers",
        Intervals.of(interrupted["start"], interrupted["end"]),
        HOST,
        interrupted.height,
        step=worst["step"],
        name=worst["name"],
        event=worst["id"],
        start_ns=worst["ts"],
        end_ns=worst["end"],
        in_steps_ns=in_steps_ns,
    )
