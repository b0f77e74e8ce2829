"""A planned call as a call of torch.distributed: its tensors, the call itself, and what it must have brought."""

from __future__ import annotations

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
        f"float8_{kind}": getattr(torch, f"float8_{kind}")
        for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
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


_GLOO_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
    | {torch.bool, torch.complex64, torch.complex128}
)
_GLOO_SUBSTITUTES = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str, backend: str = "nccl") -> torch.dtype:
    """torch's type; gloo moves those that it does not have as others of their width.

    Raises EtloomError for a type that torch does not have.
    """
    if (
        backend == "gloo"
        and DTYPES.get(_normalize_dtype_name(name)) not in _GLOO_DTYPES
        and itemsize(name) in _GLOO_SUBSTITUTES
    ):
        return _GLOO_SUBSTITUTES[itemsize(name) or 1]
    plain = _normalize_dtype_name(name)
    if plain not in DTYPES:
        raise EtloomError(
            f"tensors of type {name!r} cannot be made", remedy="leave them out: --only COLLECTIVES"
        )
    return DTYPES[plain]


def _normalize_dtype_name(name: str) -> str:
    return name.strip().lower().removeprefix("c10::").removeprefix("torch.").replace(" ", "_")


@dataclass
class PreparedCall:
    """A call with its tensors. In place: inputs and outputs are the same."""

    call: Call
    group: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def reduce_op(self) -> str:
        """The recorded operation, or the sum, which moves as much, where the backend cannot average."""
        if self.call.reduce_op == "avg" and dist.get_backend(self.group) != "nccl":
            return "sum"
        return self.call.reduce_op

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.inputs + [one for one in self.outputs if all(one is not other for other in self.inputs)]

    def start(self) -> Any:
        """Make the call; the Work to wait for."""
        call, group = self.call, self.group
        ins, outs = self.inputs, self.outputs
        operation: Any = REDUCE_OPERATIONS.get(self.reduce_op, dist.ReduceOp.SUM)
        match call.collective:
            case "all_reduce" if len(ins) == 1:
                return dist.all_reduce(ins[0], operation, group, async_op=True)
            case "all_reduce":
                options = dist.AllreduceCoalescedOptions()
                options.reduceOp = operation
                return _backend_group(group).allreduce_coalesced(ins, options)
            case "broadcast":
                return dist.broadcast(ins[0], call.root, group, async_op=True)
            case "reduce":
                return dist.reduce(ins[0], call.root, operation, group, async_op=True)
            case "all_gather" if call.coalesced and len(ins) > 1:
                return _backend_group(group).allgather_into_tensor_coalesced(outs, ins)
            case "all_gather" if len(outs) == 1:
                return dist.all_gather_into_tensor(outs[0], ins[0], group, async_op=True)
            case "all_gather":
                return dist.all_gather(outs, ins[0], group, async_op=True)
            case "reduce_scatter" if call.coalesced and len(ins) > 1:
                scattered = dist.ReduceScatterOptions()
                scattered.reduceOp = operation
                return _backend_group(group).reduce_scatter_tensor_coalesced(outs, ins, scattered)
            case "reduce_scatter" if len(ins) == 1:
                return dist.reduce_scatter_tensor(outs[0], ins[0], operation, group, async_op=True)
            case "reduce_scatter":
                return dist.reduce_scatter(outs[0], ins, operation, group, async_op=True)
            case "all_to_all" if len(ins) == len(outs) == 1:
                got, sent = (list(split) or None for split in (call.out_split, call.in_split))
                return dist.all_to_all_single(outs[0], ins[0], got, sent, group, async_op=True)
            case "all_to_all":
                return dist.all_to_all(outs, ins, group, async_op=True)
            case "gather":
                # gloo gathers no complex numbers, but pairs.
                return dist.gather(
                    _as_real(ins[0]), [*map(_as_real, outs)] or None, call.root, group, async_op=True
                )
            case "scatter":
                return dist.scatter(outs[0], ins or None, call.root, group, async_op=True)
            case "send":
                return dist.isend(ins[0], call.peer)
            case "recv":
                return dist.irecv(outs[0], call.peer)
        return dist.barrier(group, async_op=True)


def start_messages(ready: Sequence[PreparedCall]) -> list[Any]:
    """Make messages as one; the Work of each."""
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, one.inputs[0], one.call.peer)
            if one.call.collective == "send"
            else dist.P2POp(dist.irecv, one.outputs[0], one.call.peer)
            for one in ready
        ]
    )
    # Some backends give one for all.
    return works if len(works) == len(ready) else works[:1] * len(ready)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _backend_group(group: Any) -> Any:
    return group if group is not None else dist.group.WORLD


def tensor_element_counts(call: Call, rank: int) -> tuple[list[int], list[int]]:
    """Elements of the input and output tensors that torch.distributed asks of this rank for the call."""
    size = len(call.group)
    ins, outs = list(call.inputs), list(call.outputs)
    match call.collective:
        case "barrier":
            return [], []
        case "all_reduce" | "broadcast" | "reduce":
            both = ins or outs
            return both if call.coalesced or call.collective == "all_reduce" else [sum(both)], []
        case "gather":
            return [sum(ins)], [sum(ins)] * size if rank == call.root else []
        case "scatter":
            return [sum(outs)] * size if rank == call.root else [], [sum(outs)]
        case "all_gather" if not call.coalesced:
            return [sum(ins)], [sum(ins)] * size if len(outs) > 1 else [sum(ins) * size]
        case "reduce_scatter" if not call.coalesced:
            return [sum(outs)] * size if len(ins) > 1 else [sum(outs) * size], [sum(outs)]
        case "all_to_all" if len(ins) == len(outs) == 1:
            got, sent = call.out_split, call.in_split
            # Without splits both are divided evenly.
            return [sum(sent) or ins[0] // size * size], [
                sum(got) or (outs[0] // size * size if got or sent else ins[0] // size * size)
            ]
    return ins, outs


def expected_results(ready: PreparedCall, rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (tensor, what it must hold) after the call, where each rank put in its `value` everywhere."""
    call, group = ready.call, ready.call.group
    of = {
        member: verification_value(member, one.dtype, world)
        for one in ready.tensors[:1]
        for member in (*group, rank)
    }
    reduced = _reduce_values([of[member] for member in group], ready.reduce_op) if of else 0
    pairs: list[tuple[torch.Tensor, Sequence[float]]] = []
    match call.collective:
        case "all_reduce":
            pairs = [(one, [reduced]) for one in ready.inputs]
        case "broadcast":
            pairs = [(ready.inputs[0], [of[call.root or 0]])]
        case "reduce" if rank == call.root:
            pairs = [(ready.inputs[0], [reduced])]
        case "all_gather" | "all_to_all" if (
            len(ready.outputs) == len(group) and not call.coalesced and len(group) > 1
        ):
            pairs = [(one, [of[member]]) for one, member in zip(ready.outputs, group, strict=True)]
        case "all_gather":
            pairs = [(one, [of[member] for member in group]) for one in ready.outputs]
        case "all_to_all" if not call.out_split:
            pairs = [(ready.outputs[0], [of[member] for member in group])]
        case "all_to_all":
            parts = torch.split(ready.outputs[0], list(call.out_split))
            pairs = [(one, [of[member]]) for one, member in zip(parts, group, strict=True)]
        case "reduce_scatter":
            pairs = [(one, [reduced]) for one in ready.outputs]
        case "gather" if rank == call.root:
            pairs = [(one, [of[member]]) for one, member in zip(ready.outputs, group, strict=True)]
        case "scatter":
            pairs = [(ready.outputs[0], [of[call.root or 0]])]
        case "recv":
            pairs = [(ready.outputs[0], [of[call.peer or 0]])]
    return [(one, _fill_like(one, values)) for one, values in pairs if one.numel()]


def verification_value(rank: int, dtype: torch.dtype, world: int) -> int:
    """What a rank puts into every element when results are verified: 1, 2 or 3, and 0 on so many ranks of a large world
    that the type holds the sum of any of them."""
    if dtype == torch.bool:
        return rank % 2
    wide = dtype.is_floating_point or dtype.is_complex
    most = int(2 / torch.finfo(dtype).eps) if wide else torch.iinfo(dtype).max
    each = -(-3 * world // most)
    return 0 if rank % each else rank // each % 3 + 1


def _reduce_values(values: list[int], operation: str) -> float:
    match operation:
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "avg":
            return sum(values) / len(values)
        case "product":
            product = 1
            for one in values:
                product *= one
            return product
        case "band" | "bor" | "bxor":
            result = values[0]
            for one in values[1:]:
                result = {"band": result & one, "bor": result | one, "bxor": result ^ one}[operation]
            return result
    return sum(values)


def _fill_like(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    made = torch.tensor(values, dtype=torch.float64).repeat_interleave(like.numel() // len(values))
    return made.to(like.dtype).to(like.device)


def make_process_groups(
    groups: Sequence[tuple[int, ...]], world: int, timeout: Any
) -> Mapping[tuple[int, ...], Any]:
    """A process group for each set of ranks, made in one order on every rank; the world is the default group."""
    made: dict[tuple[int, ...], Any] = {}
    for ranks in groups:
        whole = ranks == tuple(range(world))
        made[ranks] = None if whole else dist.new_group(list(ranks), timeout=timeout)
    return made
