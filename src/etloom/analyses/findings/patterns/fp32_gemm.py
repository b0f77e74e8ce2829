"""Find matrix products in fp32 on a device that is much faster with narrower types.

Matrix products in fp32 while tensor cores idle (NVIDIA's, compute capability 7 and above), or on AMD's matrix
cores; not products with vectors, which are limited by memory.

Cost: half of them.
Confidence: low.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.flops.limits import find_device_peaks
from etloom.core.errors import AnalysisError
from etloom.core.text import count_noun

PLAIN = r"(?i)sgemm|simt_|_fp32_|_ffma_"
"""Matches fp32 products on NVIDIA devices. Products with a vector (gemv) or a narrow matrix (gemmSN) are limited by
memory in any precision.
"""
CUDA_CORES = r"(?i)_ffma_"
"""Matches cuBLAS' products on CUDA cores among those whose names are like the ones on tensor cores."""
TENSOR = r"(?i)tf32|tensorop|xmma|s1688|s16816|884|hmma|wgmma|gemv"
NARROW = r"(?i)e[2345]m[1235]|bf16|bfloat16|fp16|fp8|fp4|__half"
"""Operand types whose sums are accumulated in fp32."""
MATRIX_CORES = r"^Cijk_A[a-z]+_B[a-z]+_S_?B_.*_MI\d+x\d+"
"""Matches fp32 products on AMD devices: fp32 (S) in Tensile's names, also spelled S_B, with matrix core instructions
(MI).
"""
AMD = re.compile(r"(?i)\bAMD\b|Instinct|Radeon")
TF32 = {
    (9, 0): ": this device has no TF32",
    (
        9,
        4,
    ): "; this device has TF32 too (xf32), but its use depends on the versions of PyTorch, hipBLASLt and rocBLAS: "
    "check whether torch.set_float32_matmul_precision('high') changes the kernel names",
    (9, 5): ": this device has no TF32 in hardware",
}
"""Remark on TF32 for AMD devices, by compute capability as reported by HIP: MI100 and MI2xx, MI300, MI350."""

ATTAINED = 0.5
"""Share of the peak of a narrower type that products attain, where fp32 attains nearly all of its own."""
SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    devices = [
        device for device in view.trace.meta.get("device_properties") or [] if isinstance(device, dict)
    ]
    nvidia_versions = [
        device.get("computeMajor") for device in devices if not AMD.search(str(device.get("name")))
    ]
    newest = max((major for major in nvidia_versions if isinstance(major, int)), default=0)
    if newest >= 7:
        advice = (
            "enable TF32 with torch.set_float32_matmul_precision('high'), or use autocast with bfloat16"
            if newest >= 8
            else "use autocast with float16: this device has no TF32"
        )
        work = view.activities
        on_tensor_cores = view.match_activities(work, TENSOR) & ~view.match_activities(work, CUDA_CORES)
        plain = view.match_activities(work, PLAIN) & ~on_tensor_cores & ~view.match_activities(work, NARROW)
        narrow = "tf32" if newest >= 8 else "fp16"
        yield from _find_products(view, plain, "in fp32 while tensor cores are idle", advice, narrow)
    amd_versions = {(device.get("computeMajor"), device.get("computeMinor")) for device in devices}
    advice = "use autocast with bfloat16" + next(
        (text for version, text in TF32.items() if version in amd_versions), ""
    )
    faster = "in fp32, at a quarter or less of the matrix cores' 16-bit speed"
    yield from _find_products(
        view, view.match_activities(view.activities, MATRIX_CORES), faster, advice, "bf16"
    )


def _find_products(
    view: RankView, products: pl.Series, problem: str, advice: str, narrow: str
) -> Iterator[Finding]:
    def title(row: dict[str, Any]) -> str:
        return f"{count_noun(row['count'], 'matrix product')}{describe_place(row)} {problem}"

    if not products.any():
        return
    share = _estimate_saving(view, narrow)
    if share <= 0:
        return
    advice += f"; the cost assumes that {narrow} shortens them by {100 * share:.0f} %"
    saved = (pl.col("dur") * share).cast(pl.Int64)
    rows = view.activities.filter(products).select(
        "step", "stream", "name", "end", start="ts", cost_ns=saved, event="launch"
    )
    kind = "matrix cores" if narrow == "bf16" else "idle"
    yield from sum_places(view, rows, title, confidence="low", advice=advice, tracks=DEVICE, kind=kind)


def _estimate_saving(view: RankView, narrow: str) -> float:
    """Return the share of the fp32 matrix products' time that a narrower type saves if it attains `ATTAINED` of its
    peak.

    Half for devices whose peaks are unknown: the ratio of the peaks is 2 to 16.
    """
    try:
        peaks = find_device_peaks(view.trace, memory=False)
    except AnalysisError:
        return 0.5
    plain, faster = peaks.tflops("vector fp32"), peaks.tflops(narrow)
    if not plain or not faster:
        return 0.5
    return 1 - plain / (ATTAINED * faster)
