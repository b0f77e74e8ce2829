"""What tensors of no recorded origin hold, and how much memory all of them may take.

Floating point is random, scaled so that products stay near one. Integers are zero, a valid index everywhere, unless an
operator that reads them says how far they may reach; offsets of bags are evenly spread; masks are true.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from etloom.replayer.program import Program
from etloom.replayer.steps import View, views_of
from etloom.replayer.values import DTYPES
from etloom.system import available_memory

_ALIKE = frozenset({
    "aten::to", "aten::_to_copy", "aten::view", "aten::reshape", "aten::contiguous", "aten::clone", "aten::slice",
    "aten::select", "aten::flatten", "aten::squeeze", "aten::unsqueeze", "aten::t", "aten::transpose", "aten::permute",
    "aten::expand", "aten::detach", "aten::alias", "aten::copy_", "aten::cat", "aten::stack",
})  # fmt: skip
"""Operators whose results hold what their inputs hold."""

_REACH: dict[str, tuple[str, Callable[[dict[str, Any]], int]]] = {
    "aten::embedding": ("indices", lambda had: had["weight"].shape[0]),
    "aten::embedding_bag": ("indices", lambda had: had["weight"].shape[0]),
    "aten::_embedding_bag": ("indices", lambda had: had["weight"].shape[0]),
    "aten::index_select": ("index", lambda had: had["self"].shape[had["dim"]]),
    "aten::gather": ("index", lambda had: had["self"].shape[had["dim"]]),
    "aten::nll_loss": ("target", lambda had: had["self"].shape[1]),
    "aten::nll_loss_nd": ("target", lambda had: had["self"].shape[1]),
    "aten::cross_entropy_loss": ("target", lambda had: had["self"].shape[1]),
    "aten::embedding_dense_backward": ("indices", lambda had: had["num_weights"]),
}
"""Operator -> the argument that holds places, and below what they must lie."""


_MOST = 1 << 31
_DRAWN = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Bounds:
    """What storages of integers may hold, by what their readers say.

    reach: below what; least: not below what (0 where it is not told). bags: those that hold where bags begin, and below
    what. trusting: those of which a reader may trust that they are right.
    """

    reach: dict[int, int] = field(default_factory=dict)
    least: dict[int, int] = field(default_factory=dict)
    bags: dict[int, int] = field(default_factory=dict)
    trusting: set[int] = field(default_factory=set)


def bounds(program: Program) -> Bounds:
    """Readers of copies and views count too: the program is walked from its end. A recorded range narrows what readers
    say. Where they say nothing it is taken only if all are known to look at their indices."""
    found = Bounds()
    reach, bags, trusting = found.reach, found.bags, found.trusting
    recorded: dict[int, tuple[int, int]] = {}
    for step in reversed(program.steps):
        had = {one.name: value for one, value in zip(step.operator.arguments, step.values, strict=False)}
        name = step.operator.name
        if name in _REACH:
            argument, bound = _REACH[name]
            if isinstance(places := had.get(argument), View):
                with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):
                    reach[places.storage] = min(bound(had), reach.get(places.storage, _MOST))
        if name.endswith("embedding_bag") and isinstance(starts := had.get("offsets"), View):
            indices = had.get("indices")
            count = math.prod(indices.shape) if isinstance(indices, View) else 0
            bags[starts.storage] = min(count + 1, bags.get(starts.storage, _MOST))
        for view, low, high in step.ranges:
            before = recorded.get(view.storage, (low, high))
            recorded[view.storage] = min(low, before[0]), max(high, before[1])
        if name.removeprefix("aten::").startswith("_") or "backward" in name or not name.startswith("aten::"):
            trusting.update(view.storage for view in views_of(step.values))
        if name in _ALIKE and step.results:
            for view in views_of(step.values):
                for result in step.results:
                    for known in (reach, bags):
                        if result.storage in known:
                            known[view.storage] = min(known[result.storage], known.get(view.storage, _MOST))
                    if result.storage in trusting:
                        trusting.add(view.storage)
    for storage, (low, high) in recorded.items():
        if storage in reach:
            reach[storage] = max(1, min(high + 1, reach[storage]))
            found.least[storage] = max(0, min(low, reach[storage] - 1))
        elif storage not in trusting and low >= -_MOST and high < _MOST:
            reach[storage], found.least[storage] = high + 1, low
    return found


def made(view: View, count: int, device: torch.device, known: Bounds) -> torch.Tensor:
    """A flat tensor of ``count`` elements for the storage of a view."""
    dtype = DTYPES[view.dtype]
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
    if (low or high > 1) and low < high and dtype in _DRAWN:
        return torch.randint(low, high, (count,), dtype=dtype, device=device)
    return torch.zeros(count, dtype=dtype, device=device)


@contextlib.contextmanager
def bounded(more: int | None) -> Iterator[None]:
    """This process may take only so many bytes more (None: 60 % of what is free), since a trace asks for any size.

    Where the system does not tell how much it has taken (other than Linux), there is no bound.
    """
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + (int(available_memory() * 0.6) if more is None else more)
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
