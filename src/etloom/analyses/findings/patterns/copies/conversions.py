"""Find copies that only change the layout or type of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core import categories
from etloom.core.text import count_noun

COPYING = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::_reshape_copy")
"""The OPERATORS that copy; the others do nothing if no change is needed, and else call one of these."""
OPERATORS = r"^aten::(?:contiguous|clone|_to_copy|to|type_as|copy_|_reshape_copy)$"
COPIES = r"direct_copy_kernel|(?:bfloat16|float16|half)_copy_kernel"
KERNELS = rf"{COPIES}|nchwToNhwc|nhwcToNchw|(?i:transpose)|permute|convertTensor"


def find(view: RankView) -> Iterator[Finding]:
    advice = (
        "keep one layout and data type throughout: channels_last for all convolutions, autocast around whole "
        "blocks, no .contiguous() or .to() inside the loop; let a fused kernel read the strided tensor"
    )
    if view.activity.basis == "device":
        is_copy = view.match_activities(view.activities, KERNELS)
        if not is_copy.any():
            return
        copies = view.activities.filter(is_copy & view.is_kernel).select(
            "step", "stream", "name", "end", start="ts", cost_ns="dur", event="launch"
        )
    else:
        inner = view.find_host_events(OPERATORS, categories.OPERATOR_CATEGORIES)
        # A Python scalar that becomes a zero-dimensional tensor has no layout that could be kept.
        scalar = view.trace.arguments.filter(
            pl.col("dims").cast(pl.String).str.contains(r"^\[(?:\[\](?:, ?)?)+\]$")
        )
        # The copy itself, not the operators around it. A copy_ alone may also move the data.
        copies = inner.filter(
            pl.col("name").is_in(COPYING)
            & ~pl.col("id").is_in(inner["parent"].drop_nulls().implode())
            & ~pl.col("id").is_in(scalar["event"].implode())
            & ((pl.col("name") != "aten::copy_") | pl.col("parent").is_in(inner["id"].implode()))
        ).select("step", "name", "end", start="ts", cost_ns="dur", event="id")
    yield from sum_places(
        view,
        copies,
        lambda row: (
            f"{count_noun(row['count'], 'copy', 'copies')} of tensors{describe_place(row, 'block')} only change "
            "layout or type"
        ),
        confidence="medium",
        advice=advice,
        tracks=DEVICE if view.activity.basis == "device" else HOST,
        by="block",
        kind="layout or type",
    )
