"""Runs one recorded collective or message: checks its result, and measures its time next to the recorded one.

Needs torch only. Start it with torchrun, one process per rank:

    torchrun --nproc-per-node 2 repro.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# BEGIN recorded call
COLLECTIVE = "all_reduce"
RECORDED_NS: int | None = None
RECORDED_RANKS: int | None = 2
RECORDED_ON = "host"
DTYPE = torch.float32
ELEMENTS = 1024  # of the part of one rank
REDUCE_OP = "sum"
ROOT = 0
IS_LIST = False  # whether it takes a list of tensors where torch also takes one tensor
# END recorded call

GLOO_DTYPES = {torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32}
"""Type that gloo lacks -> a type of the same size that it has; a type of one byte becomes uint8."""
WARMUP, CALLS = 3, 30


def choose_values(size: int) -> tuple[list[int], str, float]:
    """Return the value of each rank, the reduce operation, and the result; any type holds the result."""
    values = [member % 2 + 1 if member < 64 else 0 for member in range(size)]
    match REDUCE_OP:
        case "min":
            return values, "min", min(values)
        case "max":
            return values, "max", max(values)
        case "avg" if dist.get_backend() == "nccl":
            return [1] * size, "avg", 1
        case "product":
            return [1 + (member == 0) for member in range(size)], "product", 2
    return values, "sum", sum(values)


def make_call(
    rank: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Any], Any]:
    """Return a function that makes the call, and one that returns pairs (tensor, expected values of equal parts)."""
    values, name, reduced = choose_values(size)
    root, is_nccl = min(ROOT, size - 1), dist.get_backend() == "nccl"
    operation: Any = getattr(dist.ReduceOp, name.upper())

    def full(count: int, value: float) -> torch.Tensor:
        return torch.full((count,), value, device=device).to(dtype)

    def split(tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.chunk(size)) if ELEMENTS else [tensor] * size

    part, whole = full(ELEMENTS, values[rank]), full(ELEMENTS * size, values[rank])
    parts, result = full(ELEMENTS * size, 0), full(ELEMENTS, 0)
    if COLLECTIVE == "barrier":
        return dist.barrier, list
    if COLLECTIVE in ("send", "recv"):
        if rank > 1:
            return lambda: None, list
        if rank == 0:
            return lambda: dist.send(part, 1), list
        return lambda: dist.recv(result, 0), lambda: [(result, values[:1])]
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_reduce": (lambda: dist.all_reduce(part, operation), lambda: [(part, [reduced])]),
        "broadcast": (lambda: dist.broadcast(part, root), lambda: [(part, [values[root]])]),
        "reduce": (
            lambda: dist.reduce(part, root, operation),
            lambda: [(part, [reduced])] if rank == root else [],
        ),
        "all_gather": (
            (lambda: dist.all_gather(split(parts), part))
            if IS_LIST
            else (lambda: dist.all_gather_into_tensor(parts, part)),
            lambda: [(parts, values)],
        ),
        "reduce_scatter": (
            (lambda: dist.reduce_scatter(result, split(whole), operation))
            if IS_LIST
            else (lambda: dist.reduce_scatter_tensor(result, whole, operation)),
            lambda: [(result, [reduced])],
        ),
        "all_to_all": (
            (lambda: dist.all_to_all(split(parts), split(whole)))
            if IS_LIST and is_nccl
            else (lambda: dist.all_to_all_single(parts, whole)),
            lambda: [(parts, values)],
        ),
        "gather": (
            lambda: dist.gather(part, split(parts) if rank == root else None, root),
            lambda: [(parts, values)] if rank == root else [],
        ),
        "scatter": (
            lambda: dist.scatter(result, split(whole) if rank == root else None, root),
            lambda: [(result, [values[root]])],
        ),
    }
    return calls[COLLECTIVE]


def check(pairs: list[tuple[torch.Tensor, list[float]]]) -> bool:
    """Return whether each tensor consists of equal parts that hold the expected values."""
    for tensor, values in pairs:
        expected = torch.tensor(values, dtype=torch.float64).repeat_interleave(tensor.numel() // len(values))
        if not torch.equal(tensor.cpu(), expected.to(tensor.dtype)):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Run a recorded {COLLECTIVE}, one process per rank.")
    default = "nccl" if RECORDED_ON == "device" and torch.cuda.is_available() else "gloo"
    parser.add_argument("--backend", default=default, help=f"gloo or nccl; default here: {default}")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --nproc-per-node {RECORDED_RANKS or 2} repro.py")
    is_nccl = options.backend == "nccl"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_nccl else torch.device("cpu")
    if is_nccl:
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    is_small = DTYPE.itemsize == 1 and DTYPE not in (torch.int8, torch.bool)
    dtype = DTYPE if is_nccl else torch.uint8 if is_small else GLOO_DTYPES.get(DTYPE, DTYPE)
    run, list_pairs = make_call(rank, size, dtype, device)
    run()
    correct = torch.tensor([int(check(list_pairs()))], device=device)
    dist.all_reduce(correct, dist.ReduceOp.MIN)
    times = []
    for _ in range(WARMUP + CALLS):
        dist.barrier()
        if is_nccl:
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        run()
        if is_nccl:
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - began)
    slowest = torch.tensor(times[WARMUP:], dtype=torch.int64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    is_correct = bool(correct.item())
    if rank == 0:
        show(statistics.median(slowest.tolist()), is_correct, options.json, size)
    dist.destroy_process_group()
    return int(not is_correct)


def show(median: float, is_correct: bool, as_json: bool, size: int) -> None:
    """Print the figures of all ranks: the median over the calls of the time of the slowest rank."""
    if as_json:
        figures = {"name": COLLECTIVE, "recorded_ns": RECORDED_NS, "median_ns": median, "ranks": size}
        print(json.dumps(figures | {"check": is_correct}))
        return
    print(f"{COLLECTIVE} of {ELEMENTS} x {DTYPE} on each of {size} ranks")
    print(f"check:    {'passed' if is_correct else 'FAILED'}")
    print(f"measured: {median / 1e3:.3f} us (slowest rank, median of {CALLS})")
    if RECORDED_NS is not None:
        ranks = f"{RECORDED_RANKS or '?'} ranks"
        print(f"recorded: {RECORDED_NS / 1e3:.3f} us ({ranks}; includes waiting for other ranks)")
        print(f"ratio:    {median / max(RECORDED_NS, 1):.3f} (measured over recorded)")
    # ncu repeats each kernel, and the repeated one would wait for other ranks forever.
    print(f"profile:  nsys profile -t cuda,nvtx torchrun --nproc-per-node {size} repro.py")
    print(f"          rocprofv3 --kernel-trace -- torchrun --nproc-per-node {size} repro.py")


if __name__ == "__main__":
    raise SystemExit(main())
