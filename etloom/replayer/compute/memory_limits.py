"""How much memory a replay needs, known before anything runs, and how much it may take."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from etloom.core.memory import available_memory
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import tensor_views
from etloom.replayer.launch_environment import ranks_on_host

_FREE_SHARE = 0.8
_PROCESS_RESERVE_BYTES = 1 << 28
WORKING_OVERHEAD = 1.15
"""What is taken while operators run, in parts of what storages hold between them."""
FRAGMENTATION_OVERHEAD = 1.4
"""The same, where freed memory stays with the process, in pieces that do not fit what is asked for next."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST_MMAP_THRESHOLD = 32 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """bytes: the most that storages hold between steps. step: the first one where they do. beyond: node -> why it
    would not fit into a limit."""

    bytes: int
    step: int
    beyond: Mapping[int, str]


def estimate_memory(program: Program, limit: float = math.inf) -> MemoryEstimate:
    """What a program takes if each storage is there from its first use to its last, as the machine has it; operators
    take more while they run. A step that would bring storages above the limit is left out, and what it would have
    given is made for the first that reads it and stays."""
    held: dict[int, int] = {}
    never_made: set[int] = set()
    beyond: dict[int, str] = {}
    total = most = where = 0
    for at, step in enumerate(program.steps):
        taken = {view.storage for view in tensor_views(step.values)}
        results = {view.storage for view in step.results}
        new = {storage: program.bytes[storage] for storage in taken | results if storage not in held}
        more = sum(new.values())
        if total + more > limit:
            beyond[step.node] = "does not fit into the memory that it may take"
            never_made |= results - held.keys()
        else:
            never_made -= results - taken
            held |= new
            total += more
            if total > most:
                most, where = total, at
        for storage in step.frees:
            if storage not in never_made:
                total -= held.pop(storage, 0)
    return MemoryEstimate(most, where, beyond)


def memory_limit(device: str, asked: int | None) -> int | None:
    """The bytes that a replay may take: as asked, else 80 % of what is free, on a CPU in equal parts for the processes
    of a replay on this host; None where nothing bounds it."""
    if asked is not None or device == "meta":
        return asked
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0] * _FREE_SHARE)
    return int(available_memory() * _FREE_SHARE) // ranks_on_host()


def return_freed_memory() -> None:
    """Have this process return memory of 1 MB and more to the system when it is freed, from now on. That takes time,
    and can be had of glibc alone."""
    _mallopt({_M_MMAP_THRESHOLD: 1 << 20})


def keep_freed_memory() -> None:
    """Have this process keep what it frees, from now on, for what is asked for next, as a program does that has run for
    long. Else it is up to where tensors happen to lie whether a result's memory is asked of the system anew in each
    pass, page for page, which costs small models a tenth of their time and more."""
    _mallopt({_M_MMAP_THRESHOLD: _MOST_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: 1 << 30})


def _mallopt(options: Mapping[int, int]) -> None:
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):
            for option, value in options.items():
                ctypes.CDLL(None).mallopt(option, value)


@contextlib.contextmanager
def limit_memory(more: int) -> Iterator[None]:
    """This process may take only so many bytes more, and a little for itself, since a trace asks for any size.

    Where the system does not tell how much it has taken (other than Linux), there is no bound.
    """
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + more + _PROCESS_RESERVE_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
