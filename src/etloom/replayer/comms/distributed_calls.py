"""Executes planned calls with torch.distributed, and computes the expected results for verification."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from etloom.core.categories import itemsize
from etloom.core.errors import EtloomError
from etloom.replayer.plan import Call

DTYPES: dict[str, torch.dtype] = {
    **dict.fromkeys(("float", "float32", "fp32"), torch.float32),
    **dict.fromkeys(("double", "float64"), torch.float64),
    **dict.fromkeys(("half", "float16"), torch.float16),
    **dict.fromkeys(("bfloat16",), torch.bfloat16),
    **dict.fromkeys(("long", "int64", "long_int"), torch.int64),
    **dict.fromkeys(("int", "int32"), torch.int32),
    **dict.fromkeys(("short", "int16", "short_int"), torch.int16),
    **dict.fromkeys(("char", "int8", "signed_char"), torch.int8),
    **dict.fromkeys(("byte", "uint8", "unsigned_char"), torch.uint8),
    "bool": torch.bool,
    **dict.fromkeys(("uint16", "unsigned_short"), torch.uint16),
    **dict.fromkeys(("uint32", "unsigned_int"), torch.uint32),
    **dict.fromkeys(("uint64", "unsigned_long"), torch.uint64),
    **dict.fromkeys(("complexfloat", "complex64", "complex<float>"), torch.complex64),
    **dict.fromkeys(("complexdouble", "complex128", "complex<double>"), torch.complex128),
    **{
        f"float8_{variant}": getattr(torch, f"float8_{variant}")
        for variant in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
    },
}
REDUCE_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_GLOO_DTYPES = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip
_GLOO_SUBSTITUTES = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""Types by their size, for types that gloo does not support."""


def torch_dtype(name: str, backend: str = "nccl") -> torch.dtype:
    """Convert a recorded data type name to a torch.dtype; for gloo, if necessary, to a supported dtype of equal size.

    Raises:
        EtloomError: torch has no such type.
    """
    plain = _normalize_dtype_name(name)
    if backend == "gloo" and DTYPES.get(plain) not in _GLOO_DTYPES and itemsize(name) in _GLOO_SUBSTITUTES:
        return _GLOO_SUBSTITUTES[itemsize(name) or 1]
    if plain not in DTYPES:
        raise EtloomError(
            f"torch has no data type {name!r}", remedy="exclude these calls: --only COLLECTIVES"
        )
    return DTYPES[plain]


def _normalize_dtype_name(name: str) -> str:
    return name.strip().lower().removeprefix("c10::").removeprefix("torch.").replace(" ", "_")


@dataclass
class PreparedCall:
    """A planned call, ready to run with its process group and tensors; in-place collectives have only input tensors."""

    call: Call
    group: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def reduce_op(self) -> str:
        """Name of the recorded reduce operation; on backends other than NCCL, "sum" takes the place of "avg"."""
        if self.call.reduce_op == "avg" and dist.get_backend(self.group) != "nccl":
            return "sum"
        return self.call.reduce_op

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.inputs + [
            output for output in self.outputs if all(output is not tensor for tensor in self.inputs)
        ]

    def start(self) -> Any:
        """Start the call asynchronously, and return torch's Work object to wait for."""
        collective = self.call.collective
        if collective in ("all_reduce", "broadcast", "reduce", "barrier"):
            return self._start_in_place()
        if collective in ("all_gather", "reduce_scatter"):
            return self._start_gather_or_scatter()
        return self._start_exchange()

    def _start_in_place(self) -> Any:
        call, group, tensors = self.call, self.group, self.inputs
        operation: Any = REDUCE_OPERATIONS.get(self.reduce_op, dist.ReduceOp.SUM)
        match call.collective:
            case "all_reduce" if len(tensors) == 1:
                return dist.all_reduce(tensors[0], operation, group, async_op=True)
            case "all_reduce":
                options = dist.AllreduceCoalescedOptions()
                options.reduceOp = operation
                return _backend_group(group).allreduce_coalesced(tensors, options)
            case "broadcast":
                return dist.broadcast(tensors[0], call.root, group, async_op=True)
            case "reduce":
                return dist.reduce(tensors[0], call.root, operation, group, async_op=True)
        return dist.barrier(group, async_op=True)

    def _start_gather_or_scatter(self) -> Any:
        """Start an all-gather or a reduce-scatter."""
        call, group, inputs, outputs = self.call, self.group, self.inputs, self.outputs
        operation: Any = REDUCE_OPERATIONS.get(self.reduce_op, dist.ReduceOp.SUM)
        match call.collective:
            case "all_gather" if call.coalesced and len(inputs) > 1:
                return _backend_group(group).allgather_into_tensor_coalesced(outputs, inputs)
            case "all_gather" if len(outputs) == 1:
                return dist.all_gather_into_tensor(outputs[0], inputs[0], group, async_op=True)
            case "all_gather":
                return dist.all_gather(outputs, inputs[0], group, async_op=True)
            case "reduce_scatter" if call.coalesced and len(inputs) > 1:
                options = dist.ReduceScatterOptions()
                options.reduceOp = operation
                return _backend_group(group).reduce_scatter_tensor_coalesced(outputs, inputs, options)
            case "reduce_scatter" if len(inputs) == 1:
                return dist.reduce_scatter_tensor(outputs[0], inputs[0], operation, group, async_op=True)
        return dist.reduce_scatter(outputs[0], inputs, operation, group, async_op=True)

    def _start_exchange(self) -> Any:
        """Start an all-to-all, gather, scatter, or message."""
        call, group, inputs, outputs = self.call, self.group, self.inputs, self.outputs
        match call.collective:
            case "all_to_all" if len(inputs) == len(outputs) == 1:
                out_split, in_split = (list(split) or None for split in (call.out_split, call.in_split))
                return dist.all_to_all_single(
                    outputs[0], inputs[0], out_split, in_split, group, async_op=True
                )
            case "all_to_all":
                return dist.all_to_all(outputs, inputs, group, async_op=True)
            case "gather":
                # gloo cannot gather complex numbers; pairs of real numbers are the same bytes.
                return dist.gather(
                    _as_real(inputs[0]), [*map(_as_real, outputs)] or None, call.root, group, async_op=True
                )
            case "scatter":
                return dist.scatter(outputs[0], inputs or None, call.root, group, async_op=True)
            case "send":
                return dist.isend(inputs[0], call.peer)
        return dist.irecv(outputs[0], call.peer)


def start_messages(calls: Sequence[PreparedCall]) -> list[Any]:
    """Start sends and receives as one batch, and return torch's Work object for each of them."""
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, message.inputs[0], message.call.peer)
            if message.call.collective == "send"
            else dist.P2POp(dist.irecv, message.outputs[0], message.call.peer)
            for message in calls
        ]
    )
    # Some backends return one Work for the batch.
    return works if len(works) == len(calls) else works[:1] * len(calls)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _backend_group(group: Any) -> Any:
    return group if group is not None else dist.group.WORLD


def tensor_element_counts(call: Call, rank: int) -> tuple[list[int], list[int]]:
    """Return the sizes (elements) of the input and output tensors that torch.distributed requires on a rank."""
    size = len(call.group)
    inputs, outputs = list(call.inputs), list(call.outputs)
    match call.collective:
        case "barrier":
            return [], []
        case "all_reduce" | "broadcast" | "reduce":
            in_place = inputs or outputs
            keeps_tensors = call.coalesced or call.collective == "all_reduce"
            return in_place if keeps_tensors else [sum(in_place)], []
        case "gather":
            return [sum(inputs)], [sum(inputs)] * size if rank == call.root else []
        case "scatter":
            return [sum(outputs)] * size if rank == call.root else [], [sum(outputs)]
        case "all_gather" if not call.coalesced:
            total = sum(inputs)
            return [total], [total] * size if len(outputs) > 1 else [total * size]
        case "reduce_scatter" if not call.coalesced:
            total = sum(outputs)
            return [total] * size if len(inputs) > 1 else [total * size], [total]
        case "all_to_all" if len(inputs) == len(outputs) == 1:
            # Without splits a tensor is divided evenly.
            even_input, even_output = inputs[0] // size * size, outputs[0] // size * size
            if not (call.out_split or call.in_split):
                even_output = even_input
            return [sum(call.in_split) or even_input], [sum(call.out_split) or even_output]
    return inputs, outputs


def expected_results(
    prepared: PreparedCall, rank: int, world_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs (tensor, expected contents) for a call to which each rank contributed its `verification_value`."""
    call, group = prepared.call, prepared.call.group
    inputs, outputs = prepared.inputs, prepared.outputs
    values = {
        member: verification_value(member, tensor.dtype, world_size)
        for tensor in prepared.tensors[:1]
        for member in (*group, rank)
    }
    reduced = _reduce_values([values[member] for member in group], prepared.reduce_op) if values else 0
    pairs: list[tuple[torch.Tensor, Sequence[float]]] = []
    match call.collective:
        case "all_reduce":
            pairs = [(tensor, [reduced]) for tensor in inputs]
        case "broadcast":
            pairs = [(inputs[0], [values[call.root or 0]])]
        case "reduce" if rank == call.root:
            pairs = [(inputs[0], [reduced])]
        case "all_gather" | "all_to_all" if len(outputs) == len(group) > 1 and not call.coalesced:
            pairs = [(tensor, [values[member]]) for tensor, member in zip(outputs, group, strict=True)]
        case "all_gather":
            pairs = [(tensor, [values[member] for member in group]) for tensor in outputs]
        case "all_to_all" if not call.out_split:
            pairs = [(outputs[0], [values[member] for member in group])]
        case "all_to_all":
            parts = torch.split(outputs[0], list(call.out_split))
            pairs = [(part, [values[member]]) for part, member in zip(parts, group, strict=True)]
        case "reduce_scatter":
            pairs = [(tensor, [reduced]) for tensor in outputs]
        case "gather" if rank == call.root:
            pairs = [(tensor, [values[member]]) for tensor, member in zip(outputs, group, strict=True)]
        case "scatter":
            pairs = [(outputs[0], [values[call.root or 0]])]
        case "recv":
            pairs = [(outputs[0], [values[call.peer or 0]])]
    return [(tensor, _fill_like(tensor, contents)) for tensor, contents in pairs if tensor.numel()]


def verification_value(rank: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the value with which a rank fills the input tensors of calls whose results are verified.

    It is 1, 2 or 3. In a large world most ranks contribute 0, so that the type can hold the sum of all values.
    """
    if dtype == torch.bool:
        return rank % 2
    is_float = dtype.is_floating_point or dtype.is_complex
    max_value = int(2 / torch.finfo(dtype).eps) if is_float else torch.iinfo(dtype).max
    stride = -(-3 * world_size // max_value)
    return 0 if rank % stride else rank // stride % 3 + 1


def _reduce_values(values: list[int], operation: str) -> float:
    match operation:
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "avg":
            return sum(values) / len(values)
        case "product":
            return math.prod(values)
        case "band":
            return functools.reduce(operator.and_, values)
        case "bor":
            return functools.reduce(operator.or_, values)
        case "bxor":
            return functools.reduce(operator.xor, values)
    return sum(values)


def _fill_like(tensor: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Return a flat tensor with the dtype and device of ``tensor``: equal parts, each filled with one of ``values``."""
    filled = torch.tensor(values, dtype=torch.float64).repeat_interleave(tensor.numel() // len(values))
    return filled.to(tensor.dtype).to(tensor.device)


def make_process_groups(
    groups: Sequence[tuple[int, ...]], world_size: int, timeout: Any
) -> Mapping[tuple[int, ...], Any]:
    """Create a process group for each set of ranks, in the same order on every rank.

    Returns:
        Ranks -> process group; None (the default group) for the whole world.
    """
    process_groups: dict[tuple[int, ...], Any] = {}
    for ranks in groups:
        is_world = ranks == tuple(range(world_size))
        process_groups[ranks] = None if is_world else dist.new_group(list(ranks), timeout=timeout)
    return process_groups
