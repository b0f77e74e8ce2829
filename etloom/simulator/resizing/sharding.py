"""Kernels and messages of a job with another size of tensor parallelism.

The collectives of a tensor-parallel group carry whole activations: tokens times hidden size. Of a matrix product that
tensor parallelism divides, one matrix is such an activation, and the other two have a share of a dimension. By the
sizes of its tensors, a call is

- divided, by roofline: a matrix product with one whole activation; attention, which has a share of the heads;
- divided, guessed: matrix products with two whole activations (4 hidden sizes divided by 4, for one), and other calls
  without any, which work on a share of activations or parameters;
- whole: other calls with a whole activation, such as normalization and residuals, and kernels of unknown calls.

Without a matrix product that is divided for certain, the prediction is refused. The messages between replicas carry the
gradients of a share of the parameters.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.collectives.process_mesh import ProcessMesh
from etloom.core import categories
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Trace
from etloom.graphs.graph import EdgeKind
from etloom.simulator.devices.call_shapes import list_matrices
from etloom.simulator.devices.kernel_ratios import scale_by_limits, scale_kernels
from etloom.simulator.scenario import Basis, Scenario

_WHOLE = (1.0, 1.0, Basis.RECORDED)
Shares = tuple[float, float, Basis]
"""Factors of the FLOPs and of the bytes of a call, and their basis."""


def shard_tensors(scenario: Scenario, mesh: ProcessMesh, size: int) -> Scenario:
    """Return the scenario with kernels and messages of another size of tensor parallelism; the ranks stay.

    Args:
        scenario: its ranks form ``mesh``.
        mesh: the process mesh before.
        size: the new size of the axis tp.

    Raises:
        EtloomError: the recording does not show which kernels are divided.
    """
    old = mesh.sizes["tp"]
    axes = _list_axes(scenario, mesh)
    message = _find_activation(axes, old, size)
    if not (scenario.graph.kind == EdgeKind.KERNEL).any():
        raise _refuse(old, size, "the run has no kernels", "record it on a GPU")
    divided = 0

    def compute_ratios(trace: Trace) -> pl.DataFrame:
        nonlocal divided
        ratios, count = compute_shard_ratios(trace, message, old / size)
        divided += count
        return ratios

    try:
        changed, shares = scale_kernels(scenario, compute_ratios)
    except AnalysisError as error:
        raise _refuse(old, size, error.what, "profile with record_shapes=True") from None
    if not divided:
        problem = f"no matrix product has a matrix of the {message:,} bytes of its messages"
        raise _refuse(old, size, problem, f"record a run with tp={size}")
    notes = (
        f"tp={old} becomes {size}: kernels divided by tensor parallelism are inferred from their shapes: {shares} (of "
        "the recorded time of kernels); exported traces keep the recorded shapes",
    )
    return _scale_gradients(changed.replace(notes=(*scenario.notes, *notes)), axes, old / size)


def _refuse(old: int, size: int, problem: str, remedy: str) -> EtloomError:
    return EtloomError(f"cannot predict tp={size} from a run with tp={old}: {problem}", remedy=remedy)


def _list_axes(scenario: Scenario, mesh: ProcessMesh) -> pl.DataFrame:
    """Return the instances with the axis along which their ranks differ; null for several."""
    instances = scenario.communications.instances

    @cache
    def find_axis(ranks: tuple[int, ...]) -> str | None:
        places = [mesh.coordinates(rank) for rank in ranks if rank < mesh.world_size]
        axes = [axis for axis in mesh.sizes if len({place[axis] for place in places}) > 1]
        return axes[0] if len(axes) == 1 else None

    axes = [None if ranks is None else find_axis(tuple(ranks)) for ranks in instances["ranks"].to_list()]
    return instances.with_columns(axis=pl.Series(axes, dtype=pl.String))


def _find_activation(axes: pl.DataFrame, old: int, size: int) -> int:
    """Return the size of a whole activation: that with the most bytes in all messages of tensor parallelism."""
    messages = axes.filter((pl.col("axis") == "tp") & (pl.col("bytes") > 0))
    if not messages.height:
        raise _refuse(
            old, size, "the sizes of its messages are not recorded", "record the execution traces, too"
        )
    totals = messages.group_by("bytes").agg(total=pl.col("bytes").sum()).sort("total", "bytes")
    return int(totals["bytes"][-1])


def compute_shard_ratios(trace: Trace, message: int, share: float) -> tuple[pl.DataFrame, int]:
    """Return id, ratio and `Basis` of the computing kernels, and the number of matrix products divided for certain.

    Args:
        trace: linked.
        message: bytes of a whole activation.
        share: the recorded size of tensor parallelism divided by the new one.

    Raises:
        AnalysisError: no shapes were recorded.
    """
    calls = count_calls(trace).filter(pl.col("row") >= 0)
    labels = list(calls.select(pl.col("name", "dims", "dtype").cast(pl.String)).iter_rows())
    products = np.array([bool(list_matrices(name, dims)) for name, dims, _ in labels], bool)
    widths = Counter(
        categories.itemsize(labels[i][2])
        for i in np.flatnonzero(products)
        if categories.itemsize(labels[i][2])
    )
    activation = message // (widths.most_common(1)[0][0] or 1) if widths else 0
    shares = [_find_shares(name, dims, activation, share) for name, dims, _ in labels]
    flops, size, basis = (list(column) for column in zip(*shares, strict=True)) if shares else ([], [], [])
    calls = calls.with_columns(
        share=pl.Series(flops, dtype=pl.Float64),
        byte_share=pl.Series(size, dtype=pl.Float64),
        basis=pl.Series(basis, dtype=pl.Int64),
    )
    ratios = pl.col("share")
    try:
        peaks = find_device_peaks(trace)
    except AnalysisError:
        calls = calls.with_columns(ratio=ratios)
    else:
        scaled = calls.with_columns(
            flops=pl.col("flops") * pl.col("share"), bytes=pl.col("bytes") * pl.col("byte_share")
        )
        limits = (add_limits(table, peaks)["ideal_ns"] for table in (calls, scaled))
        by_limits = pl.Series("limit", scale_by_limits(calls["time_ns"], *limits)).fill_nan(None)
        calls = calls.with_columns(by_limits).with_columns(ratio=pl.coalesce("limit", "share"))
    certain = int((products & (calls["basis"] == Basis.ROOFLINE).to_numpy()).sum())
    kernels = assign_kernels(trace).filter((pl.col("kind") != "communication") & ~pl.col("bus"))
    kernels = kernels.select(pl.col("id").cast(pl.Int64), "row", "replay").join(
        calls.select("row", "replay", "ratio", "basis"),
        on=("row", "replay"),
        how="left",
        maintain_order="left",
    )
    guessed = pl.lit(int(Basis.GUESSED), pl.Int64)
    return kernels.select("id", pl.col("ratio").fill_null(1.0), pl.coalesce("basis", guessed)), certain


@lru_cache(maxsize=4096)
def _find_shares(name: str | None, dims: str | None, activation: int, share: float) -> Shares:
    """Return the shares of the FLOPs and bytes that a call has with the new size. activation: its elements."""
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
        sizes = list(_list_sizes(json.loads(dims))) if dims else []
    except ValueError:
        sizes = []
    if not sizes or any(size == activation for size in sizes):
        return _WHOLE if sizes else (1.0, 1.0, Basis.GUESSED)
    return share, share, Basis.GUESSED


def _list_sizes(dims: Any) -> Iterator[int]:
    """Yield the number of elements of each tensor with a dimension, also in lists of tensors."""
    if not isinstance(dims, list) or not dims:
        return
    if all(type(size) is int for size in dims):
        yield math.prod(dims)
        return
    for entry in dims:
        yield from _list_sizes(entry)


def _scale_gradients(scenario: Scenario, axes: pl.DataFrame, share: float) -> Scenario:
    """Return the scenario with the messages between replicas scaled to the share of the parameters."""
    between = axes.filter(pl.col("axis") == "dp").select("instance")
    if not between.height:
        return scenario
    communications = scenario.communications
    is_scaled = pl.col("instance").is_in(between["instance"].implode())
    size = (pl.col("bytes") * share).round().cast(pl.Int64)
    instances = communications.instances.with_columns(bytes=pl.when(is_scaled).then(size).otherwise("bytes"))
    rows = communications.participations.filter(is_scaled)
    edges = np.unique(np.concatenate([rows["own_edge"].to_numpy(), rows["transfer_edge"].to_numpy()]))
    edges = edges[edges >= 0]
    lag = np.rint(scenario.lag[edges] * share).astype(np.int64)
    communications = type(communications)(instances, communications.participations)
    note = f"{between.height:,} messages between replicas shrink or grow by {share:g}, as their parameters do"
    return scenario.replace(communications=communications).with_lags(edges, lag, Basis.GUESSED, note)
