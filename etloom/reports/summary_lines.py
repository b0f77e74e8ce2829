"""What a run comes to, a sentence a topic: each from the tables that `etloom.reports.summary` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from etloom.core.text import format_ranks
from etloom.core.trace import Job
from etloom.graphs import critical_paths
from etloom.reports.formatting import count_noun, format_duration, format_number
from etloom.reports.summary_line import SummaryLine

MIN_LINKED_PCT = 95.0
"""Percent of host operators below which the links call for attention."""


def summarize_top_finding(findings: pl.DataFrame) -> SummaryLine:
    if findings.is_empty():
        return SummaryLine(
            "To mend first", "nothing found", "no pattern that costs half a percent of the run"
        )
    first = findings.row(0, named=True)
    text = (
        f"{first['title']} ({first['pct']:.1f} % of rank {first['rank']}, {first['confidence']} confidence)"
    )
    return SummaryLine("To mend first", format_duration(first["cost_ns"]), text)


def summarize_critical_path(path: pl.DataFrame, reason: str | None) -> SummaryLine:
    """What the longest chain of work and waits consists of, or the reason why it is not known."""
    total = int(path["time_ns"].sum()) if path.height else 0
    if not total:
        return SummaryLine("Critical path", "not known", reason or "no timed operators and no device work")
    first, *rest = critical_paths.format_path_shares(path, digits=1, most=4)
    text = f"of {format_duration(total)}; then {', '.join(rest)}" if rest else "of all"
    if not path["explainable"].all():
        text += "; not to be relied on, since the graph does not explain the recording"
    return SummaryLine("Critical path", first, text)


def summarize_step_time(steps: pl.DataFrame) -> SummaryLine:
    """Mean, spread and median over the steps, of each the mean over its ranks, as `etloom.comparison` takes them."""
    if steps.is_empty():
        return SummaryLine("Step time", "not known", "no ProfilerStep marks a step in these traces")
    times = steps.group_by("step").agg(pl.col("dur_ns").mean())["dur_ns"]
    mean, middle, least, most = (float(of() or 0) for of in (times.mean, times.median, times.min, times.max))  # type: ignore[arg-type]
    ranks = steps["rank"].n_unique()
    if len(times) == 1 or not mean:
        only = "the only step" if len(times) == 1 else "mean"
        return SummaryLine(
            "Step time", format_duration(mean), f"{only}, mean over {ranks:,} ranks" if ranks > 1 else only
        )
    each = f", of each the mean over {ranks:,} ranks" if ranks > 1 else ""
    spread = 100 * float(times.std() or 0) / mean  # type: ignore[arg-type]
    return SummaryLine(
        "Step time",
        f"{format_duration(mean)} ± {format_number(spread, 2)} %",
        f"mean and standard deviation of {count_noun(len(times), 'step')}{each}; "
        f"median {format_duration(middle)}, shortest {format_duration(least)}, longest {format_duration(most)}",
    )


def summarize_time_shares(
    time: pl.DataFrame, overlap: pl.DataFrame, basis: str, devices: Mapping[int, int]
) -> list[SummaryLine]:
    """Compute, exposed communication and idle, of the summed spans of all ranks. devices: how many each rank has that
    has several."""
    whole = pl.col("step").is_null()
    total = time.filter(whole).select(pl.exclude("rank", "step", "basis").sum()).row(0, named=True)
    span = total["span_ns"] if time.height else 0
    if not span:
        why = "the traces hold no device work and no operators with a duration"
        return [SummaryLine("Compute", "not known", why)]
    of = "device time" if basis == "device" else "host time" if basis == "host" else "time"
    comm = overlap.filter(whole).select(pl.col("communication_ns", "overlapped_ns").sum()).row(0, named=True)

    def share(name: str) -> str:
        return f"{100 * total[name] / span:.1f} %"

    if comm["communication_ns"]:
        hidden = 100 * comm["overlapped_ns"] / comm["communication_ns"]
        communication = (
            f"communication takes {100 * comm['communication_ns'] / span:.1f} % of the {of}; "
            f"computation hides {hidden:.1f} % of that"
        )
    else:
        communication = "no communication in these traces"
    copies = total["exposed_memory_ns"] + total["exposed_other_ns"]
    busy = (
        f"of the {of} between the first and the last {'kernel' if basis == 'device' else 'operator'}, "
        f"{format_duration(span / time['rank'].n_unique())} a rank"
    )
    if marked := int(time.filter(~whole)["span_ns"].sum()):
        busy += f"; its steps take {format_duration(marked / time['rank'].n_unique())}"
    idle = "nothing runs on the device" if basis == "device" else "in no operator: Python, input, waiting"
    if devices:
        have = "has" if len(devices) == 1 else "have up to"
        are = "is" if len(devices) == 1 else "are"
        idle += (
            f"; {format_ranks(devices)} {have} {max(devices.values())}, and {are} idle when all of them are"
        )
    if copies:
        idle += f"; copies and sets alone take {100 * copies / span:.1f} %"
    return [
        SummaryLine("Compute", share("compute_ns"), busy),
        SummaryLine("Exposed communication", share("exposed_communication_ns"), communication),
        SummaryLine("Idle", share("idle_ns"), idle),
    ]


def summarize_top_operator(operators: pl.DataFrame) -> SummaryLine:
    """The operator with the greatest own time over all ranks. operators: all of each rank."""
    if operators.is_empty():
        return SummaryLine("Top operator", "not known", "the traces hold no operators")
    everything = int(operators["exclusive_ns"].sum())
    top = (
        operators.group_by("name")
        .agg(pl.col("exclusive_ns").sum(), pl.col("count").sum())
        .sort("exclusive_ns", "name", descending=[True, False])
        .row(0, named=True)
    )
    share = (
        f"{100 * top['exclusive_ns'] / everything:.1f} % of the operators' exclusive time, "
        if everything
        else ""
    )
    return SummaryLine(
        "Top operator",
        top["name"] or "without a name",
        f"{share}{format_duration(top['exclusive_ns'])} in {count_noun(top['count'], 'call')}",
    )


def summarize_links(quality: pl.DataFrame) -> SummaryLine:
    """How many host operators are paired; where no execution trace was read, how much device work is."""
    sums = {
        row["subject"]: row
        for row in quality.group_by("subject").agg(pl.col("total", "linked").sum()).iter_rows(named=True)
    }
    for subject, to in (("host operators", "profiler events"), ("device work", "the calls that launched it")):
        found: dict[str, Any] | None = sums.get(subject)
        if found and found["total"]:
            share = 100 * found["linked"] / found["total"]
            # Rounded down: 100 % is said only of all.
            figure = f"{int(share * 100) / 100:g} % linked"
            text = f"{found['linked']:,} of {found['total']:,} {subject} to {to}"
            return SummaryLine("Links", figure, text, "plain" if share >= MIN_LINKED_PCT else "warn")
    return SummaryLine("Links", "none", "one trace a rank without device work: nothing to link")


def summarize_data_loss(stats: pl.DataFrame) -> SummaryLine:
    rows = dict(stats.group_by("severity").len().rows())
    errors, losses, infos = (rows.get(severity, 0) for severity in ("error", "data_loss", "info"))
    tone = "bad" if errors else "warn" if losses else "plain"
    figure = f"{count_noun(errors, 'error')}, {losses:,} lost" if errors or losses else "nothing lost"
    return SummaryLine(
        "Trouble",
        figure,
        f"notes by severity: {errors:,} error, {losses:,} data loss, {infos:,} info; all are listed under Quality",
        tone,
    )


def summarize_size(job: Job) -> SummaryLine:
    events, nodes = (sum(trace.rows(table) for trace in job.values()) for table in ("events", "nodes"))
    worlds = {int(size) for trace in job.values() if (size := trace.meta.get("world_size"))}
    world = f" of {max(worlds):,}" if worlds and max(worlds) != len(job) else ""
    return SummaryLine(
        "Read",
        f"{len(job):,}{world} rank{'' if len(job) == 1 and not world else 's'}",
        f"{count_noun(events, 'profiler event')}, {count_noun(nodes, 'execution-trace node')}",
    )
