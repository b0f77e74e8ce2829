"""HTA's methods about the kernels that operators launch, and the trace file that shows frequent sequences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

import polars as pl

from etloom import api
from etloom.analyses.kernel_sequences import find_occurrences
from etloom.compat.hta import charts, overlays
from etloom.compat.hta.counters import Counters
from etloom.compat.hta.frames import US, frame_to_pandas
from etloom.core import categories
from etloom.core.errors import AnalysisError
from etloom.core.paths import expand_home
from etloom.core.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

_KERNEL_CATEGORIES = (
    categories.DEVICE_CATEGORIES - categories.MEMCPY_CATEGORIES - categories.MEMSET_CATEGORIES
)

_DRAWN_ROWS = 20
_log = logging.getLogger(__name__)
_PATTERN_COLUMNS = {
    "pattern": pl.String,
    "count": pl.Int64,
    "GPU kernel duration (us)": pl.Float64,
    "CPU op duration (us)": pl.Float64,
}


class Sequences(Counters):
    """The methods of TraceAnalysis about the kernels that operators launch."""

    def get_aten_op_kernels_and_delay(
        self, ranks: Sequence[int] | None = None, sort_by: Sequence[str] | None = None
    ) -> dict[int, pd.DataFrame]:
        """Return {rank: ATen operators with the kernels they launch, number of calls, and mean launch delays in us}.

        Columns: aten_op_name, kernel_sequence, occurrence_count, avg_aten_op_launch_delay, avg_runtime_delay.

        Covers kernels (of MTIA all device events), not memcpy and memset. sort_by: columns, the greatest first; by
        default occurrence_count.
        """
        frames = {}
        for rank, trace in self._select_ranks(ranks):
            table = api.analyze(_kernels_only(trace), "operator-delays")
            frames[rank] = frame_to_pandas(
                table.filter(pl.col("operator").str.starts_with("aten::"))
                .select(
                    aten_op_name="operator",
                    kernel_sequence="kernels",
                    occurrence_count="count",
                    avg_aten_op_launch_delay=pl.col("launch_delay_ns") / US,
                    avg_runtime_delay=pl.col("runtime_delay_ns") / US,
                )
                .sort(*(sort_by or ["occurrence_count"]), descending=True, maintain_order=True)
            )
            title = f"Rank {rank}: operators and their kernels"
            charts.show_bars(frames[rank].head(_DRAWN_ROWS), title, x="aten_op_name", y="occurrence_count")
        return frames

    def get_frequent_cuda_kernel_sequences(
        self,
        operator_name: str,
        output_dir: str | PathLike[str] | None = None,
        min_pattern_len: int = 3,
        rank: int = 0,
        top_k: int = 5,
        visualize: bool = False,
        compress_other_kernels: bool = True,
    ) -> pd.DataFrame:
        """Return the kernel sequences that an operator launches, with count and times, the most frequent first.

        Columns: pattern ("operator|kernel|kernel"), count, GPU kernel duration (us), CPU op duration (us).

        Writes output_dir/overlaid_<name of the trace>, unless output_dir is omitted: the trace in which the events of
        the top_k patterns have an argument ``Patterns`` ({pattern: count}), to search for. With
        compress_other_kernels all other events are named by a number, which the file's ``symbols`` lists, and have no
        arguments. As in HTA, an operator that the rank lacks is logged and gives an empty frame.
        """
        ((_, trace),) = self._select_ranks([rank])
        try:
            occurrences = find_occurrences(trace, operator_name, min_pattern_len)
        except AnalysisError as error:
            _log.error("%s", error)
            return frame_to_pandas(pl.DataFrame(schema=_PATTERN_COLUMNS))
        calls = occurrences.with_columns(
            pattern=pl.concat_list(
                "operator", pl.col("name").list.eval(pl.element().cast(pl.String))
            ).list.join("|")
        )
        table = (
            calls.group_by("pattern")
            .agg(
                pl.len().cast(pl.Int64).alias("count"),
                (pl.col("kernel_ns").sum() / US).alias("GPU kernel duration (us)"),
                (pl.col("host_ns").sum() / US).alias("CPU op duration (us)"),
            )
            .sort("count", "pattern", descending=(True, False))
        )
        if output_dir:
            frequent = calls.join(table.head(top_k).select("pattern", "count"), on="pattern")
            numbers = self.t.symbol_table.sym_index if compress_other_kernels else None
            target = expand_home(output_dir) / overlays.overlay_path(self._source(rank), "overlaid")
            api.export(overlays.add_sequences(trace, frequent, numbers), target, "chrome")
        frame = frame_to_pandas(table)
        if visualize:
            charts.show_bars(
                frame.head(top_k), "Sequences of kernels", x="pattern", y="GPU kernel duration (us)"
            )
        return frame


def _kernels_only(trace: Trace) -> Trace:
    """Return the trace without the launches of memcpys and memsets."""
    events = trace.events
    kernels = events.filter(categories.mask_events(events, _KERNEL_CATEGORIES))["id"]
    return trace.replace(
        None, launches=trace.launches.filter(pl.col("device_event").is_in(kernels.implode()))
    )
