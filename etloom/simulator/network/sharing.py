"""Simulates transfers that share links: each link divides its bandwidth evenly among them (processor sharing).

The backends on the host execute a limited number of communications of a process group at a time; others queue.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import NamedTuple


class Flow(NamedTuple):
    """Data that a transfer moves over ``links``; takes ``solo_ns`` if no other flow uses these links."""

    solo_ns: float
    links: tuple[int, ...]


class Transfer(NamedTuple):
    """A communication whose flows start together, ``latency_ns`` after the last rank has begun it.

    ``begins``: time at which each rank issues it. ``queues``: the queue of each rank that it passes, None for none.
    """

    begins: tuple[float, ...]
    queues: tuple[Hashable, ...]
    latency_ns: float
    flows: tuple[Flow, ...]


def share_links(transfers: Sequence[Transfer], workers: int = 2, efficiency: float = 1.0) -> list[float]:
    """Simulate transfers over shared links, and return the time (ns) at which each transfer completes.

    Args:
        workers: number of communications that a queue executes at a time.
        efficiency: share of a link's bandwidth that several transfers on it reach together.
    """
    return _LinkSharing(transfers, workers, efficiency).run()


class _Bundle:
    """All flows over the same set of links; they progress equally and therefore share a progress counter.

    ``progress``: the time, without other flows, of what each flow has transferred until ``since``. ``ends``: a heap
    with the progress at which a flow is complete, and its transfer.
    """

    __slots__ = ("ends", "links", "progress", "share", "since", "version")

    def __init__(self, links: tuple[int, ...]) -> None:
        self.links = links
        self.ends: list[tuple[float, int]] = []
        self.progress, self.since, self.share, self.version = 0.0, 0.0, 1.0, 0

    def advance(self, now: float) -> None:
        self.progress = self.progress + (now - self.since) * self.share if self.ends else 0.0
        self.since = now


class _LinkSharing:
    """An event simulation of transfers over shared links."""

    def __init__(self, transfers: Sequence[Transfer], workers: int, efficiency: float) -> None:
        self.transfers, self.workers, self.efficiency = transfers, workers, efficiency
        self.finish = [0.0] * len(transfers)
        self.missing = [len(transfer.begins) for transfer in transfers]
        self.flows_left = [len(transfer.flows) for transfer in transfers]
        self.bundles: dict[tuple[int, ...], _Bundle] = {}
        self.bundles_on_link: dict[int, list[_Bundle]] = defaultdict(list)
        self.users: dict[int, int] = defaultdict(int)  # flows on each link
        self.busy: dict[Hashable, int] = defaultdict(int)
        self.waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        self.events: list[tuple[float, int, str, int, _Bundle | None, int]] = []
        self.count = 0

    def run(self) -> list[float]:
        for number, transfer in enumerate(self.transfers):
            begins = list(enumerate(transfer.begins))
            if begins and not any(transfer.queues):  # only the last rank matters
                begins, self.missing[number] = [max(begins, key=itemgetter(1))], 1
            for part, begin in begins:
                self._push(begin, "begin", number, None, part)
        now = 0.0
        while self.events or self._release_blocked(now):
            time, _, kind, number, bundle, detail = heapq.heappop(self.events)
            if bundle is not None and bundle.version != detail:
                continue  # its share has changed since
            now = time
            if kind == "begin":
                self._enter(number, self.transfers[number].queues[detail], now)
            elif kind == "move":
                self._start_flows(number, now)
            elif bundle is not None:
                self._end_flow(bundle, now)
        return self.finish

    def _push(
        self, time: float, kind: str, number: int, bundle: _Bundle | None = None, detail: int = 0
    ) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, number, bundle, detail))

    def _enter(self, number: int, queue: Hashable, now: float) -> None:
        """Issue a rank's part of a transfer; the part waits if all workers of its queue are busy."""
        if queue is None:
            self._participate(number, now)
        elif self.busy[queue] < self.workers:
            self.busy[queue] += 1
            self._participate(number, now)
        else:
            self.waiting[queue].append(number)

    def _participate(self, number: int, now: float) -> None:
        self.missing[number] -= 1
        if not self.missing[number]:
            self._push(now + self.transfers[number].latency_ns, "move", number)

    def _release_blocked(self, now: float) -> bool:
        """Start a waiting transfer when ranks deadlock because they queue transfers in different orders."""
        for queue in self.waiting.values():
            while queue:
                self._participate(queue.popleft(), now)
                if self.events:
                    return True
        return False

    def _start_flows(self, number: int, now: float) -> None:
        flows = self.transfers[number].flows
        if not flows:
            self._complete(number, now)
        for flow in flows:
            bundle = self._find_bundle(flow.links)
            bundle.advance(now)
            heapq.heappush(bundle.ends, (bundle.progress + flow.solo_ns, number))
            self._change_users(bundle, +1, now)

    def _find_bundle(self, links: tuple[int, ...]) -> _Bundle:
        bundle = self.bundles.get(links)
        if bundle is None:
            bundle = self.bundles[links] = _Bundle(links)
            for link in links:
                self.bundles_on_link[link].append(bundle)
        return bundle

    def _end_flow(self, bundle: _Bundle, now: float) -> None:
        bundle.advance(now)
        _, number = heapq.heappop(bundle.ends)
        self.flows_left[number] -= 1
        if not self.flows_left[number]:
            self._complete(number, now)
        self._change_users(bundle, -1, now)

    def _change_users(self, changed: _Bundle, change: int, now: float) -> None:
        """Update bandwidth shares and end times of all flows on a bundle's links when a flow of it begins or ends."""
        for link in changed.links:
            self.users[link] += change
        affected = {changed: None} | {
            other: None for link in changed.links for other in self.bundles_on_link[link]
        }
        for bundle in affected:
            if not bundle.ends:
                continue
            bundle.advance(now)
            users = max((self.users[link] for link in bundle.links), default=1)
            bundle.share = 1.0 if users == 1 else self.efficiency / users
            bundle.version += 1
            end, number = bundle.ends[0]
            self._push(
                now + max(end - bundle.progress, 0.0) / bundle.share, "end", number, bundle, bundle.version
            )

    def _complete(self, number: int, now: float) -> None:
        self.finish[number] = now
        for queue in self.transfers[number].queues:
            if queue is None:
                continue
            if self.waiting[queue]:
                self._participate(self.waiting[queue].popleft(), now)
            else:
                self.busy[queue] -= 1
