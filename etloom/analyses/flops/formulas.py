"""Operators with a formula (operator -> family and formula), and kernel families by kernel name."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from etloom.analyses.flops import attention, convolution, gemm, memory_bound
from etloom.analyses.flops.operator_call import Formula
from etloom.core import categories

MATRIX = ("gemm", "attention", "convolution")
"""Families that count for MFU: the arithmetic of a model."""
FAMILIES = (
    *MATRIX,
    *("normalisation", "softmax", "elementwise", "reduction", "embedding", "copy", "communication", "other"),
)


@dataclass(frozen=True)
class Entry:
    """The formula of an operator.

    Attributes:
        composite: The operator usually calls one that has an entry itself, and is counted only if it does not.
    """

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
    """Return the entry of an operator, None if it has none."""
    if operator.startswith(memory_bound.FUSED):
        return Entry("elementwise", memory_bound.FUSED_FORMULA)
    return REGISTRY.get(operator)


_NOT_FBGEMM = r"(?:^|[^b]|[^f]b)gemm"
_KERNELS = (
    ("embedding", r"(?i)embedding_(?:codegen|backward|bag|dense)|index_?select|gather_kernel"),
    (
        "copy",
        r"(?i)reshape_and_cache",
    ),  # writes keys and values to cache pages; the name contains the attention backend whose layout it is
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
"""Matches casts of template arguments, as Nsight Systems writes them: <(int)128, (bool)1>."""


def infer_kernel_family(kind: pl.Expr, name: pl.Expr) -> pl.Expr:
    """Return the family of a GPU activity from its type and name, for unknown operators.

    The parameter list of a kernel's name is ignored, its template arguments are not.
    """
    kernel_name = name.str.replace_all(f"{categories.ANONYMOUS_NAMESPACE}|{_CASTS}", "").str.replace(
        _PARAMETERS, ""
    )
    families = [
        pl.when(kind == "communication").then(pl.lit("communication")),
        *(pl.when(kernel_name.str.contains(pattern)).then(pl.lit(family)) for family, pattern in _KERNELS),
        pl.when(kind == "memory").then(pl.lit("copy")),
    ]
    return pl.coalesce(*families, pl.lit("other"))
