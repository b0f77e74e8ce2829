"""What the timeline tells apart by colour, and which of them an event is."""

from __future__ import annotations

import polars as pl

from etloom.core import categories

COLORS = (
    ("compute", "compute kernel"),
    ("communication", "communication"),
    ("memory", "memory copy or set"),
    ("operator", "operator"),
    ("runtime", "runtime call"),
    ("annotation", "annotation"),
    ("python", "Python"),
    ("other", "other"),
)
"""(name of the colour in report.css, as the legend says it); the order is that of the codes `with_colour` gives."""

_CODE = {name: code for code, (name, _) in enumerate(COLORS)}


def add_color_code(events: pl.DataFrame) -> pl.DataFrame:
    """events (cat, name, ...) with a column ``colour``, an index into `COLOURS`, in the same order."""
    cat = pl.col("cat").cast(pl.String)

    def among(*categories: frozenset[str]) -> pl.Expr:
        return cat.is_in(sorted(frozenset().union(*categories)))

    def code(name: str) -> pl.Expr:
        return pl.lit(_CODE[name], dtype=pl.UInt8)

    device = (
        pl.col("kind")
        .cast(pl.String)
        .replace_strict(
            {
                "computation": _CODE["compute"],
                "communication": _CODE["communication"],
                "memory": _CODE["memory"],
            },
            default=_CODE["other"],
            return_dtype=pl.UInt8,
        )
    )
    annotations = categories.ANNOTATION_CATEGORIES | {"gpu_user_annotation"}
    colour = (
        pl.when(pl.col("kind").is_not_null())
        .then(device)
        .when(among(categories.OPERATOR_CATEGORIES, annotations) & categories.is_communication())
        .then(code("communication"))
        .when(among(categories.OPERATOR_CATEGORIES))
        .then(code("operator"))
        .when(among(categories.RUNTIME_CATEGORIES))
        .then(code("runtime"))
        .when(among(annotations))
        .then(code("annotation"))
        .when(among(categories.PYTHON_CATEGORIES))
        .then(code("python"))
        .otherwise(code("other"))
    )
    known = categories.add_kernel_type(events.select("cat", "name").unique()).select(
        "cat", "name", colour.alias("colour")
    )
    return events.join(known, on=["cat", "name"], how="left", nulls_equal=True, maintain_order="left")
