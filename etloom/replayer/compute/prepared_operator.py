"""A step with its arguments laid out, so that repeating it asks no questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program_steps import TensorView

ArgumentKey = int | str  # of an argument: its position, or its name


@dataclass
class PreparedOperator:
    """A step but for its tensors, which come from and go to numbered slots.

    slots: (place, slot). lists: (place, of the list's items (index, slot)). views: (slot, what, slot of another tensor
    on that storage), to be made first. takes: (leaf of the result, slot). frees: slots.
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
        # Copies, since arguments that were kept here would keep their memory.
        positional = self.positional.copy()
        named = self.named.copy() if self.named else self.named
        for place, slot in self.slots:
            (named if isinstance(place, str) else positional)[place] = slots[slot]  # type: ignore[index,call-overload]
        for place, items in self.lists:
            holder: Any = named if isinstance(place, str) else positional
            holder[place] = into = holder[place].copy()
            for at, slot in items:
                into[at] = slots[slot]
        return self.call(*positional, **named)


def make_view(base: Any, view: TensorView) -> torch.Tensor:
    made = torch.empty(0, dtype=DTYPES[view.dtype], device=base.device)
    return made.set_(base.untyped_storage(), view.offset, view.shape, view.stride)  # type: ignore[call-overload,no-any-return]
