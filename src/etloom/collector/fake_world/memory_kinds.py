"""Kinds of memory of a script on fake tensors: parameters, gradients, optimizer, activations, buffers, others.

A storage has the kind of the phase in which it is born, until what holds it is known: modules name parameters and
buffers when they are called, an optimizer its parameters, their gradients and its state when it steps.

    parameters      of modules, also those that FSDP has gathered
    gradients       of parameters; what a backward pass requests for others
    optimizer       state, and what a step requests
    activations     what a forward pass requests, also when checkpointing repeats it; inputs and the loss
    buffers         of modules
    communication   arguments and results of collectives that are none of these
    workspaces      of cuBLAS, see `WORKSPACE_BYTES`
    other           requested before the first forward pass, and none of these
"""

from __future__ import annotations

import weakref
from typing import Any

from torch._C import _current_autograd_node

from .request_history import RequestHistory

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
