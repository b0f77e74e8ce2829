"""Find loops that read single values of tensors (`.item()`), for example one per parameter.

Loops that read values of tensors (`.item()`): with a GPU eight reads or more that wait for it, at most eight
operators apart, and an operator that is then repeated for each; without, one of sixteen operators or more.
Also on runs without a GPU.

Cost: the loops, on the host and on the device.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, sum_places
from etloom.analyses.findings.gaps import LONG_PAUSE_NS
from etloom.analyses.findings.host_calls import select_outermost
from etloom.analyses.findings.operator_runs import READS_VALUE, find_operator_runs
from etloom.analyses.findings.patterns.parameter_loops import find_parameter_loops, mask_updates
from etloom.analyses.findings.patterns.tiny_operators import MAX_READ_SHARE
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.findings.removed_work import REGION_SCHEMA, keep_disjoint, list_launched, sum_removed
from etloom.core import categories, nesting

SCOPE = "rank"
MIN_READS = 8
MAX_PERIOD = 8
"""Operators from one read to the next in a loop."""
MAX_USUAL_PAUSES = 4
"""A pause of the host of more than this many usual ones between two reads does not belong to the loop."""
MAX_WORK_NS = 200_000
"""Time on the device that a loop launches per read at most."""
_ADVICE = (
    "compute the values of all parameters together (torch._foreach_norm, torch.stack, clip_grad_norm_ with "
    "foreach=True) and read them with one .tolist(), not in every step"
)


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis == "device":
        loops = view.compute_once(find_read_loops)
        count = int(loops["reads"].sum())
        title = f"loops that read values of tensors {count:,} times (.item(), float(), if tensor)"
        yield from sum_removed(view, loops, title, confidence="medium", advice=_ADVICE)
        return
    runs = find_operator_runs(view).filter(pl.col("reads") >= MAX_READ_SHARE * pl.col("count"))
    runs = runs.filter(~mask_updates(runs, view.compute_once(find_parameter_loops)))
    reads = int(runs["reads"].sum())
    yield from sum_places(
        view,
        runs.select("step", "start", "end", "cost_ns", name="read_name", event="read_event"),
        lambda _: f"loops that read values of tensors {reads:,} times (.item(), float(), if tensor)",
        confidence="medium",
        advice=_ADVICE,
        tracks=HOST,
        by="name",
    )


def find_read_loops(view: RankView) -> pl.DataFrame:
    """Return the times in which operators repeat around reads of values, and then one of them for each read.

    The columns are those of `REGION_SCHEMA`, and ``reads``.
    """
    empty = pl.DataFrame(schema=REGION_SCHEMA | {"reads": pl.Int64})
    if not view.match_events(READS_VALUE).any():
        return empty
    calls = select_outermost(view.find_host_events("", categories.OPERATOR_CATEGORIES))
    calls = calls.sort("pid", "tid", "ts")
    waits = np.sort(view.sync_calls["ts"].to_numpy())  # a tensor on the host is read without a wait
    has_wait = np.searchsorted(waits, calls["ts"]) < np.searchsorted(waits, calls["end"])
    reads = np.flatnonzero(calls["name"].str.contains(READS_VALUE).to_numpy() & has_wait)
    if reads.size < MIN_READS:
        return empty
    thread = nesting.track_codes(calls, ("pid", "tid", "step"))
    period = np.diff(reads)
    idle = np.append(0, calls["ts"].to_numpy()[1:] - calls["end"].to_numpy()[:-1])
    # Part: of a thread and step, without a pause that is longer than those of the loop.
    usual_pause = np.median(np.maximum.reduceat(idle, reads[:-1] + 1)[:-1])
    is_pause = idle >= max(LONG_PAUSE_NS, MAX_USUAL_PAUSES * usual_pause)
    part = np.cumsum(np.append(False, np.diff(thread) != 0) | is_pause)
    cuts = np.flatnonzero((period > MAX_PERIOD) | (np.diff(part[reads]) != 0)) + 1
    bounds = [run for run in np.split(reads, cuts) if run.size >= MIN_READS]
    repeats = calls["name"].rle_id().to_numpy()
    rows = []
    for run in bounds:
        usual = int(np.median(np.diff(run)))
        last = int(run[-1])
        begin = max(int(run[0]) - usual + 1, int(np.searchsorted(part, part[last])))
        after = last + 1
        while after < calls.height and part[after] == part[last] and repeats[after] == repeats[last + 1]:
            after += 1
        # Such as a product with each gradient.
        rows.append((begin, after - 1 if after - last - 1 >= run.size / 2 else last, run.size))
    if not rows:
        return empty
    begins, ends, counts = (list(column) for column in zip(*rows, strict=True))
    regions = calls[begins].select("step", "name", start="ts", event="id")
    regions = regions.with_columns(end=calls["end"][ends], reads=pl.Series(counts))
    cost = ((pl.col("end") - pl.col("start")) * (1 - 1 / pl.col("reads"))).round()
    regions = keep_disjoint(regions.with_columns(cost_ns=cost))
    regions = regions.select(pl.col(name).cast(dtype) for name, dtype in empty.schema.items())
    # Else the loop does the work of the program, such as a model that writes token by token: host-sync.
    launched = list_launched(view, regions).group_by("region").agg(pl.col("dur").sum())
    launched = (
        regions.with_row_index("region")
        .select(pl.col("region").cast(pl.Int64), "reads")
        .join(launched, on="region", how="left", maintain_order="left")
    )
    return regions.filter(launched["dur"].fill_null(0) <= MAX_WORK_NS * launched["reads"])
