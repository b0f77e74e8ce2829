"""Simulate the files of all ranks together, by ASTRA-sim's rules, to find nodes that never end.

Resources and order within a rank are those of `list_schedule`. Across ranks:

- A collective ends on all members of its group once all run it: its messages match by tag and size. The tag counts the
  collectives of the group on the rank; for group 0 it counts those of all groups.
- A receive ends once a message with the same source, destination, tag and size was sent; a send ends by itself.
- A broadcast takes its recorded time and waits for nobody.
- The network takes no time: which nodes never end hardly depends on it.

Source: ASTRA-sim 2.0, workload/Workload.cc, system/Sys.cc and the analytical network.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etloom.exports.chakra_lint.list_schedule import Resource, required_resource
from etloom.exports.chakra_lint.message_ends import get_message_key
from etloom.formats.chakra.et_files import ChakraNode
from etloom.formats.chakra.protobuf import COLLECTIVES, TYPE_NUMBERS

_METADATA, _SEND, _RECV, _COLL = (
    TYPE_NUMBERS[f"{kind}_NODE"] for kind in ("METADATA", "COMM_SEND", "COMM_RECV", "COMM_COLL")
)
_BROADCAST = next(number for number, name in COLLECTIVES.items() if name == "broadcast")
_INSTANT_TYPES = (_METADATA, TYPE_NUMBERS["INVALID_NODE"])
_EXCLUSIVE = (Resource.CPU, Resource.COMPUTE, Resource.COMMUNICATION)
WORLD = "0"

Key = tuple[Any, ...]


@dataclass(frozen=True)
class BlockedNode:
    """A communication that has started but never ends, and the reason.

    Attributes:
        rank: Its rank.
        node: The node.
        reason: Description of what it waits for.
    """

    rank: int
    node: ChakraNode
    reason: str


@dataclass(frozen=True)
class JointRun:
    """The result of `run_together`: nodes that never end, and the last node of each rank with its end in ns.

    Attributes:
        blocked: Communications that never end; empty if all nodes do.
        last: Rank -> the node that ends last.
        unfinished: Rank -> number of nodes that never end.
        end_ns: Rank -> end of that node, ns: the time on a network that takes no time.
    """

    blocked: list[BlockedNode]
    last: dict[int, ChakraNode]
    unfinished: dict[int, int]
    end_ns: dict[int, int]


def run_together(
    nodes: Mapping[int, list[ChakraNode]], groups: Mapping[int, Mapping[str, list[int]]]
) -> JointRun:
    """Simulate the nodes of all ranks together, on a network that takes no time.

    Ranks without a file are assumed to take part in every collective, and to send every message, at once.

    Args:
        nodes: Nodes of each rank.
        groups: Rank -> number of a group -> its ranks.
    """
    clock = _Clock()
    meetings = _Meetings(nodes.keys(), groups)
    ranks = {rank: _Rank(rank, rank_nodes, clock, meetings) for rank, rank_nodes in nodes.items()}
    for rank in ranks.values():
        rank.start_queued()
    last: dict[int, ChakraNode] = {}
    end_ns: dict[int, int] = {}
    while clock.running:
        clock.now = clock.running[0][0]
        touched = set()
        while clock.running and clock.running[0][0] == clock.now:
            _, number, node_id = heapq.heappop(clock.running)
            last[number], end_ns[number] = ranks[number].end(node_id), clock.now
            touched.add(number)
        for number in sorted(touched):
            ranks[number].start_queued()
    unfinished = {number: len(rank.missing) for number, rank in ranks.items() if rank.missing}
    blocked = [
        BlockedNode(rank, ranks[rank].nodes[node_id], reason)
        for rank, node_id, reason in meetings.list_waiting()
    ]
    return JointRun(blocked, last, unfinished, end_ns)


class _Clock:
    """The simulated time, ns, and a heap of the running nodes: (end, rank, node id)."""

    def __init__(self) -> None:
        self.now = 0
        self.running: list[tuple[int, int, int]] = []

    def run(self, rank: int, node_id: int, duration: int) -> None:
        heapq.heappush(self.running, (self.now + duration, rank, node_id))


class _Meetings:
    """Matches the ranks of collectives and messages, and holds the communications that wait for other ranks."""

    def __init__(self, ranks: Any, groups: Mapping[int, Mapping[str, list[int]]]) -> None:
        self._ranks = set(ranks)
        self._groups = groups
        self._turns: dict[int, Counter[str]] = defaultdict(Counter)
        self._collectives: dict[Key, dict[int, int]] = defaultdict(dict)
        self._sent: Counter[Key] = Counter()
        self._receives: dict[Key, list[tuple[int, int]]] = defaultdict(list)

    def join(self, rank: int, node: ChakraNode) -> list[tuple[int, int]]:
        """Add a rank to a collective; return (rank, node id) of all members if all have joined, else []."""
        group = str(node.attributes.get("pg_name") or WORLD)
        members = self._groups[rank].get(group)
        turns = self._turns[rank]
        tag = turns.total() if group == WORLD else turns[group]
        turns[group] += 1
        kind, size = (str(node.attributes.get(name)) for name in ("comm_type", "comm_size"))
        present = frozenset(self._ranks if members is None else self._ranks.intersection(members))
        arrived = self._collectives[group, tag, kind, size, present]
        arrived[rank] = node.id
        is_alone = members is not None and len(members) < 2
        if is_alone or arrived.keys() != present:
            return []
        return list(self._collectives.pop((group, tag, kind, size, present)).items())

    def send(self, rank: int, node: ChakraNode) -> list[tuple[int, int]]:
        """Send a message; return the waiting receive that it completes as (rank, node id), if there is one."""
        key = get_message_key(rank, node)
        if self._receives[key]:
            return [self._receives[key].pop(0)]
        self._sent[key] += 1
        return []

    def receive(self, rank: int, node: ChakraNode) -> bool:
        """Return whether the message of a receive node has been sent; if not, register the receive as waiting."""
        key = get_message_key(rank, node)
        if self._sent[key] or key[0] not in self._ranks:
            self._sent[key] -= 1
            return True
        self._receives[key].append((rank, node.id))
        return False

    def list_waiting(self) -> list[tuple[int, int, str]]:
        """Return (rank, node id, reason) of all communications that are still waiting."""
        waiting = [
            (rank, node_id, _explain(key[0], present - arrived.keys()))
            for key, arrived in self._collectives.items()
            for present in [key[4]]
            for rank, node_id in arrived.items()
        ]
        for key, receives in self._receives.items():
            waiting += [(rank, node_id, f"no matching send on rank {key[0]}") for rank, node_id in receives]
        return sorted(waiting)


def _explain(group: str, absent: Any) -> str:
    if not absent:
        return f"group {group} has a single rank"
    ranks = ", ".join(map(str, sorted(absent)[:8]))
    return f"group {group}: the same collective (turn, type, size) never runs on rank {ranks}"


class _Rank:
    """The simulation state of one rank: unfinished dependencies, ready nodes, and busy resources."""

    def __init__(self, rank: int, nodes: list[ChakraNode], clock: _Clock, meetings: _Meetings) -> None:
        self.rank, self.clock, self.meetings = rank, clock, meetings
        self.nodes = {node.id: node for node in nodes}
        # ASTRA-sim ignores control dependencies.
        self.missing = {node_id: len(set(node.message.data_deps)) for node_id, node in self.nodes.items()}
        self.dependents: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes.values():
            for dependency in set(node.message.data_deps):
                self.dependents[dependency].append(node.id)
        self.ready: dict[Resource, list[int]] = {resource: [] for resource in _EXCLUSIVE}
        self.busy = dict.fromkeys(_EXCLUSIVE, False)
        for node_id in sorted(node_id for node_id, count in self.missing.items() if not count):
            self._make_ready(node_id)

    def start_queued(self) -> None:
        """Start the ready node with the lowest id on each free resource."""
        for resource in _EXCLUSIVE:
            if not self.busy[resource] and self.ready[resource]:
                self.busy[resource] = True
                self._begin(self.nodes[heapq.heappop(self.ready[resource])])

    def end(self, node_id: int) -> ChakraNode:
        """Mark a node as ended, free its resource, and queue the nodes whose dependencies have all ended."""
        node = self.nodes[node_id]
        del self.missing[node_id]
        if (resource := required_resource(node)) != Resource.NONE:
            self.busy[resource] = False
        for dependent in self.dependents[node_id]:
            self.missing[dependent] -= 1
            if not self.missing[dependent]:
                self._make_ready(dependent)
        return node

    def _make_ready(self, node_id: int) -> None:
        resource = required_resource(self.nodes[node_id])
        if resource == Resource.NONE:
            self._begin(self.nodes[node_id])
        else:
            heapq.heappush(self.ready[resource], node_id)

    def _begin(self, node: ChakraNode) -> None:
        if node.type == _COLL and node.attributes.get("comm_type") != _BROADCAST:
            ending = self.meetings.join(self.rank, node)
        elif node.type == _SEND:
            ending = [(self.rank, node.id), *self.meetings.send(self.rank, node)]
        elif node.type == _RECV:
            ending = [(self.rank, node.id)] if self.meetings.receive(self.rank, node) else []
        else:
            is_instant = node.type in _INSTANT_TYPES
            duration = 0 if is_instant else max(1, 1000 * int(node.message.duration_micros))
            self.clock.run(self.rank, node.id, duration)
            return
        for rank, node_id in ending:
            self.clock.run(rank, node_id, 1)
