"""etloom info: what there is in a folder or file of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.cli._described import by_rank, describe, schema_of_ranks
from etloom.cli._guard import guarded, printable
from etloom.cli._input import CacheOption, JobsOption, PathArgument, RankPatternOption, StrictOption, open_job
from etloom.cli._output import (
    Format,
    FormatOption,
    OutOption,
    as_table,
    chosen_format,
    emit,
    render,
    write_text,
)

if TYPE_CHECKING:
    import polars as pl

    from etloom.trace import Job


@guarded()
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
    chosen = chosen_format(format, out)
    job = open_job(path, rank_pattern, strict, jobs, cache, lazy=True, tell=False)
    if chosen is Format.json:
        write_text(json.dumps(describe(job, str(path)), indent=1, ensure_ascii=False) + "\n", out)
    elif chosen in (Format.csv, Format.parquet):
        emit(by_rank(job), chosen, out)
    else:
        _show(job, describe(job, str(path)), out)


def _of_rings(about: dict[str, Any]) -> str:
    """Of the rank whose ring holds least: what is there of all of them."""
    from etloom.collector.words import runs
    from etloom.reports.text import count, duration

    if not about["rings"]:
        return ""
    least = min(about["rings"], key=lambda ring: len(ring["whole_steps"]))
    ends = {row["rank"]: row["end_ns"] for row in about["by_rank"]}
    steps = least["whole_steps"]
    named = f" ({runs(steps)})" if steps else ""
    end = ends[least["rank"]]  # null without an event
    held = duration(0 if end is None else end - least["whole_since_ns"])
    of = f" of rank {least['rank']}, which holds least" if len(about["by_rank"]) > 1 else ""
    return (
        f"holds {count(len(steps), 'whole step')}{named} of the last {held}{of}; overwritten: "
        f"{count(least['overwritten_operators'], 'operator')} of the {duration(least['overwritten_ns'])} before"
    )


def _show(job: Job, about: dict[str, Any], out: Path | None) -> None:
    import polars as pl
    from rich.table import Table
    from rich.text import Text

    from etloom.ranks import ranges
    from etloom.reports.many import MANY, by_name, spread
    from etloom.reports.text import count, duration

    facts = {
        "ranks": _counted_ranks(job, about["world_size"]),
        "formats": ", ".join(
            f"{format} {' '.join(about['schema_versions'].get(format, []))}".strip()
            for format in about["formats"]
        ),
        "devices": ", ".join(f"{number} x {name}" for name, number in about["devices"].items()),
        "hosts": _some(about["hosts"]),
        "time": duration(about["span_ns"]) if about["span_ns"] is not None else "",
        "steps": f"{ranges(about['steps'])}, {duration(about['mean_step_ns'])} in the mean"
        if about["mean_step_ns"] is not None
        else f"{ranges(about['steps'])}, without times"
        if about["steps"]
        else "none marked",
        "ring": _of_rings(about),
        "tables": ", ".join(f"{name} {rows:,}" for name, rows in about["tables"].items()),
        "categories": ", ".join(f"{name} {rows:,}" for name, rows in about["categories"].items()),
    }
    head = Table(box=None, pad_edge=False, show_header=False)
    head.add_column(style="bold")
    head.add_column(overflow="fold")
    for key, value in facts.items():
        if value:
            head.add_row(key, Text(printable(value)))
    ranks = _known(pl.DataFrame(about["by_rank"], schema=schema_of_ranks()).drop("start_ns", "end_ns"))
    stats = job.stats.sort(pl.col("severity") == "info", maintain_order=True)
    if len(job) > MANY:
        ranks, stats = spread(ranks), by_name(stats)
    parts: list[Any] = [Text(printable(about["path"]), style="bold"), head, Text(), as_table(ranks)]
    empty = not about["tables"].keys() - {"stats"}
    if empty:
        parts.append(Text("\nholds no events"))
    if len(job) > MANY:
        parts.append(Text("the row of each rank: --format csv; all of it: --format json"))
    if stats.height:
        parts += [Text(), as_table(stats)]
    elif not empty:
        parts.append(Text(f"\nnothing was lost in {count(len(job), 'rank')}"))
    write_text(render(*parts, out=out), out)


def _known(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame without columns that say nothing: absent, or 0, in every row."""
    told = [column for column in frame if column.null_count() < frame.height]
    return frame.select(
        column
        for column in told
        if column.name in ("rank", "lost")
        or not column.dtype.is_integer()
        or (column.fill_null(0) != 0).any()
    )


def _counted_ranks(job: Job, world: int | None) -> str:
    """How many ranks and which: 1 of 2 (rank 0); 64 of 64 (ranks 0-63)."""
    from etloom.ranks import ranges

    said = "" if any(trace.rank is not None for trace in job.values()) else ", which no file says"
    of = f" of {world:,}" if world else ""
    return f"{len(job):,}{of} (rank{'s' * (len(job) != 1)} {ranges(job)}{said})"


def _some(names: list[str]) -> str:
    """Up to eight of them."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
