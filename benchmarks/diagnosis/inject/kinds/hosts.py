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
    calls = [Call("aten::norm", fixed=2000, children=(launch,), pause=1.0), read_value()]
    for _, slots in draw_slots(draft, random, 1, low=0.7):
        for slot in slots:
            for _ in range(count):
                draft.add_calls(slot, calls)


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


def log_some_steps(draft: Draft, random: Random) -> None:
    """The loss is read and written every other step."""
    for _, slots in list(draw_slots(draft, random, 1, low=0.9))[int(random.integers(2)) :: 2]:
        for slot in slots:
            draft.add_calls(slot, [read_value()], pause=1.0)


def boolean_masks(draft: Draft, random: Random) -> None:
    """A mask selects elements, whose number the host has to know before it can go on."""
    copy = Kernel("Memcpy DtoH (Device -> Pageable)", 0.0, "gpu_memcpy", 1500, bytes=8)
    count = int(random.integers(2, 8))
    reduce = "void at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::DeviceReducePolicy<int> >"
    launch = Call("cudaLaunchKernel", cat="cuda_runtime", kernel=Kernel(reduce, fixed=3000), fixed=3000)
    nonzero = Call(
        "aten::nonzero",
        fixed=2000,
        children=(
            launch,
            Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=copy, fixed=3000),
            Call("cudaStreamSynchronize", cat="cuda_runtime", waits=True, fixed=1000),
        ),
    )
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            draft.add_calls(slot, [Call("aten::index", fixed=3000, children=(nonzero,))], pause=1.0)


def evaluation(draft: Draft, random: Random) -> None:
    """The model is evaluated in one step: forward passes that other steps do not have, and their loss is read."""
    kernels = [name for name in NETWORK for _ in range(3)]
    occurrences = list(draw_slots(draft, random, 1, low=0.95))
    count = int(random.integers(20, 60))
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        for i in range(count):
            operator, name = kernels[i % len(kernels)]
            launch = Call(
                "cudaLaunchKernel", cat="cuda_runtime", kernel=Kernel(name, 1.0, fixed=5000), fixed=4000
            )
            draft.add_calls(slot, [Call(operator, fixed=4000, children=(launch,))])
        draft.add_calls(slot, [read_value()])


def slow_launches(draft: Draft, random: Random) -> int:
    """The calls of the runtime take longer on one rank, whose thread runs on the wrong socket."""
    rank = draw_rank(draft, random)
    category = draft.base.job[rank].events["cat"].cast(str)
    edges = find_edges(draft, EdgeKind.SEGMENT, rank=rank)
    edges = edges[draft.graph.owner[edges] >= 0]
    is_runtime = category.gather(draft.graph.owner[edges]).is_in(["cuda_runtime", "cuda_driver"]).to_numpy()
    draft.weight[edges[is_runtime]] += draft.lag[edges[is_runtime]]
    return rank


def _offload(draft: Draft, random: Random, calls: list[Call], pause: float) -> None:
    """Copy gradients to the host at the end of each step, run ``calls`` there or pause, and copy parameters back."""
    down = Kernel("Memcpy DtoH (Device -> Pinned)", fixed=20_000, cat="gpu_memcpy", bytes=1 << 20)
    up = Kernel("Memcpy HtoD (Pinned -> Device)", fixed=20_000, cat="gpu_memcpy", bytes=1 << 20)
    for _, slots in draw_slots(draft, random, 1, low=0.97):
        for slot in slots:
            copy = Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=down, fixed=2000)
            wait = Call("cudaStreamSynchronize", cat="cuda_runtime", waits=True)
            draft.add_calls(slot, [Call("aten::copy_", children=(copy,)), wait, *calls], pause=pause)
            back = Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=up, fixed=2000)
            draft.add_calls(slot, [Call("aten::copy_", children=(back,))])


def offloaded_optimizer(draft: Draft, random: Random) -> None:
    """An extension that records no operator updates the parameters on the host."""
    _offload(draft, random, [], 1.0)


def fused_cpu_optimizer(draft: Draft, random: Random) -> None:
    """One fused operator updates the parameters on the host."""
    _offload(draft, random, [Call("aten::_fused_adam_", 1.0, fixed=100_000)], 0.0)


def pinned_allocations(draft: Draft, random: Random) -> None:
    """The main thread allocates pinned memory for each batch."""
    for _, slots in draw_slots(draft, random, 1, high=0.05):
        for slot in slots:
            call = Call("cudaHostAlloc", 1.0, "cuda_runtime")
            draft.add_calls(slot, [Call("aten::pin_memory", children=(call,))])


def loaded_kernels(draft: Draft, random: Random) -> None:
    """Kernels used for the first time are loaded in a later step."""
    occurrences = list(draw_slots(draft, random, int(random.integers(1, 4)), skip=1))
    name = str(random.choice(["cuLibraryLoadData", "cuModuleLoadData", "cudaGetFuncBySymbol"]))
    kernel = Kernel(
        "void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<float>", fixed=5000
    )
    launch = Call("cudaLaunchKernel", cat="cuda_runtime", kernel=kernel, fixed=4000)
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        load = Call(
            name, 1.0, "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime"
        )
        draft.add_calls(slot, [Call("aten::upsample_bilinear2d", children=(load, launch))])


NETWORK = (
    ("aten::conv2d", "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16"),
    ("aten::batch_norm", "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>"),
    ("aten::relu", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_relu<float> >"),
    ("aten::linear", "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"),
)
"""Operators and kernels of a forward pass."""

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
    Kind("logging every other step", GPU, log_some_steps, ("host-sync",)),
    Kind("boolean masks", GPU, boolean_masks, ("host-sync",)),
    Kind("evaluation in a step", GPU, evaluation, ("additional-work",)),
    Kind("evaluation on one rank", MULTI, on_one_rank(evaluation), ("additional-work", "stragglers")),
    Kind("slow launches on one rank", MULTI, slow_launches, ("stragglers", "launch-bound")),
    Kind("offloaded optimizer", GPU, offloaded_optimizer, ("host-sync", "idle-host", "host-compute")),
    Kind("fused CPU optimizer", GPU, fused_cpu_optimizer, ("host-compute",)),
    Kind("pinned allocations", GPU, pinned_allocations, ("allocator",)),
    Kind("kernels loaded late", GPU, loaded_kernels, ("slow-calls",)),
)
