"""What tensors of no recorded origin hold.

Floating point is random, scaled so that products stay near one. Integers are zero, a valid index everywhere, unless an
operator that reads them says how far they may reach; offsets of bags are evenly spread; masks are true.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from etloom.replayer.compute.argument_values import DTYPES
from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import TensorView, tensor_views

_VALUE_PRESERVING = frozenset({
    "aten::to", "aten::_to_copy", "aten::view", "aten::reshape", "aten::contiguous", "aten::clone", "aten::slice",
    "aten::select", "aten::flatten", "aten::squeeze", "aten::unsqueeze", "aten::t", "aten::transpose", "aten::permute",
    "aten::expand", "aten::detach", "aten::alias", "aten::copy_", "aten::cat", "aten::stack", "aten::_unsafe_view",
    "aten::_reshape_alias", "aten::repeat", "aten::flip",
})  # fmt: skip
"""Operators whose results hold what their inputs hold."""

_IndexLimit = tuple[str, Callable[[dict[str, Any]], int]]
_ROWS: _IndexLimit = ("indices", lambda had: had["weight"].shape[0])
_NUMBER: _IndexLimit = ("indices", lambda had: had["num_weights"])
_ALONG: _IndexLimit = ("index", lambda had: had["self"].shape[had["dim"]])
_CLASSES: _IndexLimit = ("target", lambda had: had["self"].shape[1])
_INDEX_LIMITS: dict[str, _IndexLimit] = {
    "aten::embedding": _ROWS,
    "aten::embedding_bag": _ROWS,
    "aten::_embedding_bag": _ROWS,
    "aten::_embedding_bag_forward_only": _ROWS,
    "aten::embedding_backward": _NUMBER,
    "aten::embedding_dense_backward": _NUMBER,
    "aten::_embedding_bag_backward": _NUMBER,
    "aten::_embedding_bag_dense_backward": _NUMBER,
    "aten::index_select": _ALONG,
    "aten::index_select_backward": ("index", lambda had: had["self_sizes"][had["dim"]]),
    "aten::gather": _ALONG,
    "aten::gather_backward": _ALONG,
    "aten::nll_loss": _CLASSES,
    "aten::nll_loss_nd": _CLASSES,
    "aten::nll_loss_forward": _CLASSES,
    "aten::nll_loss_backward": _CLASSES,
    "aten::nll_loss2d": _CLASSES,
    "aten::nll_loss2d_forward": _CLASSES,
    "aten::nll_loss2d_backward": _CLASSES,
    "aten::cross_entropy_loss": _CLASSES,
}
"""Operator -> the argument that holds places, and below what they must lie."""

_READS_NUMBERS = frozenset({
    "aten::_local_scalar_dense", "aten::_assert_async", "aten::_is_all_true", "aten::_is_any_true",
})  # fmt: skip
"""Private operators to which integers are no places."""

_MAX_INDEX = 1 << 31
_RANDOM_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INTEGERS = _RANDOM_DTYPES | {torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class IntegerBounds:
    """What storages of integers may hold, by what their readers say.

    reach: below what; least: not below what (0 where it is not told). bags: those that hold where bags begin, and below
    what. trusting: those of which a reader may trust that they are right. mixed: those that are read as integers of
    several sizes, to which no bound applies. Both hold zeros.
    """

    reach: dict[int, int] = field(default_factory=dict)
    least: dict[int, int] = field(default_factory=dict)
    bags: dict[int, int] = field(default_factory=dict)
    trusting: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)


def infer_bounds(program: Program) -> IntegerBounds:
    """Readers of copies and views count too: the program is walked from its end. A recorded range narrows what readers
    say. Where they say nothing it is taken only if all are known to look at their indices."""
    found = IntegerBounds()
    reach, bags, trusting = found.reach, found.bags, found.trusting
    recorded: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for step in reversed(program.steps):
        had = {one.name: value for one, value in zip(step.operator.arguments, step.values, strict=False)}
        name = step.operator.name
        bounded_here: set[str] = set()
        if name in _INDEX_LIMITS:
            argument, bound = _INDEX_LIMITS[name]
            if isinstance(places := had.get(argument), TensorView):
                with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):
                    below = max(1, operator.index(bound(had)))
                    reach[places.storage] = min(below, reach.get(places.storage, _MAX_INDEX))
                    bounded_here.add(argument)
        if "embedding_bag" in name and isinstance(starts := had.get("offsets"), TensorView):
            bounded_here.add("offsets")
            indices = had.get("indices")
            count = math.prod(indices.shape) if isinstance(indices, TensorView) else 0
            bags[starts.storage] = min(count + 1, bags.get(starts.storage, _MAX_INDEX))
        for view, low, high in step.ranges:
            before = recorded.get(view.storage, (low, high))
            recorded[view.storage] = min(low, before[0]), max(high, before[1])
        for view in (*tensor_views(step.values), *step.results):
            if (size := _integer_size(view)) and sizes.setdefault(view.storage, size) != size:
                found.mixed.add(view.storage)
        if _trusts_indices(name):
            others = [value for argument, value in had.items() if argument not in bounded_here]
            trusting.update(view.storage for view in tensor_views(others) if _integer_size(view))
        if name in _VALUE_PRESERVING and step.results:
            for view in tensor_views(step.values):
                for result in step.results:
                    for known in (reach, bags):
                        if result.storage in known:
                            known[view.storage] = min(
                                known[result.storage], known.get(view.storage, _MAX_INDEX)
                            )
                    if result.storage in trusting:
                        trusting.add(view.storage)
    for storage, (low, high) in recorded.items():
        if storage in reach:
            reach[storage] = max(1, min(high + 1, reach[storage]))
            found.least[storage] = max(0, min(low, reach[storage] - 1))
        elif storage not in trusting and low >= -_MAX_INDEX and high < _MAX_INDEX:
            reach[storage], found.least[storage] = high + 1, low
    return found


def _trusts_indices(name: str) -> bool:
    """Whether the operator may take integers as places without a look."""
    looks = name in _VALUE_PRESERVING or name in _READS_NUMBERS
    return not looks and (
        name.removeprefix("aten::").startswith("_") or "backward" in name or not name.startswith("aten::")
    )


def _integer_size(view: TensorView) -> int:
    """Bytes of an element that may be a place; 0 of others."""
    dtype = DTYPES[view.dtype]
    return dtype.itemsize if dtype in _INTEGERS else 0


def make_initial_tensor(
    view: TensorView, count: int, device: torch.device, known: IntegerBounds
) -> torch.Tensor:
    """A flat tensor of ``count`` elements for the storage of a view."""
    dtype = DTYPES[view.dtype]
    if view.storage in known.trusting or view.storage in known.mixed:
        return torch.zeros(count, dtype=dtype, device=device)
    if dtype == torch.bool:
        return torch.ones(count, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        width = math.prod(view.shape[1:]) if len(view.shape) > 1 else 1
        small = torch.rand(count, dtype=dtype if dtype.itemsize > 1 else torch.float32, device=device)
        return (small * (2 / width if width > 1 else 1)).to(dtype)
    if view.storage in known.bags:
        return torch.arange(count, device=device).to(dtype)
    kinds = torch.iinfo(dtype)
    low = max(known.least.get(view.storage, 0), kinds.min)
    high = min(known.reach.get(view.storage, 0), kinds.max)
    if (low or high > 1) and low < high and dtype in _RANDOM_DTYPES:
        return torch.randint(low, high, (count,), dtype=dtype, device=device)
    return torch.zeros(count, dtype=dtype, device=device)
