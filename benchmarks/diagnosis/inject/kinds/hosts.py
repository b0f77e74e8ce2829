"""Problems of the host of a GPU: it is slow, stops, or waits for the device."""

from __future__ import annotations

from etloom.graphs.graph import EdgeKind

from ..draft import Call, Draft, Kernel
from .kind import GPU, MULTI, Kind, Random, draw_rank, draw_slots, find_edges, on_one_rank


def slow_host(draft: Draft, random: Random) -> int:
    rank = draw_rank(draft, random)
    edges = find_edges(draft, EdgeKind.SEGMENT, EdgeKind.IDLE, rank=rank)
    draft.weight[edges] += draft.lag[edges]
    return rank


def launch_bound(draft: Draft, random: Random) -> None:
    edges = find_edges(draft, EdgeKind.SEGMENT, EdgeKind.IDLE)
    draft.weight[edges] += draft.lag[edges]


def data_stall(draft: Draft, random: Random) -> None:
    loader = str(random.choice(["_MultiProcessingDataLoaderIter", "_SingleProcessDataLoaderIter"]))
    for _, slots in draw_slots(draft, random, 1, high=0.02):
        stall = random.exponential() + 0.2
        for slot in slots:
            draft.add_calls(
                slot, [Call(f"enumerate(DataLoader)#{loader}.__next__", stall, "user_annotation")]
            )


def read_value(waits: bool = True) -> Call:
    """Return a call of .item()."""
    copy = Kernel("Memcpy DtoH (Device -> Pageable)", 0.0, "gpu_memcpy", 1500, bytes=4)
    calls = (
        Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=copy, fixed=3000),
        Call("cudaStreamSynchronize", cat="cuda_runtime", waits=waits, fixed=1000),
    )
    return Call(
        "aten::item", fixed=500, children=(Call("aten::_local_scalar_dense", fixed=500, children=calls),)
    )


def host_sync(draft: Draft, random: Random) -> None:
    """A value is read a few times in each step, and Python works with it."""
    count = int(random.integers(1, 5))
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            draft.add_calls(slot, [read_value()], pause=1.0)


def log_each_step(draft: Draft, random: Random) -> None:
    """The loss is read, formatted and written at the end of each step."""
    for _, slots in draw_slots(draft, random, 1, low=0.9):
        for slot in slots:
            draft.add_calls(slot, [read_value()], pause=1.0)


def item_per_parameter(draft: Draft, random: Random) -> None:
    count = int(random.integers(16, 32))
    norm = (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float> > >"
    )
    launch = Call("cudaLaunchKernel", cat="cuda_runtime", kernel=Kernel(norm, fixed=3000), fixed=3000)
    for _, slots in draw_slots(draft, random, 1, low=0.7):
        for slot in slots:
            for _ in range(count):
                draft.add_calls(
                    slot, [Call("aten::norm", fixed=2000, children=(launch,)), read_value()], pause=1.0
                )


def collector_pauses(draft: Draft, random: Random) -> None:
    """Python's garbage collector stops the host at random moments."""
    count = int(random.integers(1, 3))
    for _, slots in draw_slots(draft, random, count):
        pause = random.uniform(0.5, 1.5)
        for slot in slots:
            draft.add_calls(slot, [], pause=pause)


def checkpoint(draft: Draft, random: Random) -> None:
    """A checkpoint is saved once, in a random step."""
    name = str(
        random.choice(
            [
                "torch/serialization.py(965): save",
                "torch/distributed/checkpoint/state_dict_saver.py(90): save",
            ]
        )
    )
    occurrences = list(draw_slots(draft, random, 1, low=0.95))
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        draft.add_calls(slot, [Call(name, 1.0, "python_function")])


def recompilation(draft: Draft, random: Random) -> None:
    occurrences = list(draw_slots(draft, random, 1, high=0.3, skip=1))
    name = str(
        random.choice(
            [
                "_compile.compile_inner (dynamo_timed)",
                "compile_fx_inner",
                "CachingAutotuner.benchmark_all_configs",
            ]
        )
    )
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        draft.add_calls(slot, [Call(name, 1.0)])


def cpu_optimizer(draft: Draft, random: Random) -> None:
    """Gradients are copied to the host, which updates the parameters there, and copies them back."""
    operators = random.choice(
        ["aten::mul_", "aten::addcmul_", "aten::sqrt", "aten::addcdiv_", "aten::add_"], 40
    )
    down = Kernel("Memcpy DtoH (Device -> Pinned)", fixed=20_000, cat="gpu_memcpy", bytes=1 << 20)
    up = Kernel("Memcpy HtoD (Pinned -> Device)", fixed=20_000, cat="gpu_memcpy", bytes=1 << 20)
    for _, slots in draw_slots(draft, random, 1, low=0.97):
        for slot in slots:
            calls = [
                Call(
                    "aten::copy_",
                    children=(Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=down, fixed=2000),),
                ),
                Call("cudaStreamSynchronize", cat="cuda_runtime", waits=True),
                *(Call(str(name), 1.0, fixed=60_000) for name in operators),
                Call(
                    "aten::copy_",
                    children=(Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=up, fixed=2000),),
                ),
            ]
            draft.add_calls(slot, calls)


HOSTS = (
    Kind("slow host", MULTI, slow_host, ("stragglers", "launch-bound")),
    Kind("launch-bound", GPU, launch_bound, ("launch-bound",)),
    Kind("data stall", GPU, data_stall, ("data-loading",)),
    Kind("host sync", GPU, host_sync, ("host-sync",)),
    Kind("logging each step", GPU, log_each_step, ("host-sync",)),
    Kind(".item() per parameter", GPU, item_per_parameter, ("host-sync", "item-calls")),
    Kind("GC pauses", GPU, collector_pauses, ("idle-host",)),
    Kind("checkpoint stall", GPU, checkpoint, ("checkpoints",)),
    Kind("recompilation", GPU, recompilation, ("recompilation",)),
    Kind("data stall on one rank", MULTI, on_one_rank(data_stall), ("data-loading",)),
    Kind("GC pauses on one rank", MULTI, on_one_rank(collector_pauses), ("idle-host", "stragglers")),
    Kind("recompilation on one rank", MULTI, on_one_rank(recompilation), ("recompilation",)),
    Kind("CPU optimizer", GPU, cpu_optimizer, ("host-compute",)),
)
