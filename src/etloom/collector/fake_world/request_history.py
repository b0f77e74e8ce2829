"""The requests of a script on fake tensors for device memory, in the form of torch.cuda.memory._snapshot().

The kind of memory is the user_metadata of a request, and the active modules are frames of its stack.
"""

from __future__ import annotations

import pickle
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C import _current_autograd_node

FILE_NAME = "rank{rank}_memory_snapshot.pickle"
_MAX_FRAMES = 64
_SPACING = 1 << 9
"""Addresses are multiples of this; they only tell storages apart."""
_TORCH_FOLDER = str(Path(sys.modules["torch"].__file__ or "").parent)


class RequestHistory:
    """Records when storages are born and freed, with the Python stack, modules, the operator and the backward node.

    ``describe`` returns the kind of a storage that is born now, and the names and classes of the active modules. The
    simulated allocator decides where each goes (`etloom simulate --memory`, `etloom analyze allocator`).
    """

    def __init__(self) -> None:
        self._devices: dict[int, list[dict[str, Any]]] = {}
        self._live: dict[int, tuple[int, dict[str, Any]]] = {}
        self._certain: dict[int, str] = {}
        self._frames: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._next_address = _SPACING
        self.describe: Callable[[], tuple[str, list[tuple[str, str]]]] = lambda: ("", [])

    def request(self, key: int, size: int, device: int, operator: str) -> None:
        """Record the birth of a storage; ``key`` names it until `release`. An empty storage takes no memory."""
        if size <= 0:
            return
        kind, modules = self.describe()
        entry = {
            "action": "alloc",
            "addr": self._next_address,
            "size": size,
            "stream": 0,
            "time_us": time.time_ns() // 1000,
            "frames": self._list_frames(operator, modules),
            "user_metadata": kind,
        }
        self._next_address += -(-size // _SPACING) * _SPACING
        self._devices.setdefault(device, []).append(entry)
        self._live[key] = (device, entry)

    def mark(self, key: int, kind: str, *, is_certain: bool = True) -> None:
        """Set the kind of a live storage; an uncertain kind does not replace a certain one."""
        if key in self._live and (is_certain or key not in self._certain):
            self._live[key][1]["user_metadata"] = kind
            if is_certain:
                self._certain[key] = kind

    def resize(self, key: int, size: int, device: int) -> None:
        """Record that a storage got another size: its memory is freed, and requested again for the same kind."""
        kind = self._certain.get(key)
        self.release(key)
        self.request(key, size, device, "aten::resize_")
        if kind is not None:
            self._certain[key] = kind
            self.mark(key, kind)

    def release(self, key: int) -> None:
        """Record that a storage was freed."""
        self._certain.pop(key, None)
        if key in self._live:
            device, entry = self._live.pop(key)
            freed = {name: entry[name] for name in ("addr", "size", "stream")}
            now = time.time_ns() // 1000
            self._devices[device].append({"action": "free_completed", **freed, "time_us": now, "frames": []})

    def write(self, folder: Path, rank: int) -> None:
        """Write the snapshot of a rank; storages that are alive are freed at its end."""
        for key in list(self._live):
            self.release(key)
        traces = [self._devices.get(device, []) for device in range(max(self._devices, default=-1) + 1)]
        content = {
            "segments": [],
            "device_traces": traces,
            "allocator_settings": {},
            "external_annotations": [],
        }
        path = folder / FILE_NAME.format(rank=rank)
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_bytes(pickle.dumps(content, protocol=4))
        unfinished.replace(path)

    def _list_frames(self, operator: str, modules: list[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return the frames of the caller, innermost first: operator, backward node, modules, Python without torch."""
        frames = [self._frame(f"at::_ops::{operator.partition('::')[2]}::call()", "??", 0)]
        node = _current_autograd_node()
        if node is not None:
            frames.append(self._frame(f"torch::autograd::generated::{node.name()}::apply()", "??", 0))
        frames += [self._frame(f"module {name}", kind, 0) for name, kind in modules]
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and len(frames) < _MAX_FRAMES:
            code = frame.f_code
            if not code.co_filename.startswith(_TORCH_FOLDER) and "fake_world" not in code.co_filename:
                frames.append(self._frame(code.co_name, code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return frames

    def _frame(self, name: str, file: str, line: int) -> dict[str, Any]:
        """Return a frame; equal ones are one object, which a pickle contains once."""
        return self._frames.setdefault((name, file, line), {"name": name, "filename": file, "line": line})


# Kinds of memory of a script on fake tensors: parameters, gradients, optimizer, activations, buffers, others.
#
# A storage has the kind of the phase in which it is born, until what holds it is known: modules name parameters and
# buffers when they are called, an optimizer its parameters, their gradients and its state when it steps.
#
#     parameters      of modules, also those that FSDP has gathered
#     gradients       of parameters; what a backward pass requests for others
#     optimizer       state, and what a step requests
#     activations     what a forward pass requests, also when checkpointing repeats it; inputs and the loss
#     buffers         of modules
#     communication   arguments and results of collectives that are none of these
#     workspaces      of cuBLAS, see `WORKSPACE_BYTES`
#     other           requested before the first forward pass, and none of these

WORKSPACE_BYTES = 33_554_432
"""cuBLAS's workspace of a thread that multiplies matrices, on devices of compute capability 9 as the fake one is.

PyTorch requests it with the first product, and keeps it. On other devices it is 8,519,680 B."""
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class MemoryKinds:
    """Follows modules and optimizers, and marks the storages of a history with their kind."""

    def __init__(self, history: RequestHistory) -> None:
        self._history = history
        self._active: list[Any] = []
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._is_stepping = self._has_called = False
        self._with_workspace: set[tuple[int, bool]] = set()
        history.describe = self._describe

    def attach(self) -> None:
        """Register hooks of all modules and optimizers."""
        from torch.nn.modules import module
        from torch.optim import optimizer

        module.register_module_forward_pre_hook(self._begin_call)
        module.register_module_forward_hook(self._end_call, always_call=True)
        optimizer.register_optimizer_step_pre_hook(self._begin_step)
        optimizer.register_optimizer_step_post_hook(self._end_step)

    def add_workspace(self, operator: str, device: int) -> None:
        """Record cuBLAS's workspace with the first matrix product of a thread: the forward's, and the backward's."""
        thread = (device, _current_autograd_node() is not None)
        if operator in _PRODUCTS and thread not in self._with_workspace:
            self._with_workspace.add(thread)
            key = -len(self._with_workspace)
            self._history.request(key, WORKSPACE_BYTES, device, operator)
            self._history.mark(key, "workspaces")

    def _describe(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the kind of a storage that is born now, and name and class of the active modules, innermost first."""
        modules = [(self._names.get(each, ""), type(each).__name__) for each in reversed(self._active)]
        if self._is_stepping:
            return "optimizer", modules
        if not modules and _current_autograd_node() is not None:
            return "gradients", modules
        return "activations" if self._has_called else "other", modules

    def _begin_call(self, module: Any, _: Any) -> None:
        if module not in self._names:
            for name, part in module.named_modules():
                self._names.setdefault(part, name)
        self._has_called = True
        self._active.append(module)
        self._mark(module.parameters(recurse=False), "parameters")
        self._mark(module.buffers(recurse=False), "buffers")

    def _end_call(self, module: Any, *_: Any) -> None:
        while self._active and self._active.pop() is not module:
            pass

    def _begin_step(self, optimizer: Any, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._mark(parameters, "parameters")
        self._mark([parameter.grad for parameter in parameters], "gradients")
        self._is_stepping = True

    def _end_step(self, optimizer: Any, *_: Any) -> None:
        self._is_stepping = False
        for state in optimizer.state.values():
            self._mark(state.values() if isinstance(state, dict) else (), "optimizer")

    def _mark(self, tensors: Any, kind: str) -> None:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if getattr(local, "is_cuda", False):
                self._history.mark(local.untyped_storage()._cdata, kind)
