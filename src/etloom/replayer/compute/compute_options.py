"""Options of a computation replay, and callbacks by which it reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etloom.replayer.compute.program_steps import ProgramStep

DEVICES = ("cpu", "cuda", "meta")


@dataclass(frozen=True)
class ComputeOptions:
    """Options for replaying the recorded operators.

    Attributes:
        device: cpu, cuda, or meta (shapes and types only).
        gpu: Index of the GPU, if there are several.
        namespaces: Namespaces of the operators that may run. Operators that open files or trust their sizes never run.
        step: Replay only ProfilerStep#N (default: all).
        subgraph: Replay only operators and annotations of this name, with what they contain (default: all).
        repeats: Number of timed passes.
        warmup: Number of passes before these.
        threads: Threads of an operator on a CPU, for the rest of the process (default: torch's).
        max_bytes: Memory limit (default: `memory_limits.memory_limit`). Operators that do not fit are skipped.
        deadline: time.monotonic() after which no operator is tried, and no repeat is started that would take longer.
        operator_timeout_s: Seconds after which `replay_isolated` skips an operator (default: 5).
        trace: Return a trace of the replay, which takes one more pass.
    """

    device: str = "cpu"
    gpu: int = 0
    namespaces: frozenset[str] = frozenset({"aten"})
    step: int | None = None
    subgraph: str | None = None
    repeats: int = 3
    warmup: int = 1
    threads: int | None = None
    max_bytes: int | None = None
    deadline: float | None = None
    operator_timeout_s: float | None = None
    trace: bool = True


@dataclass(frozen=True)
class ComputeHooks:
    """Callbacks by which a computation replay reports its progress.

    Attributes:
        on_step: Called with each step before it is tried for the first time.
        on_all_tried: Called when all steps were tried.
        notify: Called with progress messages, one line each.
    """

    on_step: Callable[[ProgramStep], None] = lambda step: None
    on_all_tried: Callable[[], None] = lambda: None
    notify: Callable[[str], None] = lambda line: None
