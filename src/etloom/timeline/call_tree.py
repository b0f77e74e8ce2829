"""Build the tree of calls of all threads: callers and callees with counts, host time and device time.

Calls of one name under one caller are one node; all steps are one, ``ProfilerStep#*``. GPU activity belongs to the
call that launched it; activity without a recorded launch is a node of its own, UNLAUNCHED, of no thread. Records
that end on another thread than they began on (gloo's) belong to no call and are ignored.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import arrays, categories, nesting
from etloom.core.steps import ALL_STEPS, match_steps
from etloom.core.trace import Trace

RowArray = NDArray[np.int64]

UNLAUNCHED = "(no launch recorded)"
SCHEMA = {
    "pid": pl.Int64,
    "tid": pl.Int64,
    "node": pl.Int64,
    "parent": pl.Int64,
    "depth": pl.Int64,
    "category": pl.String,
    "name": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "self_ns": pl.Int64,
    "device_ns": pl.Int64,
    "self_device_ns": pl.Int64,
    "kernels": pl.Int64,
}


def build_call_tree(trace: Trace, *, joined: bool = False, kernels: bool = False) -> pl.DataFrame:
    """Return the call tree as a table (SCHEMA), one row per node: callers before callees, siblings by time.

    Siblings and threads with the longest time come first.

    total_ns and device_ns are the self times of a node and of all nodes below it, so that parts sum to the whole;
    kernels counts kernels, memcpys and memsets.

    Args:
        trace: A linked trace.
        joined: Put a backward operator below its forward one, on whichever thread it ran.
        kernels: Add nodes for GPU activity.
    """
    calls, work = _collect_calls(trace, joined)
    if kernels:
        leaves = work.select("parent", name="name", category="category", count=1, self_ns=0)
        work = work.with_columns(row=calls.height + pl.int_range(pl.len()))
        calls = pl.concat(
            [calls, leaves.with_columns(_null_column("pid"), _null_column("tid"))], how="diagonal_relaxed"
        )
    else:
        work = work.with_columns(row="parent")
    parent = calls["parent"].to_numpy()
    level = _compute_depths(parent, None if joined or kernels else calls["depth"])
    node, first = _number_nodes(calls, parent, level)
    many = len(first)
    sums = np.zeros((3, many), np.int64)
    work_nodes = node[work["row"].to_numpy()]
    np.add.at(sums[0], node, calls["self_ns"].to_numpy())
    np.add.at(sums[1], work_nodes, work["dur"].to_numpy())
    np.add.at(sums[2], work_nodes, 1)
    count = np.zeros(many, np.int64)
    np.add.at(count, node, calls["count"].to_numpy())

    above = np.where(parent[first] >= 0, node[parent[first]], -1)
    depth = level[first]
    by_level = [np.flatnonzero(depth == at) for at in range(int(depth.max(initial=-1)) + 1)]
    within, size = sums.copy(), np.ones(many, np.int64)
    for nodes in reversed(by_level[1:]):
        for column in within:
            np.add.at(column, above[nodes], column[nodes])
        np.add.at(size, above[nodes], size[nodes])
    tracks = calls.select("pid", "tid")[first]
    root = nesting.find_nearest_ancestor(above, above < 0, np.arange(many))
    place = _order_nodes(by_level, above, size, within, nesting.track_codes(tracks[root]))
    table = calls.select("category", "name")[first].with_columns(
        *tracks[root],
        pl.Series("node", place),
        pl.Series("parent", place[above]).set(pl.Series(above < 0), None),
        pl.Series("depth", depth),
        pl.Series("count", count),
        pl.Series("total_ns", within[0]),
        pl.Series("self_ns", sums[0]),
        pl.Series("device_ns", within[1]),
        pl.Series("self_device_ns", sums[1]),
        pl.Series("kernels", within[2]),
    )
    return table.sort("node").select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())


def _null_column(name: str) -> pl.Expr:
    return pl.lit(None, pl.Int64).alias(name)


def _collect_calls(trace: Trace, joined: bool) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return a table of all host calls with the row of each caller, and a table of the GPU activity of each call.

    Calls: pid, tid, category, name, count, self_ns (ns), parent (row of this table, -1 for none). GPU activity:
    category, name, dur (ns), parent.
    """
    events = trace.events
    on_track = events["depth"].is_not_null()
    rows = np.flatnonzero(on_track.to_numpy())
    call_row = np.full(events.height + 1, -1, np.int64)  # the last one answers for -1
    call_row[rows] = np.arange(len(rows))
    parent = call_row[arrays.rows_of_ids(events, events["parent"])[rows]]
    if joined:
        parent = _attach_backward(trace, rows, call_row, parent)
    calls = events.select("pid", "tid", "name", "depth", category="cat").filter(on_track)
    calls = calls.with_columns(
        _merge_step_names(calls["name"]).alias("name"),
        pl.Series("self_ns", nesting.nest_events(events).exclusive[rows]),
        pl.Series("parent", parent),
        count=pl.lit(1, pl.Int64),
    )
    launches = trace.launches.select("device_event", "launch")
    launches = launches.unique("device_event", keep="first", maintain_order=True)
    device_events = events.select("id", "name", "dur", category="cat").filter(
        pl.col("category").is_in(list(categories.DEVICE_CATEGORIES)) & pl.col("dur").is_not_null()
    )
    work = device_events.join(
        launches,
        left_on="id",
        right_on="device_event",
        how="left",
        maintain_order="left",
    )
    called = call_row[arrays.rows_of_ids(events, work["launch"])]
    if (called < 0).any():
        nowhere = {"category": None, "name": UNLAUNCHED, "depth": 0, "count": 0, "self_ns": 0, "parent": -1}
        stray = pl.DataFrame([nowhere]).cast(
            {"category": pl.Categorical, "name": pl.Categorical, "depth": pl.Int16}
        )
        called = np.where(called < 0, calls.height, called)
        calls = pl.concat([calls, stray], how="diagonal_relaxed")
    return calls, work.select("name", "category", "dur", pl.Series("parent", called))


def _merge_step_names(names: pl.Series) -> pl.Series:
    """Return the names with all step annotations renamed to the same name, `ALL_STEPS`."""
    steps = match_steps(names)
    return names.set(pl.Series(steps), ALL_STEPS) if steps.any() else names


def _attach_backward(trace: Trace, rows: RowArray, call_row: RowArray, parent: RowArray) -> RowArray:
    """Return the parent of each call, with backward operators moved below their forward operators.

    The forward operator begins earlier, so this creates no cycle.
    """
    joins = trace.thread_dependencies.filter(pl.col("kind") == "fwd_bwd")
    backward, forward = (
        call_row[arrays.rows_of_ids(trace.events, joins[name])] for name in ("event", "after")
    )
    starts = trace.events["ts"].to_numpy()[rows]
    good = (backward >= 0) & (forward >= 0)
    good[good] = starts[forward[good]] < starts[backward[good]]
    backward, forward = backward[good], forward[good]
    forward_by_call = np.full(len(parent) + 1, -1, np.int64)
    forward_by_call[backward] = forward
    outermost = forward_by_call[parent[backward]] != forward
    joined = parent.copy()
    joined[backward[outermost]] = forward[outermost]
    return joined


def _compute_depths(parent: RowArray, depth: pl.Series | None) -> RowArray:
    """Return the depth of each call in the call tree: ``depth`` if consistent with ``parent``, else from ``parent``."""
    if depth is not None and not depth.null_count():
        depths = depth.to_numpy()
        around = depths[parent]
        around[parent < 0] = -1
        if (depths == around + 1).all():
            return depths.astype(np.int64)
    jump, level = parent.copy(), (parent >= 0).astype(np.int64)
    while (jump >= 0).any():
        level = level + np.where(jump >= 0, level[jump], 0)
        jump = np.where(jump >= 0, jump[jump], -1)
    return level


def _number_nodes(calls: pl.DataFrame, parent: RowArray, level: RowArray) -> tuple[RowArray, RowArray]:
    """Return the tree node of each call, and the first call of each node; callers have lower numbers than callees."""
    roots = np.flatnonzero(level == 0)
    tracks = nesting.track_codes(calls.select("pid", "tid")[roots])
    text_codes, names = _encode_text(calls["name"])
    categories, many = _encode_text(calls["category"])
    text_codes, names = text_codes * many + categories, names * many
    node = np.full(len(parent), -1, np.int64)
    first: list[RowArray] = [np.zeros(0, np.int64)]
    before = count = 0
    for at in range(int(level.max(initial=-1)) + 1):
        level_calls = np.flatnonzero(level == at) if at else roots
        above = node[parent[level_calls]] - before if at else tracks
        index, inverse = _find_distinct(above * names + text_codes[level_calls])
        node[level_calls] = count + inverse
        first.append(level_calls[index])
        before, count = count, count + len(index)
    return node, np.concatenate(first)


def _find_distinct(keys: RowArray) -> tuple[RowArray, RowArray]:
    """Return the first position of each distinct key, by key, and the index of each key among the distinct keys.

    Keys are not negative.
    """
    size = int(keys.max(initial=-1)) + 1
    if size > 4 * len(keys) + 4096:
        _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return index, inverse
    # So few that a table of them takes less time than to sort.
    place = np.full(size, -1, np.int64)
    place[keys[::-1]] = np.arange(len(keys))[::-1]
    distinct = np.flatnonzero(place >= 0)
    index = place[distinct]
    place[distinct] = np.arange(len(distinct))
    return index, place[keys]


def _encode_text(column: pl.Series) -> tuple[RowArray, int]:
    """Return an integer code from 0 for each value of a categorical column, and the number of codes."""
    distinct = column.unique().to_physical()
    physical = arrays.to_array(distinct, -1).astype(np.int64) + 1  # 0 for null
    code = np.zeros(int(physical.max(initial=0)) + 1, np.int64)
    code[physical] = np.arange(len(physical))
    return code[arrays.to_array(column.to_physical(), -1).astype(np.int64) + 1], len(physical)


def _order_nodes(
    by_level: list[RowArray], above: RowArray, size: RowArray, within: RowArray, tracks: RowArray
) -> RowArray:
    """Return each node's table position: threads and siblings by descending time, callers before their callees."""
    place = np.zeros(len(above), np.int64)
    if not by_level:
        return place
    track_sums = np.zeros((2, int(tracks.max(initial=0)) + 1), np.int64)
    for row, sums in zip(track_sums, within, strict=False):
        np.add.at(row, tracks[by_level[0]], sums[by_level[0]])
    for at, nodes in enumerate(by_level):
        keys = [np.arange(len(nodes)), -within[1, nodes], -within[0, nodes]]
        if at:
            keys.append(above[nodes])
        else:
            keys += [tracks[nodes], -track_sums[1, tracks[nodes]], -track_sums[0, tracks[nodes]]]
        order = nodes[np.lexsort(keys)]
        before = np.cumsum(size[order]) - size[order]
        if at:
            starts = np.flatnonzero(np.diff(above[order], prepend=-1))
            lengths = np.diff(np.append(starts, len(order)))
            before = before - np.repeat(before[starts], lengths) + place[above[order]] + 1
        place[order] = before
    return place
