"""Copies that only change the layout or the type of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, counted, describe_place, group_by_place
from etloom.analyses.findings.rank_view import View
from etloom.core import categories

COPYING = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::_reshape_copy")
"""Of OPERATORS; the others do nothing where nothing is to be done, and call one of these where something is."""
OPERATORS = r"^aten::(?:contiguous|clone|_to_copy|to|type_as|copy_|_reshape_copy)$"
COPIES = r"direct_copy_kernel|(?:bfloat16|float16|half)_copy_kernel"
KERNELS = rf"{COPIES}|nchwToNhwc|nhwcToNchw|(?i:transpose)|permute|convertTensor"

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    advice = (
        "keep one layout and one type along the path: channels_last throughout for convolutions, autocast around whole "
        "blocks, no .contiguous() or .to() inside the loop; let a fused kernel read the strided tensor"
    )
    if view.activity.basis == "device":
        kernels = view.kernels
        copies = kernels.filter(view.named(kernels, KERNELS)).select(
            "step", "stream", "name", "end", start="ts", cost_ns="dur", event="launch"
        )
    else:
        inner = view.host(OPERATORS, categories.OPERATOR_CATEGORIES)
        # A scalar of Python that becomes a tensor of no dimensions is no tensor whose layout could be kept.
        scalar = view.trace.arguments.filter(
            pl.col("dims").cast(pl.String).str.contains(r"^\[(?:\[\](?:, ?)?)+\]$")
        )
        # The copy itself, not the operators around it; a copy_ alone may move what it copies.
        copies = inner.filter(
            pl.col("name").is_in(COPYING)
            & ~pl.col("id").is_in(inner["parent"].drop_nulls().implode())
            & ~pl.col("id").is_in(scalar["event"].implode())
            & ((pl.col("name") != "aten::copy_") | pl.col("parent").is_in(inner["id"].implode()))
        ).select("step", "name", "end", start="ts", cost_ns="dur", event="id")
    yield from group_by_place(
        view,
        copies,
        lambda row: (
            f"{counted(row['count'], 'copy', 'copies')} of tensors{describe_place(row, 'block')} only for layout or type"
        ),
        confidence="medium",
        advice=advice,
        by="block",
    )
