"""etloom info: what there is in a folder or file of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.api.run_info import describe_ranks, describe_run, get_rank_schema
from etloom.cli.error_handling import handle_errors, make_printable
from etloom.cli.output import (
    Format,
    FormatOption,
    OutOption,
    build_table,
    choose_format,
    render_text,
    write_table,
    write_text,
)
from etloom.cli.run_arguments import (
    CacheOption,
    JobsOption,
    PathArgument,
    RankPatternOption,
    StrictOption,
    open_job,
)

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job


@handle_errors()
def info(
    path: PathArgument,
    format: FormatOption = None,
    out: OutOption = None,
    rank_pattern: RankPatternOption = None,
    strict: StrictOption = False,
    jobs: JobsOption = None,
    cache: CacheOption = True,
) -> None:
    """Say what traces there are: formats, ranks, device, steps, counts, how far they link, what was lost.

    --format json gives all of it; csv and parquet give the table with a row a rank.

    Examples:

    \b
      etloom info run/
      etloom info kineto_trace_0.json.gz --format json
      etloom info run/ --strict                   # exit 1 if anything was lost
    """
    chosen = choose_format(format, out)
    job = open_job(path, rank_pattern, strict, jobs, cache, lazy=True, tell=False)
    if chosen is Format.json:
        write_text(json.dumps(describe_run(job, str(path)), indent=1, ensure_ascii=False) + "\n", out)
    elif chosen in (Format.csv, Format.parquet):
        write_table(describe_ranks(job), chosen, out)
    else:
        _show(job, describe_run(job, str(path)), out)


def _describe_rings(about: dict[str, Any]) -> str:
    """Of the rank whose ring holds least: what is there of all of them."""
    from etloom.collector.session.messages import format_ranges
    from etloom.reports.formatting import count_noun, format_duration

    if not about["rings"]:
        return ""
    least = min(about["rings"], key=lambda ring: len(ring["whole_steps"]))
    ends = {row["rank"]: row["end_ns"] for row in about["by_rank"]}
    steps = least["whole_steps"]
    named = f" ({format_ranges(steps)})" if steps else ""
    end = ends[least["rank"]]  # null without an event
    held = format_duration(0 if end is None else end - least["whole_since_ns"])
    of = f" of rank {least['rank']}, which holds least" if len(about["by_rank"]) > 1 else ""
    return (
        f"holds {count_noun(len(steps), 'whole step')}{named} of the last {held}{of}; overwritten: "
        f"{count_noun(least['overwritten_operators'], 'operator')} of the {format_duration(least['overwritten_ns'])} before"
    )


def _show(job: Job, about: dict[str, Any], out: Path | None) -> None:
    import polars as pl
    from rich.table import Table
    from rich.text import Text

    from etloom.core.text import format_ranges
    from etloom.reports.formatting import count_noun, format_duration
    from etloom.reports.rank_spread import MAX_LISTED_RANKS, group_stats_by_name, summarize_rank_spread

    facts = {
        "ranks": _describe_ranks(job, about["world_size"]),
        "formats": ", ".join(
            f"{format} {' '.join(about['schema_versions'].get(format, []))}".strip()
            for format in about["formats"]
        ),
        "devices": ", ".join(f"{number} x {name}" for name, number in about["devices"].items()),
        "hosts": _join_first(about["hosts"]),
        "time": format_duration(about["span_ns"]) if about["span_ns"] is not None else "",
        "steps": f"{format_ranges(about['steps'])}, {format_duration(about['mean_step_ns'])} in the mean"
        if about["mean_step_ns"] is not None
        else f"{format_ranges(about['steps'])}, without times"
        if about["steps"]
        else "none marked",
        "ring": _describe_rings(about),
        "tables": ", ".join(f"{name} {rows:,}" for name, rows in about["tables"].items()),
        "categories": ", ".join(f"{name} {rows:,}" for name, rows in about["categories"].items()),
    }
    head = Table(box=None, pad_edge=False, show_header=False)
    head.add_column(style="bold")
    head.add_column(overflow="fold")
    for key, value in facts.items():
        if value:
            head.add_row(key, Text(make_printable(value)))
    ranks = _drop_empty_columns(
        pl.DataFrame(about["by_rank"], schema=get_rank_schema()).drop("start_ns", "end_ns")
    )
    stats = job.stats.sort(pl.col("severity") == "info", maintain_order=True)
    if len(job) > MAX_LISTED_RANKS:
        ranks, stats = summarize_rank_spread(ranks), group_stats_by_name(stats)
    parts: list[Any] = [Text(make_printable(about["path"]), style="bold"), head, Text(), build_table(ranks)]
    empty = not about["tables"].keys() - {"stats"}
    if empty:
        parts.append(Text("\nholds no events"))
    if len(job) > MAX_LISTED_RANKS:
        parts.append(Text("the row of each rank: --format csv; all of it: --format json"))
    if stats.height:
        parts += [Text(), build_table(stats)]
    elif not empty:
        parts.append(Text(f"\nnothing was lost in {count_noun(len(job), 'rank')}"))
    write_text(render_text(*parts, out=out), out)


def _drop_empty_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame without columns that say nothing: absent, or 0, in every row."""
    told = [column for column in frame if column.null_count() < frame.height]
    return frame.select(
        column
        for column in told
        if column.name in ("rank", "lost")
        or not column.dtype.is_integer()
        or (column.fill_null(0) != 0).any()
    )


def _describe_ranks(job: Job, world: int | None) -> str:
    """How many ranks and which: 1 of 2 (rank 0); 64 of 64 (ranks 0-63)."""
    from etloom.core.text import format_ranges

    said = "" if any(trace.rank is not None for trace in job.values()) else ", which no file says"
    of = f" of {world:,}" if world else ""
    return f"{len(job):,}{of} (rank{'s' * (len(job) != 1)} {format_ranges(job)}{said})"


def _join_first(names: list[str]) -> str:
    """Up to eight of them."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
