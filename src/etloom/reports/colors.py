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
_COLOR_OF_TYPE = {"computation": "compute", "communication": "communication", "memory": "memory"}


def list_color_codes(events: pl.DataFrame) -> pl.Series:
    """Return the color of each event as an index into `COLORS`, chosen by its category and name."""
    cats, texts = (encode_texts(events[column]) for column in ("cat", "name"))
    _, rows, positions = np.unique(
        cats * (int(texts.max(initial=0)) + 1) + texts, return_index=True, return_inverse=True
    )
    distinct = categories.add_kernel_type(take_rows(events[["cat", "name"]], rows))
    communicates = categories.match_names(distinct, categories.COMMUNICATION_CALL)
    codes = [
        _CODE[_choose_color(category or "", kind, bool(is_call))]
        for category, kind, is_call in zip(
            distinct["cat"].cast(pl.String), distinct["kind"].cast(pl.String), communicates, strict=True
        )
    ]
    return pl.Series("color", np.array(codes, np.uint8)[positions])


def _choose_color(category: str, kind: str | None, communicates: bool) -> str:
    """Return the color of events with a category, a kernel type (None on the host), and a name that communicates."""
    if kind is not None:
        return _COLOR_OF_TYPE.get(kind, "other")
    is_operator = category in categories.OPERATOR_CATEGORIES
    is_annotation = category in categories.ANNOTATION_CATEGORIES or category == "gpu_user_annotation"
    if communicates and (is_operator or is_annotation):
        return "communication"
    if is_operator:
        return "operator"
    if category in categories.RUNTIME_CATEGORIES:
        return "runtime"
    if is_annotation:
        return "annotation"
    return "python" if category in categories.PYTHON_CATEGORIES else "other"
