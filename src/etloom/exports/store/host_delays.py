"""Find hosts, ranks and racks that delay others, over all runs of a store.

A host delays a communication if one of its ranks arrives last. The delay lasts from the last arrival of a rank of
another host to the last arrival of its own ranks, and at most as long as a rank of another host waits. In every run
some host is last at some communication, so a host is slow in a run only if one of its delays exceeds the uncertainty of
the clocks, and the sum of its delays is at least min_pct of the run and OUTLIER times the median sum of the other
hosts. Racks are compared likewise, and each rank with the ranks of its kind. Delays at the first recorded communication
of a group do not count: their cause lies before the recording.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from etloom.analyses.helpers import check_percentage
from etloom.core.errors import AnalysisError, InvalidValue, UnknownName
from etloom.formats.parquet.store_layout import SUMMARIES, list_runs, run_folder
from etloom.formats.parquet.summary_files import SummaryFiles

UNITS = ("rank", "host", "rack")
OUTLIER = 3.0
RACK_PATTERN = r"(?i)(?:^|[^a-z0-9])(rack[-_]?\d+|r\d+)(?:[^a-z0-9]|$)"
"""Finds the rack in names of hosts such as node-rack07-3 and r12-n4."""
COLUMNS = {
    "runs": pl.Int64,
    "slow_runs": pl.Int64,
    "ranks": pl.Int64,
    "late": pl.Int64,
    "late_confirmed": pl.Int64,
    "delay_ns": pl.Int64,
    "mean_pct": pl.Float64,
    "worst_pct": pl.Float64,
    "worst_run": pl.String,
}
"""Columns after that of the unit.

- runs: number of runs that contain the unit; slow_runs: number of runs in which it is slow.
- ranks: its number of ranks in the run where it has the most.
- late: number of communications that it delayed; late_confirmed: by more than the uncertainty of the clocks.
- delay_ns: sum of its delays over the runs.
- mean_pct, worst_pct: its delay as a share of the time of a run (from the first communication to the end of the last),
  on average and in worst_run.
"""
_PLACES = ("group", "group_size", "source", "destination")
_ARRIVALS = ("communication", "rank", "start_ns", "duration_ns", "wait_ns")


def compare_hosts(
    store: Path,
    by: str = "host",
    *,
    last: int | None = None,
    min_pct: float = 1.0,
    rack_pattern: str = RACK_PATTERN,
) -> tuple[pl.DataFrame, list[str]]:
    """Compare how long hosts, ranks or racks delay others at communications, over the runs of a store.

    Args:
        store: the store.
        by: one of UNITS.
        last: only the last so many runs.
        min_pct: smallest delay of a slow unit, in percent of the time of the run.
        rack_pattern: regular expression over names of hosts with one group, the rack.

    Returns:
        A table with a column of the units and COLUMNS, the slowest first; and the names of runs that it leaves out,
        without matched communications of several ranks or without a known unit.

    Raises:
        UnknownName: the unit is unknown.
        InvalidValue: the pattern is not a regular expression with a group.
        AnalysisError: no run has an answer, or no rank names its host or rack.
    """
    check_percentage(min_pct, "min_pct")
    if by not in UNITS:
        raise UnknownName("unit", by, UNITS, option="by")
    _check_pattern(rack_pattern)
    names = list_runs(store)
    selected = names if last is None else names[-last:]
    tables = {name: _read_delays(run_folder(store, name), by, rack_pattern) for name in selected}
    delays = [table.with_columns(run=pl.lit(name)) for name, table in tables.items() if table is not None]
    if not delays:
        raise AnalysisError(
            "no run has ranks that can be compared", where=store, remedy="add runs of several ranks"
        )
    rows = pl.concat(delays).drop_nulls(by)
    if not rows.height:
        raise AnalysisError(
            f"no rank has a known {by}",
            where=store,
            remedy="specify --rack-pattern REGEX" if by == "rack" else "compare with --by rank",
        )
    answered = set(rows["run"].unique())
    return _summarize(rows, by, min_pct, selected), [name for name in selected if name not in answered]


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise InvalidValue(
            f"{pattern!r} is not a regular expression: {error}", option="rack_pattern"
        ) from None
    if groups != 1:
        raise InvalidValue(
            f"expected a regular expression with one group, got {pattern!r} with {groups}",
            option="rack_pattern",
        )


def _read_delays(run: Path, by: str, rack_pattern: str) -> pl.DataFrame | None:
    """Return a run's delays per host, rank or rack (columns late, late_confirmed, delay_ns, pct); None without data.

    ``by``: rank, host or rack, the unit.
    """
    folder = run / SUMMARIES
    if not (folder / "arrivals.parquet").is_file() or not (folder / "stragglers.parquet").is_file():
        return None
    files = SummaryFiles(run)
    arrivals, hosts = files.read("arrivals", _ARRIVALS), files.read("ranks", ("rank", "host"))
    if by == "rack":
        matches = [None if host is None else re.search(rack_pattern, host) for host in hosts["host"]]
        hosts = hosts.with_columns(pl.Series("rack", [match and match[1] for match in matches], pl.String))
    errors = files.read("collectives", ("clock_error_ns", *_PLACES, "start_ns")).with_row_index(
        "communication"
    )
    is_later = pl.col("start_ns") > pl.col("start_ns").min().over(_PLACES)
    errors = errors.select("communication", "clock_error_ns", is_later=is_later)
    rows = arrivals.join(hosts, on="rank").join(errors.cast({"communication": pl.Int64}), on="communication")
    span = rows.select((pl.col("start_ns") + pl.col("duration_ns")).max() - pl.col("start_ns").min()).item()
    if by == "rank" and (folder / "kinds.parquet").is_file():
        hosts = hosts.join(files.read("kinds"), on="rank", how="left", maintain_order="left")
    else:
        hosts = hosts.with_columns(kind=pl.lit(None, pl.Int64))
    delays = _measure_delays(rows.filter("is_later").drop_nulls("wait_ns"), by)
    units = hosts.group_by(by, maintain_order=True).agg(pl.len().alias("ranks"), pl.col("kind").first())
    table = units.join(delays, on=by, how="left", maintain_order="left")
    counts = ("late", "late_confirmed", "delay_ns")
    filled = table.with_columns(pl.col(counts).fill_null(0).cast(pl.Int64))
    return filled.with_columns(pct=100.0 * pl.col("delay_ns") / span)


def _measure_delays(rows: pl.DataFrame, by: str) -> pl.DataFrame:
    """Count and sum the delays of each rank, host or rack that arrives last: late, late_confirmed, delay_ns."""
    arrivals = (
        rows.group_by("communication", by, maintain_order=True)
        .agg(pl.col("start_ns", "wait_ns").max(), pl.col("clock_error_ns").first())
        .sort("communication", "start_ns", descending=[False, True], maintain_order=True)
    )
    start = pl.col("start_ns")
    behind = start.first() - start.get(1, null_on_oob=True)
    last = arrivals.group_by("communication", maintain_order=True).agg(
        pl.col(by, "clock_error_ns").first(),
        pl.min_horizontal(behind, pl.col("wait_ns").slice(1).max()).alias("delay_ns"),
    )
    delayed = last.filter(pl.col("delay_ns") > 0)
    return delayed.group_by(by).agg(
        pl.len().alias("late"),
        (pl.col("delay_ns") > pl.col("clock_error_ns")).sum().alias("late_confirmed"),
        pl.col("delay_ns").sum(),
    )


def _summarize(rows: pl.DataFrame, by: str, min_pct: float, runs: Sequence[str]) -> pl.DataFrame:
    """Summarize the delays over all runs: one row per host, rank or rack, those slow in most runs first (`COLUMNS`).

    ``rows``: the delays per run.
    """
    # The median of the others of a unit above the median; below it does not matter.
    others = pl.col("pct").sort().get(((pl.len().cast(pl.Int64) - 2) // 2).clip(0)).over("run", "kind")
    is_slow = (
        (pl.col("late_confirmed") > 0) & (pl.col("pct") >= min_pct) & (pl.col("pct") >= OUTLIER * others)
    )
    alone = pl.len().over("run", "kind") < 2
    table = (
        rows.with_columns(is_slow=is_slow & ~alone, run=pl.col("run").cast(pl.Enum(list(runs))))
        .sort("run", by)
        .group_by(by, maintain_order=True)
        .agg(
            pl.len().alias("runs"),
            pl.col("is_slow").sum().alias("slow_runs"),
            pl.col("ranks").max(),
            pl.col("late", "late_confirmed", "delay_ns").sum(),
            pl.col("pct").mean().alias("mean_pct"),
            pl.col("pct").max().alias("worst_pct"),
            pl.col("run").get(pl.col("pct").arg_max()).alias("worst_run"),
        )
    )
    ordered = table.sort("slow_runs", "delay_ns", by, descending=[True, True, False])
    return ordered.select(by, *(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()))
