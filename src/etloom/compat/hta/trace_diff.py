"""HTA's ``hta.trace_diff``: compares the operators and kernels of two traces."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from os import PathLike
from typing import TYPE_CHECKING

from etloom import api
from etloom.compat.hta.charts import draw_diff
from etloom.compat.hta.frames import HtaTrace, import_pandas, shorten_kernel_name
from etloom.core.errors import InvalidValue
from etloom.core.paths import expand_home

if TYPE_CHECKING:
    import pandas as pd

Numbers = int | Sequence[int] | None


class DeviceType(Enum):
    CPU = 1
    GPU = 2
    ALL = 3


class LabeledTrace:
    """A trace with a label, read from ``trace_dir`` if no HtaTrace is passed."""

    def __init__(
        self,
        label: str | None = None,
        t: HtaTrace | None = None,
        trace_dir: str | PathLike[str] | None = None,
    ) -> None:
        if t is None and trace_dir is None:
            raise InvalidValue("missing argument: t or trace_dir", remedy="pass t or trace_dir")
        self.t = t if t is not None else _open_trace(str(trace_dir))
        self.label = label or "trace"

    def ranks(self) -> list[int]:
        return self.t.get_ranks()

    def iterations(self) -> list[int]:
        """Return the step numbers of all ranks, ascending."""
        return sorted(
            {int(step) for df in self.t.traces.values() for step in df["iteration"].unique() if step >= 0}
        )

    def extract_ops(
        self, rank: Numbers = None, iteration: Numbers = None, device_type: DeviceType = DeviceType.ALL
    ) -> pd.DataFrame:
        """Return the events of the ranks ``rank`` and steps ``iteration``; by default the first rank and step.

        Of several ranks they have the columns ``rank`` and ``idx`` (the index in the frame of the rank) first.
        Raises InvalidValue for a rank or step that the trace lacks.
        """
        ranks = _select_existing("rank", rank, self.ranks(), self.label)
        steps = _select_existing("step", iteration, self.iterations(), self.label)
        frames = [self.t.get_trace(rank_id) for rank_id in ranks]
        events = frames[0]
        if len(frames) > 1:
            events = import_pandas().concat(frames, keys=ranks, names=["rank", "idx"]).reset_index()
        events = events[events["iteration"].isin(steps)]
        if device_type is DeviceType.CPU:
            return events[events["stream"] == -1]
        return events[events["stream"] != -1] if device_type is DeviceType.GPU else events

    def get_ops_summary(self, ops: pd.DataFrame) -> pd.DataFrame:
        """Sum events by category and name: cat, name, short_name, counts, total_duration (us), cat_id, name_id."""
        summed = ops.groupby(["cat", "name"])["dur"].agg(["count", "sum"]).reset_index()
        texts = self.t.symbol_table.sym_table
        names = [texts[int(number)] for number in summed["name"]]
        return import_pandas().DataFrame(
            {
                "cat": [texts[int(number)] for number in summed["cat"]],
                "name": names,
                "short_name": [shorten_kernel_name(name) for name in names],
                "counts": summed["count"],
                "total_duration": summed["sum"],
                "cat_id": summed["cat"],
                "name_id": summed["name"],
            }
        )


TraceSource = LabeledTrace | HtaTrace | str | PathLike[str]


class TraceDiff:
    @classmethod
    def compare_traces(
        cls,
        control: TraceSource,
        test: TraceSource,
        control_rank: Numbers = None,
        test_rank: Numbers = None,
        control_iteration: Numbers = None,
        test_iteration: Numbers = None,
        device_type: DeviceType = DeviceType.ALL,
        use_short_name: bool = False,
    ) -> pd.DataFrame:
        """Compare count and total duration (us) of each name in two traces; differences are test - control.

        Columns: <label>_counts and <label>_total_duration (us) of both traces, diff_counts, diff_duration and
        counts_change_categories (+, - or =).
        """
        first, second = _labeled(control, "Control"), _labeled(test, "Test")
        labels = [first.label, second.label]
        if labels[0] == labels[1]:
            labels = [f"{labels[0]}_control", f"{labels[1]}_test"]
        by = "short_name" if use_short_name else "name"
        sides = (
            (first, first.extract_ops(control_rank, control_iteration, device_type)),
            (second, second.extract_ops(test_rank, test_iteration, device_type)),
        )
        sums = [
            side.get_ops_summary(ops).groupby(by)[["counts", "total_duration"]].sum() for side, ops in sides
        ]
        renamed = [side.add_prefix(f"{label}_") for side, label in zip(sums, labels, strict=True)]
        both = import_pandas().concat(renamed, axis=1).fillna(0).sort_index()
        counts, durations = (
            [both[f"{label}_{column}"] for label in labels] for column in ("counts", "total_duration")
        )
        both["diff_counts"] = counts[1] - counts[0]
        both["diff_duration"] = durations[1] - durations[0]
        both["counts_change_categories"] = [
            "+" if n > 0 else "-" if n < 0 else "=" for n in both["diff_counts"]
        ]
        return both.rename_axis(by)

    @classmethod
    def ops_diff(
        cls,
        control: TraceSource,
        test: TraceSource,
        control_rank: Numbers = None,
        test_rank: Numbers = None,
        control_iteration: Numbers = None,
        test_iteration: Numbers = None,
        device_type: DeviceType = DeviceType.ALL,
    ) -> dict[str, list[str]]:
        """Return names by change of their count: added, deleted, increased, decreased, unchanged."""
        both = cls.compare_traces(
            *(control, test, control_rank, test_rank, control_iteration, test_iteration, device_type)
        )
        before, after = (both.iloc[:, column] for column in (0, 2))
        kinds = {
            "added": (before == 0) & (after > 0),
            "deleted": (before > 0) & (after == 0),
            "increased": (before > 0) & (after > before),
            "decreased": (after > 0) & (after < before),
            "unchanged": before == after,
        }
        return {kind: both.index[rows].tolist() for kind, rows in kinds.items()}

    @classmethod
    def visualize_counts_diff(
        cls, df: pd.DataFrame, show_image: bool = True, export_image_path: str | None = None
    ) -> None:
        """Draw the result of compare_traces: counts of both traces and their difference, as bars per name.

        Args:
            df: The result of `compare_traces`.
            show_image: Display the chart.
            export_image_path: File to write: .html, .json, and with vl-convert .png, .svg, .pdf.

        Raises:
            EtloomError: Altair is not installed, or the file cannot be written.
        """
        draw_diff(df, "counts", "Ops Count Comparison", show_image, export_image_path)

    @classmethod
    def visualize_duration_diff(
        cls, df: pd.DataFrame, show_image: bool = True, export_image_path: str | None = None
    ) -> None:
        """Draw the total durations (us) of both traces and their difference, as bars per name."""
        draw_diff(df, "duration", "Ops Duration Comparison", show_image, export_image_path)


def _open_trace(trace_dir: str) -> HtaTrace:
    """Open the traces of a folder. Raises InvalidValue if the folder does not exist."""
    folder = expand_home(trace_dir)
    if not folder.exists():
        raise InvalidValue("no such folder", where=folder, remedy="check trace_dir")
    return HtaTrace(api.open(folder))


def _labeled(source: TraceSource, label: str) -> LabeledTrace:
    if isinstance(source, LabeledTrace):
        return source
    return (
        LabeledTrace(label, t=source)
        if isinstance(source, HtaTrace)
        else LabeledTrace(label, trace_dir=source)
    )


def _select_existing(noun: str, numbers: Numbers, available: list[int], label: str) -> list[int]:
    if not available:
        raise InvalidValue(f"{label} contains no {noun}", remedy="compare other traces")
    if numbers is None:
        return available[:1]
    selected = [numbers] if isinstance(numbers, (int, str)) else list(numbers)
    if missing := [number for number in selected if number not in available]:
        raise InvalidValue(f"{label} contains no {noun} {missing[0]!r}", remedy=f"it contains {available}")
    return selected
