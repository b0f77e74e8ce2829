"""A prepared operator call: bound arguments, executable repeatedly without lookups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program_steps import TensorView

ArgumentKey = int | str
"""Position of an argument, or its name."""


@dataclass
class PreparedOperator:
    """A callable operator call that takes its tensors from numbered slots, the entries of a list of tensors.

    Attributes:
        slots: (argument, slot) of tensors.
        lists: (argument, [(index, slot)]) of lists of tensors.
        views: (slot, view, slot of another tensor on the same storage): views to create before the call.
        takes: (index of a result, slot) of tensors to keep.
        frees: Slots to clear after the call.
    """

    node: int
    name: str
    call: Callable[..., Any]
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    slots: list[tuple[ArgumentKey, int]] = field(default_factory=list)
    lists: list[tuple[ArgumentKey, list[tuple[int, int]]]] = field(default_factory=list)
    views: list[tuple[int, TensorView, int]] = field(default_factory=list)
    takes: list[tuple[int, int]] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)

    def __call__(self, slots: list[Any]) -> Any:
        for slot, view, base in self.views:
            slots[slot] = make_view(slots[base], view)
        # Copies: arguments that were stored here would keep their memory allocated.
        positional = self.positional.copy()
        named = self.named.copy() if self.named else self.named
        for key, slot in self.slots:
            (named if isinstance(key, str) else positional)[key] = slots[slot]  # type: ignore[index,call-overload]
        for key, items in self.lists:
            arguments: Any = named if isinstance(key, str) else positional
            arguments[key] = tensors = arguments[key].copy()
            for index, slot in items:
                tensors[index] = slots[slot]
        return self.call(*positional, **named)


def make_view(base: Any, view: TensorView) -> torch.Tensor:
    """Return a tensor on the storage of ``base`` with the dtype, offset, shape and strides of a recorded tensor."""
    tensor = torch.empty(0, dtype=DTYPES[view.dtype], device=base.device)
    return tensor.set_(base.untyped_storage(), view.offset, view.shape, view.stride)  # type: ignore[call-overload,no-any-return]
