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


MEMORY = (
    Kind("layout conversions", GPU, layout_conversions, ("copies",)),
    Kind("copy instead of view", GPU, copy_for_view, ("copies",)),
    Kind("zero fills", GPU, zero_fills, ("zero-fill",)),
    Kind("pageable copies", GPU, pageable_copies, ("copies",)),
    Kind("allocator churn", GPU, allocator_churn, ("allocator",)),
)
