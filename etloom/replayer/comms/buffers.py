"""Tensors for the calls of a rank, made before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from etloom.core.errors import EtloomError
from etloom.core.memory import available_memory
from etloom.replayer.comms.distributed_calls import tensor_element_counts, torch_dtype
from etloom.replayer.compute.memory_limits import ranks_on_host
from etloom.replayer.plan import Call


def allocate_buffers(
    calls: Sequence[Call], after: Sequence[tuple[int, ...]], rank: int, device: torch.device, backend: str
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Inputs and outputs of each call, out of buffers that calls in flight at one time do not share.

    after: of each call, the earlier ones that were waited for before it. Raises EtloomError where memory is short.
    """
    pool: dict[torch.dtype, list[int]] = {}
    free: dict[torch.dtype, list[int]] = {}
    plans: list[tuple[torch.dtype, list[tuple[int, int]], int]] = []
    held: dict[int, list[tuple[torch.dtype, int]]] = {}
    for call, waited in zip(calls, after, strict=True):
        for one in waited:
            for dtype, slot in held.pop(one, []):
                free[dtype].append(slot)
        dtype = torch_dtype(call.dtype, backend)
        ins, outs = tensor_element_counts(call, rank)
        slots = []
        for size in (*ins, *outs):
            spare = free.setdefault(dtype, [])
            sizes = pool.setdefault(dtype, [])
            slot = spare.pop() if spare else len(sizes)
            sizes[slot : slot + 1] = [max(size, sizes[slot] if slot < len(sizes) else 0)]
            slots.append((slot, size))
        held[call.index] = [(dtype, slot) for slot, _ in slots]
        plans.append((dtype, slots, len(ins)))
    wanted = sum(dtype.itemsize * sum(sizes) for dtype, sizes in pool.items())
    if device.type == "cpu" and wanted > (room := available_memory() // ranks_on_host()):
        shared = f", shared by {ranks_on_host()} ranks" if ranks_on_host() > 1 else ""
        raise EtloomError(
            f"buffers of {wanted / 1e9:,.1f} GB do not fit into {room / 1e9:,.1f} GB of free memory{shared}",
            remedy="smaller sizes (--scale 0.1), or fewer calls (--first)",
        )
    made = {
        dtype: [torch.ones(size, dtype=dtype, device=device) for size in sizes]
        for dtype, sizes in pool.items()
    }
    for dtype, slots, inputs in plans:
        tensors = [made[dtype][slot][:size] for slot, size in slots]
        yield tensors[:inputs], tensors[inputs:]
