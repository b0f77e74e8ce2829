"""From a recorded trace to the operators that will run: which, in what order, and whose results they take.

The top-most operator that this torch may run is run, its children are not: it calls them itself. Ids of storages are
addresses, which are used again: a storage that an operator gives and did not take is a new version of its id. What a
version's last reader leaves behind is freed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.errors import EtloomError
from etloom.replayer.operators import Operator, resolve
from etloom.replayer.values import DTYPES
from etloom.trace import Trace

_MOST_BYTES = 1 << 50
INPUT, OUTPUT = 0, 1  # of the column io of tensors
_Node = dict[str, Any]
_COMMUNICATES = "communication: etloom replay comms"
_COMMUNICATION = ("record_param_comms", "c10d::", "c10d_functional::", "_c10d_functional::", "nccl:", "gloo:")


@dataclass(frozen=True)
class View:
    """A tensor as it was recorded. storage: a version of a storage. offset, stride: in elements."""

    storage: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_host: bool
    tensor: int | None = (
        None  # its recorded id, where strides were not recorded: a view may differ in them alone
    )

    @property
    def bytes(self) -> int:
        """What its storage must hold at least."""
        if 0 in self.shape:
            return 0
        reach = sum((size - 1) * by for size, by in zip(self.shape, self.stride, strict=True))
        return (self.offset + reach + 1) * int(DTYPES[self.dtype].itemsize)


@dataclass
class Step:
    """One operator to run. values: of its arguments, in recorded order, Views in place of tensors.
    frees: storages that nobody reads afterwards. ranges: (view, least, most) of integers. recorded_ns: how long it
    took, null where no times were recorded."""

    node: int
    name: str
    operator: Operator
    values: list[Any]
    results: list[View]
    frees: tuple[int, ...] = ()
    ranges: list[tuple[View, int, int]] = field(default_factory=list)
    recorded_ns: int | None = None


@dataclass(frozen=True)
class LeftOut:
    """A recorded operator that is not run."""

    name: str
    reason: str
    recorded_ns: int | None

    @property
    def is_communication(self) -> bool:
        return self.reason == _COMMUNICATES


@dataclass(frozen=True)
class Program:
    """bytes: of each storage. external: storages that no step gives. constant: of these, what no step gives back."""

    steps: list[Step]
    left_out: list[LeftOut]
    bytes: dict[int, int] = field(default_factory=dict)
    external: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()


def program(
    trace: Trace, namespaces: frozenset[str] = frozenset({"aten"}), step: int | None = None
) -> Program:
    """The program of a linked trace, or of its step N. Raises EtloomError where nothing was recorded to replay."""
    nodes = trace.nodes.with_columns(pl.col(pl.Categorical).cast(pl.String))
    if not nodes.height:
        raise EtloomError(
            "holds no execution trace, which computation replay needs",
            remedy="record one: etloom collect, or ExecutionTraceObserver",
        )
    first, last = _range_of(nodes, step)
    timed = trace.links.join(trace.events.select(event="id", dur="dur"), on="event")
    spent: dict[int, int] = dict(timed.select("node", "dur").iter_rows())
    chosen, refused = _topmost(nodes.filter(pl.col("id").is_between(first, last, closed="left")), namespaces)
    left_out = [LeftOut(node["name"], reason, spent.get(node["id"])) for node, reason in refused]
    if not chosen:
        raise EtloomError("no recorded operator can be replayed", remedy="etloom info shows what there is")
    found = sorted([*chosen, *((node, None) for node, _ in refused)], key=lambda one: one[0]["id"])
    wanted = pl.DataFrame({"node": [node["id"] for node, _ in found]}, schema={"node": pl.UInt32})
    tensors: dict[int, list[dict[str, Any]]] = {}
    rows = trace.tensors.join(wanted, on="node", how="semi").with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    )
    for row in rows.iter_rows(named=True):
        tensors.setdefault(row["node"], []).append(row)
    steps: list[Step] = []
    storages = _Storages()
    for node, operator in found:
        own = tensors.get(node["id"], [])
        if operator is None:
            storages.replaced(own)
            continue
        try:
            one = _step(node, operator, own, storages)
        except ValueError as error:
            left_out.append(LeftOut(node["name"], str(error), spent.get(node["id"])))
            storages.replaced(own)
            continue
        one.recorded_ns = spent.get(node["id"])
        steps.append(one)
    made, given = _free(steps)
    external = frozenset(storages.bytes.keys() - made)
    return Program(steps, left_out, storages.bytes, external, external - given)


def _range_of(nodes: pl.DataFrame, step: int | None) -> tuple[int, int]:
    """The ids of the nodes of a step: operators of all threads, since ids are given in order of time."""
    if step is None:
        return 0, 1 << 62
    marks = nodes.filter(pl.col("name").str.contains(r"^ProfilerStep#\d+$")).select(
        "id", step=pl.col("name").str.extract(r"#(\d+)$").cast(pl.Int64, strict=False)
    )
    start = marks.filter(pl.col("step") == step)["id"]
    if not start.len():
        known = ", ".join(map(str, marks["step"].to_list())) or "none"
        raise EtloomError(f"the execution trace has no step {step}", remedy=f"it has {known}")
    after = marks.filter(pl.col("id") > start[0])["id"]
    return start[0], after[0] if after.len() else 1 << 62


def _topmost(
    nodes: pl.DataFrame, namespaces: frozenset[str]
) -> tuple[list[tuple[_Node, Operator]], list[tuple[_Node, str]]]:
    """The nodes to run, and those of which neither they nor a part of them can be, with the reason."""
    chosen: list[tuple[_Node, Operator]] = []
    refused: dict[int, tuple[_Node, str]] = {}
    inside: set[int] = set()  # of what is run, or left out whole
    around: dict[int, int] = {}  # node -> the innermost refused one that it is in
    columns = ("id", "name", "parent", "op_schema", "kernel_backend", "inputs", "attrs")
    # An id that comes twice is the first's: what is around what must end somewhere.
    for node in nodes.select(columns).unique("id", keep="first").sort("id").iter_rows(named=True):
        at, parent = node["id"], node["parent"]
        if parent in inside:
            inside.add(at)
            continue
        outer = parent if parent in refused else around.get(parent)
        if outer is not None:
            around[at] = outer
        found = _never(node) or (resolve(node["op_schema"], namespaces) if node["op_schema"] else None)
        if isinstance(found, Operator):
            chosen.append((node, found))
            while outer is not None:  # a part of it is run instead
                refused.pop(outer, None)
                outer = around.get(outer)
        elif found is not None:
            refused[at] = (node, found)
        if isinstance(found, Operator) or _never(node):
            inside.add(at)
    return chosen, list(refused.values())


def _never(node: _Node) -> str | None:
    """Why a node is left out with all that is in it."""
    if (node["name"] or "").startswith(_COMMUNICATION):
        return _COMMUNICATES
    if node["kernel_backend"]:
        return f"a {node['kernel_backend']} kernel: its source would have to be run"
    return None


class _Storages:
    """Numbers for the storages of a recording, of which ids are used again."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self._now: dict[int, int] = {}

    def view(self, row: dict[str, Any], new: bool) -> View:
        """The tensor of a row. new: no earlier tensor of its id shares its storage."""
        if row["dtype"] not in DTYPES:
            raise ValueError(f"dtype {row['dtype']} is not known")
        shape, stride = _sizes(row["shape"]), _sizes(row["stride"])
        told = len(stride) == len(shape)
        if not told:  # not recorded before schema 1.1.1
            stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        if min((0, row["offset"] or 0, *shape, *stride)) < 0:
            raise ValueError("a negative size was recorded")
        name = row["storage_id"]
        if new or name not in self._now:
            self._now[name] = len(self.bytes)
            self.bytes[len(self.bytes)] = 0
        storage = self._now[name]
        on_host = row["device"] == "cpu"
        view = View(
            storage,
            row["dtype"],
            row["offset"] or 0,
            shape,
            stride,
            on_host,
            None if told else row["tensor_id"],
        )
        if view.bytes > _MOST_BYTES:
            raise ValueError("a size beyond all memory was recorded")
        self.bytes[storage] = max(self.bytes[storage], view.bytes)
        return view

    def replaced(self, rows: list[dict[str, Any]]) -> None:
        """Tensors that something gave which is not run: who reads them must not get what had their ids before."""
        taken = {row["storage_id"] for row in rows if row["io"] == INPUT}
        for row in rows:
            if row["io"] == OUTPUT and row["storage_id"] not in taken:
                self._now.pop(row["storage_id"], None)


def _sizes(text: str | None) -> tuple[int, ...]:
    sizes = json.loads(text or "[]")
    if not isinstance(sizes, list) or any(type(one) is not int for one in sizes):
        raise ValueError("sizes were recorded that are none")
    return tuple(sizes)


def _step(node: _Node, operator: Operator, rows: list[dict[str, Any]], storages: _Storages) -> Step:
    """Raises ValueError with the reason where what was recorded is not enough."""
    values = json.loads(node["inputs"] or "[]")
    if not isinstance(values, list):
        raise ValueError("its inputs were not recorded as a list")
    if len(values) > len(operator.arguments):
        raise ValueError("more inputs were recorded than the operator has")
    tensors = [row for row in rows if not (row["dtype"] or "").startswith("nullptr")]
    taken = {row["storage_id"] for row in tensors if row["io"] == INPUT}
    for row in tensors:
        if row["io"] == INPUT:
            view, at, item = storages.view(row, new=False), row["index"], row["item"]
            if item is None:
                values[at] = view
            else:
                values[at] = _put(values[at], item, view)
    inputs = list(views_of(values))
    results = [storages.view(row, row["storage_id"] not in taken) for row in tensors if row["io"] == OUTPUT]
    return Step(node["id"], node["name"], operator, values, results, ranges=_ranges(node["attrs"], inputs))


def _ranges(attrs: str | None, inputs: list[View]) -> list[tuple[View, int, int]]:
    """The recorded least and most of integer inputs, by their place among the tensors."""
    try:
        told = json.loads(json.loads(attrs or "{}").get("tensor_range") or "{}")
        pairs = [(int(at), *map(int, pair)) for at, pair in told.items() if len(pair) == 2]
    except (ValueError, TypeError, AttributeError):
        return []
    return [(inputs[at], low, high) for at, low, high in pairs if 0 <= at < len(inputs) and low <= high]


def _put(values: Any, item: int, view: View) -> list[Any]:
    """The list with its item-th tensor in place, as None among tensors is no item. Lists in lists are beyond what
    operators of aten take."""
    places = [at for at, one in enumerate(values) if one is None or isinstance(one, View)] if values else []
    if not 0 <= item < len(places):
        raise ValueError("a list of tensors was not recorded as one")
    return [view if at == places[item] else one for at, one in enumerate(values)]


def views_of(values: list[Any]) -> Iterator[View]:
    """The tensors among the values of arguments."""
    for value in values:
        if isinstance(value, View):
            yield value
        elif isinstance(value, list):
            yield from (one for one in value if isinstance(one, View))


def _free(steps: list[Step]) -> tuple[set[int], set[int]]:
    """Say at each step which storages end there; the storages that steps make, and those that they give."""
    last: dict[int, int] = {}
    made: set[int] = set()
    given: set[int] = set()
    for at, step in enumerate(steps):
        taken = {view.storage for view in views_of(step.values)}
        results = {view.storage for view in step.results}
        made |= results - taken - last.keys()
        given |= results
        last |= dict.fromkeys(taken | results, at)
    ends: dict[int, list[int]] = {}
    for storage in made:
        ends.setdefault(last[storage], []).append(storage)
    for at, storages in ends.items():
        steps[at].frees = tuple(storages)
    return made, given
