"""Options of a communication replay: how the planned calls are run, and by which backend of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from etloom.core.errors import InvalidValue, UnknownName

BUILTIN_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
"""The backends that torch knows, whether or not it was built with them."""
GPU_BACKENDS = ("nccl", "ucc")
Repeats = Annotated[int, "Number of timed passes."]
Warmup = Annotated[int, "Number of passes before the timed ones."]


@dataclass(frozen=True)
class CommsOptions:
    """Options for running the calls of a plan: backend, device, timing, number of passes, verification and timeout.

    Attributes:
        backend: Backend of torch.distributed, or auto.
        device: cpu, cuda, or auto.
        timeout_s: Seconds after which a call counts as hung.
        batch: Start messages that are in flight together as one batch. By default on a GPU, where two ranks that each
            send first would wait for each other.
    """

    backend: str = "gloo"
    device: str = "cpu"
    timing: Annotated[Literal["fast", "recorded"], "recorded: keep the recorded gaps between calls."] = "fast"
    gap: Annotated[Literal["spin", "load"], "How gaps are filled; load: matrix products."] = "spin"
    blocking: Annotated[bool, "Wait for each call before the next."] = False
    repeats: Repeats = 5
    warmup: Warmup = 1
    verify: Annotated[bool, "Check every result once, before the timed passes."] = False
    timeout_s: float = 60.0
    batch: bool | None = None


@dataclass(frozen=True)
class Rendezvous:
    """Address to which all processes connect: rank 0's host and a free port there; None: derived from the launcher."""

    address: str | None = None
    port: int | None = None


def resolve_options(options: CommsOptions) -> CommsOptions:
    """Replace "auto" as backend or device by a value that fits the other option or, if both are auto, the hardware."""
    if options.repeats < 1:
        raise InvalidValue(f"expected at least 1 repeat, got {options.repeats}", option="repeats")
    backend, device = options.backend, options.device
    if device == "auto":
        if backend == "auto":
            import torch

            is_gpu = torch.cuda.is_available()
        else:
            is_gpu = backend in GPU_BACKENDS
        device = "cuda" if is_gpu else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    return replace(options, backend=backend, device=device)


def check_backend(name: str) -> None:
    """Check that ``name`` is a torch.distributed backend that is built in or registered by an installed package.

    torch is imported only for names that are not built in.

    Raises:
        UnknownName: There is no such backend.
    """
    if name not in BUILTIN_BACKENDS and name not in (registered := registered_backends()):
        raise UnknownName("backend", name, registered or BUILTIN_BACKENDS, option="backend")


def registered_backends() -> list[str]:
    """Return the names of the backends registered with torch.distributed; an empty list if torch is not installed."""
    try:
        from torch.distributed import Backend
    except ImportError:
        return []
    return [name for name in Backend.backend_list if name not in ("undefined", "fake")]


# Callbacks that the caller of a multi-process replay provides.


@dataclass(frozen=True)
class RankWork:
    """Callbacks for a rank's work between communication calls: run the rank's operators, and describe its activity.

    Attributes:
        run_operators: Called with a node to run the operators before it, and with None at the end (`Runner`).
        describe: Returns what it is doing at the moment; None if nothing.
    """

    run_operators: Callable[[int | None], None] | None = None
    describe: Callable[[], str | None] = lambda: None


Prepare = Callable[[Callable[[str], None]], RankWork]


def _skip_preparation(report: Callable[[str], None]) -> RankWork:
    return RankWork()


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a multi-process replay: end this process, print a message, and prepare a rank.

    Attributes:
        end_process: Ends this process with a reason, when another process is gone. It must not return.
        notify: Called with messages for the user, on rank 0.
        prepare: Called on every rank when the plan is complete, with a function that reports its activity to the other
            ranks; returns what the rank does between calls.
    """

    end_process: Callable[[str], None]
    notify: Callable[[str], None] = lambda line: None
    prepare: Prepare = _skip_preparation
