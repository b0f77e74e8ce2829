"""Choose the initial contents of tensors that no recorded operator computes.

Floating point values are random, scaled so that products stay near one. Integers are zero, a valid index everywhere,
unless an operator that reads them limits their range; offsets of embedding bags are evenly spaced; masks are true.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from etloom.replayer.compute.program import Program
from etloom.replayer.compute.program_steps import DTYPES, ProgramStep, TensorView, tensor_views

_VALUE_PRESERVING = frozenset({
    "aten::to", "aten::_to_copy", "aten::view", "aten::reshape", "aten::contiguous", "aten::clone", "aten::slice",
    "aten::select", "aten::flatten", "aten::squeeze", "aten::unsqueeze", "aten::t", "aten::transpose", "aten::permute",
    "aten::expand", "aten::detach", "aten::alias", "aten::copy_", "aten::cat", "aten::stack", "aten::_unsafe_view",
    "aten::_reshape_alias", "aten::repeat", "aten::flip",
})  # fmt: skip
"""Operators whose results have the values of their inputs."""

_IndexLimit = tuple[str, Callable[[dict[str, Any]], int]]
_ROWS: _IndexLimit = ("indices", lambda args: args["weight"].shape[0])
_NUMBER: _IndexLimit = ("indices", lambda args: args["num_weights"])
_ALONG: _IndexLimit = ("index", lambda args: args["self"].shape[args["dim"]])
_CLASSES: _IndexLimit = ("target", lambda args: args["self"].shape[1])
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
    "aten::index_select_backward": ("index", lambda args: args["self_sizes"][args["dim"]]),
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
"""Operator -> the argument with indices, and their exclusive upper bound."""

_READS_NUMBERS = frozenset({
    "aten::_local_scalar_dense", "aten::_assert_async", "aten::_is_all_true", "aten::_is_any_true",
})  # fmt: skip
"""Private operators that do not use integers as indices."""

_MAX_INDEX = 1 << 31
_RANDOM_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INTEGERS = _RANDOM_DTYPES | {torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class IntegerBounds:
    """Ranges of valid values of integer tensors, by storage, inferred from the operators that read them.

    Attributes:
        limits: Exclusive upper bound.
        minimums: Minimum; 0 if it is not known.
        bag_offsets: Storages with offsets of embedding bags, and their exclusive upper bound.
        trusted: Storages with a reader that may use the values without checking them. They are initialized to zeros.
        mixed: Storages that are read as integers of several sizes, to which no bound applies. They hold zeros, too.
    """

    limits: dict[int, int] = field(default_factory=dict)
    minimums: dict[int, int] = field(default_factory=dict)
    bag_offsets: dict[int, int] = field(default_factory=dict)
    trusted: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)


def infer_bounds(program: Program) -> IntegerBounds:
    """Infer the ranges of valid values of a program's integer tensors from the operators that read them.

    Readers of copies and views count too, so the program is walked from its end. A recorded range narrows the range
    that readers require. Without such a requirement it is used only if all readers are known to check their indices.
    """
    inference = _BoundsInference()
    for step in reversed(program.steps):
        inference.visit(step)
    return inference.finish()


class _BoundsInference:
    """Infers value ranges of integer tensors by visiting the steps of a program from the last to the first."""

    def __init__(self) -> None:
        self._bounds = IntegerBounds()
        self._recorded: dict[int, tuple[int, int]] = {}  # storage -> recorded minimum and maximum
        self._item_sizes: dict[int, int] = {}

    def visit(self, step: ProgramStep) -> None:
        names = (argument.name for argument in step.operator.arguments)
        args = dict(zip(names, step.values, strict=False))
        bounded = self._limit_indices(step.operator.name, args) | self._limit_offsets(
            step.operator.name, args
        )
        for view, low, high in step.ranges:
            minimum, maximum = self._recorded.get(view.storage, (low, high))
            self._recorded[view.storage] = min(low, minimum), max(high, maximum)
        for view in (*tensor_views(step.values), *step.results):
            size = _integer_size(view)
            if size and self._item_sizes.setdefault(view.storage, size) != size:
                self._bounds.mixed.add(view.storage)
        if _trusts_indices(step.operator.name):
            values = [value for argument, value in args.items() if argument not in bounded]
            self._bounds.trusted.update(view.storage for view in tensor_views(values) if _integer_size(view))
        if step.operator.name in _VALUE_PRESERVING:
            self._propagate(step)

    def _limit_indices(self, name: str, args: dict[str, Any]) -> set[str]:
        """Limit an index argument to the size of the dimension it indexes; return the names of limited arguments."""
        argument, get_limit = _INDEX_LIMITS.get(name, ("", None))
        indices = args.get(argument)
        if get_limit is None or not isinstance(indices, TensorView):
            return set()
        try:
            limit = max(1, operator.index(get_limit(args)))
        except (AttributeError, IndexError, KeyError, TypeError):
            return set()
        _lower(self._bounds.limits, indices.storage, limit)
        return {argument}

    def _limit_offsets(self, name: str, args: dict[str, Any]) -> set[str]:
        """Limit the offsets of an embedding bag to its number of indices; return the names of limited arguments."""
        offsets = args.get("offsets")
        if "embedding_bag" not in name or not isinstance(offsets, TensorView):
            return set()
        indices = args.get("indices")
        count = math.prod(indices.shape) if isinstance(indices, TensorView) else 0
        _lower(self._bounds.bag_offsets, offsets.storage, count + 1)
        return {"offsets"}

    def _propagate(self, step: ProgramStep) -> None:
        """Apply the value bounds of a copying operator's results to the inputs from which the values are copied."""
        bounds = self._bounds
        for view in tensor_views(step.values):
            for result in step.results:
                for limits in (bounds.limits, bounds.bag_offsets):
                    if result.storage in limits:
                        _lower(limits, view.storage, limits[result.storage])
                if result.storage in bounds.trusted:
                    bounds.trusted.add(view.storage)

    def finish(self) -> IntegerBounds:
        """Narrow the inferred bounds to the recorded value ranges, and return them."""
        limits, minimums = self._bounds.limits, self._bounds.minimums
        for storage, (low, high) in self._recorded.items():
            if storage in limits:
                limits[storage] = max(1, min(high + 1, limits[storage]))
                minimums[storage] = max(0, min(low, limits[storage] - 1))
            elif storage not in self._bounds.trusted and low >= -_MAX_INDEX and high < _MAX_INDEX:
                limits[storage], minimums[storage] = high + 1, low
        return self._bounds


def _lower(limits: dict[int, int], storage: int, limit: int) -> None:
    limits[storage] = min(limit, limits.get(storage, _MAX_INDEX))


def _trusts_indices(name: str) -> bool:
    """Return whether an operator may use its integer inputs as indices without checking their range."""
    checks = name in _VALUE_PRESERVING or name in _READS_NUMBERS
    return not checks and (
        name.removeprefix("aten::").startswith("_") or "backward" in name or not name.startswith("aten::")
    )


def _integer_size(view: TensorView) -> int:
    """Return the element size in bytes of an integer tensor, which may hold indices; 0 for other dtypes."""
    dtype = DTYPES[view.dtype]
    return dtype.itemsize if dtype in _INTEGERS else 0


@dataclass(frozen=True)
class Contents:
    """The initial contents of a storage: "uniform" random numbers up to ``high``, random "integers" from ``low`` to
    below ``high``, a "range" from 0, or the "constant" ``low``."""

    kind: str
    low: float = 0
    high: float = 0


def choose_contents(view: TensorView, bounds: IntegerBounds) -> Contents:
    """Return the initial contents for the storage of ``view``: random floats, valid integers."""
    dtype, storage = DTYPES[view.dtype], view.storage
    if storage in bounds.trusted or storage in bounds.mixed:
        return Contents("constant", 0)
    if dtype == torch.bool:
        return Contents("constant", 1)
    if dtype.is_floating_point or dtype.is_complex:
        width = math.prod(view.shape[1:]) if len(view.shape) > 1 else 1
        return Contents("uniform", 0, 2 / width if width > 1 else 1)
    if storage in bounds.bag_offsets:
        return Contents("range")
    info = torch.iinfo(dtype)
    low = max(bounds.minimums.get(storage, 0), info.min)
    high = min(bounds.limits.get(storage, 0), info.max)
    is_random = (low or high > 1) and low < high and dtype in _RANDOM_DTYPES
    return Contents("integers", low, high) if is_random else Contents("constant", 0)


def make_initial_tensor(
    view: TensorView, count: int, device: torch.device, bounds: IntegerBounds
) -> torch.Tensor:
    """Return a flat tensor of ``count`` initial values for the storage of ``view``, see `choose_contents`."""
    dtype, contents = DTYPES[view.dtype], choose_contents(view, bounds)
    match contents.kind:
        case "uniform":
            plain = dtype if dtype.itemsize > 1 else torch.float32
            return (torch.rand(count, dtype=plain, device=device) * contents.high).to(dtype)
        case "integers":
            low, high = int(contents.low), int(contents.high)
            return torch.randint(low, high, (count,), dtype=dtype, device=device)
        case "range":
            return torch.arange(count, device=device).to(dtype)
    return (torch.ones if contents.low else torch.zeros)(count, dtype=dtype, device=device)
