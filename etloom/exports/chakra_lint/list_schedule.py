"""Simulate the nodes of one Chakra file with their recorded durations, by list scheduling as in ASTRA-sim.

A node may start when all its dependencies have ended; among several such nodes the one with the lowest id starts first.
A rank runs at most one host operator, one GPU computation and one communication at a time; receives occupy nothing.
A node takes its duration in whole microseconds, at least one nanosecond. Communications take their recorded time:
modeling the network is left to a simulator.

Source: ASTRA-sim 2.0, workload/Workload.cc and HardwareResource.cc.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from etloom.formats.chakra.et_files import ChakraNode
from etloom.formats.chakra.protobuf import TYPE_NUMBERS

_SEND, _RECV, _COLL = (TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_INSTANT_TYPES = (TYPE_NUMBERS["METADATA_NODE"], TYPE_NUMBERS["INVALID_NODE"])


class Resource(IntEnum):
    """Resources of a simulated rank: CPU, compute, communication; a running node occupies at most a single resource."""

    CPU = 0
    COMPUTE = 1
    COMMUNICATION = 2
    NONE = 3


_EXCLUSIVE = (Resource.CPU, Resource.COMPUTE, Resource.COMMUNICATION)


@dataclass(frozen=True)
class Schedule:
    """Simulated start and end of each node by id, in ns from the start of the simulation; and nodes that never start.

    Attributes:
        start: Node id -> start in ns.
        end: Node id -> end in ns.
        stuck: Ids of the nodes that wait forever.
    """

    start: dict[int, int]
    end: dict[int, int]
    stuck: list[int]

    @property
    def makespan_ns(self) -> int:
        """The simulated end of the last node, ns; 0 if no node has run."""
        return max(self.end.values(), default=0)


def required_resource(node: ChakraNode) -> Resource:
    """Return the resource that a node occupies while it runs."""
    if node.type == _RECV or node.type in _INSTANT_TYPES:
        return Resource.NONE
    if node.runs_on_host:
        return Resource.CPU
    return Resource.COMMUNICATION if node.type in (_SEND, _COLL) else Resource.COMPUTE


def schedule_nodes(nodes: Sequence[ChakraNode], *, limited: bool = True) -> Schedule:
    """Simulate the nodes of one rank, and return the start and end of each as a `Schedule`.

    Args:
        nodes: The nodes of one rank.
        limited: Whether nodes share resources; otherwise only dependencies delay them.
    """
    missing = {node.id: len(node.dependencies - {node.id}) + (node.id in node.dependencies) for node in nodes}
    dependents: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        for dependency in node.dependencies:
            dependents[dependency].append(node.id)
    run = _Run(nodes, limited=limited)
    for node_id in sorted(node_id for node_id, count in missing.items() if not count):
        run.make_ready(node_id)
    run.start_queued()
    while run.running:
        for node_id in run.advance():
            for dependent in dependents[node_id]:
                missing[dependent] -= 1
                if not missing[dependent]:
                    run.make_ready(dependent)
        run.start_queued()
    return Schedule(run.start, run.end, sorted(missing.keys() - run.end.keys()))


class _Run:
    """The state of a simulation: the time (ns), the running nodes, and the ready nodes of each resource."""

    def __init__(self, nodes: Sequence[ChakraNode], *, limited: bool) -> None:
        self.resources = {node.id: required_resource(node) if limited else Resource.NONE for node in nodes}
        self.durations = {
            node.id: 0 if node.type in _INSTANT_TYPES else max(1, 1000 * int(node.message.duration_micros))
            for node in nodes
        }
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.now = 0
        self.running: list[tuple[int, int]] = []  # (end, id)
        self.ready: dict[Resource, list[int]] = {resource: [] for resource in _EXCLUSIVE}
        self.busy = dict.fromkeys(_EXCLUSIVE, False)

    def make_ready(self, node_id: int) -> None:
        """Start a node that occupies no resource; add any other to the queue of its resource."""
        resource = self.resources[node_id]
        if resource == Resource.NONE:
            self._begin(node_id)
        else:
            heapq.heappush(self.ready[resource], node_id)

    def start_queued(self) -> None:
        """Start the ready node with the lowest id on each free resource."""
        for resource in _EXCLUSIVE:
            if not self.busy[resource] and self.ready[resource]:
                self.busy[resource] = True
                self._begin(heapq.heappop(self.ready[resource]))

    def advance(self) -> Iterator[int]:
        """Advance the time to the next end of a node, and yield all nodes that end then.

        Including those that start and end meanwhile.
        """
        self.now = self.running[0][0]
        while self.running and self.running[0][0] == self.now:
            _, node_id = heapq.heappop(self.running)
            if (resource := self.resources[node_id]) != Resource.NONE:
                self.busy[resource] = False
            yield node_id

    def _begin(self, node_id: int) -> None:
        self.start[node_id], self.end[node_id] = self.now, self.now + self.durations[node_id]
        heapq.heappush(self.running, (self.end[node_id], node_id))
