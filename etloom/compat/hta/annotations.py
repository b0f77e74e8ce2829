"""HTA's questions about user annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from etloom import kinds
from etloom.analyses._launched import launched
from etloom.analyses.annotated_kernels import with_annotation
from etloom.analyses.annotations import ON_DEVICE
from etloom.compat.hta.device import Device
from etloom.compat.hta.frames import US, frame

if TYPE_CHECKING:
    import pandas as pd

OTHERS = "others"


class Annotations(Device):
    """The part of TraceAnalysis that asks what annotations hold."""

    def get_gpu_user_annotation_breakdown(
        self,
        use_gpu_annotation: bool = True,
        visualize: bool = True,
        duration_ratio: float = 0.8,
        num_kernels: int = 1000,
        allowlist_patterns: Sequence[str] | None = None,
        image_renderer: str | None = None,
    ) -> pd.DataFrame | None:
        """name, sum (us), max (us), min (us), stddev, mean (us), rank; None where there are none.

        allowlist_patterns: parts of names. Names beyond num_kernels, and beyond duration_ratio of the rank's time, are
        "others", whose statistics are of its annotations.
        """
        categories = [ON_DEVICE] if use_gpu_annotation else sorted(kinds.ANNOTATIONS)
        parts = []
        for rank, trace in self.job.items():
            marks = trace.events.filter(pl.col("cat").is_in(categories) & pl.col("dur").is_not_null())
            marks = marks.select(pl.col("name").cast(pl.String), "dur")
            if allowlist_patterns is not None:
                wanted = (pl.col("name").str.contains(part, literal=True) for part in allowlist_patterns)
                marks = marks.filter(pl.any_horizontal(wanted))
            parts.append(
                _listed(marks, duration_ratio, num_kernels).with_columns(pl.lit(rank, pl.Int64).alias("rank"))
            )
        table = pl.concat(parts)
        if table.is_empty():
            return None
        dur = pl.col("dur") / US
        return frame(
            table.group_by("rank", "name", maintain_order=True)
            .agg(
                dur.sum().alias("sum (us)"),
                dur.max().alias("max (us)"),
                dur.min().alias("min (us)"),
                dur.std().alias("stddev"),
                dur.mean().alias("mean (us)"),
            )
            .sort("rank", "sum (us)", descending=(False, True))
            .select("name", "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)", "rank")
        )

    def get_gpu_kernels_with_user_annotations(
        self, rank: int, expand_names: bool = True, shorten_names: bool = True
    ) -> pd.DataFrame | None:
        """The frame's rows of device work with ``user_annotation``, the innermost annotation around the launch (as a
        number, -1 for none), and with expand_names the texts s_name, s_cat, s_user_annotation.

        None for a trace whose devices show no annotations.
        """
        ((_, trace),) = self._asked([rank])
        if not trace.events.select((pl.col("cat") == ON_DEVICE).any()).item():
            return None
        table = self.t.get_trace(rank)
        ids = launched(trace, "id")["id"]
        names = dict(zip(ids.to_list(), with_annotation(trace)["annotation"].to_list(), strict=True))
        found = table[table["index"].isin(list(names))].copy()
        number = self.t.symbol_table.sym_index
        texts = [names[event] for event in found["index"].tolist()]
        found["user_annotation"] = [-1 if text is None else number[text] for text in texts]
        if expand_names:
            symbols = self.t.symbol_table.sym_table
            for column in ("name", "cat"):
                found[f"s_{column}"] = [symbols[int(one)] for one in found[column]]
            if shorten_names:
                found["s_name"] = [shortened(name) for name in found["s_name"]]
            found["s_user_annotation"] = ["" if text is None else text for text in texts]
        return found


def shortened(name: str) -> str:
    """A kernel's own name: without what stands in <> and (), and without what it returns."""
    kept, depth = [], 0
    for char in name.replace("(anonymous namespace)::", ""):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(char)
    words = "".join(kept).split()
    return words[-1] if words else name


def _listed(marks: pl.DataFrame, ratio: float, most: int) -> pl.DataFrame:
    """name, dur with the names that take least of the time as OTHERS."""
    sums = (
        marks.group_by("name")
        .agg(pl.col("dur").sum().alias("total"))
        .sort("total", "name", descending=(True, False))
    )
    if sums.height <= most:
        return marks
    before = pl.col("total").cum_sum() - pl.col("total")
    listed = (pl.int_range(pl.len()) < most) & (before < ratio * pl.col("total").sum())
    shown = sums.select("name", shown=pl.when(listed).then("name").otherwise(pl.lit(OTHERS)))
    return marks.join(shown, on="name").select(name="shown", dur="dur")
