"""Matrix products in fp32 on a device that has tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.patterns._finding import Finding, at, counted, places
from etloom.patterns._view import View, named

PLAIN = r"(?i)sgemm|simt_|gemmSN_|gemv2.*float|_fp32_|s884gemm_fp32|Cijk_.*_SB_"
TENSOR = r"(?i)tf32|tensorop|xmma|s1688|s16816|884|hmma|wgmma"
NARROW = r"(?i)e[2345]m[1235]|bf16|bfloat16|fp16|fp8|fp4|__half"
"""Types of operands whose sums are kept in fp32."""

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    devices = view.trace.meta.get("device_properties") or []
    majors = [one.get("computeMajor") for one in devices if isinstance(one, dict)]
    newest = max((major for major in majors if isinstance(major, int)), default=0)
    if newest < 7:
        return
    plain = view.work.filter(named(view.work, PLAIN) & ~named(view.work, f"{TENSOR}|{NARROW}"))
    # TF32 has 4 to 8 times the peak of fp32 (0 on Volta, where it takes half precision): half is a careful guess.
    half = pl.col("dur") // 2
    rows = plain.select("step", "stream", "name", "end", start="ts", cost_ns=half, event="launch")
    how = (
        "torch.set_float32_matmul_precision('high') lets TF32 do them, or use autocast with bfloat16"
        if newest >= 8
        else "use autocast with float16: this device has no TF32"
    )
    yield from places(
        view,
        rows,
        lambda row: f"{counted(row['count'], 'matrix product')}{at(row)} in fp32 beside idle tensor cores",
        confidence="low",
        advice=how,
    )
