"""Estimates the memory that a computation replay needs, and limits how much this process may allocate."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from etloom.core.machine import available_memory
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import tensor_views
from etloom.replayer.launch_environment import ranks_on_host

WORKING_OVERHEAD = 1.15
"""Memory while operators run, relative to what storages hold between them."""
FRAGMENTATION_OVERHEAD = 1.4
"""The same ratio if freed memory stays with the process, in blocks that later requests cannot use."""
_FREE_SHARE = 0.8
_PROCESS_RESERVE_BYTES = 1 << 28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_MAX_MMAP_THRESHOLD = 32 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated peak memory of a program's tensors, and the operators that do not fit into a memory limit.

    Attributes:
        bytes: Maximum that storages hold between steps.
        step: Index of the first step at which they do.
        oversized: Node -> reason for operators that do not fit into a limit.
    """

    bytes: int
    step: int
    oversized: Mapping[int, str]


def estimate_memory(program: Program, limit: float = math.inf) -> MemoryEstimate:
    """Estimate the peak memory (bytes) of a program's tensor storages, each of which exists from first to last use.

    Operators take more while they run. A step that would exceed the limit is skipped; its results are then allocated
    for their first reader, and stay.
    """
    allocated: dict[int, int] = {}
    never_computed: set[int] = set()
    oversized: dict[int, str] = {}
    total = peak = peak_step = 0
    for index, step in enumerate(program.steps):
        read = {view.storage for view in tensor_views(step.values)}
        results = {view.storage for view in step.results}
        new = {storage: program.bytes[storage] for storage in read | results if storage not in allocated}
        if total + sum(new.values()) > limit:
            oversized[step.node] = "does not fit into the memory limit"
            never_computed |= results - allocated.keys()
        else:
            never_computed -= results - read
            allocated |= new
            total += sum(new.values())
            if total > peak:
                peak, peak_step = total, index
        for storage in step.frees:
            if storage not in never_computed:
                total -= allocated.pop(storage, 0)
    return MemoryEstimate(peak, peak_step, oversized)


def memory_limit(device: str, max_bytes: int | None) -> int | None:
    """Return the number of bytes that a replay may allocate on a device; None if there is no limit.

    The default is 80 % of the free memory; on a CPU the processes of a replay on this host share it equally.
    """
    if max_bytes is not None or device == "meta":
        return max_bytes
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0] * _FREE_SHARE)
    return int(available_memory() * _FREE_SHARE) // ranks_on_host()


def return_freed_memory() -> None:
    """Make this process return freed blocks of 1 MB and more to the system, from now on.

    That takes time. Only glibc supports it.
    """
    _set_malloc_options({_M_MMAP_THRESHOLD: 1 << 20})


def keep_freed_memory() -> None:
    """Make this process keep freed memory for later requests, from now on, as a long-running program does.

    Otherwise the addresses of tensors decide whether a result's memory is requested from the system again in each pass,
    page by page, which costs small models 10 % of their time and more.
    """
    _set_malloc_options({_M_MMAP_THRESHOLD: _MAX_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: 1 << 30})


def _set_malloc_options(options: Mapping[int, int]) -> None:
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):
            for option, value in options.items():
                ctypes.CDLL(None).mallopt(option, value)


@contextlib.contextmanager
def limit_memory(more_bytes: int) -> Iterator[None]:
    """Context manager: limit this process to ``more_bytes`` of further memory, plus a reserve of 256 MiB.

    There is no limit on systems other than Linux, which do not report how much the process has allocated.
    """
    try:
        import resource

        allocated = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = allocated + more_bytes + _PROCESS_RESERVE_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
