"""Simulate the files of all ranks together, by ASTRA-sim's rules, to find nodes that never end.

Resources and order within a rank are those of `list_schedule`. Across ranks:

- A collective ends on all members of its group once all run it: its messages match by tag and size. The tag counts the
  collectives of the group on the rank; for group 0 it counts those of all groups.
- A receive ends once a message with the same source, destination, tag and size was sent; a send ends by itself.
- A broadcast takes its recorded time and waits for nobody.
- Control dependencies count as data dependencies do.
- A node of type 0 ends at once, but what depends on it starts only after another node of the rank has ended.
- What a damaged node does when it starts is in `lint_codes.NODE_EFFECTS`.
- The network takes no time: which nodes never end hardly depends on it.

Source: ASTRA-sim 2.0, workload/Workload.cc, system/Sys.cc and the analytical network.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from etloom.exports.chakra_lint.lint_codes import ABORT, RAISE
from etloom.exports.chakra_lint.list_schedule import EXCLUSIVE, RankGraph, Resource
from etloom.exports.chakra_lint.message_ends import get_message_key
from etloom.formats.chakra.et_files import ChakraNode
from etloom.formats.chakra.protobuf import COLLECTIVES, TYPE_NUMBERS

_SEND, _RECV, _COLL = (TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_BROADCAST = next(number for number, name in COLLECTIVES.items() if name == "broadcast")
_INSTANT_TYPES = (TYPE_NUMBERS["METADATA_NODE"], TYPE_NUMBERS["INVALID_NODE"])
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
        aborted: Whether a node ends the whole simulation.
    """

    blocked: list[BlockedNode]
    last: dict[int, ChakraNode]
    unfinished: dict[int, int]
    end_ns: dict[int, int]
    aborted: bool = False


def run_together(
    graphs: Mapping[int, RankGraph],
    groups: Mapping[int, Mapping[str, list[int]]],
    effects: Mapping[int, Mapping[int, str]] = MappingProxyType({}),
) -> JointRun:
    """Simulate the nodes of all ranks together, on a network that takes no time.

    Ranks without a file are assumed to take part in every collective, and to send every message, at once.

    Args:
        graphs: Nodes of each rank.
        groups: Rank -> number of a group -> its ranks.
        effects: Rank -> node id -> what it does to the simulator (`lint_codes.NODE_EFFECTS`).
    """
    clock = _Clock()
    meetings = _Meetings(graphs.keys(), groups)
    ranks = {
        rank: _Rank(rank, graph, clock, meetings, effects.get(rank, {})) for rank, graph in graphs.items()
    }
    for rank in ranks.values():
        rank.start_queued()
    last: dict[int, ChakraNode] = {}
    end_ns: dict[int, int] = {}
    running = clock.running
    while running and not clock.is_aborted:
        now = clock.now = running[0][0]
        touched = set()
        while running and running[0][0] == now:
            _, number, place = heapq.heappop(running)
            last[number], end_ns[number] = ranks[number].end(place), now
            touched.add(number)
        for number in sorted(touched):
            ranks[number].start_queued()
    unfinished = {number: rank.left for number, rank in ranks.items() if rank.left}
    blocked = [
        BlockedNode(rank, ranks[rank].nodes[place], reason) for rank, place, reason in meetings.list_waiting()
    ]
    return JointRun(blocked, last, unfinished, end_ns, clock.is_aborted)


class _Clock:
    """The simulated time, ns, and a heap of the running nodes: (end, rank, position)."""

    def __init__(self) -> None:
        self.now = 0
        self.is_aborted = False
        self.running: list[tuple[int, int, int]] = []

    def run(self, rank: int, place: int, duration: int) -> None:
        heapq.heappush(self.running, (self.now + duration, rank, place))


class _Meetings:
    """Matches the ranks of collectives and messages, and holds the communications that wait for other ranks."""

    def __init__(self, ranks: Any, groups: Mapping[int, Mapping[str, list[int]]]) -> None:
        self._ranks = set(ranks)
        self._groups = groups
        self._turns: dict[int, Counter[str]] = defaultdict(Counter)
        self._collectives: dict[Key, dict[int, int]] = defaultdict(dict)
        self._sent: Counter[Key] = Counter()
        self._receives: dict[Key, list[tuple[int, int]]] = defaultdict(list)

    def join(self, rank: int, node: ChakraNode, place: int) -> list[tuple[int, int]]:
        """Add a rank to a collective; return (rank, position) of all members if all have joined, else []."""
        group = str(node.attributes.get("pg_name") or WORLD)
        members = self._groups[rank].get(group)
        turns = self._turns[rank]
        tag = turns.total() if group == WORLD else turns[group]
        turns[group] += 1
        kind, size = (str(node.attributes.get(name)) for name in ("comm_type", "comm_size"))
        present = frozenset(self._ranks if members is None else self._ranks.intersection(members))
        arrived = self._collectives[group, tag, kind, size, present]
        arrived[rank] = place
        is_alone = members is not None and len(members) < 2
        if is_alone or arrived.keys() != present:
            return []
        return list(self._collectives.pop((group, tag, kind, size, present)).items())

    def send(self, rank: int, node: ChakraNode) -> list[tuple[int, int]]:
        """Send a message; return the waiting receive that it completes as (rank, position), if there is one."""
        key = get_message_key(rank, node)
        if self._receives[key]:
            return [self._receives[key].pop(0)]
        self._sent[key] += 1
        return []

    def receive(self, rank: int, node: ChakraNode, place: int) -> bool:
        """Return whether the message of a receive node has been sent; if not, register the receive as waiting."""
        key = get_message_key(rank, node)
        if self._sent[key] or key[0] not in self._ranks:
            self._sent[key] -= 1
            return True
        self._receives[key].append((rank, place))
        return False

    def list_waiting(self) -> list[tuple[int, int, str]]:
        """Return (rank, position, reason) of all communications that are still waiting."""
        waiting = [
            (rank, place, _explain(key[0], present - arrived.keys()))
            for key, arrived in self._collectives.items()
            for present in [key[4]]
            for rank, place in arrived.items()
        ]
        for key, receives in self._receives.items():
            waiting += [(rank, place, f"no matching send on rank {key[0]}") for rank, place in receives]
        return sorted(waiting)


def _explain(group: str, absent: Any) -> str:
    if not absent:
        return f"group {group} has a single rank"
    ranks = ", ".join(map(str, sorted(absent)[:8]))
    return f"group {group}: the same collective (turn, type, size) never runs on rank {ranks}"


class _Rank:
    """The simulation state of one rank: unfinished dependencies, ready nodes, and busy resources."""

    def __init__(
        self, rank: int, graph: RankGraph, clock: _Clock, meetings: _Meetings, effects: Mapping[int, str]
    ) -> None:
        self.rank, self.graph, self.clock, self.meetings, self.effects = rank, graph, clock, meetings, effects
        self.nodes, self.left = graph.nodes, len(graph.nodes)
        self.missing = list(graph.missing)
        self.ready: tuple[list[int], ...] = ([], [], [])
        self.busy = [False, False, False]
        self.deferred = [place for place, count in enumerate(self.missing) if not count]
        self.catches = False  # exceptions: neither at the start nor after a message

    def start_queued(self) -> None:
        """Start the ready node with the lowest id on each free resource."""
        deferred, self.deferred = self.deferred, []
        for place in deferred:
            self._make_ready(place)
        for resource in EXCLUSIVE:
            ready = self.ready[resource]
            while ready and not self.busy[resource]:
                self.busy[resource] = True
                self._begin(heapq.heappop(ready))
        self.catches = True

    def end(self, place: int) -> ChakraNode:
        """Mark a node as ended, free its resource, and queue the nodes whose dependencies have all ended."""
        node = self.nodes[place]
        if node.type in (_SEND, _RECV):
            self.catches = False
        self.deferred += self._release(place)
        return node

    def _release(self, place: int) -> list[int]:
        """Free the resource of a node that has ended, and return the nodes that no longer wait for any other."""
        self.left -= 1
        if (resource := self.graph.resources[place]) != Resource.NONE:
            self.busy[resource] = False
        missing, free = self.missing, []
        for dependent in self.graph.dependents[place]:
            missing[dependent] -= 1
            if not missing[dependent]:
                free.append(dependent)
        return free

    def _make_ready(self, place: int) -> None:
        resource = self.graph.resources[place]
        if resource == Resource.NONE:
            self._begin(place)
        else:
            heapq.heappush(self.ready[resource], place)

    def _begin(self, place: int) -> None:
        node = self.nodes[place]
        if self.effects and (effect := self.effects.get(node.id)) is not None:
            self.clock.is_aborted |= effect == ABORT or (effect == RAISE and not self.catches)
        elif node.type in _INSTANT_TYPES:
            self.deferred += self._release(place)
        elif node.type == _COLL and node.attributes.get("comm_type") != _BROADCAST:
            self._end_all(self.meetings.join(self.rank, node, place))
        elif node.type == _SEND:
            self._end_all([(self.rank, place), *self.meetings.send(self.rank, node)])
        elif node.type == _RECV:
            self._end_all([(self.rank, place)] if self.meetings.receive(self.rank, node, place) else [])
        else:
            self.clock.run(self.rank, place, self.graph.durations[place])

    def _end_all(self, ending: list[tuple[int, int]]) -> None:
        for rank, place in ending:
            self.clock.run(rank, place, 1)
