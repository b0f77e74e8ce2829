"""Compare the call trees of two runs: at the lowest operator or module of both, what ran instead of what.

Two programs differ where one fuses operators, uses another library or another device. Their call trees still agree at
the top. From there they are walked together: a callee of both sides is walked in turn, and all callees of one side
only, with what the caller launched itself, are one row. So each activity is in one row, and the changes add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.limits import add_limits, certain_ns, find_device_peaks
from etloom.analyses.helpers.operator_times import measure_operators
from etloom.comparison.difference_tables import assign_steps, join_sides
from etloom.comparison.measures import is_stepped
from etloom.core import categories
from etloom.core.arrays import is_present, rows_of_ids, to_array
from etloom.core.errors import AnalysisError
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.text import format_duration
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, has_device_events

TOP = "(top)"
SEPARATOR = " > "
_MOST_PARTS = 4
MODULE = r"^nn\.Module: (.*?)(?:_\d+)?$"
"""Names of modules in Python stacks; equal modules of a run (layers) are one node."""


COSTS = ("flops", "ideal_ns", "timed_ns")
"""Of calls with a cost model: FLOPs, minimum time at the peaks of the device, measured time of the same calls; ns."""


@dataclass
class Node:
    """An operator or module of one side, at a path of callers.

    Attributes:
        own: Names of the activities that it launched itself, on a host its own name -> time, ns.
        callees: Operators and modules inside it, by name.
        costs: `COSTS` of its own calls.
    """

    own: dict[str, float] = field(default_factory=dict)
    callees: dict[str, Node] = field(default_factory=dict)
    costs: list[float] = field(default_factory=lambda: [0.0] * len(COSTS))

    def sum_all(self) -> tuple[float, list[float]]:
        """Return the time (ns) and the costs of the node with all that is inside it."""
        total, costs, nodes = 0.0, [0.0] * len(COSTS), [self]
        while nodes:  # calls may nest deeper than Python recurses
            node = nodes.pop()
            total += sum(node.own.values())
            costs = [sum(pair) for pair in zip(costs, node.costs, strict=True)]
            nodes += node.callees.values()
        return total, costs


def compare_trees(before: Job, after: Job, stepped: bool, clear: bool = True) -> pl.DataFrame:
    """Return what takes how long at each lowest common operator or module: per step, mean over ranks.

    Args:
        before: The first run, linked.
        after: The second run.
        stepped: Per step, else of the run.
        clear: See `join_sides`.

    Returns:
        caller (names from the top, joined by ``>``), before and after (what ran there: its names and times), and the
        columns of `join_sides`, largest change first. Times are those of GPU activities, or exclusive host time if
        a run has none. before_gflop, after_gflop: of the operators whose cost is known, a mean
        over the ranks with shapes; before_roofline_pct,
        after_roofline_pct: their time at the peaks of the run's device, as a share of the measured one.
    """
    on_device = all(has_device_events(trace) for job in (before, after) for trace in job.values())
    with_modules = all(_has_modules(trace) for job in (before, after) for trace in job.values())
    sides = [_build_tree(job, stepped, on_device, with_modules) for job in (before, after)]
    keys = ("caller", "before", "after")
    sums = [f"{side}_{name}" for side in keys[1:] for name in ("ns", *COSTS)]
    schema = dict.fromkeys(keys, pl.String) | dict.fromkeys(sums, pl.Float64)
    table = pl.DataFrame(list(_align(*sides)), schema=schema, orient="row")
    first, second = (
        table.filter(pl.col(name) > 0).select(*keys, ns=name) for name in ("before_ns", "after_ns")
    )
    costs = [
        cost
        for side in keys[1:]
        for cost in (
            _divide(f"{side}_flops", pl.lit(1e9)).alias(f"{side}_gflop"),
            (100 * _divide(f"{side}_ideal_ns", pl.col(f"{side}_timed_ns"))).alias(f"{side}_roofline_pct"),
        )
    ]
    joined = join_sides(first, second, clear=clear)
    return joined.join(
        table.select(*keys, *costs), on=keys, how="left", nulls_equal=True, maintain_order="left"
    )


def _divide(name: str, by: pl.Expr) -> pl.Expr:
    """Return an expression that is null where nothing is known."""
    return pl.when((pl.col(name) > 0) & (by > 0)).then(pl.col(name) / by)


def _align(first: Node, second: Node) -> Iterator[tuple[Any, ...]]:
    """Yield caller, what ran before and after, and for each side its time (ns) and `COSTS`, for two trees."""
    pairs: list[tuple[tuple[str, ...], Node, Node]] = [((), first, second)]
    while pairs:
        path, first, second = pairs.pop()
        common = [name for name in first.callees if name in second.callees]
        pairs += [((*path, name), first.callees[name], second.callees[name]) for name in common]
        (before, first_costs), (after, second_costs) = (_list_parts(node, common) for node in (first, second))
        if before or after:
            sums = (float(sum(before.values())), *first_costs, float(sum(after.values())), *second_costs)
            yield (SEPARATOR.join(path) or TOP, _describe_parts(before), _describe_parts(after), *sums)


def _list_parts(node: Node, common: list[str]) -> tuple[dict[str, float], list[float]]:
    """Return what ran in a node outside of its ``common`` callees: times (ns) by name, and the sum of the costs."""
    others = {name: callee.sum_all() for name, callee in node.callees.items() if name not in common}
    times = {**node.own, **{name: ns for name, (ns, _) in others.items()}}
    costs = [sum(each) for each in zip(node.costs, *(costs for _, costs in others.values()), strict=True)]
    return {name: ns for name, ns in times.items() if ns > 0}, costs


def _describe_parts(parts: dict[str, float]) -> str | None:
    """Return names and times such as "gemm 1.20 ms, softmax 30.0 µs", the longest first; None for nothing."""
    ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    texts = [f"{name} {format_duration(ns)}" for name, ns in ordered[:_MOST_PARTS]]
    if len(ordered) > _MOST_PARTS:
        texts.append(f"{len(ordered) - _MOST_PARTS} more")
    return ", ".join(texts) or None


def _has_modules(trace: Trace) -> bool:
    python = categories.mask_events(trace.events, categories.PYTHON_CATEGORIES)
    return bool(categories.match_names(trace.events, MODULE, python).any())


def _build_tree(job: Job, stepped: bool, on_device: bool, with_modules: bool) -> Node:
    """Return the root of a run's call tree, with times per step as means over ranks."""
    root = Node()
    costs_of_ranks = [_list_costs(trace, on_device) for trace in job.values()]
    with_costs = sum(
        costs.height > 0 for costs in costs_of_ranks
    )  # shapes may be recorded on some ranks only
    for trace, calls in zip(job.values(), costs_of_ranks, strict=True):
        for path, name, ns, *costs in _sum_rank(trace, calls, stepped, on_device, with_modules):
            node = root
            for caller in path:
                node = node.callees.setdefault(caller, Node())
            node.own[name] = node.own.get(name, 0.0) + ns / len(job)
            shares = (cost / max(with_costs, 1) for cost in costs)
            node.costs = [total + share for total, share in zip(node.costs, shares, strict=True)]
    return root


def _sum_rank(
    trace: Trace, calls: pl.DataFrame, stepped: bool, on_device: bool, with_modules: bool
) -> Iterator[tuple[Any, ...]]:
    """Yield path of operators and modules, name of what it launches itself, time in ns and `COSTS`, per step."""
    work, nodes, number = _place_work(trace, stepped, on_device, with_modules)
    work = work.join(calls, on="id", how="left", maintain_order="left")
    numbers, paths = _find_paths(trace, *nodes, work["owner"].to_numpy())
    sums = work.select("name", "dur", *COSTS, path=pl.Series(numbers))
    sums = sums.group_by("path", "name").agg(pl.col("dur", *COSTS).sum()).sort("path", "name")
    for path, name, *values in sums.iter_rows():
        yield paths[path], name, *(value / number for value in values)


Key = tuple[tuple[str, ...], str | None]
"""An operator or module by its path of callers (the last one is itself), and what it launches itself: its name, or None
for the node with all that is inside it."""


def measure_nodes(trace: Trace, stepped: bool, on_device: bool, with_modules: bool) -> NodeTimes:
    """Return the times of a rank's operators, modules and activities by their place in the call tree."""
    work, nodes, number = _place_work(trace, stepped, on_device, with_modules)
    owners, rows = work["owner"].to_numpy(), np.flatnonzero(nodes[1])
    numbers, paths = _find_paths(trace, *nodes, np.append(rows, owners))
    places = [tuple(path) for path in paths]
    at_nodes, at_work = np.split(numbers, [len(rows)])
    sums = (
        work.select("name", "dur", path=pl.Series(at_work))
        .group_by("path", "name")
        .sum()
        .sort("path", "name")
    )
    times: dict[Key, float] = {}
    for path, name, ns in sums.iter_rows():
        place = places[path]
        keys = [(place[:depth], None) for depth in range(1, len(place) + 1)]
        for key in (*keys, (place, name)):
            times[key] = times.get(key, 0.0) + ns / number
    nodes_by_event = zip(trace.events["id"].gather(rows), at_nodes.tolist(), strict=True)
    keys_of_events: dict[int, Key] = {event: (places[path], None) for event, path in nodes_by_event}
    if on_device:
        activities = zip(work["id"], at_work.tolist(), work["name"], strict=True)
        keys_of_events |= {event: (places[path], name) for event, path, name in activities}
    return NodeTimes(times, keys_of_events)


class NodeTimes(NamedTuple):
    """Times of a rank by place in the call tree, ns per step, and the place of each operator and activity (by id)."""

    times: dict[Key, float]
    keys: dict[int, Key]


def measure_ranks(ranks: Sequence[Trace], stepped: bool) -> list[NodeTimes]:
    """Return the times of one rank of several runs by place in the call tree, with levels that all of them have."""
    with_modules = all(map(_has_modules, ranks))
    on_device = all(map(has_device_events, ranks))
    return [measure_nodes(trace, stepped, on_device, with_modules) for trace in ranks]


def _place_work(
    trace: Trace, stepped: bool, on_device: bool, with_modules: bool
) -> tuple[pl.DataFrame, tuple[Any, Any], int]:
    """Return a rank's activities (id, name, dur, and the row of the node that each belongs to), the parent of each
    event and whether it is a node, and the number of steps by which sums are divided."""
    events = trace.events
    is_node = categories.mask_events(events, categories.OPERATOR_CATEGORIES) & is_present(events["dur"])
    is_node |= categories.mask_events(events, (categories.CAPTURED_OPERATOR,))
    if with_modules:
        python = categories.mask_events(events, categories.PYTHON_CATEGORIES)
        is_node |= categories.match_names(events, MODULE, python)
    if on_device:
        launches = trace.launches.select("operator", id="device_event").unique("id", keep="first")
        work = trace.compute_once(assign_steps).join(launches, on="id", how="left", maintain_order="left")
        work = work.select("id", "name", "step", "dur", caller="operator")
    else:
        work = measure_operators(trace).select("id", "name", "step", dur="exclusive_ns", caller="id")
    per_step = is_stepped(trace, stepped)
    number = find_steps(trace).height if per_step else 1
    work = work.drop_nulls("step") if per_step else work
    parent = rows_of_ids(events, events["parent"])
    owners = find_nearest_ancestor(parent, is_node, rows_of_ids(events, work["caller"]))
    work = work.select("id", pl.col("name").cast(pl.String).fill_null(""), "dur", owner=pl.Series(owners))
    return work, (parent, is_node), number


def _list_costs(trace: Trace, on_device: bool) -> pl.DataFrame:
    """Return id and `COSTS` of the GPU activities of calls whose cost is known, divided by their time; on a host, of
    the calls themselves."""
    try:
        calls = add_limits(trace.compute_once(count_calls), find_device_peaks(trace))
    except AnalysisError:  # no shapes
        return pl.DataFrame(schema={"id": pl.UInt32} | dict.fromkeys(COSTS, pl.Float64))
    calls = calls.filter("known", pl.col("row") >= 0).with_columns(ideal_ns=certain_ns())
    calls = calls.with_columns(timed_ns=pl.when(pl.col("ideal_ns").is_not_null()).then("time_ns"))
    if not on_device:
        return calls.select(pl.Series("id", trace.events["id"])[calls["row"]], pl.col(COSTS).cast(pl.Float64))
    keys = ("row", "replay")
    work = assign_kernels(trace).select("id", "dur", *keys).join(calls.select(*keys, *COSTS), on=keys)
    share = (pl.col("dur") / pl.col("dur").sum().over(keys)).fill_nan(0)
    return work.select("id", pl.col(COSTS) * share)


def _find_paths(
    trace: Trace, parent: np.ndarray[Any, Any], is_node: np.ndarray[Any, Any], owners: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], list[list[str]]]:
    """Return the number of the path of names above (and with) each node in ``owners``, and the names of each path."""
    names = to_array(trace.events["name"].to_physical(), -1)
    path_numbers: dict[int, int] = {-1: 0}
    number_by_key: dict[tuple[int, int], int] = {}
    paths: list[list[str]] = [[]]
    above = find_nearest_ancestor(parent, is_node, parent)
    texts: dict[int, str] = {}
    for row in np.unique(owners).tolist():
        chain = []
        while row not in path_numbers:
            chain.append(row)
            row = int(above[row])
        for inner in reversed(chain):
            key = path_numbers[row], int(names[inner])
            if key not in number_by_key:
                text = texts.setdefault(key[1], _name_node(trace.events["name"][inner]))
                number_by_key[key] = len(paths)
                paths.append([*paths[key[0]], text])
            path_numbers[inner] = number_by_key[key]
            row = inner
    return np.array([path_numbers[row] for row in owners.tolist()], np.int64), paths


def _name_node(name: str | None) -> str:
    """Return the name of an operator, or the class of a module, without its number."""
    match = re.match(MODULE, name or "")
    return match[1] if match else name or ""
