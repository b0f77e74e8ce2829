"""Determines the network of a prediction, from a bandwidth factor or a topology (rate, preset, YAML file)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.simulator.changes import Network, parse_network
from etloom.simulator.network.fit import NetworkFit
from etloom.simulator.network.model import NetworkModel
from etloom.simulator.network.topology import ANY_SIZE, PRESETS, Level, Topology, get_preset, read_topology
from etloom.simulator.scenario import Basis

_SAME_LATENCY = ", the same latency"

LINK_EFFICIENCY = 0.95
"""Share of a given rate that transfers reach if the recorded network's rate is not known: headers and pauses."""

UNKNOWN_LATENCY_NS = 25_000.0
"""Latency of a message if neither the network nor the recording states it."""


NOMINAL_DEVIATION = 0.3
"""Relative standard deviation of times from nominal rates, calibrated on NCCL's collectives in a node."""


@dataclass(frozen=True)
class TargetNetwork:
    """Network of a prediction: model (None: communications take the recorded time), and basis of its parameters."""

    model: NetworkModel | None
    basis: Basis
    deviation: float
    notes: tuple[str, ...] = ()


def resolve_network(
    target: float | Topology | None, fit: NetworkFit | None, recorded: float | Topology | None = None
) -> TargetNetwork:
    """Return the network of a prediction, from a bandwidth factor, a topology, or the network fitted to the recording.

    Args:
        target: a factor of the fitted bandwidth, or a topology; None: the fitted network.
        fit: the network fitted to the recording, None if it has no communication.
        recorded: the nominal network of the recording, for its efficiency.

    Raises:
        EtloomError: a factor of a network that could not be fitted, or a factor as the recorded network.
    """
    if target is None:
        if fit is None:
            return TargetNetwork(None, Basis.RECORDED, 0.0)
        return TargetNetwork(fit.model, Basis.FITTED, _deviation(fit, 0.0), (_describe_fit(fit),))
    if isinstance(target, float):
        if fit is None:
            raise EtloomError(
                f"network x{target:g}: no network could be fitted to the recording, so no factor applies",
                remedy="name a rate (200Mbit/s), or scale recorded times: etloom simulate --set 'comm x0.5'",
            )
        model = fit.model.scale_bandwidth(target)
        notes = (_describe_fit(fit), f"network: {target:g} x the recorded bandwidth{_SAME_LATENCY}")
        return TargetNetwork(model, Basis.FITTED, _deviation(fit, math.log2(target)), notes)
    return _place_on_topology(target, recorded, fit)


def resolve_change(change: Network, fit: NetworkFit | None) -> TargetNetwork:
    """Return the network that a `Network` change of `etloom.simulate` describes. Raises EtloomError."""
    rate = change.bytes_per_second
    target = resolve_network(change.bandwidth if rate is None else _describe_rate(change.text, rate), fit)
    if change.latency_ns is None or target.model is None:
        return target
    note = f"latency: {change.latency_ns / 1e3:,.1f} µs per message"
    notes = (*(text.removesuffix(_SAME_LATENCY) for text in target.notes), note)
    return replace(target, model=target.model.with_latency(change.latency_ns), notes=notes)


def parse_target(text: str) -> float | Topology:
    """Parse a factor (x0.2) to a float, or a rate, preset name or YAML file to a topology. Raises EtloomError."""
    if text in PRESETS:
        return get_preset(text)
    if Path(text).suffix in (".yaml", ".yml"):
        return read_topology(Path(text))
    try:
        parsed = parse_network(text, None)
    except EtloomError:
        raise EtloomError(
            f"unknown network {text!r}",
            remedy=f"a factor (x0.2), a rate (200Mbit/s, 50GB/s), a YAML file, or one of {', '.join(PRESETS)}",
        ) from None
    if parsed.bytes_per_second is None:
        return parsed.bandwidth
    return _describe_rate(text, parsed.bytes_per_second)


def _describe_rate(name: str, bytes_per_second: float) -> Topology:
    """Return a topology of a single level, for any number of ranks, with a bandwidth and unknown latency."""
    return Topology(
        name, (Level("network", ANY_SIZE, "switch", bytes_per_second, math.nan, LINK_EFFICIENCY),)
    )


def _place_on_topology(
    topology: Topology, recorded: float | Topology | None, fit: NetworkFit | None
) -> TargetNetwork:
    """Return the network for a topology, with efficiency and missing latencies from the fitted network, if known."""
    efficiency, basis, deviation = None, Basis.GUESSED, NOMINAL_DEVIATION
    notes: list[str] = []
    if fit is not None:
        notes.append(_describe_fit(fit))
    if recorded is not None and fit is not None:
        if isinstance(recorded, float):
            raise EtloomError(
                f"recorded network: expected a network, got the factor x{recorded:g}",
                remedy="such as 1Gbit/s, a preset or a YAML file",
            )
        recorded_rate = recorded.levels[-1].bytes_per_second
        efficiency = min(fit.level.bytes_per_second / recorded_rate, 1.0)
        basis = Basis.FITTED
        deviation = _deviation(fit, math.log2(topology.levels[-1].bytes_per_second / recorded_rate))
        notes.append(
            f"transfers reach {100 * efficiency:.0f} % of the recorded network's bandwidth, and are assumed to reach "
            f"the same share of the new one's"
        )
    levels = []
    for level in topology.levels:
        latency = level.latency_ns
        if math.isnan(latency):
            latency = fit.level.latency_ns if fit else UNKNOWN_LATENCY_NS
        levels.append(replace(level, latency_ns=latency, efficiency=efficiency or level.efficiency))
    if efficiency is None:
        shares = ", ".join(f"{level.name} {100 * level.efficiency:.0f} %" for level in levels)
        notes.append(
            f"assumed share of the bandwidth that transfers reach: {shares}; measured by `predict --recorded-network`"
        )
    sharing = fit.model.sharing_efficiency if fit else 1.0
    model = NetworkModel(Topology(topology.name, tuple(levels)), sharing_efficiency=sharing)
    return TargetNetwork(model, basis, deviation, tuple(notes))


def _describe_fit(fit: NetworkFit) -> str:
    source = "fitted" if fit.is_latency_fitted else "assumed: no small communication was recorded"
    return (
        f"recorded network: {fit.level.bytes_per_second / 1e9:,.3f} GB/s per rank and direction, fitted to "
        f"{fit.count:,} communications (spread {100 * fit.deviation:.0f} %); latency "
        f"{fit.level.latency_ns / 1e3:,.1f} µs per message ({source})"
    )


def _deviation(fit: NetworkFit, octaves: float) -> float:
    """Return the relative standard deviation of transfer times at a bandwidth 2**``octaves`` times the recorded
    bandwidth."""
    return math.hypot(0.02, fit.deviation / math.sqrt(min(max(fit.count, 1), 16)), 0.01 * octaves)
