"""Predicts the share of each kernel's work that remains per rank with another tensor-parallel size.

The collectives of a tensor-parallel group carry whole activations: tokens times hidden size. Of a matrix product that
tensor parallelism divides, one matrix is such an activation, and the other two have a share of a dimension. By the
sizes of its tensors, a call is

- divided, by roofline: a matrix product with one whole activation; attention, which has a share of the heads;
- divided, by an assumption: matrix products with two whole activations (4 hidden sizes divided by 4, for one), and
  other calls without any, which work on a share of activations or parameters;
- whole: other calls with a whole activation, such as normalization and residuals, and kernels of unknown calls.

Without a matrix product that is divided for certain, the prediction is refused. The messages between replicas carry the
gradients of a share of the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import polars as pl

from etloom.analyses.flops.call_shapes import list_matrices
from etloom.collectives.process_mesh import ProcessMesh
from etloom.core.errors import AnalysisError
from etloom.simulator.resizing.sharding import (
    COMPLETE,
    UNKNOWN,
    Calls,
    Shares,
    check_kernels,
    count_elements,
    list_axes,
    refuse,
    scale_calls,
    scale_messages,
)
from etloom.simulator.scenario import Basis, Scenario


def shard_tensors(scenario: Scenario, mesh: ProcessMesh, size: int) -> Scenario:
    """Return the scenario with kernel and message times for another tensor-parallel size; the set of ranks is
    unchanged.

    Args:
        scenario: its ranks form ``mesh``.
        mesh: the process mesh before.
        size: the new size of the axis tp.

    Raises:
        EtloomError: the recording does not show which kernels are divided.
    """
    old = mesh.sizes["tp"]
    axes = list_axes(scenario, mesh)
    message = _find_activation(axes, old, size)
    check_kernels(scenario, "tp", old, size)
    try:
        changed, shares, divided = scale_calls(
            scenario, lambda calls: find_tensor_shares(calls, message, old / size)
        )
    except AnalysisError as error:
        raise refuse("tp", old, size, error.what, "profile with record_shapes=True") from None
    if not divided:
        problem = f"no matrix product has a matrix of the {message:,} bytes of its messages"
        raise refuse("tp", old, size, problem, f"record a run with tp={size}")
    notes = (
        f"tp={old} becomes {size}: kernels divided by tensor parallelism are inferred from their shapes: {shares} (of "
        "the recorded time of kernels); exported traces keep the recorded shapes",
    )
    between = axes.filter(pl.col("axis") == "dp")["instance"].to_list()
    note = f"{{count}} messages between replicas shrink or grow by {old / size:g}, as their parameters do"
    changed = changed.replace(notes=(*scenario.notes, *notes))
    return scale_messages(changed, dict.fromkeys(between, old / size), note)


def _find_activation(axes: pl.DataFrame, old: int, size: int) -> int:
    """Return the bytes of a whole activation: the message size with the most bytes in tensor-parallel communication."""
    messages = axes.filter((pl.col("axis") == "tp") & (pl.col("bytes") > 0))
    if not messages.height:
        raise refuse(
            "tp", old, size, "the sizes of its messages are not recorded", "record the execution traces, too"
        )
    totals = messages.group_by("bytes").agg(total=pl.col("bytes").sum()).sort("total", "bytes")
    return int(totals["bytes"][-1])


def find_tensor_shares(calls: Calls, message: int, share: float) -> list[Shares]:
    """Return, for each call, its FLOPs and bytes with the new tensor-parallel size relative to the recorded ones.

    Args:
        calls: all calls of a rank.
        message: bytes of a whole activation.
        share: the recorded size of tensor parallelism divided by the new one.
    """
    activation = count_elements(message, calls)
    return [_find_shares(name, dims, activation, share) for name, dims, _ in calls]


@lru_cache(maxsize=4096)
def _find_shares(name: str | None, dims: str | None, activation: int, share: float) -> Shares:
    """Return the shares of a call's recorded FLOPs and bytes that remain with the new tensor-parallel size.

    ``activation``: number of elements of a whole activation.
    """
    matrices = list_matrices(name, dims)
    if matrices:
        is_complete = [size == activation for size in matrices]
        total = sum(matrices)
        kept = matrices[is_complete.index(True)] if any(is_complete) else 0
        factor = (kept + share * (total - kept)) / total
        return share, factor, Basis.ROOFLINE if sum(is_complete) == 1 else Basis.GUESSED
    if name is not None and "attention" in name.lower():
        return share, share, Basis.ROOFLINE
    try:
        sizes = list(list_sizes(json.loads(dims))) if dims else []
    except ValueError:
        sizes = []
    if not sizes or any(size == activation for size in sizes):
        return COMPLETE if sizes else UNKNOWN
    return share, share, Basis.GUESSED


def list_sizes(dims: Any) -> Iterator[int]:
    """Yield the number of elements of each tensor that has at least one dimension, also of tensors in lists."""
    if not isinstance(dims, list) or not dims:
        return
    if all(type(size) is int for size in dims):
        yield math.prod(dims)
        return
    for entry in dims:
        yield from list_sizes(entry)
