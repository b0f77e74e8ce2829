"""Runs the nodes of a Chakra file for as long as they say: list scheduling, as ASTRA-sim does with recorded times.

A node may begin when all that it depends on have ended. Of those that may, the one with the lowest id goes first. A
rank does at a time one operator of the host, one computation of the device and one communication; receives take
nothing. A node takes its duration in whole microseconds, at least a nanosecond. Communications take what was recorded:
what a network would make of them is for a simulator to say.

Source: ASTRA-sim 2.0, workload/Workload.cc and HardwareResource.cc.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from etloom.formats.chakra.et_files import ChakraNode
from etloom.formats.chakra.protobuf import NODE_TYPES

_TYPES = {name: number for number, name in NODE_TYPES.items()}
_SEND, _RECV, _COLL = (_TYPES[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_INSTANT_TYPES = (_TYPES["METADATA_NODE"], _TYPES["INVALID_NODE"])


class Resource(IntEnum):
    CPU = 0
    COMPUTE = 1
    COMMUNICATE = 2
    FREE = 3  # takes none


@dataclass(frozen=True)
class Schedule:
    """``start`` and ``end`` by id, ns from the beginning; ``stuck``: ids that wait for ever."""

    start: dict[int, int]
    end: dict[int, int]
    stuck: list[int]

    @property
    def makespan_ns(self) -> int:
        return max(self.end.values(), default=0)


def required_resource(node: ChakraNode) -> Resource:
    """What a node occupies while it runs."""
    if node.type == _RECV or node.type in _INSTANT_TYPES:
        return Resource.FREE
    if node.runs_on_host:
        return Resource.CPU
    return Resource.COMMUNICATE if node.type in (_SEND, _COLL) else Resource.COMPUTE


def schedule_nodes(nodes: Sequence[ChakraNode], *, limited: bool = True) -> Schedule:
    """When each node runs. limited: whether nodes share resources; else dependencies alone hold them up."""
    missing = {node.id: len(node.on - {node.id}) + (node.id in node.on) for node in nodes}
    leads: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        for on in node.on:
            leads[on].append(node.id)
    uses = {node.id: required_resource(node) if limited else Resource.FREE for node in nodes}
    takes = {
        node.id: 0 if node.type in _INSTANT_TYPES else max(1, 1000 * int(node.message.duration_micros))
        for node in nodes
    }
    ready: list[list[int]] = [[], [], []]
    running: list[tuple[int, int]] = []  # (end, id)
    busy = [False] * 3
    start: dict[int, int] = {}
    end: dict[int, int] = {}

    def begin(one: int, now: int) -> None:
        start[one], end[one] = now, now + takes[one]
        heapq.heappush(running, (end[one], one))

    def may_begin(one: int, now: int) -> None:
        if uses[one] == Resource.FREE:
            begin(one, now)
        else:
            heapq.heappush(ready[uses[one]], one)

    now = 0
    for one in sorted(one for one, count in missing.items() if not count):
        may_begin(one, now)
    while True:
        for kind in (Resource.CPU, Resource.COMPUTE, Resource.COMMUNICATE):
            if not busy[kind] and ready[kind]:
                busy[kind] = True
                begin(heapq.heappop(ready[kind]), now)
        if not running:
            return Schedule(start, end, sorted(missing.keys() - end.keys()))
        now = running[0][0]
        while running and running[0][0] == now:
            _, done = heapq.heappop(running)
            if uses[done] != Resource.FREE:
                busy[uses[done]] = False
            for one in leads[done]:
                missing[one] -= 1
                if not missing[one]:
                    may_begin(one, now)
