"""What names mean, by vendor."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest

from etloom.core import categories, names
from etloom.core.steps import STEP_PATTERN
from etloom.core.trace import Trace

COPY, SET = "gpu_memcpy", "gpu_memset"

KERNELS = {
    "NCCL to 2.17": [
        (
            "kernel",
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            "all_reduce",
        ),
        ("kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long)", "send_recv"),
        ("kernel", "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long)", "broadcast"),
        ("Kernel", "ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
    ],
    "NCCL from 2.18": [
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)", "all_reduce"),
        ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("kernel", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", "reduce_scatter"),
        ("kernel", "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevComm*)", "reduce"),
        ("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("kernel", "ncclSymDevKernel_AllReduce_RSxLD_AGxST_Sum_bf16(ncclSymDevArgs)", "all_reduce"),
    ],
    "RCCL": [
        ("kernel", "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None),
        ("kernel", "ncclDevKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)", None),
        ("kernel", "rccl_main_kernel(ncclDevComm*, unsigned long, ncclWork*)", None),
        ("kernel", "mscclKernel_Sum_rccl_bfloat16_Simple_false(ncclDevComm*)", None),
    ],
    "HCCL": [
        ("kernel", "hcom_allReduce__503_0_1", "all_reduce"),
        ("kernel", "hcom_alltoallv_", "all_to_all"),
        ("mtia_ccp_events", "hccl_all_gather", "all_gather"),
    ],
    "MTIA": [("mtia_ccp_events", "collective_subgraph_execution", None)],
    "oneCCL": [
        ("kernel", "oneccl_allreduce_pcie", "all_reduce"),
        ("kernel", "ccl::sycl_kernel<int>(int)", None),
    ],
    "one-shot and two-shot": [
        ("kernel", "void vllm::cross_device_reduce_1stage<__hip_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("kernel", "void aiter::cross_device_reduce_2stage<half, 4>(int)", "all_reduce"),
        ("kernel", "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>(x)", "all_reduce"),
        (
            "kernel",
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>(x)",
            "all_reduce",
        ),
        ("kernel", "kuserbuffers_pushsendrecv(int*, int*, int4*)", None),
        ("kernel", "kuserbuffers_inc(int*)", None),
        (
            "kernel",
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
            "all_reduce",
        ),
        (
            "kernel",
            "void <unnamed>::multimem_all_reduce_kernel<c10::BFloat16, (int)16>(T1 *, unsigned long)",
            "all_reduce",
        ),
    ],
    "DeepEP, NVSHMEM, MSCCL++": [
        ("kernel", "void deep_ep::intranode::dispatch<4, 768, 8192>(int4*, float*)", "all_to_all"),
        ("kernel", "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)", None),
        ("kernel", "void dpsk::ep::internode::notify_dispatch<true, 4>(int const*, int*)", None),
        ("kernel", "void dpsk::ep::internode::dispatch<8>(int4*, float*)", "all_to_all"),
        ("kernel", "void dpsk::ep::intranode::combine<__nv_bfloat16, 8>(int4*)", "all_to_all"),
        ("kernel", "void dpsk::ep::internode::dispatch_ll<3, 10>(void*)", "all_to_all"),
        ("kernel", "dpsk::ep::intranode::barrier<8>(int**)", "barrier"),
        ("kernel", "void deep_ep::internode_ll::combine<true, 7168, 8>(void*)", "all_to_all"),
        ("kernel", "nvshmemi_proxy_barrier(int)", "barrier"),
        ("kernel", "void mscclpp::collective::allreduce_packet<float>(float*)", "all_reduce"),
    ],
}

MEMORY = [
    (COPY, "Memcpy HtoD (Pinned -> Device)"),
    (COPY, "Memcpy PtoP (Device -> Device)"),
    (SET, "Memset (Device)"),
    ("Memcpy", "Memcpy DtoH (Device -> Pageable)"),
    (COPY, "CopyHostToDevice"),
    ("kernel", "CopyHostToDevice"),
    ("kernel", "FillBuffer"),
    ("kernel", "hipMemcpyAsync"),
    ("kernel", "__amd_rocclr_copyBuffer"),
    ("kernel", "__amd_rocclr_fillBufferAligned"),
    ("mtia_ccp_events", "dma_copy"),
]

COMPUTATION = [
    "void at::native::vectorized_elementwise_kernel<4, ncclDummy>(ncclDevComm*)",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
    "triton_red_fused_all_reduce_native_layer_norm_0",
    "void fused_gemm_allreduce_kernel<float>(float*)",
    "_combined_routing_memset",
    "_finalize_matmul_scatter_bf16",
    "myAsyncCopyKernel",
    "tileSyncKernel(float*)",
    "void dmatrix_product<double>(double*)",
    "dmatmul_f64",
    "Cijk_Ailk_Bljk_BBS_BH_Bias_Stream_Wait_Event",
    "hipLikeKernel",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 1, 128, 1>(float*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4>(int)",
    "void cub::DeviceReduceKernel<AllReducePolicy>(int*)",
]

NO_WORK = [
    ("cuda_sync", "Stream Sync"),
    ("gpu_user_annotation", "nccl:all_reduce"),
    ("cuda_runtime", "cudaMemcpyAsync"),
    ("cpu_op", "c10d::allreduce_"),
    (None, "ncclKernel"),
]


def kind_of(cat: str | None, name: str) -> str | None:
    frame = pl.DataFrame(
        {"cat": [cat], "name": [name]}, schema={"cat": pl.Categorical, "name": pl.Categorical}
    )
    return categories.add_kernel_type(frame)["kind"][0]


@pytest.mark.parametrize(
    ("cat", "name", "collective"),
    [row for rows in KERNELS.values() for row in rows],
    ids=[f"{vendor}: {row[1][:40]}" for vendor, rows in KERNELS.items() for row in rows],
)
def test_communication_kernels(cat: str, name: str, collective: str | None) -> None:
    assert kind_of(cat, name) == "communication"
    assert categories.parse_collective(name) == collective


@pytest.mark.parametrize(("cat", "name"), MEMORY)
def test_memcpy_and_memset(cat: str, name: str) -> None:
    assert kind_of(cat, name) == "memory"


@pytest.mark.parametrize("name", COMPUTATION)
def test_substrings_do_not_mislead(name: str) -> None:
    assert kind_of("kernel", name) == "computation"


@pytest.mark.parametrize(("cat", "name"), NO_WORK)
def test_events_without_gpu_activity_have_no_kind(cat: str | None, name: str) -> None:
    assert kind_of(cat, name) is None


@pytest.mark.parametrize("name", ["job_exe", "packet", "pe_exe_3", "cpum_exe_subgraph", "runFunction"])
def test_bookkeeping_of_mtia_is_other(name: str) -> None:
    assert kind_of("mtia_ccp_events", name) == "other"
    assert kind_of("kernel", name) == "computation"


CALLS = [
    ("c10d::allreduce_", False, "all_reduce"),
    ("c10d::_allgather_base_", False, "all_gather"),
    ("c10d::reduce_scatter_tensor_coalesced_", False, "reduce_scatter"),
    ("c10d::alltoall_base_", False, "all_to_all"),
    ("c10d::monitored_barrier_", False, "barrier"),
    ("c10d::recv_any_source_", False, "recv"),
    ("c10d::send", False, "send"),
    ("_c10d_functional::all_to_all_single", False, "all_to_all"),
    ("_c10d_functional::wait_tensor", False, "wait"),
    ("_c10d_functional_autograd::all_gather_into_tensor", False, "all_gather"),
    ("vllm::all_reduce", False, "all_reduce"),
    ("symm_mem::multimem_all_reduce_", False, "all_reduce"),
    *(
        (f"vllm::all_gather{rest}", False, "all_gather")
        for rest in ("_coalesced", "_c", "_into_tensor", "2", ".default")
    ),
    ("record_param_comms", False, None),
    ("gloo:all_reduce", True, "all_reduce"),
    ("nccl:_reduce_scatter_base", True, "reduce_scatter"),
    ("nccl:send 0->1", True, "send"),
    ("nccl:recv 0<-1", True, "recv"),
    ("mpi:all_gather", True, "all_gather"),
    ("ucc:barrier", True, "barrier"),
]


@pytest.mark.parametrize(("name", "backend", "collective"), CALLS)
def test_communication_calls(name: str, backend: bool, collective: str | None) -> None:
    answers = pl.DataFrame({"name": [name]}).select(
        a=categories.is_communication(), b=categories.is_backend_range()
    )
    assert answers.row(0) == (True, backend)
    assert categories.parse_collective(name) == collective


@pytest.mark.parametrize(
    "name",
    [
        *(
            "aten::gather",
            "aten::broadcast_tensors",
            "aten::scatter_reduce",
            "torch::distributed::reducer::mul_out",
        ),
        *("autograd::engine::evaluate_function: GatherBackward0", "GatherBackward0", "### all_reduce ###"),
        *("DistributedDataParallel.forward", "fb::fast_gather", "fsdp::all_gather_copy_in"),
    ],
)
def test_other_operators_are_not_communication(name: str) -> None:
    assert pl.DataFrame({"name": [name]}).select(categories.is_communication()).item() is False
    assert categories.parse_collective(name) is None


RECORDED = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "wait": "wait",
    "init": None,
    "aten::gather": None,
    "GatherBackward0": None,
}


def test_recorded_collective_names() -> None:
    names = pl.Series([*RECORDED, None, "reduce"], dtype=pl.Categorical)
    assert categories.parse_collectives(names).cast(pl.String).to_list() == [
        *RECORDED.values(),
        None,
        "reduce",
    ]
    assert categories.parse_collectives(names).dtype == pl.Categorical


@pytest.mark.parametrize(
    ("size", "spellings"),
    {
        1: "bool|Byte|signed char|unsigned char|c10::Float8_e4m3fn|torch.uint8|uint8_t|ncclInt8",
        2: "c10::Half|c10::BFloat16|BFloat16|torch.float16|bf16|short int|ncclBfloat16",
        4: "float|Float|int|Int|torch.float32|int32_t|c10::complex<c10::Half>|ncclFloat32",
        8: "double|long int|Long|torch.int64|c10::complex<float>|ComplexFloat|unsigned long",
        16: "c10::complex<double>|torch.complex128",
    }.items(),
)
def test_itemsize(size: int, spellings: str) -> None:
    for spelling in spellings.split("|"):
        assert categories.itemsize(spelling) == size, spelling


@pytest.mark.parametrize("unknown", [None, "", "Scalar", "GenericList[Tensor(float)]", "nccl"])
def test_itemsize_of_no_element_type_is_none(unknown: str | None) -> None:
    assert categories.itemsize(unknown) is None


def test_step_annotation() -> None:
    assert re.match(STEP_PATTERN, "ProfilerStep#17")[1] == "17"
    assert re.match(STEP_PATTERN, "ProfilerStep#17 again") is None


def test_the_extent_is_of_work_only() -> None:
    rows = [
        ("X", "Trace", 10, 1000), ("i", None, 5, None), ("X", "cpu_op", 20, 30), ("X", "kernel", 40, 25),
        ("i", "cpu_instant_event", 70, None), ("X", None, 15, 3), ("i", None, 2000, None),
    ]  # fmt: skip
    events = pl.DataFrame(
        rows,
        {"ph": pl.Categorical, "cat": pl.Categorical, "ts": pl.Int64, "dur": pl.Int64},
        orient="row",
    )
    first, last = (
        one.alias(name) for one, name in zip(categories.recorded_extent(), ("first", "last"), strict=True)
    )
    assert events.select(first, last).row(0) == (15, 70)
    assert events[:2].select(first, last).row(0) == (None, None)
    counts = categories.count_events(Trace({"events": events.with_row_index("id")}))
    assert counts["count"].sum() == events.height
    assert counts.select(pl.col("work_start", "first_ts").min(), pl.col("work_end", "end").max()).row(0) == (
        15, 5, 70, 2000,
    )  # fmt: skip
    assert counts.filter(cat="Trace").select("count", "first_ts", "last_ts", "end", "work_start").row(0) == (
        1, 10, 10, 1010, None,
    )  # fmt: skip


def test_types_of_events_of_several_categories_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(names, "_user_files", {})
    request.addfinalizer(names.list_names.cache_clear)
    events = pl.DataFrame(
        {
            "cat": ["kernel", None, "gpu_memcpy", "cpu_op", "kernel", "Kernel", "kernel", "kernel"],
            "name": ["my_ring", "my_ring", None, "my_ring", "ncclKernel_X", "Memcpy", None, "elementwise"],
        }
    )
    expected = ["computation", None, "memory", None, "communication", "memory", "computation", "computation"]
    assert categories.add_kernel_type(events)["kind"].to_list() == expected
    file = tmp_path / "mine.yaml"
    file.write_text("communication:\n  - {pattern: '^my_ring'}\n")
    names.add_names(file)  # what is kept of the names is not used any more
    kinds = categories.add_kernel_type(events.cast({"cat": pl.Categorical, "name": pl.Categorical}))["kind"]
    assert kinds.to_list() == ["communication", *expected[1:]]
