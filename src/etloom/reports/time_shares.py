"""Shares of compute, exposed communication and idle time in the time of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from etloom.analyses.helpers.run_tables import WINDOWS
from etloom.core.text import format_duration, format_ranks
from etloom.core.trace import Job

PART_LABELS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "exposed_memory": "exposed memory",
    "exposed_other": "exposed other",
    "idle": "idle",
}
"""Parts of temporal-breakdown, which sum to the span, and their labels."""
PART_COLORS = dict(zip(PART_LABELS, ("compute", "communication", "memory", "other", "idle"), strict=True))
"""Part of the breakdown -> its color in report.css."""


@dataclass(frozen=True)
class SummaryLine:
    """A line of a run's summary, shown as a tile in the HTML report and as a line in the terminal.

    ``figure`` is the number that matters, ``text`` explains it; tone is "plain", "warn" or "bad".
    """

    topic: str
    figure: str
    text: str
    tone: str = "plain"


def add_step_margins(job: Job, time: pl.DataFrame) -> pl.DataFrame:
    """Extend the span and idle time in each rank's total row of temporal-breakdown to the whole annotated steps.

    That analysis counts from the first to the last activity, as its peers do. The time in which a step prepares its
    input before its first kernel is idle time, too, and so is the time between the first launch and its kernel. Adds
    this time to span_ns and idle_ns, and recomputes the percentages. The time before the first activity is left out if
    it is unknown whether the device worked, and is in the additional column unknown_ns.
    """
    length = pl.col("end") - pl.col("start") - pl.col("unknown_ns")
    lengths = WINDOWS.read(job).select("rank", "unknown_ns", length=length)
    margin = (pl.col("length") - pl.col("span_ns")).clip(0).fill_null(0)
    is_total = pl.col("step").is_null()
    extended = time.filter(is_total).join(lengths, on="rank", how="left", maintain_order="left")
    extended = extended.with_columns(pl.col("span_ns", "idle_ns") + margin).drop("length")
    shares = (
        pl.when(pl.col("span_ns") > 0)
        .then(100.0 * pl.col(f"{part}_ns") / pl.col("span_ns"))
        .alias(f"{part}_pct")
        for part in PART_LABELS
    )
    return pl.concat((extended.with_columns(*shares), time.filter(~is_total)), how="diagonal")


def summarize_time_shares(
    time: pl.DataFrame, overlap: pl.DataFrame, steps: pl.DataFrame, basis: str, devices: Mapping[int, int]
) -> list[SummaryLine]:
    """Return summary lines on compute, exposed communication and idle time, in percent of the spans of all ranks.

    Of a run in which only some ranks have GPU activity ("mixed"), host times of the others are left out.

    Args:
        time: `add_step_margins`.
        overlap: the answer to comm-overlap.
        steps: the answer to steps.
        basis: see `etloom.reports.summary.RunSummary`.
        devices: rank -> number of devices, for ranks with several.
    """
    without_gpu: list[int] = []
    if basis == "mixed":
        basis = "device"
        without_gpu = time.filter(basis="host")["rank"].unique().sort().to_list()
        time, overlap = (frame.filter(~pl.col("rank").is_in(without_gpu)) for frame in (time, overlap))
    is_total = pl.col("step").is_null()
    total = time.filter(is_total).select(pl.exclude("rank", "step", "basis").sum()).row(0, named=True)
    span = total["span_ns"] if time.height else 0
    if not span:
        reason = "the traces contain no GPU activities and no operators with a duration"
        return [SummaryLine("Compute", "unknown", reason)]
    basis_time = "device time" if basis == "device" else "host time" if basis == "host" else "time"
    comm = (
        overlap.filter(is_total).select(pl.col("communication_ns", "overlapped_ns").sum()).row(0, named=True)
    )

    def share(name: str) -> str:
        return f"{100 * total[name] / span:.1f} %"

    if comm["communication_ns"]:
        hidden = 100 * comm["overlapped_ns"] / comm["communication_ns"]
        communication = (
            f"communication takes {100 * comm['communication_ns'] / span:.1f} % of the {basis_time}; "
            f"{hidden:.1f} % of it overlaps computation"
        )
        if time["rank"].n_unique() > 1:
            communication += "; waiting for late ranks counts as communication"
    else:
        communication = "no communication in these traces"
    copies = total["exposed_memory_ns"] + total["exposed_other_ns"]
    edge = "kernel" if basis == "device" else "operator"
    begin = f"the start of the first step or {edge}" if time.filter(~is_total).height else f"the first {edge}"
    busy = (
        f"of the {basis_time} from {begin} to the end: {format_duration(span / time['rank'].n_unique())} "
        "per rank in total"
    )
    if total["unknown_ns"]:
        unknown = format_duration(total["unknown_ns"] / time["rank"].n_unique())
        busy += f"; before the first recorded activity, {unknown} are left out: it is unknown whether the GPU worked"
    if without_gpu:
        verbs = ("has", "is") if len(without_gpu) == 1 else ("have", "are")
        busy += f"; {format_ranks(without_gpu)} {verbs[0]} no GPU activity and {verbs[1]} left out"
    idle = "no GPU activity runs" if basis == "device" else "outside operators: Python, input, waiting"
    if devices:
        have = "has" if len(devices) == 1 else "have up to"
        are = "is" if len(devices) == 1 else "are"
        idle += (
            f"; {format_ranks(devices)} {have} {max(devices.values())}, and {are} idle when all of them are"
        )
    if copies:
        idle += f"; memcpy and memset alone take {100 * copies / span:.1f} %"
    idle += _note_steps_without_activity(steps)
    return [
        SummaryLine("Compute", share("compute_ns"), busy),
        SummaryLine("Exposed communication", share("exposed_communication_ns"), communication),
        SummaryLine("Idle", share("idle_ns"), idle),
    ]


def _note_steps_without_activity(steps: pl.DataFrame) -> str:
    """Return a note on steps without GPU activity, if other steps of their rank have some; empty without such steps."""
    gpu_steps = steps.filter((pl.col("kernels").sum() > 0).over("rank"))
    idle = gpu_steps.filter(kernels=0).height
    if not idle:
        return ""
    ranks = " of all ranks" if gpu_steps["rank"].n_unique() > 1 else ""
    return f"; no GPU activity was recorded for {idle:,} of {gpu_steps.height:,} steps{ranks}, which count as idle"
