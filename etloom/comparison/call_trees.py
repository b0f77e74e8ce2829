"""Compare the call trees of two runs: at the lowest operator or module of both, what ran instead of what.

Two programs differ where one fuses operators, uses another library or another device. Their call trees still agree at
the top. From there they are walked together: a callee of both sides is walked in turn, and all callees of one side
only, with what the caller launched itself, are one row. So each activity is in one row, and the changes add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.helpers.operator_times import measure_operators
from etloom.comparison.difference_tables import assign_steps, join_sides
from etloom.comparison.run_tables import is_stepped
from etloom.core import categories
from etloom.core.arrays import is_present, rows_of_ids, to_array
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, has_device_events

TOP = "(top)"
SEPARATOR = " > "
_SIDES = ("first_ns", "second_ns")
_MOST_PARTS = 4
MODULE = r"^nn\.Module: (.*?)(?:_\d+)?$"
"""Names of modules in Python stacks; equal modules of a run (layers) are one node."""


Row = tuple[str, str | None, str | None, float, float]
"""Caller, what ran before, what ran after, and their times in ns."""


@dataclass
class Node:
    """An operator or module of one side, at a path of callers.

    Attributes:
        own: Names of the activities that it launched itself, on a host its own name -> time, ns.
        callees: Operators and modules inside it, by name.
    """

    own: dict[str, float] = field(default_factory=dict)
    callees: dict[str, Node] = field(default_factory=dict)

    @property
    def ns(self) -> float:
        total, nodes = 0.0, [self]
        while nodes:  # calls may nest deeper than Python recurses
            node = nodes.pop()
            total += sum(node.own.values())
            nodes += node.callees.values()
        return total


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
        a run has none.
    """
    on_device = all(has_device_events(trace) for job in (before, after) for trace in job.values())
    with_modules = all(_has_modules(trace) for job in (before, after) for trace in job.values())
    sides = [_build_tree(job, stepped, on_device, with_modules) for job in (before, after)]
    rows = list(_align(*sides))
    schema = {
        "caller": pl.String,
        "before": pl.String,
        "after": pl.String,
        "first_ns": pl.Float64,
        "second_ns": pl.Float64,
    }
    table = pl.DataFrame(rows, schema=schema, orient="row")
    keys = ("caller", "before", "after")
    first, second = (table.filter(pl.col(name) > 0).select(*keys, ns=name) for name in _SIDES)
    return join_sides(first, second, clear=clear)


def _align(first: Node, second: Node) -> Iterator[Row]:
    """Yield the rows of two trees."""
    pairs: list[tuple[tuple[str, ...], Node, Node]] = [((), first, second)]
    while pairs:
        path, first, second = pairs.pop()
        common = [name for name in first.callees if name in second.callees]
        pairs += [((*path, name), first.callees[name], second.callees[name]) for name in common]
        before, after = (_list_parts(node, common) for node in (first, second))
        if before or after:
            times = float(sum(before.values())), float(sum(after.values()))
            yield (SEPARATOR.join(path) or TOP, _describe_parts(before), _describe_parts(after), *times)


def _list_parts(node: Node, common: list[str]) -> dict[str, float]:
    others = {name: callee.ns for name, callee in node.callees.items() if name not in common}
    return {name: ns for name, ns in {**node.own, **others}.items() if ns > 0}


def _describe_parts(parts: dict[str, float]) -> str | None:
    """Return names and times such as "gemm 1.20 ms, softmax 30.0 µs", the longest first; None for nothing."""
    ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    texts = [f"{name} {_format_time(ns)}" for name, ns in ordered[:_MOST_PARTS]]
    if len(ordered) > _MOST_PARTS:
        texts.append(f"{len(ordered) - _MOST_PARTS} more")
    return ", ".join(texts) or None


def _format_time(ns: float) -> str:
    return f"{ns / 1e6:,.3g} ms" if ns >= 1e6 else f"{ns / 1e3:,.3g} µs"


def _has_modules(trace: Trace) -> bool:
    python = categories.mask_events(trace.events, categories.PYTHON_CATEGORIES)
    return bool(categories.match_names(trace.events, MODULE, python).any())


def _build_tree(job: Job, stepped: bool, on_device: bool, with_modules: bool) -> Node:
    """Return the root of a run's call tree, with times per step as means over ranks."""
    root = Node()
    for trace in job.values():
        for path, name, ns in _sum_rank(trace, stepped, on_device, with_modules):
            node = root
            for caller in path:
                node = node.callees.setdefault(caller, Node())
            node.own[name] = node.own.get(name, 0.0) + ns / len(job)
    return root


def _sum_rank(
    trace: Trace, stepped: bool, on_device: bool, with_modules: bool
) -> Iterator[tuple[list[str], str, float]]:
    """Yield (path of operators and modules, name of what it launches itself, time per step in ns) of a rank."""
    events = trace.events
    is_node = categories.mask_events(events, categories.OPERATOR_CATEGORIES) & is_present(events["dur"])
    is_node |= categories.mask_events(events, (categories.CAPTURED_OPERATOR,))
    if with_modules:
        python = categories.mask_events(events, categories.PYTHON_CATEGORIES)
        is_node |= categories.match_names(events, MODULE, python)
    if on_device:
        launches = trace.launches.select("operator", id="device_event").unique("id", keep="first")
        work = trace.compute_once(assign_steps).join(launches, on="id", how="left", maintain_order="left")
        work = work.select("name", "step", "dur", caller="operator")
    else:
        work = measure_operators(trace).select("name", "step", dur="exclusive_ns", caller="id")
    per_step = is_stepped(trace, stepped)
    number = find_steps(trace).height if per_step else 1
    work = work.drop_nulls("step") if per_step else work
    parent = rows_of_ids(events, events["parent"])
    owners = find_nearest_ancestor(parent, is_node, rows_of_ids(events, work["caller"]))
    numbers, paths = _find_paths(trace, parent, is_node, owners)
    sums = work.select(pl.col("name").cast(pl.String).fill_null(""), "dur", path=pl.Series(numbers))
    sums = sums.group_by("path", "name").agg(pl.col("dur").sum()).sort("path", "name")
    for path, name, ns in sums.iter_rows():
        yield paths[path], name, ns / number


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
