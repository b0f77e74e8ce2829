"""Cost formulas and families of operators, by operator name, and families of kernels, by kernel name."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from etloom.analyses.flops import attention, convolution, declared_costs, gemm, memory_bound, state_space
from etloom.analyses.flops.operator_call import Formula
from etloom.core import categories, names

MATRIX = ("gemm", "attention", "convolution", "moe")
"""Families that count for MFU: the arithmetic of a model."""
FAMILIES = names.FAMILIES


@dataclass(frozen=True)
class Entry:
    """The family (such as gemm) and the cost formula of an operator.

    Attributes:
        composite: The operator usually calls another one that has an entry. It is counted only where it calls none.
        part: The operator may be part of a composite one, which is then counted nevertheless.
        needs: What the formula needs of the surroundings of a call, see `etloom.analyses.flops.call_context`.
    """

    family: str
    formula: Formula
    composite: bool = False
    part: bool = False
    needs: str | None = None


_TABLES = {
    "gemm": gemm.FORMULAS,
    "attention": attention.FORMULAS,
    "convolution": convolution.FORMULAS,
    "normalisation": memory_bound.NORMALISATION,
    "softmax": memory_bound.SOFTMAX,
    "elementwise": memory_bound.ELEMENTWISE,
    "reduction": memory_bound.REDUCTION,
    "loss": memory_bound.LOSS,
    "optimizer": memory_bound.OPTIMIZER,
    "embedding": memory_bound.EMBEDDING,
    "copy": memory_bound.COPY,
    "quantization": memory_bound.QUANTIZATION,
    "ssm": state_space.FORMULAS,
}
REGISTRY: dict[str, Entry] = {
    **{name: Entry(family, formula) for family, table in _TABLES.items() for name, formula in table.items()},
    **{name: Entry("gemm", formula, composite=True) for name, formula in gemm.COMPOSITE.items()},
    **{name: Entry("attention", formula, composite=True) for name, formula in attention.COMPOSITE.items()},
}


def find_entry(operator: str | None) -> Entry | None:
    """Return the family and cost formula of an operator; None if the operator has no formula or no name."""
    if operator is None:
        return None
    if (row := declared_costs.find_row(operator)) is not None:
        return Entry(
            row["family"],
            declared_costs.make_formula(row),
            composite="wraps" in row,
            part=row["model"] == "arguments",
            needs="experts" if "router" in row else "pairs" if row["model"] == "attention" else None,
        )
    if operator.startswith(memory_bound.FUSED):
        return Entry("elementwise", memory_bound.FUSED_FORMULA, part=True)
    return REGISTRY.get(operator)


_PARAMETERS = r"\(.*$"
_CASTS = r"\([A-Za-z_][\w: ]*\)(?:-|\b)"
"""Matches casts of template arguments, as Nsight Systems writes them: <(int)128, (bool)1>."""


def infer_kernel_family(kind: pl.Expr, name: pl.Expr) -> pl.Expr:
    """Return an expression for the family of a GPU activity, inferred from its kind and name where the operator is
    unknown.

    The parameter list of a kernel's name is ignored, its template arguments are not.
    """
    kernel_name = name.str.replace_all(f"{categories.ANONYMOUS_NAMESPACE}|{_CASTS}", "").str.replace(
        _PARAMETERS, ""
    )
    fused = [row["pattern"].pattern for row in names.list_names("communication") if "computes" in row]
    is_communication = kind == "communication"
    families = [
        pl.when(is_communication & kernel_name.str.contains("|".join(fused))).then(
            pl.lit("fused_communication")
        ),
        pl.when(is_communication).then(pl.lit("communication")),
        *(
            pl.when(kernel_name.str.contains(row["pattern"].pattern)).then(pl.lit(row["family"]))
            for row in names.list_names("families")
        ),
        pl.when(kind == "memory").then(pl.lit("copy")),
    ]
    return pl.coalesce(*families, pl.lit("other"))
