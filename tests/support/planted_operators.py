"""Traces with one planted slow operator each (`kernels/standalone` of the shared data), and the reason to be named."""

from __future__ import annotations

PLANTED = {
    "conv_01_large_spatial_small_ch": "3 input channels",
    "conv_04_depthwise": "depthwise",
    "conv_05_pointwise_1x1": "pointwise",
    "elem_01_add_poor_bw": "reads and writes memory slowly",
    "gemm_01_compute_few_tiles": "too few tiles",
    "gemm_04_memory_tall_skinny": "skinny",
    "moe_01_many_experts_few_tokens": "64 experts with 0.5 tokens",
    "moe_03_top1_sparse": "16 experts, 1 for a token",
    "moe_04_top2_dense": "16 experts, 2 for a token",
    "sdpa_01_long_seq_low_eff": "long sequence",
    "sdpa_03_short_seq_overhead": "short sequences",
}
NOT_FIRST_FINDING = {"moe_04_top2_dense", "sdpa_03_short_seq_overhead"}
"""A launch gap of the first costs more; the other is 0.1 % of its recording."""
