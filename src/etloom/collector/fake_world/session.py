"""Runs the script of a rank on fake tensors, and records its steps."""

from __future__ import annotations

import json
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..options import RecordingOptions
from ..rank_environment import current_rank
from ..session.messages import MessageLog
from . import (
    FACTS_NAME,
    FAILURE_NAME,
    attention,
    data_defaults,
    failures,
    fake_cuda,
    fake_distributed,
    fake_kernels,
    host_side,
)
from .dispatch_recorder import DispatchRecorder, OperatorRecord
from .trace_file import write_trace


def start(torch: Any, library: Any) -> None:
    """Run the rest of this process on fake tensors and record its steps; to be called right after torch is imported.

    Args:
        torch: The module.
        library: The library of the fake device, loaded with ctypes before torch.
    """
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode

    options = RecordingOptions.from_environment()
    rank, world_size = current_rank()
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)  # imports torch._dynamo, which knows torch.cuda
    # Otherwise it would copy constants, such as a batch norm's count, to the device.
    setattr(FakeTensorMode, "avoid_device_init", True)  # noqa: B010
    fake_cuda.install(torch, library.etloom_set_device)
    fake_distributed.install(torch, rank, world_size, Path(options.scratch))
    attention.install()
    data_defaults.install(torch)
    fake_kernels.install(torch)
    host_side.install(torch)
    torch.compile = _EagerCompiler()
    for name in (
        "init_cuda_context",
        "init_gpu_context",
    ):  # before and since torch 2.7; they allocate on the device
        setattr(fake_tensor, name, lambda *_: None)
    if "FakeTensor" not in torch.nn.Module._apply.__code__.co_cellvars:
        # Before torch 2.6 `model.cuda()` would move the data of a fake parameter, but not its device.
        torch.__future__.set_swap_module_params_on_conversion(True)
    recorder = DispatchRecorder(torch)
    recorder.ignore_inferred_shapes()
    failures.report_to(Path(options.out) / FAILURE_NAME.format(rank=rank))
    fake_tensors.__enter__()
    recorder.__enter__()  # type: ignore[no-untyped-call]
    recorder.kinds.attach()
    _StepRecording(options, rank, recorder).attach(torch)


class _EagerCompiler:
    """Stands for torch.compile, which needs the device: the operators before fusion are recorded."""

    def __init__(self) -> None:
        self._messages = MessageLog()

    def __call__(self, model: Any = None, **_: Any) -> Any:
        self._messages.warn_once("torch.compile is ignored: operators are those of the eager code")
        return model if model is not None else lambda function: function


class _StepRecording:
    """Counts the steps of the first optimizer; after the last step to record, writes the trace and ends the script."""

    def __init__(self, options: RecordingOptions, rank: int, recorder: DispatchRecorder) -> None:
        self._options = options
        self._rank = rank
        self._recorder = recorder
        self._count = 0
        self._steps: list[tuple[int, list[OperatorRecord]]] = []
        self._optimizer: Any = None
        recorder.recording = options.first == 0

    def attach(self, torch: Any) -> None:
        """Register a hook that counts the calls of optimizers' step()."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._torch = torch
        register_optimizer_step_post_hook(self._end_step)

    def _end_step(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        recorder, options = self._recorder, self._options
        if recorder.recording:
            self._steps.append((self._count, recorder.operators))
            recorder.operators = []
        self._count += 1
        recorder.recording = self._count >= options.first
        if options.last is not None and self._count >= options.last:
            self._finish()

    def _finish(self) -> None:
        from ..session.rank_facts import process_groups

        recorder = self._recorder
        recorder.recording = False
        out = Path(self._options.out)
        recorder.memory.history.write(out, self._rank)
        path = out / f"torch_et_{self._rank}.json.gz"
        write_trace(path, self._steps, process_groups(), self._rank, recorder.memory.peak_bytes)
        facts = {
            "rank": self._rank,
            "world_size": current_rank()[1],
            "steps": [step for step, _ in self._steps],
            "operators": sum(len(operators) for _, operators in self._steps),
            "peak_memory_bytes": recorder.memory.peak_bytes,
            "torch": self._torch.__version__,
        }
        (out / FACTS_NAME.format(rank=self._rank)).write_text(json.dumps(facts), encoding="utf-8")
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        raise SystemExit(0)
