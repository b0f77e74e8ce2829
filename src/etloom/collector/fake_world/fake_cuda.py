"""Replaces torch.cuda on a machine without a GPU: devices, streams, events and memory queries of a script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

_DEVICE_MEMORY = 80 << 30
_NAME = "etloom fake device"


class _Properties:
    """The device properties that the fake torch.cuda reports: similar to an H100 with 80 GiB."""

    name = _NAME
    major, minor = 9, 0
    total_memory = _DEVICE_MEMORY
    multi_processor_count = 132
    warp_size = 32
    is_integrated = is_multi_gpu_board = False
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    gcnArchName = ""


class _Stream:
    """A fake CUDA stream on which nothing runs, so it is always idle."""

    stream_id = cuda_stream = device_index = 0
    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Return immediately, because nothing runs on the stream."""

    wait_stream = wait_event = record_event = lambda self, *_: _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    """A fake CUDA event that is always complete; elapsed times, in ms, are measured with the clock of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    wait = synchronize = lambda self, *_: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._time - self._time)


def install(torch: Any, select_native_device: Callable[[int], Any]) -> None:
    """Replace the functions of torch.cuda that need a GPU by functions that work without a GPU.

    Args:
        torch: The module.
        select_native_device: Selects the current device of the library of the fake device.
    """
    cuda, current = torch.cuda, [0]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        select_device(-1 if index is None else index)

    def select_device(index: int) -> int:
        before, current[0] = current[0], current[0] if index < 0 else index
        select_native_device(current[0])
        return before

    nothing = lambda *_, **__: None  # noqa: E731
    replacements = {
        **dict.fromkeys(("init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect"), nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "set_stream"), nothing),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"), nothing),
        **dict.fromkeys(("set_per_process_memory_fraction", "set_rng_state_all"), nothing),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *_, **__: True),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda *_: 0),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda *_: 0),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: _Stream()),
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: current[0],
        "device_count": lambda: 64,
        "set_device": set_device,
        "get_device_name": lambda *_: _NAME,
        "get_device_capability": lambda *_: (_Properties.major, _Properties.minor),
        **dict.fromkeys(("get_device_properties", "_get_device_properties"), lambda *_: _Properties()),
        "mem_get_info": lambda *_: (_DEVICE_MEMORY, _DEVICE_MEMORY),
        "memory_stats": lambda *_: {},
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": list,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, replacement in replacements.items():
        setattr(cuda, name, replacement)
    low_level = {
        "_cuda_getDevice": lambda: current[0],
        "_cuda_setDevice": set_device,
        "_cuda_getDeviceCount": lambda: 64,
        "_cuda_exchangeDevice": select_device,
        "_cuda_maybeExchangeDevice": select_device,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentRawStream": lambda *_: 0,
    }
    for name, replacement in low_level.items():
        setattr(torch._C, name, replacement)
        if hasattr(cuda, name):
            setattr(cuda, name, replacement)
    cuda._exchange_device = cuda._maybe_exchange_device = select_device
