"""Slow operators as tasks for kernel engineers: attained and attainable time, the saving, the reason, an example call.

One row per operator, shapes, types, strides and precision. mean_ns: device time of a call (basis host: its duration);
attainable_ns: the time that a call should need, which rests on what `rests_on` names: a "table" of times measured on
this device (matrix products and attention, of the nearest shapes, if etloom[devices] is installed; with the error
that nine of ten are within), a sibling: the operators of the same family and precision in the same rank that reach
the most FLOPs and bytes per time, "roofline" (the limits of the device), or "fixed cost" (no time below 2 us is
attainable). A call is slow if the table, else a sibling, is at least 20 % faster; the roofline is a bound that no
kernel fully reaches, so only operators below half of it are listed. saved_ns: the time above it, of all calls, an
upper bound of the saving; saved_pct: its share of the time of all operators of the rank. reason and advice: what the
shapes show (docs/reference/findings.md, slow-operators). event: a call of median duration; `etloom repro RUN --event
ID` writes a script that runs it. device_pct: share of the rank's recording, from its first to its last event, in which
its device ran (null on a CPU): where it is low, the host limits the run, not these operators. Of a device
without known peaks the roofline is that of the slowest known device
whose architecture its kernels name (sm90, sm100, gfx90a, gfx950); otherwise, and on a CPU, only siblings are
compared.

--ncu adds columns from a report of Nsight Compute: the mean over the instances of the operator's kernels, by name.
occupancy_pct: achieved occupancy; dram_pct: memory throughput relative to its peak; stall: the most frequent reason for
which warps wait, with its share of all such reasons.

Units: ns, percent. Needs shapes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl

from etloom.analyses.flops.call_shapes import estimate_times
from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.limits import add_limits, certain_ns, find_device_peaks
from etloom.analyses.flops.peaks import Peaks, check_device, find_architecture_peaks
from etloom.analyses.flops.shape_reasons import describe_setting, explain_call
from etloom.analyses.helpers import Step, check_percentage, check_top, conform_columns, filter_step
from etloom.core import categories
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity, describe_rank

SCOPE = "rank"
COLUMNS = {
    "family": pl.String,
    "name": pl.String,
    "precision": pl.String,
    "calls": pl.Int64,
    "basis": pl.String,
    "time_ns": pl.Int64,
    "time_pct": pl.Float64,
    "mean_ns": pl.Float64,
    "attainable_ns": pl.Float64,
    "rests_on": pl.String,
    "saved_ns": pl.Int64,
    "saved_pct": pl.Float64,
    "device_pct": pl.Float64,
    "reason": pl.String,
    "advice": pl.String,
    "event": pl.Int64,
    "shapes": pl.String,
    "types": pl.String,
    "strides": pl.String,
    "occupancy_pct": pl.Float64,
    "dram_pct": pl.Float64,
    "stall": pl.String,
}
_SIBLING, _ROOFLINE = 0.8, 0.5
"""An operator is slow if it attains less than this share of the rate of a sibling, or of the roofline."""
_FIXED_NS = 2_000.0
"""Time that a kernel, or an operator on the host, takes whatever it does."""
_MIN_DEVICE_PCT = 50.0
"""Share of the recording in which the device runs below which the host, not the operators, is what to look at first."""
_GROUP = ["family", "name", "dims", "types", "strides", "precision"]
_PEERS = ["family", "precision"]


def analyze(
    trace: Trace,
    *,
    min_pct: Annotated[
        float, "Only operators whose saving is at least this share of the time, percent."
    ] = 1.0,
    step: Step = None,
    top: Annotated[int, "Number of rows of each rank, largest saving first."] = 20,
    device: Annotated[str | None, "The device (H100), if the trace does not name it."] = None,
    device_peaks: Annotated[str | None, "A file of device peaks, as shown in docs/flops.md."] = None,
    ncu: Annotated[
        str | None, "A report of Nsight Compute: the output of ncu --csv, or ncu --csv --page raw."
    ] = None,
) -> pl.DataFrame:
    check_top(top)
    check_percentage(min_pct, "min_pct")
    check_device(device, device_peaks)
    metrics = None if ncu is None else _read_report(ncu)
    calls = filter_step(trace, count_calls(trace), step)
    if not calls["time_ns"].count():
        raise AnalysisError(
            "an execution trace contains no times",
            where=describe_rank(trace),
            remedy="add the run's Kineto trace to the folder",
        )
    total = int(calls["time_ns"].sum())
    calls = calls.filter("known", pl.col("time_ns") > 0, pl.col("assumed").is_null())
    peaks = _find_peaks(trace, device, device_peaks)
    calls = add_limits(calls, peaks)
    arguments = trace.arguments.select("strides", "concrete_inputs", id="event")
    calls = calls.join(arguments, on="id", how="left", maintain_order="left").with_columns(
        pl.col(pl.Categorical, pl.Enum).cast(pl.String)
    )
    groups = _add_measured(calls.group_by(_GROUP, maintain_order=True).agg(_aggregate()), peaks)
    rows = _add_attainable(groups).with_columns(
        saved=(pl.col("time_ns") - pl.col("calls") * pl.col("attainable_ns")).cast(pl.Int64)
    )
    rows = rows.filter(pl.col("saved") >= min_pct / 100 * total).sort(
        ["saved", *_GROUP], descending=[True] + [False] * len(_GROUP), nulls_last=True
    )
    rows = rows.head(top)
    setting = describe_setting(trace, peaks)
    reasons = [explain_call(row, setting, row["basis"] == "device") for row in rows.iter_rows(named=True)]
    rows = rows.with_columns(
        time_pct=100 * pl.col("time_ns") / total,
        saved_ns="saved",
        saved_pct=100 * pl.col("saved") / total,
        device_pct=pl.lit(_measure_device_share(trace), pl.Float64),
        reason=pl.Series([reason and reason.text for reason in reasons], dtype=pl.String),
        advice=pl.Series([reason and reason.advice for reason in reasons], dtype=pl.String),
        shapes="dims",
    )
    return conform_columns(_join_metrics(trace, calls, rows, metrics), COLUMNS)


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield notes for the terminal: on the ranks whose devices are mostly idle, and on how to run the first task."""
    idle = table.filter(pl.col("device_pct") < _MIN_DEVICE_PCT)
    for rank, share in idle.select("rank", "device_pct").unique().sort("rank").head(1).iter_rows():
        yield (
            f"the device of rank {rank} runs for {share:.0f} % of the recording: what keeps it idle costs more than "
            "these operators; see etloom analyze findings first"
        )
    example = table.drop_nulls("event").head(1)
    for rank, event in example.select("rank", "event").iter_rows():
        yield f"etloom repro RUN --rank {rank} --event {event} --out DIR writes a script that runs the first one"


def _measure_device_share(trace: Trace) -> float | None:
    """Return the share of the recording, from its first to its last event, in which the device ran, percent."""
    activity = compute_activity(trace)
    events = trace.events.filter(
        pl.col("cat").is_in(list(categories.HOST_CATEGORIES | categories.DEVICE_CATEGORIES))
    )
    start, end = events["ts"].min(), (events["ts"] + events["dur"]).max()
    if activity.basis != "device" or not isinstance(start, int) or not isinstance(end, int) or end <= start:
        return None
    return 100 * activity.busy.total / (end - start)


def _find_peaks(trace: Trace, device: str | None, device_peaks: str | None) -> Peaks:
    """Return the peaks of the device, else the least that its kernels name; without any, if nothing is specified."""
    try:
        return find_device_peaks(trace, device=device, device_peaks=device_peaks)
    except AnalysisError:
        if device is not None or device_peaks is not None:
            raise
        return find_architecture_peaks(trace) or Peaks("unknown", None, {}, {})


def _aggregate() -> list[pl.Expr]:
    """Return expressions that aggregate the calls of an operator (see `add_limits`) into a row of the table."""
    median = (pl.col("time_ns") - pl.col("time_ns").median()).abs().arg_min()
    certain = certain_ns()
    roofline = pl.max_horizontal(certain.mean(), pl.lit(_FIXED_NS))
    return [
        pl.len().alias("calls"),
        pl.col("basis", "dtype").first(),
        pl.col("time_ns").sum(),
        pl.col("time_ns").mean().alias("mean_ns"),
        *(pl.col(name).cast(pl.Float64).mean() for name in ("flops", "bytes")),
        pl.when(certain.is_not_null().all()).then(roofline).alias("roofline_ns"),
        pl.col("bus").any(),
        pl.col("id").get(median).cast(pl.Int64).alias("event"),
        pl.col("concrete_inputs").get(median),
    ]


def _add_measured(rows: pl.DataFrame, peaks: Peaks) -> pl.DataFrame:
    """Add table_ns and table: the time of calls of the nearest measured shapes on this device, and its error; null if
    there is none."""
    times, errors = np.full((2, rows.height), np.nan)
    if (rows["basis"] == "device").all():
        times, errors = estimate_times(rows, peaks)
    texts = [f"table, 90 % within {error:.0f} %" if error > 0 else None for error in errors]
    return rows.with_columns(
        table_ns=pl.Series(times, nan_to_null=True), table=pl.Series(texts, dtype=pl.String)
    )


def _add_attainable(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the slow rows with the columns attainable_ns and rests_on: by measured times, else by a faster sibling,
    else by the roofline."""
    peers = rows.with_row_index("row").drop_nulls("precision").filter(~pl.col("bus"))
    # The arithmetic of operators outside of these families takes no time: their formulas count it roughly.
    for work, is_limit in (("flops", pl.col("family").is_in(MATRIX)), ("bytes", pl.lit(True))):
        has_work = is_limit & (pl.col(work) > 0)
        rate = pl.when(has_work).then(pl.col(work) / pl.col("mean_ns"))
        peers = peers.with_columns(rate=rate).with_columns(
            pl.when(has_work).then(pl.col(work) / pl.col("rate").max().over(_PEERS)).alias(f"{work}_ns"),
            pl.format("sibling {} {}", "name", "dims")
            .get(pl.col("rate").fill_null(-1).arg_max())
            .over(_PEERS)
            .alias(f"{work}_sibling"),
        )
    by_flops = pl.col("flops_ns").fill_null(0) >= pl.col("bytes_ns").fill_null(0)
    peers = peers.with_columns(
        sibling=pl.when(by_flops).then("flops_sibling").otherwise("bytes_sibling"),
        sibling_ns=pl.when(pl.col("flops_ns").is_not_null() | pl.col("bytes_ns").is_not_null()).then(
            pl.max_horizontal("flops_ns", "bytes_ns", "roofline_ns", pl.lit(_FIXED_NS))
        ),
    )
    has_table = pl.col("table_ns").is_not_null()
    uses_table = has_table & (pl.col("table_ns") < _SIBLING * pl.col("mean_ns"))
    uses_sibling = ~has_table & (pl.col("sibling_ns") < _SIBLING * pl.col("mean_ns"))
    uses_roofline = ~has_table & (pl.col("roofline_ns") < _ROOFLINE * pl.col("mean_ns"))
    return (
        peers.with_columns(
            attainable_ns=pl.when(uses_table)
            .then(pl.max_horizontal("table_ns", pl.lit(_FIXED_NS)))
            .when(uses_sibling)
            .then("sibling_ns")
            .when(uses_roofline)
            .then("roofline_ns"),
            rests_on=pl.when(uses_table)
            .then("table")
            .when(uses_sibling & (pl.col("sibling_ns") > pl.col("roofline_ns").fill_null(0)))
            .then("sibling")
            .when(uses_sibling | uses_roofline)
            .then(pl.lit("roofline")),
        )
        .with_columns(
            rests_on=pl.when(pl.col("attainable_ns") <= _FIXED_NS)
            .then(pl.lit("fixed cost"))
            .otherwise("rests_on")
        )
        .drop_nulls("attainable_ns")
    )


_METRICS = {
    "occupancy_pct": ("achieved occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    "dram_pct": (
        "dram throughput",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
}
_STALL = re.compile(
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.(?:ratio|pct)"
    r"|smsp__pcsamp_warps_issue_stalled_(\w+)|stall (.+)"
)
_MAX_REPORT_BYTES = 256 << 20


def _read_report(path: str) -> pl.DataFrame:
    """Return kernel, metric (a column of the table, or "stall " and a reason) and its mean over the kernel's instances.

    Raises:
        AnalysisError: The file is not a report that ncu --csv printed.
    """
    remedy = "expected the output of ncu --csv or ncu --csv --page raw"
    try:
        if Path(path).stat().st_size > _MAX_REPORT_BYTES:
            raise AnalysisError(
                "the report is larger than 256 MiB", where=path, remedy="filter its kernels: ncu -k"
            )
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise AnalysisError(f"cannot read the report: {error.strerror}", where=path, remedy=remedy) from error
    header = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise AnalysisError("the report has no header with ID and Kernel Name", where=path, remedy=remedy)
    values: list[tuple[str, str, float]] = []
    for row in csv.DictReader(lines[header:]):
        kernel = row.get("Kernel Name") or ""
        pairs = [(row["Metric Name"], row.get("Metric Value"))] if "Metric Name" in row else row.items()
        for metric, text in pairs if kernel else ():
            column = _find_column(str(metric))
            number = _parse_number(text) if column else None
            if column and number is not None:
                values.append((_normalize_kernel(kernel), column, number))
    if not values:
        raise AnalysisError(
            "the report has no occupancy, DRAM throughput or stalls", where=path, remedy=remedy
        )
    table = pl.DataFrame(values, schema=["kernel", "metric", "value"], orient="row")
    return table.group_by("kernel", "metric").agg(pl.col("value").mean())


def _find_column(metric: str) -> str | None:
    """Return the column of a metric of Nsight Compute, or "stall " and the reason; None for other metrics."""
    plain = metric.strip().lower()
    for column, names in _METRICS.items():
        if plain in names:
            return column
    match = _STALL.fullmatch(plain)
    reason = next(filter(None, match.groups()), "") if match else ""
    is_stall = reason and reason != "selected" and not reason.endswith("not_issued")
    return f"stall {reason.replace('_', ' ')}" if is_stall else None


def _parse_number(text: object) -> float | None:
    try:
        number = float(str(text).replace(",", ""))
    except ValueError:
        return None
    return number if 0 <= number < 1e18 else None


def _normalize_kernel(name: str) -> str:
    return re.sub(r"\s+", "", name.removeprefix("void "))


def _join_metrics(
    trace: Trace, calls: pl.DataFrame, rows: pl.DataFrame, metrics: pl.DataFrame | None
) -> pl.DataFrame:
    """Add the columns of the report to the rows: means of their kernels by name, weighted by the kernels' time."""
    if metrics is None or rows.is_empty():
        return rows.with_columns(
            pl.lit(None, dtype=COLUMNS[name]).alias(name) for name in ("occupancy_pct", "dram_pct", "stall")
        )
    if rows["basis"][0] != "device":
        raise AnalysisError("the trace contains no kernels, which --ncu is about", where=describe_rank(trace))
    groups = calls.join(rows.select("row", *_GROUP, group="row").drop("row"), on=_GROUP, nulls_equal=True)
    kernels = assign_kernels(trace).join(groups.select("row", "replay", "group"), on=["row", "replay"])
    kernels = kernels.group_by("group", pl.col("name").cast(pl.String)).agg(pl.col("dur").sum())
    # A report with the names of functions alone does not distinguish the instances of a template.
    full = kernels["name"].map_elements(_normalize_kernel, pl.String)
    base = full.str.replace(r"[<(].*$", "").str.replace(r"^.*::", "")
    report_names = set(metrics["kernel"])
    names = [name if name in report_names else short for name, short in zip(full, base, strict=True)]
    matched = kernels.with_columns(kernel=pl.Series(names, dtype=pl.String)).join(metrics, on="kernel")
    if matched.is_empty():
        raise AnalysisError(
            "no kernel of the slow operators is in the report of ncu",
            where=describe_rank(trace),
            remedy=f"the report has {metrics['kernel'].sort()[0][:80]}; the trace {kernels['name'].sort()[0][:80]}",
        )
    weighted = (pl.col("value") * pl.col("dur")).sum() / pl.col("dur").sum()
    values = matched.group_by("group", "metric").agg(weighted.alias("value"))
    wide = {
        column: dict(values.filter(metric=column).select("group", "value").iter_rows()) for column in _METRICS
    }
    stalls = values.filter(pl.col("metric").str.starts_with("stall ")).with_columns(
        share=100 * pl.col("value") / pl.col("value").sum().over("group")
    )
    texts = (
        stalls.sort("share", "metric", descending=[True, False])
        .group_by("group", maintain_order=True)
        .agg(
            pl.format(
                "{} ({} %)",
                pl.col("metric").str.strip_prefix("stall "),
                pl.col("share").round(0).cast(pl.Int64),
            ).first()
        )
    )
    wide["stall"] = dict(texts.iter_rows())
    return rows.with_columns(
        pl.Series(column, [by_group.get(row) for row in rows["row"]], dtype=COLUMNS[column])
        for column, by_group in wide.items()
    )
