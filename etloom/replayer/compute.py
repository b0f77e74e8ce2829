"""The recorded operators run again, in order, each with what its producers gave."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.errors import EtloomError
from etloom.replayer.resolve import resolve
from etloom.trace import Trace

_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}  # fmt: skip

_VALUES = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
"""Operators that give a number and no tensor: on meta nothing follows from leaving them out."""


@dataclass(frozen=True)
class Replayed:
    """coverage: name, result, reason, count, recorded (ns, null without Kineto), replayed (ns). trace: the replay."""

    coverage: pl.DataFrame
    trace: Trace


def replay(
    trace: Trace,
    device: str = "cpu",
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
    max_memory: int = 1 << 32,
) -> Replayed:
    """Run the top-most operators of an execution trace. Raises EtloomError where there is none.

    The times are of the host, ns. max_memory (B) bounds what lives at once of what is allocated for inputs.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise EtloomError("no CUDA device here", remedy="--device cpu or meta")
    todo = _topmost(trace, step)
    if not todo:
        raise EtloomError("no operators to replay", remedy="record with ExecutionTraceObserver")
    tensors = trace.tensors.filter(pl.col("node").is_in([one["id"] for one in todo]))
    by_node: dict[int, list[dict[str, Any]]] = {}
    last: dict[int, int] = {}
    for row in tensors.iter_rows(named=True):
        by_node.setdefault(row["node"], []).append(row)
        last[row["storage_id"]] = row["node"]
    spent = dict(trace.events.filter(pl.col("rf_id").is_not_null()).select("rf_id", "dur").iter_rows())
    memory = _Memory(device, max_memory)
    rows, events = [], []
    with torch.no_grad():
        for one in todo:
            mine = by_node.get(one["id"], [])
            operator, schema, reason = resolve(one["op_schema"], namespaces)
            begin = end = time.perf_counter_ns()
            if reason is None and device == "meta" and one["name"] in _VALUES:
                result, reason = "substituted", "gives a value, which meta tensors have none of"
            elif reason is None:
                try:
                    arguments, keywords = _arguments(one, schema, mine, memory, device)
                    begin = time.perf_counter_ns()
                    given = operator(*arguments, **keywords)
                    if device == "cuda":
                        torch.cuda.synchronize()
                    end = time.perf_counter_ns()
                    reason = memory.keep(given, [row for row in mine if row["io"] == 1])
                    events.append({"cat": "cpu_op", "ph": "X", "name": one["name"], "ts": begin, "dur": end - begin,
                                   "pid": 0, "tid": 0, "depth": 0})  # fmt: skip
                    result = "replayed" if reason is None else "differs"
                # Whatever one operator raises is its row's reason; the others still run.
                except Exception as error:
                    result, reason = "skipped", str(error).split("\n", 1)[0][:160] or type(error).__name__
            else:
                result = "skipped"
            rows.append((one["name"], result, reason, spent.get(one["rf_id"]), end - begin))
            memory.free({row["storage_id"] for row in mine if last[row["storage_id"]] == one["id"]})
    return Replayed(_coverage(rows), _trace(events, trace.rank))


def _topmost(trace: Trace, step: int | None) -> list[dict[str, Any]]:
    taken: set[int] = set()
    inside: set[int] = set()
    found = []
    for one in trace.nodes.select(
        "id", "name", "parent", "rf_id", "op_schema", "inputs", "input_types"
    ).with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True):  # fmt: skip
        if step is None or one["parent"] in inside or one["name"] == f"ProfilerStep#{step}":
            inside.add(one["id"])
        if one["parent"] in taken:
            taken.add(one["id"])
        elif one["op_schema"]:
            taken.add(one["id"])
            if one["id"] in inside:
                found.append(one)
    return found


class _Memory:
    """The storages that live, by recorded id."""

    def __init__(self, device: str, limit: int) -> None:
        self.device, self.limit, self.held = device, limit, 0
        self.storages: dict[int, Any] = {}

    def tensor(self, row: dict[str, Any]) -> Any:
        import torch

        kind = _DTYPES.get(row["dtype"])
        if row["dtype"].startswith("nullptr"):
            # An undefined tensor: torch makes it, empty, where the operator wants one.
            return torch.empty(0, device=self.device)
        if kind is None:
            raise ValueError(f"dtype {row['dtype']} is not known")
        dtype = getattr(torch, kind)
        shape = json.loads(row["shape"])
        stride = json.loads(row["stride"]) if row["stride"] else None
        if not stride:
            stride = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        if any(size < 0 for size in shape + stride) or (row["offset"] or 0) < 0:
            raise ValueError("a size below zero is recorded")
        reach = sum((size - 1) * by for size, by in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
        need = ((row["offset"] or 0) + reach) * dtype.itemsize
        storage = self.storages.get(row["storage_id"])
        if storage is None or storage.nbytes() < need:
            if self.device != "meta" and self.held + need > self.limit:
                raise MemoryError("over --max-memory")
            count = need // dtype.itemsize
            # Zero is a valid index, class and offset for every operator that takes integers as places.
            real = dtype.is_floating_point or dtype.is_complex
            made = (torch.rand if real else torch.zeros)(count, dtype=dtype, device=self.device)
            self.held += need - (storage.nbytes() if storage is not None else 0)
            storage = self.storages[row["storage_id"]] = made.untyped_storage()
        return torch.empty(0, dtype=dtype, device=self.device).set_(
            storage, row["offset"] or 0, shape, stride
        )

    def keep(self, given: Any, rows: list[dict[str, Any]]) -> str | None:
        """Hold what an operator gave for its consumers; how it differs from the recording, or null."""
        import torch

        flat = torch.utils._pytree.tree_leaves(given)
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        rows = [row for row in rows if row["dtype"] in _DTYPES]
        for one, row in zip(tensors, rows, strict=False):
            if row["storage_id"] not in self.storages:
                self.held += one.untyped_storage().nbytes()
            self.storages[row["storage_id"]] = one.untyped_storage()
            if list(one.shape) != json.loads(row["shape"]):
                return f"gave shape {list(one.shape)}, recorded {row['shape']}"
            if str(one.dtype) != f"torch.{_DTYPES[row['dtype']]}":
                return f"gave {one.dtype}, recorded {row['dtype']}"
        return None if len(tensors) == len(rows) else f"gave {len(tensors)} tensors, recorded {len(rows)}"

    def free(self, ids: set[int]) -> None:
        for one in ids:
            storage = self.storages.pop(one, None)
            if storage is not None:
                self.held = max(0, self.held - storage.nbytes())


def _arguments(
    one: dict[str, Any], schema: Any, rows: list[dict[str, Any]], memory: _Memory, device: str
) -> tuple[list[Any], dict[str, Any]]:
    import torch

    values = json.loads(one["inputs"] or "[]")
    if len(values) > len(schema.arguments):
        raise ValueError("more inputs are recorded than this torch's operator has")
    inputs: dict[int, list[Any]] = {}
    for row in rows:
        if row["io"] == 0:
            inputs.setdefault(row["index"], []).append(memory.tensor(row))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for at, (value, wanted) in enumerate(zip(values, schema.arguments, strict=False)):
        kind = str(wanted.real_type if hasattr(wanted, "real_type") else wanted.type)
        if at in inputs:
            value = inputs[at] if "List[" in kind else inputs[at][0]
        elif value is None or value in ("<None>", "None", ""):
            value = None
        elif kind in ("Device", "Optional[Device]", "Device?") or wanted.name == "device":
            value = torch.device(device)
        elif isinstance(value, str) and value.startswith("<"):
            raise ValueError(f"the value of {wanted.name} is not recorded")
        if wanted.name == "dtype" and isinstance(value, int):
            value = _dtype(value)
        elif wanted.name == "layout" and value is not None:
            value = torch.strided
        elif wanted.name == "memory_format" and isinstance(value, int):
            value = [torch.contiguous_format, torch.preserve_format, torch.channels_last][value]
        if wanted.name == "pin_memory":
            value = None
        if wanted.kwarg_only:
            named[wanted.name] = value
        else:
            positional.append(value)
    return positional, named


def _dtype(code: int) -> Any:
    import torch

    names = [
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "bool",
    ]
    return torch.bfloat16 if code == 15 else getattr(torch, names[code])


def _coverage(rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    names = {
        "name": pl.String,
        "result": pl.String,
        "reason": pl.String,
        "recorded": pl.Int64,
        "replayed": pl.Int64,
    }
    frame = pl.DataFrame(rows, schema=names, orient="row")
    return (
        frame.group_by("name", "result", "reason", maintain_order=True)
        .agg(pl.len().alias("count"), pl.col("recorded").sum(), pl.col("replayed").sum())
        .with_columns(
            (pl.col("count") / pl.col("count").sum()).alias("share_of_count"),
            (pl.col("recorded") / pl.col("recorded").sum()).fill_nan(None).alias("share_of_time"),
        )
        .sort("count", descending=True)
    )


def _trace(events: list[dict[str, Any]], rank: int | None) -> Trace:
    rows = [{"id": at, "position": at, **one} for at, one in enumerate(events)]
    return Trace(
        {"events": pl.DataFrame(rows)} if rows else {}, {"rank": rank or 0, "clock": "relative", "base_ns": 0}
    )
