"""Problems of memory: copies, fills and allocations."""

from __future__ import annotations

from ..draft import Call, Draft, Kernel
from .devices import _launch
from .kind import GPU, Kind, Random, draw_slots

LAYOUTS = (
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>",
    "void at::native::(anonymous namespace)::batch_transpose_kernel<float>",
    "void at::native::elementwise_kernel<128, 4, "
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)> >",
)
COPY = LAYOUTS[2]


def layout_conversions(draft: Draft, random: Random) -> None:
    name, count = str(random.choice(LAYOUTS)), int(random.integers(3, 16))
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            draft.add_calls(
                slot, [Call("aten::contiguous", children=(_launch("aten::copy_", Kernel(name, 1.0), 1000),))]
            )


def copy_for_view(draft: Draft, random: Random) -> None:
    """A tensor is repeated or cloned where a view would do."""
    operator, count = (
        str(random.choice(["aten::repeat", "aten::clone", "aten::reshape"])),
        int(random.integers(1, 8)),
    )
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            inner = Call("aten::clone", children=(_launch("aten::copy_", Kernel(COPY, 1.0), 1000),))
            draft.add_calls(slot, [Call(operator, children=(inner,))])


def zero_fills(draft: Draft, random: Random) -> None:
    count = int(random.integers(2, 10))
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >"
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            draft.add_calls(slot, [_launch("aten::zero_", Kernel(name, 1.0), 1000)])


def pageable_copies(draft: Draft, random: Random) -> None:
    """Inputs are copied from pageable memory, which blocks the host."""
    count = int(random.integers(1, 4))
    for _, slots in draw_slots(draft, random, count, high=0.3):
        for slot in slots:
            kernel = Kernel("Memcpy HtoD (Pageable -> Device)", 1.0, "gpu_memcpy", bytes=64 << 20)
            call = Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=kernel, waits=True)
            draft.add_calls(slot, [Call("aten::to", children=(Call("aten::copy_", children=(call,)),))])


def allocator_churn(draft: Draft, random: Random) -> None:
    """The allocator releases cached blocks, which waits for the device, and allocates them again."""
    count = int(random.integers(1, 6))
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            calls = [
                Call("cudaFree", 1.0, "cuda_runtime", waits=True),
                Call("cudaMalloc", 2.0, "cuda_runtime"),
            ]
            draft.add_calls(slot, [Call("aten::empty", children=tuple(calls))])


def input_copies(draft: Draft, random: Random) -> None:
    """The batch is copied from pinned memory on the stream of the computation, which waits for it."""
    copy = Kernel("Memcpy HtoD (Pinned -> Device)", 1.0, "gpu_memcpy", bytes=64 << 20)
    call = Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=copy, fixed=3000)
    inner = Call("aten::_to_copy", fixed=1000, children=(Call("aten::copy_", fixed=1000, children=(call,)),))
    for _, slots in draw_slots(draft, random, 1, high=0.02):
        for slot in slots:
            draft.add_calls(slot, [Call("aten::to", fixed=1000, children=(inner,))])


def output_copies(draft: Draft, random: Random) -> None:
    """Outputs are copied to pageable memory at the end of each step."""
    copy = Kernel("Memcpy DtoH (Device -> Pageable)", 1.0, "gpu_memcpy", bytes=64 << 20)
    calls = (
        Call("cudaMemcpyAsync", cat="cuda_runtime", kernel=copy, fixed=3000),
        Call("cudaStreamSynchronize", cat="cuda_runtime", waits=True, fixed=1000),
    )
    for _, slots in draw_slots(draft, random, 1, low=0.9):
        for slot in slots:
            draft.add_calls(slot, [Call("aten::to", children=(Call("aten::copy_", children=calls),))])


def many_small_copies(draft: Draft, random: Random) -> None:
    """The tensors of a batch are copied to the device one by one."""
    count = int(random.integers(20, 60))
    copy = Kernel("Memcpy HtoD (Pinned -> Device)", fixed=1500, cat="gpu_memcpy", bytes=4096)
    call = Call("cudaMemcpyAsync", 1.0, "cuda_runtime", kernel=copy, fixed=2000)
    for _, slots in draw_slots(draft, random, 1, high=0.1):
        for slot in slots:
            for _ in range(count):
                draft.add_calls(
                    slot, [Call("aten::to", 0.5, children=(Call("aten::copy_", 0.5, children=(call,)),))]
                )


def emptied_cache(draft: Draft, random: Random) -> None:
    """The cache of the allocator is emptied at the end of each step, and the next one allocates again."""
    count = int(random.integers(4, 20))
    for _, slots in draw_slots(draft, random, 1, low=0.95):
        for slot in slots:
            wait = Call("cudaDeviceSynchronize", cat="cuda_runtime", waits=True)
            draft.add_calls(slot, [wait, *(Call("cudaFree", 1.0, "cuda_runtime") for _ in range(count))])
    for _, slots in draw_slots(draft, random, count, high=0.6, skip=1):
        for slot in slots:
            call = Call("cudaMalloc", 1.0, "cuda_runtime")
            draft.add_calls(slot, [Call("aten::empty", fixed=1000, children=(call,))])


MEMORY = (
    Kind("layout conversions", GPU, layout_conversions, ("copies",)),
    Kind("copy instead of view", GPU, copy_for_view, ("copies",)),
    Kind("zero fills", GPU, zero_fills, ("zero-fill",)),
    Kind("pageable copies", GPU, pageable_copies, ("copies",)),
    Kind("input copies", GPU, input_copies, ("copies",)),
    Kind("output copies", GPU, output_copies, ("copies", "host-sync")),
    Kind("many small copies", GPU, many_small_copies, ("copies", "launch-bound")),
    Kind("emptied cache", GPU, emptied_cache, ("allocator", "host-sync")),
    Kind("allocator churn", GPU, allocator_churn, ("allocator",)),
)
