"""HTA's methods about user annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from etloom.analyses.annotations import ON_DEVICE
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.compat.hta import charts
from etloom.compat.hta.frames import frame_to_pandas
from etloom.compat.hta.kernel_names import shorten_kernel_name
from etloom.compat.hta.run_access import add_frame_index, group_small_names, summarize_durations
from etloom.compat.hta.sequences import Sequences
from etloom.core import arrays, nesting
from etloom.core import categories as kinds
from etloom.core.arrays import rows_of_ids

if TYPE_CHECKING:
    import pandas as pd


class Annotations(Sequences):
    """The methods of TraceAnalysis about user annotations."""

    def get_gpu_user_annotation_breakdown(
        self,
        use_gpu_annotation: bool = True,
        visualize: bool = True,
        duration_ratio: float = 0.8,
        num_kernels: int = 1000,
        allowlist_patterns: Sequence[str] | None = None,
        image_renderer: str | None = None,
    ) -> pd.DataFrame | None:
        """Return the total, longest, shortest and mean duration of annotations (us), by name and rank.

        Columns: name, sum (us), max (us), min (us), stddev, mean (us), rank. None without annotations.

        Names beyond num_kernels, and beyond duration_ratio of the rank's time, are "others", whose statistics are of
        its annotations. Names that contain one of the texts allowlist_patterns keep their own row.
        """
        categories = [ON_DEVICE] if use_gpu_annotation else sorted(kinds.ANNOTATION_CATEGORIES)
        parts = []
        for rank, trace in self.job.items():
            marks = trace.events.filter(pl.col("cat").is_in(categories) & pl.col("dur").is_not_null())
            marks = marks.select(pl.col("name").cast(pl.String), "dur")
            grouped = group_small_names(marks, duration_ratio, num_kernels, allowlist_patterns or ())
            summary = summarize_durations(grouped, "name").sort("name")
            parts.append(summary.with_columns(rank=pl.lit(rank, pl.Int64)))
        table = pl.concat(parts)
        if table.is_empty():
            return None
        frame = frame_to_pandas(table)
        if visualize:
            charts.show_bars(frame, "Time by annotation", x="name", y="sum (us)", rows="rank")
        return frame

    def get_gpu_kernels_with_user_annotations(
        self,
        rank: int,
        expand_names: bool = True,
        shorten_names: bool = True,
        *,
        shortern_names: bool | None = None,
    ) -> pd.DataFrame | None:
        """Return a rank's frame of GPU activity with ``user_annotation``, the innermost annotation around the launch.

        It is a number, -1 for none; expand_names adds the texts s_name, s_cat and s_user_annotation.

        Numbered from 0, with ``end`` after ``dur``. None for a trace whose devices show no annotations.
        """
        ((_, trace),) = self._select_ranks([rank])
        if not trace.events.select((pl.col("cat") == ON_DEVICE).any()).item():
            return None
        table = self.t.get_trace(rank)
        work = add_frame_index(trace, select_launched_work(trace, "id", "launch"))
        annotation_rows = nesting.find_nearest_ancestor(
            rows_of_ids(trace.events, trace.events["parent"]),
            kinds.mask_events(trace.events, kinds.ANNOTATION_CATEGORIES),
            rows_of_ids(trace.events, work["launch"]),
        )
        innermost = arrays.take_rows(trace.events["name"], annotation_rows).cast(pl.String)
        names = dict(zip(work["index"].to_list(), innermost.to_list(), strict=True))
        rows = table[table["index"].isin(list(names))].copy()
        number = self.t.symbol_table.sym_index
        texts = [names[at] for at in rows["index"].tolist()]
        rows["user_annotation"] = [-1 if text is None else number[text] for text in texts]
        if expand_names:
            symbols = self.t.symbol_table.sym_table
            for column in ("name", "cat"):
                rows[f"s_{column}"] = [symbols[int(value)] for value in rows[column]]
            if shorten_names if shortern_names is None else shortern_names:
                rows["s_name"] = [shorten_kernel_name(name) for name in rows["s_name"]]
            rows["s_user_annotation"] = ["" if text is None else text for text in texts]
        rows.insert(rows.columns.get_loc("dur") + 1, "end", rows.pop("end"))
        return rows.reset_index(drop=True)
