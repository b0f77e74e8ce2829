"""Matrix products in fp32 on a device that is much faster with narrower types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.text import count_noun

PLAIN = r"(?i)sgemm|simt_|_fp32_"
"""Matches fp32 products on NVIDIA devices. Products with a vector (gemv) or a narrow matrix (gemmSN) are limited by
memory in any precision.
"""
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
        plain = view.match_activities(view.activities, PLAIN) & ~view.match_activities(
            view.activities, f"{TENSOR}|{NARROW}"
        )
        yield from _find_products(view, plain, "in fp32 while tensor cores are idle", advice, "idle")
    amd_versions = {(device.get("computeMajor"), device.get("computeMinor")) for device in devices}
    advice = "use autocast with bfloat16" + next(
        (text for version, text in TF32.items() if version in amd_versions), ""
    )
    faster = "in fp32, at a quarter or less of the matrix cores' 16-bit speed"
    yield from _find_products(
        view, view.match_activities(view.activities, MATRIX_CORES), faster, advice, "matrix cores"
    )


def _find_products(
    view: RankView, products: pl.Series, problem: str, advice: str, kind: str
) -> Iterator[Finding]:
    def title(row: dict[str, Any]) -> str:
        return f"{count_noun(row['count'], 'matrix product')}{describe_place(row)} {problem}"

    # The peak of narrower types is 2 to 16 times that of fp32: half of the time is a conservative estimate.
    half = pl.col("dur") // 2
    rows = view.activities.filter(products).select(
        "step", "stream", "name", "end", start="ts", cost_ns=half, event="launch"
    )
    yield from sum_places(view, rows, title, confidence="low", advice=advice, tracks=DEVICE, kind=kind)
