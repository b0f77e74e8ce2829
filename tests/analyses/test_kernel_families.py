"""Families of kernels by name: a table that users extend, and that covers the kernels of all shared traces."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.analyses.flops.formulas import infer_kernel_family
from etloom.analyses.kernel_families import classify_kernels
from etloom.core import categories, names
from support.small_traces import RankBuilder

NAMES = {
    "void deep_ep::internode::dispatch<true, 8>(int4*, float*)": "communication",
    "void dpsk::ep::internode::notify_dispatch<false, 4>(int const*)": "communication",
    "dpsk::ep::intranode::combine<__nv_bfloat16>(__nv_bfloat16*)": "communication",
    "void deep_ep::internode_ll::combine<7168>(void*)": "communication",
    "nvshmemi_transfer_kernel(int)": "communication",
    "void flashinfer::allreduce_fusion_kernel_oneshot_lamport<Params>(Params)": "fused_communication",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_rmsnorm_kernel<8>(float*)": "fused_communication",
    "triton_red_fused_all_reduce_rms_norm_3": "normalisation",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(int)2>(int)": "attention",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, c10::Half>(c10::Half*)": "normalisation",
    "void flashinfer::activation::act_and_mul_kernel<c10::Half>(c10::Half*)": "elementwise",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>(float*)": "sorting",
    "triton_poi_fused_add_0": "elementwise",
    "triton_red_fused_sum_1": "reduction",
    "triton__0d1d2d": "elementwise",
    "_per_token_group_quant_fp8": "quantization",
    "_combined_routing_compute": "routing",
    "void (anonymous namespace)::moe_align_block_size_kernel<int>(int)": "routing",
    "at::cuda::(anonymous namespace)::spin_kernel(long)": "waiting",
    "fused_moe_kernel": "moe",
    "void ck::kernel_moe_gemm<128>(float*)": "moe",
    "_ZN5aiter46fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x256E": "moe",
    "void vllm::moe::topkGatingSoftmax<8, 128>(float const*)": "routing",
    "void marlin::Marlin<8, 256>(int4 const*)": "gemm",
    "_fwd_grouped_kernel_stage1": "attention",
    "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<32, 4>>(SSMParamsBase)": "ssm",
    "_chunk_scan_fwd_kernel": "ssm",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "ssm",
    "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128>>(ConvParamsBase)": "ssm",
    "liger_cross_entropy_kernel": "loss",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)": "loss",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>>": "optimizer",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": "rope",
    "_triton_rope": "rope",
    "triton_poi_fused_add_rope_7": "elementwise",
    "void property_kernel<int>()": "other",
    "nobody_knows_this": "other",
}


def families(kernels: list[str]) -> list[str]:
    frame = pl.DataFrame({"cat": ["kernel"] * len(kernels), "name": kernels}).with_columns(
        kind=categories.kernel_type()
    )
    return (
        frame.select(infer_kernel_family(pl.col("kind").cast(pl.String), pl.col("name")))
        .to_series()
        .to_list()
    )


def test_families_by_name() -> None:
    assert dict(zip(NAMES, families(list(NAMES)), strict=True)) == NAMES


def test_rows_of_users_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_user_files", {})
    file = tmp_path / "mine.yaml"
    file.write_text(
        "families:\n  - {family: gemm, pattern: nobody}\ncommunication:\n  - {pattern: '^my_ring', computes: softmax}\n"
    )
    names.add_names(file)
    try:
        assert families(["nobody_knows_this", "my_ring_softmax(int)"]) == ["gemm", "fused_communication"]
    finally:
        monkeypatch.undo()
        names.list_names.cache_clear()


@pytest.mark.parametrize("row", ["{family: nothing, pattern: x}", "{family: gemm, pattern: '(?<=a)b'}"])
def test_a_wrong_row_is_refused(tmp_path: Path, row: str) -> None:
    file = tmp_path / "names.yaml"
    file.write_text(f"families:\n  - {row}\n")
    with pytest.raises(etloom.EtloomError, match=r"row 1 of families"):
        names.read_names(file)


TRACES = [
    "tracelens/*.json.gz",
    "serving/vllm_decode_full",
    "critical_path/*.json.gz",
    "hta_misc/negative*.json.gz",
]
TRACES += [
    "hta_misc/rank-0*.json.gz",
    "hta_multirank",
    "dlrm",
    "nccl_ddp",
    "linear",
    "simple_add",
    "nsys/*.gz",
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", TRACES)
def test_families_cover_shared_traces(pattern: str, data: Path) -> None:
    for path in sorted(data.glob(pattern)):
        for trace in etloom.open(path).values():
            kernels = classify_kernels(trace)
            unknown = kernels.filter(pl.col("family") == "other")["dur"].sum()
            assert unknown <= 0.03 * kernels["dur"].sum(), path


def test_copies_and_fills_have_a_family_of_their_own(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::mm", 0, 100)
    run.kernel(5, 10, 20, "Memset (Device)", "gpu_memset").kernel(20, 40, 100, "sgemm")
    families = etloom.analyze(etloom.link(run.trace(tmp_path)), "kernel-families")
    assert families.select("family", "total_ns").rows() == [("gemm", 100_000), ("copy", 20_000)]
