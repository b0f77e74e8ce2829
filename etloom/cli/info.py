"""etloom info: what there is in a folder or file of traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    from etloom.trace import Job, Trace


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
        emit(_ranks(job), chosen, out)
    else:
        _show(job, describe(job, str(path)), out)


def describe(job: Job, path: str) -> dict[str, Any]:
    """All that `etloom info` says, under stable keys; times in ns, absent is None."""
    import polars as pl

    from etloom.schema import TABLES

    traces = list(job.values())
    ranks = _ranks(job)
    first, last = ranks["start_ns"].min(), ranks["end_ns"].max()
    whole = first is not None and len({trace.meta.get("clock") for trace in traces}) == 1
    return {
        "path": path,
        "ranks": job.ranks,
        "world_size": _one(trace.meta.get("world_size") for trace in traces),
        "formats": sorted({name for trace in traces for name in trace.meta.get("formats", ())}),
        "schema_versions": _versions(traces),
        "devices": dict(Counter(device for trace in traces for device in _devices(trace))),
        "hosts": sorted({str(trace.meta["host"]) for trace in traces if trace.meta.get("host")}),
        "clock": _one(trace.meta.get("clock") for trace in traces),
        "start_ns": first if whole else None,
        "span_ns": last - first if whole else None,  # type: ignore[operator]
        "steps": sorted({step for trace in traces for step in trace.once(_steps)["step"]}),
        "mean_step_ns": ranks["mean_step_ns"].mean(),
        "rings": _rings(job),
        "tables": {name: count for name in TABLES if (count := sum(trace.rows(name) for trace in traces))},
        "categories": dict(
            job.query("select cat, count(*) as n from events group by cat")
            .with_columns(pl.col("cat").fill_null("(none)"))
            .sort("n", "cat", descending=[True, False])
            .rows()
        ),
        "by_rank": ranks.to_dicts(),
        "stats": job.stats.with_columns(pl.col("rank").cast(pl.Int64)).to_dicts(),
    }


def _ranks(job: Job) -> pl.DataFrame:
    """A row a rank."""
    import polars as pl

    from etloom import kinds

    rows = []
    for rank, trace in job.items():
        link, steps = trace.meta.get("link", {}), trace.once(_steps)["dur"]
        device = pl.col("cat").is_in(list(kinds.DEVICE)).sum()
        first, last, on_device = _asked(trace, "events", *kinds.extent(), device)
        rows.append(
            {
                "rank": rank,
                "events": trace.rows("events"),
                "nodes": trace.rows("nodes"),
                "device_events": on_device,
                "start_ns": first,
                "end_ns": last,
                "steps": steps.len(),
                "mean_step_ns": steps.mean(),
                "linked_by": link.get("how"),
                "linked_pct": None if link.get("coverage") is None else 100 * link["coverage"],
                "launched_pct": 100 * link["launched"] / link["device_work"]
                if link.get("device_work")
                else None,
                "lost": trace.stats.filter(pl.col("severity") != "info")["count"].sum(),
            }
        )
    return pl.DataFrame(rows, schema=_schema())


def _rings(job: Job) -> list[dict[str, Any]]:
    """What the rings of the collector overwrote, and since when they hold everything, a rank each."""
    return [
        {"rank": rank, **overwritten}
        for rank, trace in job.items()
        if (overwritten := trace.meta.get("header", {}).get("observer", {}).get("overwritten"))
    ]


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
    held = duration(ends[least["rank"]] - least["whole_since_ns"])
    of = f" of rank {least['rank']}, which holds least" if len(about["by_rank"]) > 1 else ""
    return (
        f"holds {count(len(steps), 'whole step')}{named} of the last {held}{of}; overwritten: "
        f"{count(least['overwritten_operators'], 'operator')} of the {duration(least['overwritten_ns'])} before"
    )


def _schema() -> dict[str, Any]:
    """Of the table with a row a rank."""
    import polars as pl

    numbers = dict.fromkeys(
        ("rank", "events", "nodes", "device_events", "start_ns", "end_ns", "steps"), pl.Int64
    )
    links = {"linked_by": pl.String, "linked_pct": pl.Float64, "launched_pct": pl.Float64}
    return {**numbers, "mean_step_ns": pl.Float64, **links, "lost": pl.Int64}


def _asked(trace: Trace, table: str, *what: pl.Expr) -> tuple[Any, ...]:
    """One row of figures of a table, without reading more of it than they need."""
    columns = [expression.alias(str(number)) for number, expression in enumerate(what)]
    return trace.scan(table).select(columns).collect(engine=trace.engine).row(0)


def _steps(trace: Trace) -> pl.DataFrame:
    """Number and duration in ns of the steps that annotations mark, also where the trace is not linked."""
    import polars as pl

    from etloom import kinds

    marks = trace.scan("events").filter(pl.col("cat").is_in(list(kinds.ANNOTATIONS)))
    name = pl.col("name").cast(pl.String)
    return (
        marks.select(name.str.extract(kinds.STEP).cast(pl.Int64, strict=False).alias("step"), "ts", "dur")
        .filter(pl.col("step").is_not_null())
        .collect(engine=trace.engine)
        .unique("step", keep="first", maintain_order=True)
    )


def _devices(trace: Trace) -> list[str]:
    """The devices that did something; the CPU where the trace holds no device work.

    An execution trace alone knows them as where its tensors were.
    """
    import polars as pl

    from etloom import kinds
    from etloom.opening.doubts import CUT_DEVICE, device_names

    if not trace.rows("events"):
        where = {str(name) for name in trace.tensors["device"].unique() if name}
        return sorted(where - {"cpu"}) or sorted(where)
    on_device = trace.scan("events").filter(pl.col("cat").is_in(list(kinds.DEVICE)))
    used = on_device.select(pl.col("device").unique()).collect(engine=trace.engine)["device"]
    if not used.len():
        calls = trace.scan("events").filter(pl.col("cat").is_in(list(kinds.RUNTIME))).head(1)
        called = calls.select(pl.len()).collect(engine=trace.engine).item()
        if trace.table("stats")["name"].is_in([CUT_DEVICE]).any():
            return [f"{' or '.join(device_names(trace))} (the file ends before its work)"]
        return ["cpu (calls to a device, but none of its work was recorded)" if called else "cpu"]
    properties = [one for one in trace.meta.get("device_properties", ()) if isinstance(one, dict)]
    names = {one.get("id"): one.get("name") for one in properties}
    return [str(names.get(device) or f"device {device}") for device in used.drop_nulls().sort()]


def _versions(traces: Iterable[Trace]) -> dict[str, list[str]]:
    """Format -> the schema versions that the files of it state."""
    found: dict[str, set[str]] = {}
    for trace in traces:
        for format in trace.meta.get("formats", ()):
            version = trace.meta.get("kineto_schema_version" if format == "kineto" else "schema_version")
            if version is not None:
                found.setdefault(format, set()).add(str(version))
    return {format: sorted(versions) for format, versions in sorted(found.items())}


def _one(values: Iterable[Any]) -> Any:
    """What all agree on; None where they do not, or do not know."""
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else None


def _show(job: Job, about: dict[str, Any], out: Path | None) -> None:
    import polars as pl
    from rich.table import Table
    from rich.text import Text

    from etloom.reports.many import MANY, by_name, ranges, spread
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
    ranks = _known(pl.DataFrame(about["by_rank"], schema=_schema()).drop("start_ns", "end_ns"))
    stats = job.stats.sort(pl.col("severity") == "info", maintain_order=True)
    if len(job) > MANY:
        ranks, stats = spread(ranks), by_name(stats)
    parts: list[Any] = [Text(printable(about["path"]), style="bold"), head, Text(), as_table(ranks)]
    if len(job) > MANY:
        parts.append(Text("the row of each rank: --format csv; all of it: --format json"))
    parts += (
        [Text(), as_table(stats)]
        if stats.height
        else [Text(f"\nnothing was lost in {count(len(job), 'rank')}")]
    )
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
    from etloom.reports.many import ranges

    said = "" if any(trace.rank is not None for trace in job.values()) else ", which no file says"
    of = f" of {world:,}" if world else ""
    return f"{len(job):,}{of} (rank{'s' * (len(job) != 1)} {ranges(job)}{said})"


def _some(names: list[str]) -> str:
    """Up to eight of them."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
