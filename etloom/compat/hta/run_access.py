"""State that the methods of TraceAnalysis share: the run, its frames, and the selection of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from etloom.compat.hta.frames import HtaTrace, find_profiler_file, frame_indices
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import has_device_events


class RunAccess:
    """The run of a TraceAnalysis: the analyzed part (``job``), the whole run (``full_job``), and its frames (``t``)."""

    job: Job
    full_job: Job
    t: HtaTrace

    def _select_ranks(self, ranks: Sequence[int] | None) -> list[tuple[int, Trace]]:
        """Return (rank, trace) for the ``ranks``, or for the first rank if there are none. Raises AnalysisError."""
        for rank in ranks or []:
            if rank not in self.job:
                raise unknown_rank_error(rank, self.job)
        return [(rank, self.job[rank]) for rank in (ranks or self.job.ranks[:1])]

    def _with_device(self, ranks: Sequence[int] | None) -> list[tuple[int, Trace]]:
        """Return (rank, trace) as `_select_ranks`, but without ranks that have no GPU activity, as in HTA."""
        return [(rank, trace) for rank, trace in self._select_ranks(ranks) if has_device_events(trace)]

    def _source(self, rank: int) -> Path:
        """Return the path of the file with the profiler's events of a rank."""
        return find_profiler_file(self.full_job[rank])


def add_frame_index(trace: Trace, table: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``index``: the index, in the frame of the rank, of the event whose id is in ``id``."""
    return table.join(frame_indices(trace), on="id", how="left", maintain_order="left")


def summarize_durations(table: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return statistics of ``dur`` (ns) by ``by``: sum (us), max (us), min (us), stddev (in us), mean (us)."""
    dur = pl.col("dur") / 1e3
    return table.group_by(*by, maintain_order=True).agg(
        dur.sum().alias("sum (us)"),
        dur.max().alias("max (us)"),
        dur.min().alias("min (us)"),
        dur.std().fill_null(0.0).alias("stddev"),
        dur.mean().alias("mean (us)"),
    )


def group_small_names(
    times: pl.DataFrame, ratio: float, max_names: int, always_shown: Sequence[str] = ()
) -> pl.DataFrame:
    """Return name and dur of each row; beyond ``max_names`` names, those with little time become "others".

    Small are those beyond ``max_names`` and those beyond ``ratio`` of the time, unless they contain one of the texts
    of ``always_shown``.
    """
    sums = (
        times.group_by("name")
        .agg(pl.col("dur").sum().alias("total"))
        .sort("total", "name", descending=(True, False))
    )
    if sums.height <= max_names:
        return times.select("name", "dur")
    before = pl.col("total").cum_sum() - pl.col("total")
    below_limit = (pl.int_range(pl.len()) < max_names) & (before < ratio * pl.col("total").sum())
    is_shown = (pl.col("name").str.contains(text, literal=True) for text in always_shown)
    labels = sums.select(
        "name",
        shown=pl.when(pl.any_horizontal(below_limit, *is_shown)).then("name").otherwise(pl.lit("others")),
    )
    return times.join(labels, on="name").select(name="shown", dur="dur")
