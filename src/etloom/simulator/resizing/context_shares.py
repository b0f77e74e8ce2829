"""Predicts the share of each kernel's and message's work that remains per rank with another context-parallel size.

A rank of context parallelism works on a share of the tokens of each sequence; the whole sequence keeps its length. The
number of its tokens follows from the shapes of attention. By its shapes, a call is

- divided, by roofline: a matrix product with the tokens as a dimension, whose weights stay; attention, whose queries or
  heads are divided; other calls on the tokens;
- divided, by an assumption: matrix products without that dimension, such as those of experts, and attention in a ring
  of messages, where the number of its kernels changes, so that each recorded one stands for several;
- whole: other calls, such as those of the optimizer.

Messages of activations (tensor, pipeline and expert parallelism, all-to-alls of context parallelism) carry a share of
the tokens; gathered keys and values, and gradients, keep their size. In a ring, each message stands for several.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import lru_cache

import polars as pl

from etloom.analyses.flops.call_shapes import parse_product, parse_tokens
from etloom.collectives.process_mesh import ProcessMesh
from etloom.core.errors import AnalysisError
from etloom.simulator.resizing.sharding import (
    COMPLETE,
    UNKNOWN,
    Calls,
    Shares,
    check_kernels,
    list_axes,
    refuse,
    scale_calls,
    scale_messages,
)
from etloom.simulator.resizing.tensor_shares import list_sizes
from etloom.simulator.scenario import Basis, Scenario

_PARAMETERS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_")
"""Operators on lists of parameters and gradients."""


def shard_context(scenario: Scenario, mesh: ProcessMesh, size: int) -> Scenario:
    """Return the scenario with kernel and message times for another context-parallel size; the set of ranks is
    unchanged.

    Args:
        scenario: its ranks form ``mesh``.
        mesh: the process mesh before.
        size: the new size of the axis cp.

    Raises:
        EtloomError: the recording does not show which kernels work on the tokens.
    """
    old = mesh.sizes["cp"]
    axes = list_axes(scenario, mesh)
    exchanges = axes.filter(pl.col("axis") == "cp")
    in_ring = "message" in exchanges["collective"].to_list()
    if not exchanges["collective"].drop_nulls().len():
        raise refuse(
            "cp", old, size, "the messages of its groups are not recorded", f"record a run with cp={size}"
        )
    check_kernels(scenario, "cp", old, size)
    try:
        changed, shares, divided = scale_calls(
            scenario, lambda calls: find_context_shares(calls, old, size, in_ring)
        )
    except AnalysisError as error:
        raise refuse("cp", old, size, error.what, "profile with record_shapes=True") from None
    if not divided:
        problem = "no matrix product has the tokens of its attention as a dimension"
        raise refuse("cp", old, size, problem, f"record a run with cp={size}")
    note = (
        f"cp={old} becomes {size}: kernels on the tokens of a rank are inferred from the shapes of attention: {shares} "
        "(of the recorded time of kernels); the sequence keeps its length; exported traces keep the recorded shapes"
    )
    changed = changed.replace(notes=(*scenario.notes, note))
    factors = {
        instance: _find_factor(axis, collective, old, size)
        for instance, axis, collective in axes.select("instance", "axis", "collective").iter_rows()
    }
    return scale_messages(changed, factors, _explain_messages(old, size, in_ring))


def _find_factor(axis: str | None, collective: str | None, old: int, size: int) -> float:
    """Return the factor by which the bytes of a message change with the new context-parallel size."""
    share = old / size
    if axis == "cp" and collective == "message":
        return share * (size - 1) / (old - 1)
    if axis in ("tp", "pp", "ep") or (axis == "cp" and collective == "all_to_all"):
        return share
    return 1.0


def _explain_messages(old: int, size: int, in_ring: bool) -> str:
    text = f"{{count}} messages of activations take {old / size:g} of their bytes, as their tokens do"
    if in_ring:
        count = (size - 1) / (old - 1)
        text += (
            f"; attention exchanges {size - 1} messages in a ring instead of {old - 1}, so each recorded one stands "
            f"for {count:.3g}"
        )
    return text


def find_context_shares(calls: Calls, old: int, size: int, in_ring: bool = False) -> list[Shares]:
    """Return, for each call, its FLOPs and bytes with the new context-parallel size relative to the recorded ones.

    Args:
        calls: all calls of a rank.
        old: the recorded size of context parallelism.
        size: the new one.
        in_ring: whether attention passes keys and values around a ring.
    """
    tokens, lengths = _count_tokens(calls, old)
    return [_find_shares(name, dims, tokens, lengths, old / size, in_ring) for name, dims, _ in calls]


def _count_tokens(calls: Calls, old: int) -> tuple[int, frozenset[int]]:
    """Return the number of tokens that a rank works on (0 if unknown), and the possible numbers per sequence.

    Between all-to-alls, attention has all tokens of the sequence and a share of the heads; else those of the rank.
    """
    attention = Counter(shape for name, dims, _ in calls if (shape := parse_tokens(name, dims)))
    factors = [parse_product(name, dims) for name, dims, _ in calls]
    products = Counter(dimension for m, _, k in filter(None, factors) for dimension in {int(m), int(k)})
    candidates = [
        (batch * queries // part, queries // part)
        for batch, queries in attention
        for part in (1, old)
        if queries % part == 0
    ]
    best = max(candidates, key=lambda candidate: products[candidate[0]], default=None)
    if best is None or not products[best[0]]:
        return 0, frozenset()
    return best[0], frozenset(length for tokens, length in candidates if tokens == best[0])


@lru_cache(maxsize=4096)
def _find_shares(
    name: str | None, dims: str | None, tokens: int, lengths: frozenset[int], share: float, in_ring: bool
) -> Shares:
    """Return the shares of a call's recorded FLOPs and bytes that remain with the new context-parallel size."""
    product = parse_product(name, dims)
    if product:
        m, n, k = product
        sizes = {"left": m * k, "right": k * n, "result": m * n}
        divided = {"left", "result"} if m == tokens else {"left", "right"} if k == tokens else set()
        if not divided or m == k:
            return share, share, Basis.GUESSED
        total = sum(sizes.values())
        moved = sum(sizes[matrix] for matrix in divided)
        return share, (share * moved + total - moved) / total, Basis.ROOFLINE
    if name is not None and ("attention" in name.lower() or "attn" in name.lower()):
        return share, share, Basis.GUESSED if in_ring else Basis.ROOFLINE
    try:
        tensors = json.loads(dims) if dims else []
    except ValueError:
        tensors = []
    if not any(True for _ in list_sizes(tensors)):
        return UNKNOWN
    if name is not None and name.startswith(_PARAMETERS):
        return COMPLETE
    return (share, share, Basis.ROOFLINE) if _has_tokens(tensors, tokens, lengths) else COMPLETE


def _has_tokens(tensors: object, tokens: int, lengths: frozenset[int]) -> bool:
    """Return whether a shape has the rank's tokens as a dimension, or a sequence's tokens next to batch or heads."""
    if not isinstance(tensors, list):
        return False
    if not tensors or any(type(size) is not int for size in tensors):
        return any(_has_tokens(entry, tokens, lengths) for entry in tensors)
    if tokens in tensors:
        return True
    with_batch = any(before * after == tokens for before, after in itertools.pairwise(tensors))
    return not lengths.isdisjoint(tensors) and (len(tensors) > 3 or (len(tensors) == 3 and with_batch))
