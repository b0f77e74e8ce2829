"""etloom info: shows the contents of a folder or file of traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.cli.command import command
from etloom.cli.error_handling import make_printable
from etloom.cli.output import (
    Format,
    MetricsFormat,
    OutFile,
    build_table,
    choose_format,
    format_metrics,
    render_text,
    split_format,
    write_table,
    write_text,
)
from etloom.cli.run_arguments import RunOptions, RunPath, check_readable, open_job

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job


@command()
def info(*, path: RunPath, format: MetricsFormat = None, out: OutFile = None, run: RunOptions) -> None:
    """Show what traces contain: formats, ranks, devices, steps, row counts, linked share, lost data.

    --format json prints everything; csv and parquet give the table with one row per rank; prometheus and otlp give
    metrics.

    Examples:

    \b
      etloom info run/
      etloom info kineto_trace_0.json.gz --format json
      etloom info run/ --strict                   # exit 1 if anything was lost
      etloom info run/ --format prometheus > run.prom
    """
    table_format, metric_format = split_format(format)
    selected = choose_format(table_format, out)
    job = open_job(path, run, lazy=True, warn=False)  # sets the threads of polars, so its imports come later
    import etloom
    from etloom.analyses.run_info import describe_ranks

    facts = {**etloom.info(job), "path": str(path)}
    if metric_format is not None:
        from etloom.reports.monitoring import measure_run

        write_text(format_metrics(measure_run(facts), path, metric_format), out)
    elif selected is Format.json:
        write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", out)
    elif selected in (Format.csv, Format.parquet):
        write_table(describe_ranks(job), selected, out)
    else:
        write_text(_format_facts(job, facts, out), out)
    check_readable(job, path, may_be_empty=True)


def _format_facts(job: Job, facts: dict[str, Any], out: Path | None) -> str:
    """Format the facts about a run as text: a list of properties, a table of ranks, and the data-quality rows."""
    import polars as pl
    from rich.text import Text

    from etloom.analyses.run_info import get_rank_schema
    from etloom.core.text import count_noun
    from etloom.reports import rank_spread

    ranks = pl.DataFrame(facts["by_rank"], schema=get_rank_schema()).drop("start_ns", "end_ns")
    ranks = _drop_empty_columns(ranks)
    stats = job.stats.sort(pl.col("severity") == "info", maintain_order=True)
    has_many_ranks = len(job) > rank_spread.MAX_LISTED_RANKS
    if has_many_ranks:
        ranks, stats = rank_spread.summarize_rank_spread(ranks), rank_spread.group_stats_by_name(stats)
    else:
        ranks = rank_spread.group_equal_ranks(ranks)
        stats = rank_spread.group_equal_ranks(stats, ignored="example")
    parts: list[Any] = [
        Text(make_printable(facts["path"]), style="bold"),
        _build_property_list(job, facts),
        Text(),
        build_table(ranks),
    ]
    is_empty = not facts["tables"].keys() - {"stats"}
    if is_empty:
        parts.append(Text("\nno events"))
    if has_many_ranks:
        parts.append(Text("one row per rank: --format csv; everything: --format json"))
    if stats.height:
        parts += [Text(), build_table(stats)]
    elif not is_empty:
        parts.append(Text(f"\nno data was lost in {count_noun(len(job), 'rank')}"))
    return render_text(*parts, out=out)


def _build_property_list(job: Job, facts: dict[str, Any]) -> Any:
    """Build a rich table of two columns: name and value of each property that the run has."""
    from rich.table import Table
    from rich.text import Text

    from etloom.core.text import format_duration

    versions = facts["schema_versions"]
    properties = {
        "ranks": _describe_ranks(job, facts["world_size"]),
        "formats": ", ".join(
            f"{name} {' '.join(versions.get(name, []))}".strip() for name in facts["formats"]
        ),
        "devices": ", ".join(f"{number} x {name}" for name, number in facts["devices"].items()),
        "hosts": _join_first(facts["hosts"]),
        "time": format_duration(facts["span_ns"]) if facts["span_ns"] is not None else "",
        "steps": _describe_steps(job, facts),
        "ring": _describe_rings(facts),
        "tables": ", ".join(f"{name} {rows:,}" for name, rows in facts["tables"].items()),
        "categories": ", ".join(f"{name} {rows:,}" for name, rows in facts["categories"].items()),
    }
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in properties.items():
        if value:
            grid.add_row(name, Text(make_printable(value)))
    return grid


def _describe_steps(job: Job, facts: dict[str, Any]) -> str:
    from etloom.core.steps import find_step_before
    from etloom.core.text import format_duration, format_ranges

    if not facts["steps"]:
        return "none annotated"
    count = len(facts["steps"])
    numbers = f"{count:,} (number{'s' * (count != 1)} {format_ranges(facts['steps'])})"
    if facts["mean_step_ns"] is None:
        return f"{numbers}, without times"
    mean = "mean " * (count != 1 or len(facts["ranks"]) > 1)
    text = f"{numbers}, {mean}duration of the annotation {format_duration(facts['mean_step_ns'])}"
    before = find_step_before(job)
    return text if before is None else f"{text}, {format_duration(before.step_ns)} before the recording"


def _describe_rings(facts: dict[str, Any]) -> str:
    """Describe the steps in the ring buffer of the rank whose buffer holds the fewest whole steps."""
    from etloom.core.text import count_noun, format_duration, format_ranges

    if not facts["rings"]:
        return ""
    smallest = min(facts["rings"], key=lambda ring: len(ring["whole_steps"]))
    ends = {row["rank"]: row["end_ns"] for row in facts["by_rank"]}
    steps = smallest["whole_steps"]
    numbers = f" ({format_ranges(steps)})" if steps else ""
    end = ends[smallest["rank"]]  # null without an event
    span = format_duration(0 if end is None else end - smallest["whole_since_ns"])
    overwritten = format_duration(smallest["overwritten_ns"])
    owner = f" (rank {smallest['rank']}, the smallest)" if len(facts["by_rank"]) > 1 else ""
    return (
        f"holds {count_noun(len(steps), 'whole step')}{numbers} of the last {span}{owner}; overwritten: "
        f"{count_noun(smallest['overwritten_operators'], 'operator')} of the {overwritten} before"
    )


def _drop_empty_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Drop columns that are null, or 0, in every row."""
    filled = [column for column in frame if column.null_count() < frame.height]
    return frame.select(
        column
        for column in filled
        if column.name in ("rank", "lost")
        or not column.dtype.is_integer()
        or (column.fill_null(0) != 0).any()
    )


def _describe_ranks(job: Job, world_size: int | None) -> str:
    """Return the number of ranks in the run and their numbers, such as `1 of 2 (rank 0)` or `64 of 64 (ranks 0-63)`."""
    from etloom.core.text import format_ranges

    is_stated = job.stored is not None or any(trace.rank is not None for trace in job.values())
    note = "" if is_stated else ", not stated in any file"
    total = f" of {world_size:,}" if world_size else ""
    return f"{len(job):,}{total} (rank{'s' * (len(job) != 1)} {format_ranges(job)}{note})"


def _join_first(names: Sequence[str]) -> str:
    """Join the first eight names with commas; "..." stands for further names."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
