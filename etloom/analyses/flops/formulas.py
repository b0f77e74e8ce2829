"""Which operators have a formula: operator -> family and formula, and by what a kernel's own name tells its family."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from etloom.analyses.flops import attention, convolution, gemm, memory_bound
from etloom.analyses.flops.operator_call import Formula
from etloom.core import categories

MATRIX = ("gemm", "attention", "convolution")
"""Families whose arithmetic is a model's; MFU counts only these."""
FAMILIES = (
    *MATRIX,
    *("normalisation", "softmax", "elementwise", "reduction", "embedding", "copy", "communication", "other"),
)


@dataclass(frozen=True)
class Entry:
    """composite: it mostly calls an operator that has an entry, and counts only where it calls none."""

    family: str
    formula: Formula
    composite: bool = False


_TABLES = {
    "gemm": gemm.FORMULAS,
    "attention": attention.FORMULAS,
    "convolution": convolution.FORMULAS,
    "normalisation": memory_bound.NORMALISATION,
    "softmax": memory_bound.SOFTMAX,
    "elementwise": memory_bound.ELEMENTWISE,
    "reduction": memory_bound.REDUCTION,
    "embedding": memory_bound.EMBEDDING,
    "copy": memory_bound.COPY,
}
REGISTRY: dict[str, Entry] = {
    **{name: Entry(family, formula) for family, table in _TABLES.items() for name, formula in table.items()},
    **{name: Entry("gemm", formula, composite=True) for name, formula in gemm.COMPOSITE.items()},
}


def find_entry(operator: str) -> Entry | None:
    """What is known of an operator by its name."""
    if operator.startswith(memory_bound.FUSED):
        return Entry("elementwise", memory_bound.FUSED_FORMULA)
    return REGISTRY.get(operator)


_NOT_FBGEMM = r"(?:^|[^b]|[^f]b)gemm"
_KERNELS = (
    ("embedding", r"(?i)embedding_(?:codegen|backward|bag|dense)|index_?select|gather_kernel"),
    (
        "copy",
        r"(?i)reshape_and_cache",
    ),  # keys and values into the pages of a cache; named after whose layout that is
    ("attention", r"(?i)flash|fmha|attention|attn_|_attn|sdpa"),
    (
        "convolution",
        r"(?i)conv(?:olution|\dd|_)|fprop|dgrad|wgrad|winograd|implicit_gemm|igemm_(?:fwd|bwd|wrw)|scudnn|fft2d"
        r"|nchwToNhwc|nhwcToNchw",
    ),
    ("gemm", rf"(?i){_NOT_FBGEMM}|gemv|nvjet|^Cijk_|^bmm_|splitKreduce|_matmul|dot_kernel"),
    ("normalisation", r"(?i)(?:layer|batch|group|rms|instance)_?norm|bn_fw|bn_bw"),
    ("softmax", r"(?i)softmax"),
    ("reduction", r"(?i)reduce_kernel|_reduce_|reduction"),
    ("copy", r"(?i)^mem(?:cpy|set)|copybuffer|fillbuffer|copy_kernel|direct_copy|CatArray|FillFunctor"),
    ("elementwise", r"(?i)elementwise|multi_tensor_apply|triton_poi|rotary"),
)
_PARAMETERS = r"\(.*$"
_CASTS = r"\([A-Za-z_][\w: ]*\)(?:-|\b)"
"""Before the numbers that fill a template, as Nsight Systems spells them: <(int)128, (bool)1>."""


def infer_kernel_family(kind: pl.Expr, name: pl.Expr) -> pl.Expr:
    """The family that a device event's own kind and name tell, for one whose operator tells none.

    What a kernel is given as parameters says nothing of it; what its template is filled with does.
    """
    own = name.str.replace_all(f"{categories.ANONYMOUS_NAMESPACE}|{_CASTS}", "").str.replace(_PARAMETERS, "")
    told = [
        pl.when(kind == "communication").then(pl.lit("communication")),
        *(pl.when(own.str.contains(pattern)).then(pl.lit(family)) for family, pattern in _KERNELS),
        pl.when(kind == "memory").then(pl.lit("copy")),
    ]
    return pl.coalesce(*told, pl.lit("other"))
