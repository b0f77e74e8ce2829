"""Limits the capture of Nsight Systems to a recording window, and marks operators as NVTX ranges."""

from __future__ import annotations

from typing import Any


class NsysCapture:
    """Starts and stops the capture of Nsight Systems by cudaProfilerStart and cudaProfilerStop; idle without CUDA."""

    def __init__(self, shapes: bool) -> None:
        self._shapes = shapes
        self._ranges: Any = None
        self._capturing = False

    def start(self) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._capturing = True
        emit_nvtx: Any = torch.autograd.profiler.emit_nvtx
        self._ranges = emit_nvtx(record_shapes=self._shapes)
        self._ranges.__enter__()

    def stop(self) -> None:
        import torch

        ranges, self._ranges = self._ranges, None
        if ranges is not None:
            ranges.__exit__(None, None, None)
        if self._capturing:
            self._capturing = False
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
