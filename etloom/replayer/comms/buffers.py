"""Allocates the input and output tensors of a rank's communication calls before any call is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from etloom.core.errors import EtloomError
from etloom.core.machine import available_memory
from etloom.replayer.comms.distributed_calls import tensor_element_counts, torch_dtype
from etloom.replayer.launch_environment import ranks_on_host
from etloom.replayer.plan import Call

_Slots = list[tuple[int, int]]
"""(buffer, elements) of each tensor of a call."""


def allocate_buffers(
    calls: Sequence[Call], waits: Sequence[tuple[int, ...]], rank: int, device: torch.device, backend: str
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the input and output tensors of each call; calls in flight at the same time share no buffer.

    Args:
        waits: For each call, the earlier calls that are waited for before it.

    Raises:
        EtloomError: The buffers do not fit into memory.
    """
    sizes, assignments = _assign_buffers(calls, waits, rank, backend)
    if device.type == "cpu":
        _check_memory(sizes)
    buffers = {
        dtype: [torch.ones(size, dtype=dtype, device=device) for size in dtype_sizes]
        for dtype, dtype_sizes in sizes.items()
    }
    for dtype, slots, input_count in assignments:
        tensors = [buffers[dtype][buffer][:elements] for buffer, elements in slots]
        yield tensors[:input_count], tensors[input_count:]


def _assign_buffers(
    calls: Sequence[Call], waits: Sequence[tuple[int, ...]], rank: int, backend: str
) -> tuple[dict[torch.dtype, list[int]], list[tuple[torch.dtype, _Slots, int]]]:
    """Assign a reusable buffer to each tensor; return buffer sizes (elements) by dtype, and each call's buffers."""
    sizes: dict[torch.dtype, list[int]] = {}
    free: dict[torch.dtype, list[int]] = {}
    assignments: list[tuple[torch.dtype, _Slots, int]] = []
    in_use: dict[int, list[tuple[torch.dtype, int]]] = {}
    for call, completed in zip(calls, waits, strict=True):
        for earlier in completed:
            for dtype, buffer in in_use.pop(earlier, []):
                free[dtype].append(buffer)
        dtype = torch_dtype(call.dtype, backend)
        inputs, outputs = tensor_element_counts(call, rank)
        free_buffers, dtype_sizes = free.setdefault(dtype, []), sizes.setdefault(dtype, [])
        slots = []
        for elements in (*inputs, *outputs):
            if free_buffers:
                buffer = free_buffers.pop()
                dtype_sizes[buffer] = max(elements, dtype_sizes[buffer])
            else:
                buffer = len(dtype_sizes)
                dtype_sizes.append(elements)
            slots.append((buffer, elements))
        in_use[call.index] = [(dtype, buffer) for buffer, _ in slots]
        assignments.append((dtype, slots, len(inputs)))
    return sizes, assignments


def _check_memory(sizes: Mapping[torch.dtype, Sequence[int]]) -> None:
    required = sum(dtype.itemsize * sum(dtype_sizes) for dtype, dtype_sizes in sizes.items())
    processes = ranks_on_host()
    available = available_memory() // processes
    if required > available:
        shared = f", shared by {processes} ranks" if processes > 1 else ""
        raise EtloomError(
            f"buffers of {required / 1e9:,.1f} GB do not fit into {available / 1e9:,.1f} GB of free memory{shared}",
            remedy="reduce the sizes (--scale 0.1) or the number of calls (--first)",
        )
