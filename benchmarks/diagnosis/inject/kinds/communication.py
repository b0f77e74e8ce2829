"""Problems of communication between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etloom.graphs.graph import EdgeKind

from ..draft import Call, Draft, Kernel
from .hosts import read_value
from .kind import MULTI, Kind, Random, draw_slots, find_edges

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PIPELINE = ("pipeline",)


def slow_link(draft: Draft, random: Random) -> None:
    """All transfers take longer by the same factor."""
    edges = find_edges(draft, EdgeKind.TRANSFER, EdgeKind.MESSAGE)
    draft.weight[edges] += draft.lag[edges]


def network_jitter(draft: Draft, random: Random) -> None:
    """Some collectives take much longer, on all ranks at once."""
    arrivals = draft.graph.source
    edges = find_edges(draft, EdgeKind.TRANSFER)
    factors = random.exponential(size=len(draft.graph)) * (random.random(len(draft.graph)) < 0.5)
    draft.weight[edges] += 3 * draft.lag[edges] * factors[arrivals[edges]]


def lost_overlap(draft: Draft, random: Random) -> None:
    """Collectives run on the stream of the computation."""
    edges = find_edges(draft, EdgeKind.TRANSFER)
    for rank, trace in draft.base.job.items():
        stream = draft.compute_stream(rank)
        kernels = trace.events.filter(
            (trace.events["cat"] == "kernel")
            & trace.events["name"].cast(str).str.contains("(?i)nccl.*AllReduce")
        )["id"].to_list()
        for event in kernels[: max(1, round(draft.share * len(kernels)))]:
            if draft.serialize(rank, stream, event, 1 << 30):
                draft.streams.setdefault(rank, {})[event] = stream
    draft.weight[edges] += draft.lag[edges]


@dataclass(frozen=True)
class Series:
    """Collectives in a row, of which the computation waits for the last.

    Attributes:
        count: How many, one after the other.
        size: Bytes of each.
        places: How many such rows a step has.
        low: First place, as a share of the step.
        high: Last place.
        collective: Its kind.
        kernel: The name of its kernels.
        pause: Weight of the host's time after the result is read; 0: nothing reads it.
    """

    count: int
    size: int
    places: int = 1
    low: float = 0.0
    high: float = 1.0
    collective: str = "all_reduce"
    kernel: str = ALL_REDUCE
    pause: float = 0.0


def _add_series(draft: Draft, random: Random, series: Series) -> None:
    """Add collectives of equal duration; if the result is read, they take 20 us, and the host's time has the weight."""
    weight, fixed = (0.0, 20_000) if series.pause else (1.0, 0)
    for index, slots in draw_slots(draft, random, series.places, low=series.low, high=series.high):
        for i in range(series.count):
            launched = len(draft.launched)
            for slot in slots:
                stream = draft.communication_stream(slot.rank)
                kernel = Kernel(series.kernel, stream=stream, after_computation=True)
                launch = Call("cudaLaunchKernel", cat="cuda_runtime", kernel=kernel, fixed=3000)
                inner = Call("record_param_comms", fixed=2000, children=(launch,))
                added = draft.add_calls(
                    slot, [Call(f"c10d::{series.collective}_", fixed=2000, children=(inner,))]
                )
                number = 1_000_000 + 1000 * index + i
                draft.describe_collective(slot.rank, added[0][0] + 1, number, series.size, series.collective)
            draft.match(draft.launched[launched:], weight, fixed)
            del draft.launched[launched + len(slots) :]
        for (rank, event), slot in zip(draft.launched[launched:], slots, strict=True):
            draft.add_calls(
                slot,
                [
                    Call("cudaEventRecord", cat="cuda_runtime"),
                    Call("cudaStreamWaitEvent", cat="cuda_runtime"),
                ],
            )
            draft.block_stream(rank, draft.compute_stream(rank), slot.time, event)
        for slot in slots if series.pause else ():
            draft.add_calls(slot, [read_value()], pause=series.pause)


def tiny_collectives(draft: Draft, random: Random) -> None:
    count, size = int(random.integers(20, 80)), int(random.choice([4, 8, 64, 1024]))
    _add_series(draft, random, Series(count, size, low=0.9))


def small_buckets(draft: Draft, random: Random) -> None:
    count, size = int(random.integers(10, 40)), int(random.integers(20_000, 500_000))
    _add_series(draft, random, Series(count, size, low=0.7))


def gathered_again(draft: Draft, random: Random) -> None:
    """Sharded parameters are gathered again in each micro-batch, before the computation that needs them."""
    places, size = int(random.integers(2, 7)), int(random.integers(20, 200)) << 20
    series = Series(1, size, places, collective="all_gather", kernel=ALL_GATHER)
    _add_series(draft, random, series)


def synchronized_micro_batches(draft: Draft, random: Random) -> None:
    """Gradients are reduced after each micro-batch instead of once per step."""
    count, places = int(random.integers(3, 7)), int(random.integers(1, 4))
    _add_series(draft, random, Series(count, 25 << 20, places, low=0.3))


def broadcast_buffers(draft: Draft, random: Random) -> None:
    """The buffers of the model are broadcast before each forward."""
    count, size = int(random.integers(1, 7)), int(random.integers(4, 400)) << 10
    series = Series(count, size, high=0.02, collective="broadcast", kernel=BROADCAST)
    _add_series(draft, random, series)


def synchronized_norms(draft: Draft, random: Random) -> None:
    """Each normalization layer gathers its statistics over the ranks."""
    places, size = int(random.integers(10, 40)), int(random.integers(1, 16)) << 10
    series = Series(1, size, places, high=0.4, collective="all_gather", kernel=ALL_GATHER)
    _add_series(draft, random, series)


def reduced_metrics(draft: Draft, random: Random) -> None:
    """A metric is reduced over the ranks in each step, read and formatted."""
    _add_series(draft, random, Series(1, 4, low=0.9, pause=1.0))


def network_hiccup(draft: Draft, random: Random) -> None:
    """One collective of one step takes much longer, on all ranks."""
    edges = find_edges(draft, EdgeKind.TRANSFER)
    edges = edges[draft.lag[edges] > 0]
    arrival = random.choice(np.unique(draft.graph.source[edges]))
    draft.weight[edges[draft.graph.source[edges] == arrival]] = 1.0


def slow_pair(draft: Draft, random: Random) -> None:
    """Messages between two neighbours take longer, those of other ranks do not."""
    edges = find_edges(draft, EdgeKind.MESSAGE)
    ranks = draft.graph.rank
    pairs = np.sort(np.column_stack((ranks[draft.graph.source[edges]], ranks[draft.base.target[edges]])))
    chosen = random.choice(np.unique(pairs, axis=0))
    draft.weight[edges[(pairs == chosen).all(axis=1)]] = 1.0


COMMUNICATION = (
    Kind("slow link", MULTI, slow_link, ("exposed-communication",)),
    Kind("network jitter", MULTI, network_jitter, ("exposed-communication",)),
    Kind("lost overlap", MULTI, lost_overlap, ("unused-overlap", "exposed-communication")),
    Kind("tiny collectives", MULTI, tiny_collectives, ("small-collectives",)),
    Kind("small buckets", MULTI, small_buckets, ("small-collectives",)),
    Kind("redundant all-gathers", MULTI, gathered_again, ("exposed-communication",)),
    Kind("reduction per micro-batch", MULTI, synchronized_micro_batches, ("exposed-communication",)),
    Kind(
        "broadcast of buffers",
        MULTI,
        broadcast_buffers,
        ("buffer-broadcasts", "small-collectives", "exposed-communication"),
    ),
    Kind("synchronized norms", MULTI, synchronized_norms, ("small-collectives", "exposed-communication")),
    Kind("metric reduced and read", MULTI, reduced_metrics, ("host-sync",)),
    Kind("network hiccup", MULTI, network_hiccup, ("exposed-communication",)),
    Kind("slow pair of stages", PIPELINE, slow_pair, ("exposed-communication",)),
)
