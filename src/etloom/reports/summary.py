"""Summarizes a run: a few lines with key figures, and the tables of the analyses behind them.

The HTML report and the terminal show the same `RunSummary`. A rank that cannot answer an analysis (no steps, no GPU
activities) is missing in that table and reported in ``unanswered``. A run of execution traces alone has no times: its
summary counts operators and communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.analyses import hangs
from etloom.analyses.answers import Answer, answer, answer_by_rank, find_stored_answer
from etloom.analyses.helpers import step_times
from etloom.core import registry
from etloom.core.errors import AnalysisError
from etloom.core.steps import StepBefore, find_step_before
from etloom.core.text import SIZE_UNITS, choose_unit, count_noun, format_duration, format_number, format_ranks
from etloom.core.trace import Job
from etloom.graphs import critical_paths
from etloom.reports.finding_text import format_gain
from etloom.reports.memory_section import is_memory_only, summarize_memory
from etloom.reports.time_shares import PART_LABELS, SummaryLine, add_step_margins, summarize_time_shares

RANK_ANALYSES = (
    "steps",
    "temporal-breakdown",
    "comm-overlap",
    "top-ops",
    "kernel-breakdown",
    "link-quality",
)
JOB_ANALYSES = (
    "findings",
    "critical-path",
    "collective-summary",
    "collectives",
    "stragglers",
    "clocks",
    "imbalance",
)
"""Analyses of all ranks together."""
ANALYSIS_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "critical-path": {"by": "edge"},
    "top-ops": {"top": 10**9},  # the first over all ranks may be further down on a single rank
}
SEVERAL_DEVICES = "link.several_devices"
"""The stat of ranks with several devices, which the linker writes."""
MAX_OPERATORS = 20
"""Operators listed per rank: those with the largest exclusive times, and those with the largest device times."""
MAX_GRAPH_EVENTS = 8_000_000
"""The critical path of a larger run is left to `etloom analyze critical-path`: its graph takes too much memory."""
MIN_LINKED_PCT = 95.0
"""Percentage of linked host operators below which the summary warns."""


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run: lines with key figures, the tables of the analyses, and the data-quality rows.

    ``tables``: by analysis, ``rank`` first; ``overview``, one row per rank (see `_build_overview`); for a run without
    times also ``recorded``, its operators; for dumps of the Flight Recorder also ``hangs``. ``basis``: what the
    breakdown refers to: "device", "host", "mixed" or "none". ``unanswered``: analysis -> reason why some rank cannot
    answer it.
    """

    ranks: tuple[int, ...]
    lines: tuple[SummaryLine, ...]
    tables: Mapping[str, pl.DataFrame]
    stats: pl.DataFrame
    basis: str
    unanswered: Mapping[str, str] = field(default_factory=dict)


def summarize_run(job: Job) -> RunSummary:
    """Return the summary of a run of linked traces; it is computed once per job."""
    return job.compute_once(_compute_summary)


def answer_once(job: Job, name: str) -> Answer:
    """Return the result of an analysis of all ranks, with the options of the summary; it is computed once per job."""
    return job.compute_once(_answer, name)


def _answer(job: Job, name: str) -> Answer:
    return answer(job, name, **ANALYSIS_OPTIONS.get(name, {}))


def is_untimed(job: Job) -> bool:
    """Return whether the traces contain execution-trace nodes but no profiler events."""
    facts = job.rank_facts
    return bool(facts["events"].sum() == 0 and facts["nodes"].sum() > 0)


def _compute_summary(job: Job) -> RunSummary:
    tables, unanswered = _analyze_ranks(job)
    operators = tables["top-ops"]
    tables["top-ops-sum"] = sum_over_ranks(operators, "exclusive_ns")
    tables["kernel-breakdown-sum"] = sum_over_ranks(tables["kernel-breakdown"], "total_ns")
    order = [
        pl.col(name).rank("ordinal", descending=True).over("rank") for name in ("exclusive_ns", "device_ns")
    ]
    tables["top-ops"] = operators.filter(pl.any_horizontal(place <= MAX_OPERATORS for place in order))
    for name in JOB_ANALYSES:
        tables[name], reason = _analyze_job(job, name)
        if reason:
            unanswered[name] = reason
    tables["overview"] = overview = _build_overview(job, tables)
    stats = job.stats
    bases = overview["basis"].drop_nulls().unique().to_list()
    basis = bases[0] if len(bases) == 1 else "mixed" if bases else "none"
    if is_untimed(job):
        tables["recorded"] = count_recorded_operators(job)
        lines: tuple[SummaryLine, ...] = (
            _summarize_recorded_operators(tables["recorded"]),
            _summarize_recorded_communication(job),
            _summarize_recorded_times(tables["recorded"]),
            _summarize_data_loss(stats),
            _summarize_size(job),
        )
        return RunSummary(tuple(job.ranks), lines, tables, stats, basis)
    if is_hang_dump(job):
        line, tables["hangs"] = summarize_hang(job)
        lines = (
            line,
            _summarize_recorded_communication(job),
            _summarize_data_loss(stats),
            _summarize_size(job),
        )
        return RunSummary(tuple(job.ranks), lines, tables, stats, basis)
    if is_memory_only(job):
        lines = (*summarize_memory(job), _summarize_data_loss(stats))
        return RunSummary(tuple(job.ranks), lines, tables, stats, basis)
    devices = dict(stats.filter(pl.col("name") == SEVERAL_DEVICES).select("rank", "count").iter_rows())
    lines = (
        _summarize_top_finding(tables["findings"]),
        _summarize_step_time(tables["steps"], find_step_before(job)),
        *summarize_time_shares(
            add_step_margins(job, tables["temporal-breakdown"]),
            tables["comm-overlap"],
            tables["steps"],
            basis,
            devices,
        ),
        _summarize_critical_path(tables["critical-path"], unanswered.get("critical-path")),
        _summarize_top_operator(operators),
        _summarize_links(tables["link-quality"]),
        _summarize_data_loss(stats),
        _summarize_size(job),
    )
    return RunSummary(tuple(job.ranks), lines, tables, stats, basis, unanswered)


def _analyze_ranks(job: Job) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    """Return the tables of the single-rank analyses, and by analysis the reason why its table lacks ranks."""
    tables, unanswered, answers = {}, {}, {}
    for name in RANK_ANALYSES:
        try:
            stored = find_stored_answer(job, name, ANALYSIS_OPTIONS.get(name, {}))
        except AnalysisError as error:
            stored = Answer(pl.DataFrame(), dict.fromkeys(job, error))
        if stored is not None:
            answers[name] = stored
    missing = {name: (name, ANALYSIS_OPTIONS.get(name, {})) for name in RANK_ANALYSES if name not in answers}
    if missing:
        answers |= answer_by_rank(job, missing)
    for name, result in ((name, answers[name]) for name in RANK_ANALYSES):
        tables[name] = result.table
        if result.table.is_empty() and not result.table.columns:
            columns = registry.get("analyses", name).COLUMNS
            tables[name] = pl.DataFrame(schema={"rank": pl.Int64, **columns})
        if result.refused:
            reason = next(iter(result.refused.values())).what
            unanswered[name] = f"{reason} ({format_ranks(result.refused)})"
    return tables, unanswered


def _analyze_job(job: Job, name: str) -> tuple[pl.DataFrame, str | None]:
    """Return the table of an analysis of all ranks, and the reason if it cannot be computed, else None.

    That there is a single rank is not reported as a reason.
    """
    empty = pl.DataFrame(schema=registry.get("analyses", name).COLUMNS)
    if name == "critical-path" and job.rank_facts["events"].sum() > MAX_GRAPH_EVENTS:
        return empty, f"more than {MAX_GRAPH_EVENTS:,} events: run `etloom analyze critical-path`"
    try:
        return answer_once(job, name).table, None
    except AnalysisError as error:
        return empty, error.what if len(job) > 1 and name in ("stragglers", "clocks") else None


def _build_overview(job: Job, tables: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return a table with one row per rank: step count and times, span, and time shares in percent of the span.

    Columns: rank, basis, steps, step_mean_ns and step_std_ns (as in the line on step times), span_ns (see
    `add_step_margins`), <part>_pct, overlap_pct
    (of the communication).
    """
    time_ns = pl.col("time_ns")
    times = step_times.measure_step_times(tables["steps"])[0].group_by("rank")
    steps = (
        tables["steps"]
        .group_by("rank")
        .agg(pl.len().alias("steps"))
        .join(
            times.agg(time_ns.mean().alias("step_mean_ns"), time_ns.std().alias("step_std_ns")),
            on="rank",
            how="left",
        )
    )
    is_total = pl.col("step").is_null()
    time = add_step_margins(job, tables["temporal-breakdown"]).filter(is_total)
    overlap = tables["comm-overlap"].filter(is_total).select("rank", "overlap_pct")
    return (
        pl.DataFrame({"rank": list(job)}, schema={"rank": pl.Int64})
        .join(steps, on="rank", how="left", maintain_order="left")
        .join(time, on="rank", how="left", maintain_order="left")
        .join(overlap, on="rank", how="left", maintain_order="left")
        .select(
            "rank",
            "basis",
            pl.col("steps").fill_null(0).cast(pl.Int64),
            "step_mean_ns",
            "step_std_ns",
            "span_ns",
            *(f"{part}_pct" for part in PART_LABELS),
            "overlap_pct",
        )
    )


def _summarize_top_finding(findings: pl.DataFrame) -> SummaryLine:
    """Return the summary line on the first finding: its title, and the time the job would gain without the problem."""
    if findings.is_empty():
        text = "no pattern costs the job or a rank half a percent of its time"
        return SummaryLine("Top finding", "nothing found", text)
    first = findings.row(0, named=True)
    gain, share = format_gain(first)
    text = f"{first['title']} (up to {share}, {first['confidence']} confidence)"
    return SummaryLine("Top finding", gain, text)


def _summarize_critical_path(path: pl.DataFrame, reason: str | None) -> SummaryLine:
    """Return the summary line on the critical path: its shares by kind, or the reason why it is unknown."""
    total = int(path["time_ns"].sum()) if path.height else 0
    if not total:
        return SummaryLine("Critical path", "unknown", reason or "no timed operators and no GPU activities")
    first, *rest = critical_paths.format_path_shares(path, digits=1, most=4, least_pct=0.05)
    text = f"of {format_duration(total)}" + (f"; then {', '.join(rest)}" if rest else "")
    if not path["explainable"].all():
        text += "; not reliable: the graph does not explain the recording"
    return SummaryLine("Critical path", first, text)


def _summarize_step_time(steps: pl.DataFrame, before: StepBefore | None) -> SummaryLine:
    """Return the summary line on step times: mean, standard deviation, median, shortest and longest.

    The time of a step is the mean over its ranks, as in comparisons.

    Args:
        steps: The tables of `analyze steps`.
        before: The step time before the recording.
    """
    if steps.is_empty():
        return SummaryLine("Step time", "unknown", "no ProfilerStep annotation in these traces")
    by_rank, measured = step_times.measure_step_times(steps)
    times = by_rank.group_by("step").agg(pl.col("time_ns").mean()).sort("step")["time_ns"]
    note = _describe_measured(steps, measured)
    if before is not None:
        note += f"; {format_duration(before.step_ns)} before the recording"
    statistics: tuple[Any, ...] = (times.mean(), times.median(), times.min(), times.max())
    mean, median, shortest, longest = (float(value or 0) for value in statistics)
    ranks = steps["rank"].n_unique()
    if len(times) == 1 or not mean:
        only = "the only step" if steps["step"].n_unique() == 1 else "mean"
        return SummaryLine(
            "Step time",
            format_duration(mean),
            (f"{only}, mean over {ranks:,} ranks" if ranks > 1 else only) + note,
        )
    each = f", each the mean over {ranks:,} ranks" if ranks > 1 else ""
    spread = 100 * float(times.std() or 0) / mean  # type: ignore[arg-type]
    return SummaryLine(
        "Step time",
        f"{format_duration(mean)} ± {format_number(spread, 2)} %",
        f"mean and standard deviation of {count_noun(len(times), 'step')}{each}; "
        f"median {format_duration(median)}, shortest {format_duration(shortest)}, longest {format_duration(longest)}"
        f"{note}",
    )


def _describe_measured(steps: pl.DataFrame, measured: str) -> str:
    """Return a note on what the step times measure (see `measure_step_times`), if not the annotations alone."""
    if measured == "annotation":
        return "; annotations on the host" if steps["device_end_ns"].count() else ""
    if measured == "period":
        return "; from end to end on the device, which lags behind the host"
    annotation = format_duration(float(steps["dur_ns"].mean() or 0))  # type: ignore[arg-type]
    tail = format_duration(step_times.measure_device_tail(steps))
    starts_later = (steps["device_start_ns"] >= steps["start_ns"] + steps["dur_ns"]).all()
    extent = "from its first to its last GPU activity" if starts_later else "until its GPU activity ends"
    return f"; {extent}: the annotation on the host takes {annotation}, and the GPU finishes {tail} after it"


def _summarize_top_operator(operators: pl.DataFrame) -> SummaryLine:
    """Return the summary line on the operator with the largest exclusive time over all ranks.

    operators: all operators of each rank.
    """
    if operators.is_empty():
        return SummaryLine("Top operator", "unknown", "the traces contain no operators")
    total_ns = int(operators["exclusive_ns"].sum())
    top = (
        operators.group_by("name")
        .agg(pl.col("exclusive_ns").sum(), pl.col("count").sum())
        .sort("exclusive_ns", "name", descending=[True, False])
        .row(0, named=True)
    )
    share = (
        f"{100 * top['exclusive_ns'] / total_ns:.1f} % of the operators' exclusive time, " if total_ns else ""
    )
    return SummaryLine(
        "Top operator",
        top["name"] or "unnamed",
        f"{share}{format_duration(top['exclusive_ns'])} in {count_noun(top['count'], 'call')}",
    )


def _summarize_links(quality: pl.DataFrame) -> SummaryLine:
    """Return the summary line on the share of linked host operators; without an execution trace, of GPU activities."""
    sums = {
        row["subject"]: row
        for row in quality.group_by("subject").agg(pl.col("total", "linked").sum()).iter_rows(named=True)
    }
    targets = {
        "host operators": ("Linked operators", "host operators", "profiler events"),
        "device work": ("Linked kernels", "GPU activities", "the calls that launched them"),
    }
    for subject, (topic, label, to) in targets.items():
        counts: dict[str, Any] | None = sums.get(subject)
        if counts and counts["total"]:
            share = 100 * counts["linked"] / counts["total"]
            # Rounded down: 100 % means all.
            figure = f"{int(share * 100) / 100:g} % linked"
            text = f"{counts['linked']:,} of {counts['total']:,} {label} to {to}"
            return SummaryLine(topic, figure, text, "plain" if share >= MIN_LINKED_PCT else "warn")
    return SummaryLine("Linked", "none", "one trace per rank without GPU activities: nothing to link")


def _summarize_data_loss(stats: pl.DataFrame) -> SummaryLine:
    """Return the summary line on data loss: the number of data-quality rows by severity."""
    rows = dict(stats.group_by("severity").len().rows())
    errors, losses, infos = (rows.get(severity, 0) for severity in ("error", "data_loss", "info"))
    tone = "bad" if errors else "warn" if losses else "plain"
    figure = f"{count_noun(errors, 'error')}, {losses:,} lost" if errors or losses else "nothing lost"
    return SummaryLine(
        "Data loss",
        figure,
        f"reading stats by severity: {errors:,} error, {losses:,} data loss, {infos:,} info; see Data quality",
        tone,
    )


def _summarize_size(job: Job) -> SummaryLine:
    """Return the summary line on size: the number of ranks, profiler events and execution-trace nodes."""
    facts = job.rank_facts
    events, nodes = (int(facts[name].sum()) for name in ("events", "nodes"))
    largest = facts.select(pl.col("world_size").max()).item()
    world = f" of {largest:,}" if largest and largest != len(job) else ""
    return SummaryLine(
        "Read",
        f"{len(job):,}{world} rank{'' if len(job) == 1 and not world else 's'}",
        f"{count_noun(events, 'profiler event')}, {count_noun(nodes, 'execution-trace node')}",
    )


def count_recorded_operators(job: Job) -> pl.DataFrame:
    """Count the execution-trace nodes of each rank by name.

    Returns:
        rank, name, count, total_ns (sum of the durations that Chakra nodes state, null for other nodes), the most
        frequent first.
    """
    from etloom.formats.chakra import recorded_duration_ns

    duration = recorded_duration_ns()
    counts = [
        trace.nodes.group_by(pl.col("name").cast(pl.String))
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.when(duration.count() > 0).then(duration.sum()).alias("total_ns"),
        )
        .select(pl.lit(rank, pl.Int64).alias("rank"), "name", "count", "total_ns")
        for rank, trace in job.items()
    ]
    return pl.concat(counts).sort("count", "name", "rank", descending=(True, False, False))


def _summarize_recorded_operators(operators: pl.DataFrame) -> SummaryLine:
    """Return the summary line on recorded operators: their number, and the most frequent name.

    operators: see `count_recorded_operators`.
    """
    by_name = (
        operators.group_by("name").agg(pl.col("count").sum()).sort("count", "name", descending=(True, False))
    )
    most_frequent, times = by_name.row(0)
    text = f"with {count_noun(by_name.height, 'name')}; most frequent: {most_frequent}, {count_noun(times, 'time')}"
    return SummaryLine("Operators", f"{by_name['count'].sum():,}", text)


def _summarize_recorded_times(operators: pl.DataFrame) -> SummaryLine:
    """Return the summary line on times: the sum of the durations of nodes, or the reason why there are none."""
    total_ns = int(operators["total_ns"].sum())
    if not total_ns:
        reason = (
            "an execution trace has operators and tensors; add the profiler trace of the same steps for times"
        )
        return SummaryLine("Times", "not recorded", reason)
    text = "sum over nodes, which state their duration but not their start"
    return SummaryLine("Times", format_duration(total_ns), text)


def _summarize_recorded_communication(job: Job) -> SummaryLine:
    """Return the summary line on recorded communication: number of collectives, of sends and receives, and bytes."""
    comms = pl.concat(
        trace.comms.select(pl.col("collective").cast(pl.String), "bytes") for trace in job.values()
    )
    calls = comms.filter(pl.col("collective").is_not_null() & ~pl.col("collective").is_in(["wait", "init"]))
    if calls.is_empty():
        return SummaryLine("Communication", "none", "no communication in these traces")
    size = int(calls["bytes"].sum())
    unit, factor = choose_unit(size, SIZE_UNITS)
    by_name = calls.group_by("collective").len().sort("len", "collective", descending=(True, False))
    names = ", ".join(f"{name} {count:,}" for name, count in by_name.head(3).iter_rows())
    more = ", ..." if by_name.height > 3 else ""
    text = f"calls: {names}{more}; {format_number(size / factor)} {unit} in total"
    return SummaryLine("Communication", f"{calls.height:,}", text)


# Sums over ranks of tables that have a row per rank and name.

KEYS = ("kind", "name")
SUMMED = ("count", "exclusive_ns", "self_ns", "runtime_ns", "total_ns", "device_ns")


def sum_over_ranks(table: pl.DataFrame, cost: str) -> pl.DataFrame:
    """Sum a table over its ranks by name (and kind, if present); rows sorted by ``cost``, largest first.

    Args:
        table: rank, name, counts and times per rank.
        cost: the column of times to sort by.

    Returns:
        kind, name, ranks (number of ranks), the sums, pct (share of the sum of ``cost``), max_ns (the largest ``cost``
        of a rank) and max_rank (that rank).
    """
    keys = [key for key in KEYS if key in table.columns]
    summed = [name for name in SUMMED if name in table.columns]
    most = pl.col(cost).arg_max()
    total = max(int(table[cost].sum() or 0), 1)
    first = [cost, "pct", "count", "ranks"]
    return (
        table.with_columns(pl.col(key).cast(pl.String) for key in keys)
        .group_by(keys)
        .agg(
            pl.col("rank").n_unique().cast(pl.Int64).alias("ranks"),
            pl.col(summed).sum(),
            pl.col(cost).max().alias("max_ns"),
            pl.col("rank").get(most).alias("max_rank"),
        )
        .with_columns(pct=100.0 * pl.col(cost) / total)
        .select(*keys, *first, *(name for name in summed if name not in first), "max_ns", "max_rank")
        .sort(cost, *keys, descending=[True, *[False] * len(keys)], nulls_last=True)
    )


# Summarizes dumps of the Flight Recorder: which ranks stopped, and the calls that others wait in.


def is_hang_dump(job: Job) -> bool:
    """Return whether every trace is a dump of the Flight Recorder, which has no operators and no times of GPU work."""
    return all("flight_recorder" in trace.meta.get("formats", ()) for trace in job.values())


def summarize_hang(job: Job) -> tuple[SummaryLine, pl.DataFrame]:
    """Return the summary line on a hang, and the table of `etloom analyze hangs` with lists of ranks as text."""
    table = hangs.analyze(job)
    ranks_as_text = [
        pl.Series(name, [_list_ranks(ranks) for ranks in table[name].to_list()], pl.String)
        for name in ("ranks", "others")
    ]
    return _describe(table), table.with_columns(ranks_as_text)


def _describe(table: pl.DataFrame) -> SummaryLine:
    if table.is_empty():
        return SummaryLine("Hang", "none", hangs.EMPTY_MESSAGE)
    cause = hangs.find_cause(table)
    if cause is not None:
        return SummaryLine("Hang", f"{format_ranks(cause.ranks)}: {cause.kind}", cause.sentence, "bad")
    first = table.row(0, named=True)
    call = f"{first['collective'] or 'a call'} of group {first['group']} ({_list_ranks(first['ranks'])})"
    return SummaryLine(
        "Hang", count_noun(table.height, "finding"), f"first: {first['finding']}, {call}", "bad"
    )


def _list_ranks(ranks: Iterable[int] | None) -> str | None:
    """Format ranks as text, such as "ranks 0-7, 9"; None if there are no ranks."""
    numbers = list(ranks or ())
    return format_ranks(numbers) if numbers else None
