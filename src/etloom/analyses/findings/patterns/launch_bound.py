"""Find time in which the device is idle because the host launches too slowly.

Host-bound: gaps that end with a launch issued after the device had run out of work (only until the launch
returned, if the rest is longer than 50 µs); times in which only communication runs because computation is
launched late; and the time in steps before the first and after the last kernel. The title states if a few
gaps above 5 ms dominate, which may be warm-up (before the first annotated step, or without annotations).
If a recording has at most three device activities, no steps and no gaps: the operators around their launches, if
the device is idle for at least half of their time.

Cost: the gaps.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import (
    BOTH,
    HOST,
    Finding,
    describe_long_gaps,
    describe_place,
    find_long_gaps,
    format_times,
    sum_findings,
    sum_places,
)
from etloom.analyses.findings.gaps import list_stalls
from etloom.analyses.findings.patterns.item_calls import find_read_loops
from etloom.analyses.findings.rank_view import RankView
from etloom.core import arrays, categories
from etloom.core.intervals import Intervals, union
from etloom.core.text import count_noun

SCOPE = "rank"
MIN_ACTIVITIES = 4
"""A recording of fewer device activities does not show whether launches are slow in general."""
MIN_IDLE_SHARE = 0.5
"""The host limits such a recording if the device is idle for at least this share of the time of its operators."""
MIN_STEPS = 3
MIN_WARM_UP = 0.1
"""The host's work in the first step is warm-up if it exceeds that of any other step by at least this share."""
_ADVICE = (
    "capture the step in a CUDA graph or torch.compile it (mode='reduce-overhead'), fuse small operators "
    "(foreach or fused optimizers), or give each launch more work (a larger batch)"
)
_WARM_UP_ADVICE = (
    "warm up before the trace (first calls load libraries and tune kernels); if the gaps remain, check on the timeline "
    "what the host does in them"
)
_NEVER = np.iinfo(np.int64).min
"""Earlier than any time: when an unknown launch call began."""
_LONG_GAPS_ADVICE = "check on the timeline what the host does in the long gaps: it is more than launching"


def find(view: RankView) -> Iterator[Finding]:
    late = view.compute_once(list_late_launches)
    late = late.with_columns(cost_ns="usual_ns")
    first = view.steps["start"].min()
    early = pl.lit(False) if first is None else 2 * (first - pl.col("start")) > pl.col("cost_ns")
    late = late.with_columns(early=early)

    def warm_up(row: dict[str, Any]) -> str:
        if row["early"] and 2 * row["longest"][0] > row["cost_ns"]:
            return " (before the first annotated step: may be warm-up)"
        return " (no step is annotated: may be warm-up)" if first is None and find_long_gaps(row) else ""

    def title(row: dict[str, Any]) -> str:
        gaps = count_noun(row["count"], "gap")
        where = f"{describe_place(row, 'block')}, {gaps}{describe_long_gaps(row)}{warm_up(row)}"
        return f"host-bound: the device waits for the host to launch{where}"

    def advice(row: dict[str, Any]) -> str:
        if warm_up(row):
            return _WARM_UP_ADVICE
        long = len(find_long_gaps(row))
        return (
            _LONG_GAPS_ADVICE
            if long == row["count"]
            else f"{_LONG_GAPS_ADVICE}; for the others {_ADVICE}"
            if long
            else _ADVICE
        )

    findings = [
        *sum_places(
            view,
            late.filter(~pl.col("is_hidden")),
            title,
            confidence="medium" if view.activities.height >= MIN_ACTIVITIES else "low",
            advice=advice,
            tracks=BOTH,
            by="block",
        ),
        *sum_places(
            view,
            late.filter("is_hidden"),
            lambda row: (
                "host-bound: computation waits for the host to launch while the device only communicates, "
                f"{format_times(row['count'])}"
            ),
            confidence="medium",
            advice=_ADVICE,
            tracks=HOST,
            by="block",
            hidden=_list_waits(view),
        ),
    ]
    if findings:
        title_of_all = findings[0].title
        if len(findings) > 1:
            title_of_all += f"; {format_times(findings[1].count)} more while the device only communicates"
        yield sum_findings(findings, title_of_all)
    elif view.activities.height < MIN_ACTIVITIES and len(view.busy) == 1 and view.steps.is_empty():
        yield from _find_idle_operators(view)


def _find_idle_operators(view: RankView) -> Iterator[Finding]:
    """Yield the time that the host spends in operators around few launches, if the device is idle in most of it."""
    thread, calls = ("pid", "tid"), view.find_host_events()
    launches = calls.filter(pl.col("id").is_in(view.activities["launch"].drop_nulls().implode()))
    launches = launches.select(*thread, call_ts="ts")
    operators = view.find_host_events(categories=categories.OPERATOR_CATEGORIES)
    outermost = operators.filter(~pl.col("parent").is_in(operators["id"].implode()).fill_null(False))
    outermost = outermost.join(launches, on=thread, nulls_equal=True, maintain_order="left")
    outermost = outermost.filter(pl.col("call_ts").is_between("ts", "end")).unique("id", maintain_order=True)
    starts, ends = (outermost[name].to_numpy() for name in ("ts", "end"))
    waits = calls.join(view.sync_calls.select("id"), on="id", how="semi")
    waits = waits.join(outermost, on=thread, how="semi", nulls_equal=True)
    used = (view.busy | Intervals.of(waits["ts"], waits["end"])).covered(starts, ends)
    rows = outermost.select(
        "step", "name", "end", start="ts", event="id", cost_ns=pl.Series(ends - starts - used)
    )
    total, idle = int((ends - starts).sum()), int(rows["cost_ns"].sum())
    if total == 0 or idle < MIN_IDLE_SHARE * total:
        return
    yield from sum_places(
        view,
        rows,
        lambda row: (
            f"host-bound: the device is idle for {100 * idle / total:.0f} % of the time of the operators that "
            f"launch its work{describe_place(row)}"
        ),
        confidence="low",
        advice=f"record more calls to be sure; then {_ADVICE}",
        tracks=HOST,
        by="block",
    )


def list_late_launches(view: RankView) -> pl.DataFrame:
    """Return the times in which the device runs no computation because the host has not launched it yet.

    Returns:
        The columns of `find_gaps`; is_hidden (the device communicates meanwhile), and usual_ns, the cost without the
        part of the first step that is due to warm-up.
    """
    idle = view.select_gaps("launch").drop("cost_ns")
    if idle.height and view.steps.is_empty():
        # The recording begins with its first launch, before which no work can run.
        idle = idle.filter(pl.col("end") > view.busy.starts[0])
    loops = view.compute_once(find_read_loops)
    in_loop = Intervals.of(loops["start"], loops["end"]).covered(idle["start"], idle["end"])
    idle = idle.filter(pl.Series(2 * in_loop <= idle["gap_ns"].to_numpy()))  # item-calls names these
    hidden = _find_hidden(view)
    is_hidden = pl.Series("is_hidden", np.arange(idle.height + hidden.height) >= idle.height)
    late = (pl.concat([idle, hidden]) if hidden.height else idle).hstack([is_hidden])
    first_step, excess_ns = _measure_warm_up(view)
    if not excess_ns:
        return late.hstack([late["gap_ns"].alias("usual_ns")])
    first_ns = late.filter(pl.col("step") == first_step)["gap_ns"].sum()
    share = 1 - min(1.0, excess_ns / max(1, first_ns))
    usual = pl.col("gap_ns") * pl.when(pl.col("step") == first_step).then(share).otherwise(1.0)
    return late.with_columns(usual_ns=usual.round().cast(pl.Int64))


def _measure_warm_up(view: RankView) -> tuple[int | None, int]:
    """Return the first annotated step, and the time (ns) by which the host works longer in it than in any other step.

    0 if that is less than `MIN_WARM_UP` of the time or the step launches more; waits for the device are not work.
    """
    steps = view.steps
    if steps.height < MIN_STEPS:
        return None, 0
    waits = _list_waits(view).covered(steps["start"], steps["end"])
    work = (steps["end"] - steps["start"]).to_numpy() - waits
    counts = dict(view.activities.group_by("step").agg(pl.col("launch").count()).iter_rows())
    launches = [counts.get(step, 0) for step in steps["step"]]
    excess_ns = int(work[0] - work[1:].max())
    is_usual = launches[0] <= (1 + MIN_WARM_UP) * max(launches[1:])
    is_long = excess_ns > MIN_WARM_UP * work[1:].max()
    return int(steps["step"][0]), excess_ns if is_usual and is_long else 0


def _find_hidden(view: RankView) -> pl.DataFrame:
    """Return the times in which the device only communicates although the host launches computation late.

    They end when the computation starts, before the communication does: it does not wait for its result.
    """
    times = view.activity.times
    other = union(intervals for kind, intervals in times.items() if kind != "communication")
    uncovered = times["communication"] - other
    if view.window is not None:
        uncovered = uncovered.clip(*view.window)
    communication = categories.KERNEL_TYPES.index("communication")
    others = np.flatnonzero(view.activities["kind"].to_physical().to_numpy() != communication)
    if not uncovered.total or not others.size:
        return view.gaps.clear()
    starts = view.activities["ts"].to_numpy()
    places = np.searchsorted(starts[others], uncovered.ends)
    following = np.append(others, -1)[places]
    called = arrays.to_array(view.activities["launch_ts"], _NEVER)[following]
    running = times["communication"].covered(uncovered.ends, uncovered.ends + 1) > 0
    is_late = (following >= 0) & (starts[following] == uncovered.ends) & (called > uncovered.starts) & running
    start, end = uncovered.starts[is_late], np.minimum(uncovered.ends, called)[is_late]
    table = arrays.take_rows(view.activities[["launch", "step", "stream", "name"]], following[is_late])
    table = table.with_columns(
        cause=pl.lit("launch", view.gaps.schema["cause"]),
        start=pl.Series(start),
        end=pl.Series(end),
        gap_ns=pl.Series(end - start),
        is_late_effect=pl.lit(False),
        event="launch",
    )
    return table.select(pl.col(name).cast(dtype) for name, dtype in view.gaps.schema.items())


def _list_waits(view: RankView) -> Intervals:
    """Return the times at which the host is blocked by the device, or by a cause that another pattern reports."""
    waits = Intervals.of(view.sync_calls["ts"], view.sync_calls["end"])
    return union([waits, *view.compute_once(list_stalls).values()])
