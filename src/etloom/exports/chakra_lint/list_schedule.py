"""Simulate the nodes of one Chakra file with their recorded durations, by list scheduling as in ASTRA-sim.

A node may start when all its dependencies have ended; among several such nodes the one with the lowest id starts first.
A rank runs at most one host operator, one GPU computation and one communication or memory access at a time; receives
occupy nothing. A node takes its duration in whole microseconds, at least one nanosecond. Communications take their
recorded time: modeling the network is left to a simulator.

Source: ASTRA-sim 2.0, workload/Workload.cc and HardwareResource.cc.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from etloom.formats.chakra.et_files import ChakraNode
from etloom.formats.chakra.protobuf import TYPE_NUMBERS

_METADATA, _COMP, _RECV = (TYPE_NUMBERS[f"{kind}_NODE"] for kind in ("METADATA", "COMP", "COMM_RECV"))


class Resource(IntEnum):
    """Resources of a simulated rank: CPU, compute, communication; a running node occupies at most a single resource."""

    CPU = 0
    COMPUTE = 1
    COMMUNICATION = 2
    NONE = 3


EXCLUSIVE = (Resource.CPU, Resource.COMPUTE, Resource.COMMUNICATION)


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
    node_type = node.type
    if node_type in (_RECV, _METADATA):
        return Resource.NONE
    if node.runs_on_host:
        return Resource.CPU
    return Resource.COMPUTE if node_type == _COMP else Resource.COMMUNICATION


class RankGraph:
    """The nodes of one rank by position in the order of their ids, and who waits for whom.

    Attributes:
        nodes: The nodes; of several with one id the last.
        missing: Number of dependencies of each node; those on nodes that do not exist never end.
        dependents: Positions of the nodes that depend on each node.
        resources: Resource of each node.
        durations: Recorded time of each node, ns.
    """

    def __init__(self, nodes: Iterable[ChakraNode]) -> None:
        by_id = {node.id: node for node in nodes}
        ids = sorted(by_id)
        self.nodes = [by_id[node_id] for node_id in ids]
        position = {node_id: place for place, node_id in enumerate(ids)}
        self.missing: list[int] = []
        self.dependents: list[list[int]] = [[] for _ in ids]
        for place, node in enumerate(self.nodes):
            dependencies = node.dependencies
            self.missing.append(len(dependencies))
            for dependency in dependencies:
                if (target := position.get(dependency)) is not None:
                    self.dependents[target].append(place)
        self.resources = [required_resource(node) for node in self.nodes]
        self.durations = [
            0 if node.type == _METADATA else 1000 * node.message.duration_micros or 1 for node in self.nodes
        ]

    def replay(self, *, limited: bool = True) -> tuple[list[int], list[int]]:
        """Return the simulated start and end of each node with its recorded time, ns; -1 for nodes that never start.

        Args:
            limited: Whether nodes share resources; otherwise only dependencies delay them.
        """
        missing = list(self.missing)
        resources = self.resources if limited else [Resource.NONE] * len(missing)
        starts, ends = [-1] * len(missing), [-1] * len(missing)
        ready: tuple[list[int], ...] = ([], [], [])
        busy = [False, False, False]
        running: list[tuple[int, int]] = []  # (end, position)
        now = 0

        def begin(place: int) -> None:
            starts[place], ends[place] = now, now + self.durations[place]
            heapq.heappush(running, (ends[place], place))

        def make_ready(place: int) -> None:
            resource = resources[place]
            if resource == Resource.NONE:
                begin(place)
            else:
                heapq.heappush(ready[resource], place)

        for place, count in enumerate(missing):
            if not count:
                make_ready(place)
        while True:
            for resource in EXCLUSIVE:
                if ready[resource] and not busy[resource]:
                    busy[resource] = True
                    begin(heapq.heappop(ready[resource]))
            if not running:
                return starts, ends
            now = running[0][0]
            while running and running[0][0] == now:
                place = heapq.heappop(running)[1]
                if (resource := resources[place]) != Resource.NONE:
                    busy[resource] = False
                for dependent in self.dependents[place]:
                    missing[dependent] -= 1
                    if not missing[dependent]:
                        make_ready(dependent)


def schedule_nodes(nodes: Sequence[ChakraNode], *, limited: bool = True) -> Schedule:
    """Simulate the nodes of one rank, and return the start and end of each as a `Schedule`.

    Args:
        nodes: The nodes of one rank.
        limited: Whether nodes share resources; otherwise only dependencies delay them.
    """
    graph = RankGraph(nodes)
    starts, ends = graph.replay(limited=limited)
    timed = [(node.id, place) for place, node in enumerate(graph.nodes) if starts[place] >= 0]
    stuck = [node.id for place, node in enumerate(graph.nodes) if starts[place] < 0]
    return Schedule({i: starts[place] for i, place in timed}, {i: ends[place] for i, place in timed}, stuck)
