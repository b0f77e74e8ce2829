"""Colors of the timeline, and the assignment of events to them."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.arrays import encode_texts, take_rows

COLORS = (
    ("compute", "compute kernel"),
    ("communication", "communication"),
    ("memory", "memcpy or memset"),
    ("operator", "operator"),
    ("runtime", "runtime call"),
    ("annotation", "annotation"),
    ("python", "Python"),
    ("other", "other"),
)
"""(name of the color in report.css, label in the legend), in the order of the codes of `list_color_codes`."""

_CODE = {name: code for code, (name, _) in enumerate(COLORS)}


def list_color_codes(events: pl.DataFrame) -> pl.Series:
    """Return the color of each event as an index into `COLORS`, chosen by its category and name."""
    cat = pl.col("cat").cast(pl.String)

    def category_in(*categories: frozenset[str]) -> pl.Expr:
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
    color = (
        pl.when(pl.col("kind").is_not_null())
        .then(device)
        .when(category_in(categories.OPERATOR_CATEGORIES, annotations) & categories.is_communication())
        .then(code("communication"))
        .when(category_in(categories.OPERATOR_CATEGORIES))
        .then(code("operator"))
        .when(category_in(categories.RUNTIME_CATEGORIES))
        .then(code("runtime"))
        .when(category_in(annotations))
        .then(code("annotation"))
        .when(category_in(categories.PYTHON_CATEGORIES))
        .then(code("python"))
        .otherwise(code("other"))
    )
    cats, texts = (encode_texts(events[column]) for column in ("cat", "name"))
    _, rows, positions = np.unique(
        cats * (int(texts.max(initial=0)) + 1) + texts, return_index=True, return_inverse=True
    )
    codes = categories.add_kernel_type(take_rows(events.select("cat", "name"), rows)).select(color)
    return take_rows(codes.to_series(), positions).alias("color")
