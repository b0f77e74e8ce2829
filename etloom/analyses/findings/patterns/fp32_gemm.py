"""Matrix products in fp32 on a device that does them much faster in narrower types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import Finding, counted, describe_place, group_by_place
from etloom.analyses.findings.rank_view import View

PLAIN = r"(?i)sgemm|simt_|_fp32_"
"""Of NVIDIA's devices: products in fp32. Those with a vector (gemv) and with a narrow matrix (gemmSN) are bound by
memory, whatever computes them."""
TENSOR = r"(?i)tf32|tensorop|xmma|s1688|s16816|884|hmma|wgmma|gemv"
NARROW = r"(?i)e[2345]m[1235]|bf16|bfloat16|fp16|fp8|fp4|__half"
"""Types of operands whose sums are kept in fp32."""
MATRIX_CORES = r"^Cijk_A[a-z]+_B[a-z]+_S_?B_.*_MI\d+x\d+"
"""Of AMD's: fp32 (S) in Tensile's names, also spelled S_B, by instructions of the matrix cores (MI)."""
AMD = re.compile(r"(?i)\bAMD\b|Instinct|Radeon")
TF32 = {
    (9, 0): ": this device has no TF32",
    (
        9,
        4,
    ): "; this device has TF32 too (xf32), but whether PyTorch, hipBLASLt and rocBLAS take it depends on their "
    "versions: see whether torch.set_float32_matmul_precision('high') changes the names of the kernels",
    (9, 5): ": this device has no TF32 in hardware",
}
"""What is to be said of it on AMD's devices, by compute capability as HIP tells it: MI100 and MI2xx, MI300, MI350."""

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    devices = [one for one in view.trace.meta.get("device_properties") or [] if isinstance(one, dict)]
    others = [one.get("computeMajor") for one in devices if not AMD.search(str(one.get("name")))]
    newest = max((major for major in others if isinstance(major, int)), default=0)
    if newest >= 7:
        how = (
            "torch.set_float32_matmul_precision('high') lets TF32 do them, or use autocast with bfloat16"
            if newest >= 8
            else "use autocast with float16: this device has no TF32"
        )
        plain = view.named(view.work, PLAIN) & ~view.named(view.work, f"{TENSOR}|{NARROW}")
        yield from _found(view, plain, "in fp32 beside idle tensor cores", how, "idle")
    of_amd = {(one.get("computeMajor"), one.get("computeMinor")) for one in devices}
    how = "use autocast with bfloat16" + next(
        (text for version, text in TF32.items() if version in of_amd), ""
    )
    faster = "in fp32, at a quarter or less of the matrix cores' 16-bit speed"
    yield from _found(view, view.named(view.work, MATRIX_CORES), faster, how, "matrix cores")


def _found(view: View, products: pl.Series, what: str, how: str, kind: str) -> Iterator[Finding]:
    def title(row: dict[str, Any]) -> str:
        return f"{counted(row['count'], 'matrix product')}{describe_place(row)} {what}"

    # The peak of narrower types is 2 to 16 times that of fp32: half of the time is a careful guess.
    half = pl.col("dur") // 2
    rows = view.work.filter(products).select(
        "step", "stream", "name", "end", start="ts", cost_ns=half, event="launch"
    )
    yield from group_by_place(view, rows, title, confidence="low", advice=how, kind=kind)
