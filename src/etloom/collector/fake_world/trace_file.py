"""Writes the operators of a rank as an execution trace in PyTorch's format (schema 1.1.1-chakra.0.0.4)."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .dispatch_recorder import OperatorRecord, TensorRecord

_SCHEMA = "1.1.1-chakra.0.0.4"
_EMPTY: dict[str, list[Any]] = {"values": [], "shapes": [], "types": [], "strides": []}
_DTYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "int64": "long int",
    "int32": "int",
    "int16": "short int",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
    "complex64": "c10::complex<float>",
    "float8_e4m3fn": "c10::Float8_e4m3fn",
    "float8_e5m2": "c10::Float8_e5m2",
}
_SCALARS = {bool: "Bool", int: "Int", float: "Double", str: "String", type(None): "None"}
_FUNCTION, _USER_SCOPE = 0, 7


def write_trace(
    path: Path,
    steps: Iterable[tuple[int, list[OperatorRecord]]],
    groups: list[dict[str, Any]],
    rank: int,
    peak_memory_bytes: int,
) -> None:
    """Write an execution trace of the process groups and the operators of each step; the file appears when complete.

    The operators of a step are children of a node ProfilerStep#N.

    Args:
        path: The file, ending in .json.gz.
        steps: Number and operators of each step.
        groups: pg_name, pg_desc, ranks and group_size of each process group.
        rank: The recorded rank; its position in each process group follows from it.
        peak_memory_bytes: Peak memory of the device; written as an attribute of each step.
    """
    nodes = list(_NodeBuilder(groups, rank).build(steps, {"peak_memory_bytes": peak_memory_bytes}))
    document = {
        "schema": _SCHEMA,
        "pid": os.getpid(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "start_ts": 0,
        "nodes": nodes,
        "finish_ts": 0,
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with gzip.open(unfinished, "wt", compresslevel=3) as file:
        json.dump(document, file)
    unfinished.replace(path)


class _NodeBuilder:
    """Builds the nodes of an execution trace, with ids from 1 in the order of creation."""

    def __init__(self, groups: list[dict[str, Any]], rank: int) -> None:
        self._groups = {str(group["pg_name"]): group for group in groups}
        self._rank = rank
        self._next = 1
        self._sequence: dict[str, int] = {}

    def build(
        self, steps: Iterable[tuple[int, list[OperatorRecord]]], attributes: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the nodes of an execution trace in the order in which they end, the root (process) last."""
        root = self._build_node("[pytorch|profiler|execution_trace|process]", 0, _USER_SCOPE)
        thread = self._build_node("[pytorch|profiler|execution_trace|thread]", root["id"], _USER_SCOPE)
        if self._groups:
            config = _describe_values([json.dumps(list(self._groups.values()))])
            yield self._build_node("## process_group:init ##", thread["id"], _USER_SCOPE, inputs=config)
        for step, operators in steps:
            mark = self._build_node(f"ProfilerStep#{step}", thread["id"], _USER_SCOPE, attributes=attributes)
            for operator in operators:
                yield from self._build_operator(operator, mark["id"])
            yield mark
        yield thread
        yield root

    def _build_operator(self, operator: OperatorRecord, parent: int) -> Iterator[dict[str, Any]]:
        node = self._build_node(
            operator.name,
            parent,
            _FUNCTION,
            schema=operator.schema,
            inputs=_describe_values(operator.inputs),
            outputs=_describe_values(operator.outputs),
        )
        if operator.communication is not None:
            yield self._build_record(operator, node["id"])
        yield node

    def _build_record(self, operator: OperatorRecord, parent: int) -> dict[str, Any]:
        facts = operator.communication or {}
        name = facts["group_name"]
        group = self._groups.get(name, {"pg_desc": "", "group_size": -1, "ranks": []})
        sequence = self._sequence[name] = self._sequence.get(name, -1) + 1
        ranks = group["ranks"] or list(range(group["group_size"]))
        group_rank = ranks.index(self._rank) if self._rank in ranks else -1
        collective = operator.name.partition("::")[2].strip("_")
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
        if stride and ranks != list(range(ranks[0], ranks[0] + stride * len(ranks), stride)):
            stride = 0
        start = ranks[0] if ranks and (stride or len(ranks) == 1) else -1
        rank = facts["peer"] if facts["peer"] >= 0 else group_rank
        values = [[], [sequence, False], [name, group["pg_desc"]], rank, collective, [], []]
        attributes = {
            "collective_name": collective,
            "dtype": _DTYPES.get(facts["dtype"], facts["dtype"]),
            "in_msg_nelems": facts["in_nelems"],
            "out_msg_nelems": facts["out_nelems"],
            "pg_name": name,
            "pg_desc": group["pg_desc"],
            "pg_size": group["group_size"],
            "global_rank_start": start,
            "global_rank_stride": stride,
        }
        inputs = _describe_values([*values, start, stride, group["group_size"]])
        return self._build_node("record_param_comms", parent, _FUNCTION, inputs=inputs, attributes=attributes)

    def _build_node(
        self,
        name: str,
        parent: int,
        scope: int,
        *,
        schema: str = "",
        inputs: dict[str, list[Any]] | None = None,
        outputs: dict[str, list[Any]] | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        number = self._next
        self._next += 1
        facts = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": scope, "tid": 1, "fw_tid": 0}
        texts = {"op_schema": schema, "kernel_backend": "", "kernel_file": ""}
        attrs = [
            {"name": key, "type": "int64" if key == "seq_id" else "uint64", "value": value}
            for key, value in facts.items()
        ]
        attrs += [{"name": key, "type": "string", "value": value} for key, value in texts.items()]
        attrs += [
            {"name": key, "type": "string" if isinstance(value, str) else "int64", "value": value}
            for key, value in (attributes or {}).items()
        ]
        return {
            "id": number,
            "name": name,
            "ctrl_deps": parent,
            "inputs": inputs or _EMPTY,
            "outputs": outputs or _EMPTY,
            "attrs": attrs,
        }


def _describe_values(values: list[Any]) -> dict[str, list[Any]]:
    """Return the values, shapes, types and strides of arguments or results, each as a list, as in PyTorch's traces."""
    described = [_describe_value(value) for value in values]
    return {
        name: [item[i] for item in described]
        for i, name in enumerate(("values", "shapes", "types", "strides"))
    }


def _describe_value(value: Any) -> tuple[Any, Any, str, Any]:
    if isinstance(value, TensorRecord):
        count = 1
        for size in value.shape:
            count *= size
        tensor = [value.tensor_id, value.storage_id, value.offset, count, value.itemsize, value.device]
        kind = f"Tensor({_DTYPES.get(value.dtype, value.dtype)})"
        return tensor, list(value.shape), kind, list(value.stride)
    if isinstance(value, list):
        items = [_describe_value(item) for item in value]
        kinds = ",".join(item[2] for item in items)
        return (
            [item[0] for item in items],
            [item[1] for item in items],
            f"GenericList[{kinds}]",
            [item[3] for item in items],
        )
    return ("<None>" if value is None else value), [], _SCALARS.get(type(value), "String"), []
