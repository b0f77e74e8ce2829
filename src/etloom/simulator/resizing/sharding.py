"""Predicts kernels and messages with another tensor-, context- or expert-parallel size; the set of ranks is unchanged.

tensor_shares    which kernels tensor parallelism divides
context_shares   which kernels work on the tokens of a rank
expert_shares    the place of the experts in the mesh, and their kernels

Each finds for a call of an operator the share of its FLOPs and bytes that it has with the new size. Kernels follow by
roofline, where the device is known, and the sizes and times of messages by the axis of their group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import polars as pl

from etloom.analyses.flops.call_shapes import list_matrices
from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.collectives.process_mesh import ProcessMesh
from etloom.core import categories
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Trace
from etloom.graphs.graph import EdgeKind
from etloom.simulator.devices.kernel_ratios import list_kernel_ranks, scale_by_limits, scale_kernels
from etloom.simulator.scenario import Basis, Scenario

Shares = tuple[float, float, Basis]
"""Factors of the FLOPs and of the bytes of a call, and their basis."""

COMPLETE: Shares = (1.0, 1.0, Basis.RECORDED)
UNKNOWN: Shares = (1.0, 1.0, Basis.GUESSED)

Calls = list[tuple[str | None, str | None, str | None]]
"""Name, dimensions and data type of each call of an operator."""


def refuse(axis: str, old: int, size: int, problem: str, remedy: str) -> EtloomError:
    """Return the error that a recording lacks the data needed to predict another size of an axis."""
    return EtloomError(f"cannot predict {axis}={size} from a run with {axis}={old}: {problem}", remedy=remedy)


def check_kernels(scenario: Scenario, axis: str, old: int, size: int) -> None:
    """Raise EtloomError if the recorded run has no kernels, so that axis sizes cannot be predicted."""
    if not (scenario.graph.kind == EdgeKind.KERNEL).any():
        raise refuse(axis, old, size, "the run has no kernels", "record it on a GPU")


def list_axes(scenario: Scenario, mesh: ProcessMesh) -> pl.DataFrame:
    """Return a table of the communications with the mesh axis along which their ranks differ (null for several)."""
    instances = scenario.communications.instances

    @cache
    def find_axis(ranks: tuple[int, ...]) -> str | None:
        places = [mesh.coordinates(rank) for rank in ranks if rank < mesh.world_size]
        axes = [axis for axis in mesh.sizes if len({place[axis] for place in places}) > 1]
        return axes[0] if len(axes) == 1 else None

    axes = [None if ranks is None else find_axis(tuple(ranks)) for ranks in instances["ranks"].to_list()]
    return instances.with_columns(axis=pl.Series(axes, dtype=pl.String))


def scale_calls(
    scenario: Scenario, find_shares: Callable[[Calls], list[Shares]]
) -> tuple[Scenario, str, int]:
    """Return the scenario with scaled kernel times, a text on the sources of these times, and the number of matrix
    products scaled by roofline.

    Args:
        scenario: of a run with kernels.
        find_shares: returns the shares of each call.

    Raises:
        AnalysisError: no shapes were recorded.
    """
    certain, tables = 0, []
    for rank in list_kernel_ranks(scenario):
        ratios, count = compute_call_ratios(scenario.recorded[rank], find_shares)
        tables.append(ratios.with_columns(rank=pl.lit(rank, pl.Int64)))
        certain += count
    changed, text = scale_kernels(scenario, pl.concat(tables))
    return changed, text, certain


def compute_call_ratios(
    trace: Trace, find_shares: Callable[[Calls], list[Shares]]
) -> tuple[pl.DataFrame, int]:
    """Return id, ratio (new / recorded time) and `Basis` of computation kernels, and the number of matrix products
    scaled by roofline.

    Args:
        trace: linked.
        find_shares: returns the shares of each call.

    Raises:
        AnalysisError: no shapes were recorded.
    """
    calls = count_calls(trace).filter(pl.col("row") >= 0)
    labels = list(calls.select(pl.col("name", "dims", "dtype").cast(pl.String)).iter_rows())
    products = np.array([bool(list_matrices(name, dims)) for name, dims, _ in labels], bool)
    shares = find_shares(labels)
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
        before, after = (add_limits(table, peaks)["ideal_ns"] for table in (calls, scaled))
        by_limits = pl.Series("limit", scale_by_limits(calls["time_ns"], before, after)).fill_nan(None)
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


def count_elements(size: int, calls: Calls) -> int:
    """Return the number of elements in a message of ``size`` bytes, in the data type of most matrix products; 0 if the
    type is unknown."""
    widths = Counter(
        width
        for name, dims, dtype in calls
        if list_matrices(name, dims) and (width := categories.itemsize(dtype))
    )
    return size // widths.most_common(1)[0][0] if widths else 0


def scale_messages(scenario: Scenario, factors: Mapping[int, float], note: str) -> Scenario:
    """Return the scenario with the sizes and times of messages scaled for another size of a parallelism axis.

    Args:
        scenario: the scenario.
        factors: instance -> factor.
        note: for the answer; {count} stands for the number of messages.
    """
    factors = {instance: factor for instance, factor in factors.items() if factor != 1}
    if not factors:
        return scenario
    scales = pl.DataFrame(
        {"instance": list(factors), "factor": list(factors.values())},
        schema={"instance": pl.Int64, "factor": pl.Float64},
    )
    communications = scenario.communications
    instances = communications.instances.join(scales, on="instance", how="left", maintain_order="left")
    size = (pl.col("bytes") * pl.col("factor").fill_null(1.0)).round().cast(pl.Int64)
    instances = instances.with_columns(bytes=size).drop("factor")
    rows = communications.participations.join(scales, on="instance")
    edges, first = np.unique(
        np.concatenate([rows["own_edge"].to_numpy(), rows["transfer_edge"].to_numpy()]), return_index=True
    )
    factor = np.tile(rows["factor"].to_numpy(), 2)[first][edges >= 0]
    edges = edges[edges >= 0]
    lag = np.rint(scenario.lag[edges] * factor).astype(np.int64)
    communications = type(communications)(instances, communications.participations)
    return scenario.replace(communications=communications).with_lags(
        edges, lag, Basis.GUESSED, note.format(count=f"{len(factors):,}")
    )
