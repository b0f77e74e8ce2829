"""Random jobs of three ranks, simulated event by event: traces of which every cause is known.

A rank has two host threads that take turns and three streams. Its program is a list of instructions; the
collectives stand at the same places in the programs of all ranks. Times are even, so that half of each is whole.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from etloom import linker
from etloom.core.trace import Job, Trace
from etloom.graphs import MinimumLatencies
from etloom.graphs.graph import Graph, PointRole

RANKS = 3
COMM_STREAM = 30
STREAMS = (10, 20, COMM_STREAM)
LAUNCH, STREAM, SYNC, ENTRY = 4_000, 1_200, 2_600, 1_800
FLOORS = MinimumLatencies(
    submission=LAUNCH, launch=LAUNCH, stream=STREAM, sync=SYNC, entry={}, entry_default=ENTRY
)
SYNCS = {
    "stream": ("cudaStreamSynchronize", "Stream Sync"),
    "device": ("cudaDeviceSynchronize", "Context Sync"),
    "event": ("cudaEventSynchronize", "Event Sync"),
}


@dataclass(frozen=True)
class World:
    """How fast things are: shares of host, kernel and transfer times, the launch delay, whether calls wait."""

    host: float = 1
    kernel: float = 1
    transfer: float = 1
    launch: int = LAUNCH
    syncs: bool = True


@dataclass(frozen=True)
class Do:
    """An instruction: its kind and sizes; ``gap`` before it, ``before`` and ``after`` it inside its operator."""

    what: str  # launch, graph, collective, record, wait, sync, turn, compute
    stream: int = 10
    sizes: tuple[int, ...] = ()
    which: Any = None
    gap: int = 0
    before: int = 0
    after: int = 0
    call: int = 2_000
    inner: tuple[Do, ...] = ()


def programs(seed: int, length: int = 60) -> list[list[Do]]:
    """A program for each rank."""
    dice = random.Random(seed)

    def even(low: int, high: int) -> int:
        return 2 * dice.randint(low // 2, high // 2)

    def instruction(depth: int = 0) -> Do:
        what = dice.choices(
            ["launch", "graph", "record", "wait", "sync", "turn", "compute"],
            [12, 2, 2, 2, 2, 0 if depth else 1, 4],
        )[0]
        count = 1 if what != "graph" else dice.randint(2, 4)
        inner = tuple(instruction(1) for _ in range(dice.randint(2, 5))) if what == "turn" else ()
        if what == "turn":
            inner = (Do("compute", before=even(60_000, 90_000)), *inner)
        return Do(
            what,
            dice.choice(STREAMS[:2]),
            tuple(even(500, dice.choice([4_000, 60_000])) for _ in range(count)),
            dice.choice(["stream", "device", "event"]) if what == "sync" else dice.randint(0, 3),
            gap=even(1_000, 8_000) if what == "turn" else even(0, 8_000),
            before=even(0, 6_000),
            after=even(0, 3_000),
            call=even(1_000, 5_000),
            inner=inner,
        )

    places = sorted(dice.sample(range(length), 5))
    sizes = [even(5_000, 80_000) for _ in places]

    def whole() -> list[Do]:
        program = [instruction() for _ in range(length)]
        for place, size in zip(reversed(places), reversed(sizes), strict=True):
            around = [
                Do("record", 10, which=7, gap=even(0, 4_000)),
                Do("wait", COMM_STREAM, which=7),
                Do("collective", COMM_STREAM, (size,), before=even(0, 30_000), call=even(1_000, 5_000)),
                Do("record", COMM_STREAM, which=8),
                Do("wait", dice.choice(STREAMS[:2]), which=8),
            ]
            program[place:place] = around
        # A thread begins when it begins, however fast the host is.
        return [Do("compute", before=1_000), *program]

    return [whole() for _ in range(RANKS)]


@dataclass
class Rank:
    """The state of one rank while it is simulated, and what its profiler writes."""

    world: World
    tid: int = 1
    now: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)
    comms: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {s: [] for s in STREAMS})
    pending: dict[int, list[int]] = field(default_factory=lambda: {s: [] for s in STREAMS})
    recorded: dict[int, tuple[dict[str, Any] | None, int, int]] = field(default_factory=dict)
    correlation: int = 0

    def host(self, time: int) -> None:
        self.now += int(time * self.world.host)

    def emit(self, cat: str, name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
        own = {"pid": 100, "tid": self.tid} | more
        self.events.append({"cat": cat, "name": name, "ts": start, "end": end} | own)
        return self.events[-1]

    def call(self, name: str, start: int, end: int) -> int:
        self.correlation += 1
        self.emit("cuda_runtime", name, start, end, correlation=self.correlation)
        return self.correlation

    def free(self, stream: int) -> int:
        """When the next work of a stream may start, for all that the device has to do before."""
        known = [work["end"] + STREAM for work in self.ends[stream]] + self.pending[stream]
        return max(known, default=0)

    def work(
        self, stream: int, start: int, end: int, correlation: int, name: str = "kernel"
    ) -> dict[str, Any]:
        one = self.emit(
            "kernel", name, start, end, pid=0, tid=stream, device=0, stream=stream, correlation=correlation
        )
        self.ends[stream].append(one)
        self.pending[stream] = []
        return one

    def launch(self, do: Do) -> tuple[int, int, int]:
        """The submission, the correlation of the call, and when the device may start."""
        begun = self.now
        self.host(do.call)
        name = "cudaGraphLaunch" if do.what == "graph" else "cudaLaunchKernel"
        correlation = self.call(name, begun, self.now)
        return self.now, correlation, max(self.now + self.world.launch, self.free(do.stream))

    def run(self, do: Do) -> dict[str, Any] | None:
        """Carry out an instruction; of a collective the work, whose end is not known yet."""
        self.host(do.gap)
        begun, collective = self.now, None
        if do.what == "turn":
            self.turn(do)
            return None
        self.host(do.before)
        if do.what in ("launch", "graph"):
            self.kernels(do)
        elif do.what == "collective":
            _, correlation, start = self.launch(do)
            collective = self.work(
                do.stream, start, start, correlation, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            )
        elif do.what == "record":
            self.record(do)
        elif do.what == "wait":
            self.stream_wait(do)
        elif do.what == "sync":
            self.sync(do)
        self.host(do.after)
        self.emit("cpu_op", f"aten::{do.what}", begun, self.now)
        return collective

    def kernels(self, do: Do) -> None:
        """One kernel; of a graph several, of which the second starts with the first."""
        _, correlation, start = self.launch(do)
        for i, size in enumerate(sorted(do.sizes[:2]) + list(do.sizes[2:])):
            at = start if i < 2 else self.free(do.stream)
            self.work(do.stream, at, at + int(size * self.world.kernel), correlation)

    def record(self, do: Do) -> None:
        last = self.ends[do.stream][-1] if self.ends[do.stream] else None
        begun = self.now
        self.host(do.call)
        self.recorded[do.which] = (last, do.stream, self.call("cudaEventRecord", begun, self.now))

    def stream_wait(self, do: Do) -> None:
        if do.which not in self.recorded:
            return
        last, stream, record = self.recorded[do.which]
        begun = self.now
        self.host(do.call)
        correlation = self.call("cudaStreamWaitEvent", begun, self.now)
        self.note("Stream Wait Event", begun, correlation, do.stream, stream, record)
        if last is not None:
            self.pending[do.stream].append(last["end"] + STREAM)

    def sync(self, do: Do) -> None:
        name, kind = SYNCS[do.which]
        stream, record, works = do.stream, None, []
        if do.which == "device":
            works = [own[-1] for own in self.ends.values() if own]
        elif do.which == "stream":
            works = self.ends[do.stream][-1:]
        else:
            last, stream, record = self.recorded.get(0, (None, do.stream, None))
            works = [] if last is None else [last]
        begun = self.now
        if not works:
            return
        ends = [work["end"] + SYNC for work in works] if self.world.syncs else []
        self.now = max([begun + ENTRY, *ends])
        correlation = self.call(name, begun, self.now)
        self.note(kind, begun, correlation, stream, stream, record)

    def note(
        self, kind: str, at: int, correlation: int, waiting: int, stream: int, record: int | None
    ) -> None:
        """What cuda_sync writes of a synchronisation."""
        event = self.emit(
            "cuda_sync", kind, at, at, pid=0, tid=waiting, device=0, stream=waiting, correlation=correlation
        )
        self.syncs.append({"of": event, "kind": kind, "wait_stream": stream, "record_correlation": record})

    def turn(self, do: Do) -> None:
        """The other thread works while this one rests."""
        begun, self.tid = self.now, 2
        for inner in do.inner:
            self.run(replace(inner, gap=0) if inner is do.inner[0] else inner)
        self.tid = 1
        self.emit("user_annotation", "backward", begun, self.now)

    def order(self, ties: int = 1) -> list[int]:
        """The events as a table holds them: by start, longest first, then as a file might have them."""
        return sorted(
            range(len(self.events)),
            key=lambda i: (self.events[i]["ts"], -self.events[i]["end"], ties * i),
        )

    def trace(self, rank: int, ties: int = 1, world_size: int = RANKS) -> Trace:
        order = self.order(ties)
        number = {id(self.events[i]): n for n, i in enumerate(order)}
        events = pl.DataFrame(
            [
                {"id": n, "ph": "X", "dur": event["end"] - event["ts"], "position": n}
                | {key: value for key, value in event.items() if key not in ("end", "seq")}
                for n, event in enumerate(self.events[i] for i in order)
            ],
            infer_schema_length=None,
        )
        syncs = [{"event": number[id(one.pop("of"))]} | one for one in [dict(row) for row in self.syncs]]
        comms = [
            {"id": seq, "event": number[id(event)], "collective": "all_reduce", "pg_name": "0"}
            | {"ranks": str(list(range(world_size))), "seq": seq}
            for seq, event in enumerate(e for e in self.events if e["name"].startswith("nccl"))
        ]
        tables = {"events": events, "comms": pl.DataFrame(comms)}
        if syncs:
            tables["syncs"] = pl.DataFrame(syncs, infer_schema_length=None)
        return linker.link(Trace(tables, {"rank": rank, "clock": "relative"}))


def simulate(jobs: list[list[Do]], world: World = World()) -> list[Rank]:
    """Run the programs of all ranks, from one collective to the next."""
    ranks = [Rank(world) for _ in jobs]
    at = [0] * len(jobs)
    while any(place < len(job) for place, job in zip(at, jobs, strict=True)):
        met = []
        for i, (rank, job) in enumerate(zip(ranks, jobs, strict=True)):
            while at[i] < len(job):
                at[i] += 1
                work = rank.run(job[at[i] - 1])
                if work is not None:
                    met.append((work, job[at[i] - 1].sizes[0]))
                    break
        if met:
            arrival = max(work["ts"] for work, _ in met)
            for work, size in met:
                work["end"] = arrival + int(size * world.transfer)
    return ranks


def job_of(ranks: list[Rank], ties: int = 1) -> Job:
    """ties: 1 or -1, the order in which a file has events of one start and end."""
    return Job({number: rank.trace(number, ties, len(ranks)) for number, rank in enumerate(ranks)})


def event_times(graph: Graph, time: np.ndarray) -> dict[tuple[int, int, int], int]:
    """(rank, event, start or end) -> time."""
    return {
        (int(r), int(e), int(role)): int(t)
        for r, e, role, t in zip(graph.rank, graph.event, graph.role, time, strict=True)
        if role in (PointRole.START, PointRole.END)
    }


def true_times(ranks: list[Rank], job: Job, world: World, programs: list[list[Do]]) -> dict[tuple, int]:
    """The same points in another world. Events are recognised by the order in which they were emitted."""
    again = simulate(programs, world)
    found = {}
    for r, (before, after) in enumerate(zip(ranks, again, strict=True)):
        assert [e["name"] for e in before.events] == [e["name"] for e in after.events]
        order = before.order()
        for number, i in enumerate(order):
            event = after.events[i]
            if event["cat"] != "cuda_sync":
                found[r, number, int(PointRole.START)] = event["ts"]
                found[r, number, int(PointRole.END)] = event["end"]
    return found
