"""Formats the gain and cost of a finding as text, for the terminal and the HTML report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etloom.core.text import count_noun, format_duration
from etloom.reports.kernel_labels import shorten_labels

PERCENT_BASES = (
    "Percent of the job: of the time from the first to the last event of all ranks, from which the job's gain is "
    "simulated, without the overhead of the recorder if the step time before the recording is known. Percent of a "
    "rank's recording or steps: of that rank alone, which others may wait for or hide; steps last as long as their "
    "annotations on the host."
)
"""The bases of the percentages of findings, for readers of the page and the terminal."""


_GAP_PATTERNS = frozenset({"launch-bound", "device-waits"})
"""Findings about gaps on the device, whose event is the launch after the gap."""


def label_location(row: Mapping[str, Any], column: str) -> str:
    """Return the text of a column of a finding that locates it, such as "operator aten::mm".

    The operator of a gap is the one that ends it. row: of the analysis findings.
    """
    is_end = column == "operator" and row["pattern"] in _GAP_PATTERNS
    return f"{'gap ended by operator' if is_end else column} {row[column]}"


def format_gain(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return two texts: the time the job would save without the problem (per step if annotated), and its percentage.

    If the gain is unknown, what the rank loses. row: of the analysis findings.
    """
    if row["job_gain_ns"] is None:
        return _format_time(
            row["cost_ns"], row["step_cost_ns"]
        ), f"{row['pct'] or 0:.1f} % of rank {row['rank']}"
    if row["job_gain_ns"] == 0:
        return "no gain", "the job waits for something else"
    return _format_time(
        row["job_gain_ns"], row["step_gain_ns"]
    ), f"{row['job_gain_pct'] or 0:.1f} % of the job"


def format_cost(row: Mapping[str, Any], rank_count: int | None) -> str:
    """Return text on a finding's cost: the ranks that lose time (stragglers: that cause the loss) and the largest loss.

    row: of the analysis findings. rank_count: number of ranks of the job, if known.
    """
    time = f"{_format_time(row['cost_ns'], row['step_cost_ns'])}, {_choose_share(row)}"
    if row["pattern"] == "stragglers":
        several = f"{row['ranks']:,} ranks, of which " if row["ranks"] > 1 else ""
        return f"caused by {several}rank {row['rank']}: {time}"
    if rank_count == 1:
        return f"lost: {time}"
    if row["ranks"] == 1:
        return f"lost on rank {row['rank']}: {time}"
    ranks = f"all {rank_count:,} ranks" if row["ranks"] == rank_count else f"{row['ranks']:,} ranks"
    return f"lost on {ranks}, most on rank {row['rank']}: {time}"


def format_parts(row: Mapping[str, Any]) -> str:
    """Return text on a finding's cost by place, such as "by place, in total: Attention 7.2 ms ..."; may be empty."""
    parts = json.loads(row["parts"]) if row["parts"] else []
    names = shorten_labels([part["place"] or "elsewhere" for part in parts]) if parts else []
    texts = [
        f"{name} {format_duration(part['cost_ns'])} ({count_noun(part['count'], 'time')}{_format_part_gain(part)})"
        for name, part in zip(names, parts, strict=True)
    ]
    scope = "over the whole recording, not per step" if row["step_cost_ns"] else "in total"
    return f"by place, {scope}: {'; '.join(texts)}" if texts else ""


def _format_part_gain(part: Mapping[str, Any]) -> str:
    gain = part.get("job_gain_ns")
    return "" if gain is None else f"; the job gains {format_duration(gain)} without this alone"


def _format_time(total_ns: int, step_ns: int | None) -> str:
    return f"{format_duration(step_ns)} per step" if step_ns else f"{format_duration(total_ns)} in total"


def _choose_share(row: Mapping[str, Any]) -> str:
    if row["step_pct"]:
        return f"{row['step_pct']:.1f} % of its steps"
    return f"{row['pct'] or 0:.1f} % of its recording"
