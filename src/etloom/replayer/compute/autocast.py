"""Replays operators that ran under autocast: recordings hold their inputs before the cast and results after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program_steps import ProgramStep

_NARROW = {torch.bfloat16, torch.float16}


def find_type(step: ProgramStep, device: str) -> torch.dtype | None:
    """Return the 16-bit dtype to which autocast may have cast an operator's inputs; None if it probably did not."""
    types = {DTYPES[view.dtype] for view in (*step.results, *step.inputs.values())}
    narrow = types & _NARROW
    return next(iter(narrow)) if len(narrow) == 1 and len(types) > 1 and device != "meta" else None


def wrap(call: Callable[..., Any], device: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a function that runs ``call`` under autocast to ``dtype``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype, cache_enabled=False):
            return call(*args, **kwargs)

    return run


def has_other_types(result: Any, step: ProgramStep) -> bool:
    """Return whether an operator's result has as many tensors as were recorded, but with dtypes that differ."""
    types = [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    recorded = [DTYPES[view.dtype] for view in step.results]
    return len(types) == len(recorded) and types != recorded
