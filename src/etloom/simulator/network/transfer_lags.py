"""The prediction step that replaces the transfer times of a scenario by those on another network."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.graphs.graph import Int64Array
from etloom.simulator.network.model import NetworkModel, TransferTimes
from etloom.simulator.scenario import Basis, Scenario

MAX_SWEEPS = 30
SETTLED = 2e-4
"""Relative change of the run time below which the times have settled."""


def apply_network(
    scenario: Scenario, network: NetworkModel, basis: Basis, fitted: NetworkModel | None = None
) -> Scenario:
    """Return the scenario with the transfer times of its communications replaced by those on a network.

    The time of a transfer depends on the transfers on its links at that moment, and these on the times of all: both
    are computed in turn until the run time settles. Communications of unknown size or algorithm keep their time, which
    a note counts; unmatched ones take the time of the network, without waits for ranks that were not recorded.

    Args:
        network: the new network.
        fitted: if given, transfers keep their deviations from this model of the recorded network: the time of each is
            multiplied by the ratio of its times on both.
    """
    times = TransferTimes(scenario.communications, network)
    notes = []
    if times.unknown:
        notes.append(
            f"{times.unknown:,} communications keep their time: their size or algorithm is not known"
        )
    if not len(times.instances):
        return scenario.replace(notes=(*scenario.notes, *notes))
    edges = _Edges(scenario, times)
    lag = scenario.lag if fitted else edges.clear(scenario.lag)
    modelled = edges.model_recording(scenario, fitted) if fitted else None
    previous, point_times = -1, scenario.compute_times(lag)
    for sweep in range(MAX_SWEEPS):
        begins = point_times[edges.begin]
        finish = times.finish(begins)
        if modelled is None:
            lag = edges.set_transfers(lag, begins, finish)
        else:
            lag = edges.scale_transfers(scenario.lag, edges.measure(begins, finish) / modelled)
        point_times = scenario.compute_times(lag)
        makespan = int(point_times.max() - point_times.min())
        if sweep and abs(makespan - previous) <= SETTLED * makespan:
            break
        previous = makespan
    changed = np.concatenate((edges.own, edges.transfer[edges.transfer >= 0]))
    return scenario.with_lags(changed, lag[changed], basis, *notes).replace(times=point_times)


class _Edges:
    """Dependency-graph edges and begin points of the participations in `TransferTimes.parts`, as parallel arrays."""

    def __init__(self, scenario: Scenario, times: TransferTimes) -> None:
        parts = scenario.communications.participations[times.parts]
        self.begin = parts["begin"].to_numpy()
        self.transfer = parts["transfer_edge"].to_numpy()
        self.own = parts["own_edge"].to_numpy()
        self.place, self.stays = times.place, times.stays
        matched = pl.Series(self.transfer >= 0)
        is_matched = pl.DataFrame({"place": times.place, "matched": matched})
        self.alone = ~is_matched.select(pl.col("matched").any().over("place"))["matched"].to_numpy()

    def clear(self, lag: Int64Array) -> Int64Array:
        """Return the edge lags (ns), with 0 from begin to finish of each rank's part in a matched communication."""
        lag = lag.copy()
        lag[self.own[~self.alone]] = 0
        return lag

    def measure(self, begins: np.ndarray, finish: np.ndarray) -> np.ndarray:
        """Return the duration (ns, at least 1) of each transfer, from the arrival of the last rank to ``finish``."""
        return np.asarray(np.maximum(finish - self._find_last(begins, len(finish)), 1.0))

    def model_recording(self, scenario: Scenario, network: NetworkModel) -> np.ndarray:
        """Return the duration (ns) of each transfer on a network if all ranks begin at their recorded times."""
        begins = scenario.graph.time[self.begin]
        return self.measure(begins, TransferTimes(scenario.communications, network).finish(begins))

    def scale_transfers(self, lag: Int64Array, ratio: np.ndarray) -> Int64Array:
        """Return the edge lags (ns), with the lags of each transfer multiplied by the transfer's ``ratio``."""
        scaled = lag.copy()
        for edges in (self.own, self.transfer):
            index = edges[edges >= 0]
            factor = ratio[self.place[edges >= 0]]
            scaled[index] = np.rint(np.minimum(lag[index] * factor, 2.0**62)).astype(np.int64)
        return scaled

    def _find_last(self, begins: np.ndarray, count: int) -> np.ndarray:
        """Return the time (ns) at which the last rank arrives at each transfer."""
        last = np.full(count, np.iinfo(np.int64).min)
        np.maximum.at(last, self.place, begins)
        return last

    def set_transfers(self, lag: Int64Array, begins: np.ndarray, finish: np.ndarray) -> Int64Array:
        """Return the edge lags (ns) with which each transfer ends at its time in ``finish``."""
        lag = lag.copy()
        last = self._find_last(begins, len(finish))
        lasting = np.rint(self.stays * (finish - last)[self.place]).astype(np.int64)
        needed = last[self.place] + np.maximum(lasting, 0)
        has = self.transfer >= 0
        lag[self.transfer[has]] = (needed - last[self.place])[has]
        lag[self.own[self.alone]] = (needed - begins)[self.alone]
        return lag
