"""Problems of the device: slow kernels, wrong kernels, too many kernels."""

from __future__ import annotations

import re

import numpy as np

from etloom.graphs.graph import EdgeKind
from etloom.timeline.activity import find_steps

from ..draft import Call, Draft, Kernel
from .kind import GPU, MULTI, Kind, Random, draw_rank, draw_slots, find_edges

FORWARD = (
    ("aten::conv2d", "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16"),
    ("aten::linear", "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"),
    (
        "aten::layer_norm",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
    ),
)
"""Operators and kernels that run again in backward."""
GEMM = r"(?i)gemm|cudnn.*(?:conv|wgrad|dgrad|fprop)|xmma"
FP32 = (
    "volta_sgemm_128x64_nn",
    "ampere_sgemm_64x64_tn",
    "volta_scudnn_sgemm_128x128_relu_small_nn",
    "cutlass_simt_sgemm_128x64",
)
EXPERTS = ("moe_grouped_gemm_kernel", "void grouped_gemm::GroupedGemm<bf16>", "fused_moe_kernel")
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>, at::detail::Array<char*, 3> >",
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::AddFunctor<float> > >",
    "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float> >",
)


def slow_rank(draft: Draft, random: Random) -> int:
    rank = draw_rank(draft, random)
    edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
    edges = edges[~_is_communication(draft, rank, edges)]
    draft.weight[edges] += draft.lag[edges]
    return rank


def throttling(draft: Draft, random: Random) -> int | None:
    """Kernels become slower and slower, from a random moment on."""
    start = random.uniform(0.0, 0.5)
    for rank in draft.base.job:
        edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
        edges = edges[~_is_communication(draft, rank, edges)]
        time = draft.graph.time[draft.graph.source[edges]]
        share = (time - time.min()) / max(1, time.max() - time.min())
        draft.weight[edges] += draft.lag[edges] * np.clip((share - start) / (1 - start), 0, 1)
    return None


def fp32_gemm(draft: Draft, random: Random) -> None:
    """Some products take 1.6 to 3 times as long, and run as kernels for fp32."""
    factor, name = random.uniform(0.6, 2.0), str(random.choice(FP32))
    order = random.random(1 << 16)
    for rank, trace in draft.base.job.items():
        edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
        names = trace.events["name"].cast(str).gather(draft.graph.event[draft.graph.source[edges]]).to_list()
        products = edges[[bool(re.search(GEMM, text)) for text in names]]
        products = products[np.argsort(order[: len(products)])]
        enough = np.searchsorted(np.cumsum(draft.lag[products]) * factor, draft.target_ns)
        chosen = products[: int(enough) + 1]
        draft.weight[chosen] += draft.lag[chosen] * factor
        draft.names[rank] = {int(event): name for event in draft.graph.event[draft.graph.source[chosen]]}


def expert_imbalance(draft: Draft, random: Random) -> int:
    """A tenth of the kernels are those of experts, which take longer on one rank."""
    slow, name = draw_rank(draft, random), str(random.choice(EXPERTS))
    positions = random.random(1 << 16) < 0.1
    for rank in draft.base.job:
        edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
        edges = edges[~_is_communication(draft, rank, edges)]
        chosen = edges[positions[: len(edges)]]
        draft.names[rank] = {int(event): name for event in draft.graph.event[draft.graph.source[chosen]]}
        if rank == slow:
            draft.weight[chosen] += draft.lag[chosen]
    return slow


def unfused_elementwise(draft: Draft, random: Random) -> None:
    count, length = int(random.integers(2, 8)), int(random.integers(4, 10))
    for _, slots in draw_slots(draft, random, count):
        names = random.choice(ELEMENTWISE, length)
        for slot in slots:
            draft.add_calls(
                slot, [_launch("aten::mul", Kernel(str(name), 1.0), fixed=1000) for name in names]
            )


def tiny_kernels(draft: Draft, random: Random) -> None:
    """Loops of operators that launch kernels of 2 us, which takes the host longer."""
    count, length = int(random.integers(1, 4)), int(random.integers(60, 150))
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            draft.add_calls(
                slot,
                [
                    Call(
                        "aten::add_",
                        weight=1.0,
                        children=(
                            Call(
                                "cudaLaunchKernel",
                                0.5,
                                "cuda_runtime",
                                kernel=Kernel(ELEMENTWISE[0], fixed=2000),
                            ),
                        ),
                    )
                    for _ in range(length)
                ],
            )


def optimizer_per_parameter(draft: Draft, random: Random) -> None:
    """The optimizer updates one parameter after the other, by several small kernels each."""
    count = int(random.integers(60, 200))
    operators = ("aten::mul_", "aten::add_", "aten::addcmul_", "aten::sqrt", "aten::addcdiv_")
    for _, slots in draw_slots(draft, random, 1, low=0.95):
        for slot in slots:
            for _ in range(count):
                for operator in operators:
                    kernel = Kernel(ELEMENTWISE[0], fixed=1500)
                    launch = Call("cudaLaunchKernel", 0.5, "cuda_runtime", kernel=kernel, fixed=1000)
                    draft.add_calls(slot, [Call(operator, weight=1.0, children=(launch,))])


def small_operators(draft: Draft, random: Random) -> None:
    """Operators with tiny kernels between all others, as in a model with a small batch."""
    count = int(random.integers(100, 300))
    names = ("aten::add", "aten::mul", "aten::softmax", "aten::layer_norm", "aten::gelu")
    for index, slots in draw_slots(draft, random, count):
        for slot in slots:
            kernel = Kernel(str(ELEMENTWISE[index % 3]), fixed=2000)
            launch = Call("cudaLaunchKernel", 0.3, "cuda_runtime", kernel=kernel, fixed=2000)
            draft.add_calls(slot, [Call(names[index % len(names)], weight=1.0, children=(launch,))])


def uneven_batches(draft: Draft, random: Random) -> None:
    """The ranks take turns in having the longest sequences, and compute longer."""
    graph = draft.graph
    for rank, trace in draft.base.job.items():
        edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
        edges = edges[~_is_communication(draft, rank, edges)]
        time = graph.time[graph.source[edges]]
        for i, (start, end) in enumerate(find_steps(trace).select("start", "end").iter_rows()):
            share = random.uniform(0.7, 1.0) if i % len(draft.base.job) == rank else random.uniform(0.0, 0.1)
            inside = edges[(time >= start) & (time < end)]
            draft.weight[inside] += draft.lag[inside] * share
            grids = draft.grids.setdefault(rank, {})
            grids |= {int(event): 1 + share for event in graph.event[graph.source[inside]]}


def memory_bound_neighbour(draft: Draft, random: Random) -> int:
    """Another program uses the memory of one rank's device in bursts: kernels take longer in them."""
    rank = draw_rank(draft, random)
    edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
    edges = edges[~_is_communication(draft, rank, edges)]
    time = draft.graph.time[draft.graph.source[edges]]
    parts = int(random.integers(10, 30))
    burst = random.random(parts) < 0.4
    burst[int(random.integers(parts))] = True
    part = (time - time.min()) * parts // (time.max() - time.min() + 1)
    draft.weight[edges[burst[part]]] += draft.lag[edges[burst[part]]]
    return rank


def recomputed_activations(draft: Draft, random: Random) -> None:
    """Parts of the forward run again in backward."""
    count, length = int(random.integers(3, 9)), int(random.integers(4, 9))
    for _, slots in draw_slots(draft, random, count, low=0.4, high=0.8):
        for slot in slots:
            again = tuple(
                Call(
                    operator,
                    fixed=2000,
                    children=(
                        Call("cudaLaunchKernel", cat="cuda_runtime", kernel=Kernel(name, 1.0), fixed=3000),
                    ),
                    columns={"seq_id": 1_000_000 + i},
                )
                for i, (operator, name) in enumerate((FORWARD * 3)[:length])
            )
            backward = {"seq_id": 999_999, "fwd_tid": 1}
            draft.add_calls(
                slot, [Call("CheckpointFunctionBackward", fixed=3000, children=again, columns=backward)]
            )


def slow_kernel(draft: Draft, random: Random) -> int:
    """One kernel of one step takes much longer on one rank, for example after page faults."""
    rank = draw_rank(draft, random)
    edges = find_edges(draft, EdgeKind.KERNEL, rank=rank)
    names = draft.base.job[rank].events["name"].cast(str).gather(draft.graph.event[draft.graph.source[edges]])
    draft.weight[random.choice(edges[names.str.contains(GEMM).to_numpy()])] = 1.0
    return rank


def _launch(operator: str, kernel: Kernel, fixed: int = 0) -> Call:
    call = Call("cudaLaunchKernel", cat="cuda_runtime", kernel=kernel, fixed=fixed)
    return Call(operator, fixed=fixed, children=(call,))


def _is_communication(draft: Draft, rank: int, edges: np.ndarray) -> np.ndarray:
    names = draft.base.job[rank].events["name"].cast(str).gather(draft.graph.event[draft.graph.source[edges]])
    return names.str.contains("(?i)nccl").to_numpy()


DEVICES = (
    Kind("slow rank", MULTI, slow_rank, ("stragglers",)),
    Kind("thermal throttling", GPU, throttling, ("throttling",)),
    Kind("fp32 GEMM", GPU, fp32_gemm, ("fp32-gemm",)),
    Kind("MoE imbalance", MULTI, expert_imbalance, ("expert-imbalance", "stragglers")),
    Kind("unfused elementwise", GPU, unfused_elementwise, ("elementwise-chains",)),
    Kind(
        "optimizer per parameter",
        GPU,
        optimizer_per_parameter,
        ("launch-bound", "tiny-operators", "elementwise-chains"),
    ),
    Kind("small operators", GPU, small_operators, ("launch-bound",)),
    Kind("uneven batches", MULTI, uneven_batches, ("stragglers",)),
    Kind("memory-bound neighbour", MULTI, memory_bound_neighbour, ("stragglers", "throttling")),
    Kind("recomputed activations", GPU, recomputed_activations, ("recomputation",)),
    Kind("slow kernel on one rank", MULTI, slow_kernel, ("stragglers",)),
    Kind("tiny kernels", GPU, tiny_kernels, ("launch-bound", "tiny-operators")),
)
