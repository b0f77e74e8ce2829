"""The network model: topologies, costs of collectives, shared links, and parameters fitted to a recording.

topology       levels with bandwidth and latency, from YAML or a preset
placement      the cost of a communication: rounds and bytes per level, by the placement of its ranks on hosts
model          the times of communications on a network: many groups at a time, or a scenario's with shared links
fit            the network of a recording
target         the network of a prediction, as the user names it
transfer_lags  the prediction step
astra_sim      times of single collectives as ASTRA-sim's analytical network gives them
"""

from __future__ import annotations

from etloom.simulator.network.fit import NetworkFit, fit_network, try_fit
from etloom.simulator.network.model import NetworkModel
from etloom.simulator.network.target import (
    TargetNetwork,
    parse_target,
    resolve_change,
    resolve_network,
)
from etloom.simulator.network.topology import Topology, parse_topology, read_topology
from etloom.simulator.network.transfer_lags import apply_network

__all__ = [
    "NetworkFit",
    "NetworkModel",
    "TargetNetwork",
    "Topology",
    "apply_network",
    "fit_network",
    "parse_target",
    "parse_topology",
    "read_topology",
    "resolve_change",
    "resolve_network",
    "try_fit",
]
