"""Predicts kernel and collective times on another device, from measured tables or from the peaks of both devices.

kernel_ratios      the time of each kernel on another device, relative to the recorded one
collective_ratios  the time of collectives within a node
measured_tables    tables of kernels and collectives measured on several devices
call_shapes        families, sizes and precisions of operator calls, as the tables name them
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from etloom.analyses.flops.measured_tables import MeasuredRatios
from etloom.analyses.flops.peaks import lookup_peaks
from etloom.core.errors import AnalysisError
from etloom.simulator.devices.kernel_ratios import (
    change_device,
    changes_vendor,
    find_recorded_device,
    list_kernel_costs,
)
from etloom.simulator.scenario import Basis, Scenario

__all__ = ["change_collectives", "change_device", "changes_vendor", "list_kernel_costs"]


# Predicts the time of collectives within one node on another device, from NCCL times measured on both devices.

NODE_SIZE = 8
"""Devices a node: ranks 0 to 7 are taken as the first one."""

_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
}


def change_collectives(scenario: Scenario, device: str, *, tables: Path | None = None) -> Scenario:
    """Return the scenario with times of collectives within a node for another device; unchanged without tables.

    Args:
        scenario: of a run recorded on a device with known peaks.
        device: name of a device of devices.json, such as h100.
        tables: folder of measured tables; default: those of the package aiconfigurator-core, if it is installed.
    """
    try:
        old = find_recorded_device(scenario)
    except AnalysisError:
        return scenario
    measured = MeasuredRatios.load("collective", old.name, lookup_peaks(device).name, tables)
    if measured is None:
        return scenario
    known = scenario.communications.instances.filter(
        (pl.col("where") == "device")
        & pl.col("collective").is_in(list(_NAMES))
        & (pl.col("bytes") > 0)
        & (pl.col("group_size") > 1)
        & ((pl.col("ranks").list.min() // NODE_SIZE) == (pl.col("ranks").list.max() // NODE_SIZE))
    )
    sizes = known.select("group_size", "bytes").to_numpy().astype(np.float64)
    names = [_NAMES[name] for name in known["collective"]]
    ratios = known.select("instance", ratio=pl.Series(measured.compute_ratios(sizes, names))).drop_nans()
    if not ratios.height:
        return scenario
    parts = scenario.communications.participations.join(ratios, on="instance")
    lag, basis = scenario.lag.copy(), scenario.basis.copy()
    for column in ("own_edge", "transfer_edge"):
        edges = parts.filter(pl.col(column) >= 0)
        index = edges[column].to_numpy()
        lag[index] = np.rint(scenario.lag[index] * edges["ratio"].to_numpy()).astype(np.int64)
        basis[index] = np.maximum(basis[index], int(Basis.TABLE))
    note = f"{ratios.height:,} collectives within a node take the ratio of those measured on both devices"
    return scenario.replace(lag=lag, basis=basis, notes=(*scenario.notes, note))
