"""Problems of communication between ranks."""

from __future__ import annotations

from etloom.graphs.graph import EdgeKind

from ..draft import Call, Draft, Kernel
from .kind import MULTI, Kind, Random, draw_slots, find_edges

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
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


def _add_small(draft: Draft, random: Random, count: int, size: int, low: float) -> None:
    """Add ``count`` all-reduces in a row, of which the computation waits for the last."""
    for index, slots in draw_slots(draft, random, 1, low=low):
        for i in range(count):
            launched = len(draft.launched)
            for slot in slots:
                stream = draft.communication_stream(slot.rank)
                kernel = Kernel(ALL_REDUCE, stream=stream, after_computation=True)
                launch = Call("cudaLaunchKernel", cat="cuda_runtime", kernel=kernel, fixed=3000)
                inner = Call("record_param_comms", fixed=2000, children=(launch,))
                added = draft.add_calls(slot, [Call("c10d::allreduce_", fixed=2000, children=(inner,))])
                draft.describe_collective(slot.rank, added[0][0] + 1, 1_000_000 + 1000 * index + i, size)
            draft.match(draft.launched[launched:], 1.0)
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


def tiny_collectives(draft: Draft, random: Random) -> None:
    _add_small(draft, random, int(random.integers(20, 80)), int(random.choice([4, 8, 64, 1024])), 0.9)


def small_buckets(draft: Draft, random: Random) -> None:
    _add_small(draft, random, int(random.integers(10, 40)), int(random.integers(20_000, 500_000)), 0.7)


COMMUNICATION = (
    Kind("slow link", MULTI, slow_link, ("exposed-communication",)),
    Kind("network jitter", MULTI, network_jitter, ("exposed-communication",)),
    Kind("lost overlap", MULTI, lost_overlap, ("unused-overlap", "exposed-communication")),
    Kind("tiny collectives", MULTI, tiny_collectives, ("small-collectives",)),
    Kind("small buckets", MULTI, small_buckets, ("small-collectives",)),
)
