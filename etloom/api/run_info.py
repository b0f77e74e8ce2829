"""What `etloom info` knows of a run: the facts under stable keys, and a row a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job, Trace

_RING = ("overwritten_operators", "overwritten_ns", "whole_since_ns")


def describe_run(job: Job) -> dict[str, Any]:
    """Return the facts of `etloom.info` under stable keys; times in ns, unknown facts are None."""
    import polars as pl

    from etloom.core.schema import TABLES

    traces = list(job.values())
    ranks = describe_ranks(job)
    first, last = ranks["start_ns"].min(), ranks["end_ns"].max()
    whole = first is not None and len({trace.meta.get("clock") for trace in traces}) == 1
    return {
        "path": job.meta.get("path"),
        "ranks": job.ranks,
        "world_size": _agreed_value(trace.meta.get("world_size") for trace in traces),
        "formats": sorted({name for trace in traces for name in trace.meta.get("formats", ())}),
        "schema_versions": _list_versions(traces),
        "devices": dict(Counter(device for trace in traces for device in _list_devices(trace))),
        "hosts": sorted({str(trace.meta["host"]) for trace in traces if trace.meta.get("host")}),
        "clock": _agreed_value(trace.meta.get("clock") for trace in traces),
        "start_ns": first if whole else None,
        "span_ns": last - first if whole else None,  # type: ignore[operator]
        "steps": sorted({step for trace in traces for step in trace.compute_once(_find_steps)["step"]}),
        "mean_step_ns": ranks["mean_step_ns"].mean(),
        "rings": _list_rings(job),
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


def describe_ranks(job: Job) -> pl.DataFrame:
    """A row a rank."""
    import polars as pl

    from etloom.core import categories

    rows = []
    for rank, trace in job.items():
        link, steps = trace.meta.get("link", {}), trace.compute_once(_find_steps)["dur"]
        device = pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES)).sum()
        first, last, on_device = _compute(trace, "events", *categories.recorded_extent(), device)
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
                "linked_pct": None if (coverage := link.get("coverage")) is None else 100 * coverage,
                "launched_pct": 100 * link["launched"] / link["device_work"]
                if link.get("device_work")
                else None,
                "lost": trace.stats.filter(pl.col("severity") != "info")["count"].sum(),
            }
        )
    return pl.DataFrame(rows, schema=get_rank_schema())


def _list_rings(job: Job) -> list[dict[str, Any]]:
    """What the rings of the collector overwrote, and since when they hold everything, a rank each."""
    found = []
    for rank, trace in job.items():
        # The header of any other trace is its writer's.
        told: Any = trace.meta.get("header") if "observer" in trace.meta.get("formats", ()) else None
        for name in ("observer", "overwritten"):
            told = told.get(name) if isinstance(told, dict) else None
        if isinstance(told, dict) and _is_ring(told):
            found.append({**told, "rank": rank})
    return found


def _is_ring(told: dict[str, Any]) -> bool:
    """Also of a header that a Kineto trace of the rank, or a file of tables, has brought along."""
    steps = told.get("whole_steps")
    whole = isinstance(steps, list) and all(type(step) is int for step in steps)
    return whole and all(type(told.get(name)) is int for name in _RING)


def get_rank_schema() -> dict[str, Any]:
    """Of the table with a row a rank."""
    import polars as pl

    numbers = dict.fromkeys(
        ("rank", "events", "nodes", "device_events", "start_ns", "end_ns", "steps"), pl.Int64
    )
    links = {"linked_by": pl.String, "linked_pct": pl.Float64, "launched_pct": pl.Float64}
    return {**numbers, "mean_step_ns": pl.Float64, **links, "lost": pl.Int64}


def _compute(trace: Trace, table: str, *what: pl.Expr) -> tuple[Any, ...]:
    """One row of figures of a table, without reading more of it than they need."""
    columns = [expression.alias(str(number)) for number, expression in enumerate(what)]
    return trace.scan(table).select(columns).collect(engine=trace.engine).row(0)


def _find_steps(trace: Trace) -> pl.DataFrame:
    """Number and duration in ns of the steps that annotations mark, also where the trace is not linked; of those that
    the nodes of an execution trace alone mark, no duration."""
    import polars as pl

    from etloom.core import categories
    from etloom.core.steps import parse_step
    from etloom.timeline.activity import find_step_nodes as node_marks

    if not trace.rows("events"):
        dur = pl.lit(None, pl.Int64)
        return node_marks(trace.nodes).select("step", ts=dur, dur=dur).unique("step", maintain_order=True)
    marks = trace.scan("events").filter(pl.col("cat").is_in(list(categories.ANNOTATION_CATEGORIES)))
    return (
        marks.select(parse_step().alias("step"), "ts", "dur")
        .filter(pl.col("step").is_not_null())
        .collect(engine=trace.engine)
        .unique("step", keep="first", maintain_order=True)
    )


def _list_devices(trace: Trace) -> list[str]:
    """The devices that did something; the CPU where the trace holds no device work.

    An execution trace alone knows them as where its tensors were.
    """
    import polars as pl

    from etloom.core import categories
    from etloom.linker.source_checks import GPU_CUT_OFF, list_device_names

    if not trace.rows("events"):
        where = {str(name) for name in trace.tensors["device"].unique() if name}
        return sorted(where - {"cpu"}) or sorted(where)
    on_device = trace.scan("events").filter(pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES)))
    used = on_device.select(pl.col("device").unique()).collect(engine=trace.engine)["device"]
    if not used.len():
        calls = trace.scan("events").filter(pl.col("cat").is_in(list(categories.RUNTIME_CATEGORIES))).head(1)
        called = calls.select(pl.len()).collect(engine=trace.engine).item()
        if trace.table("stats")["name"].is_in([GPU_CUT_OFF]).any():
            return [f"{' or '.join(list_device_names(trace))} (the file ends before its work)"]
        return ["cpu (calls to a device, but none of its work was recorded)" if called else "cpu"]
    properties = [one for one in trace.meta.get("device_properties", ()) if isinstance(one, dict)]
    names = {one.get("id"): one.get("name") for one in properties}
    return [str(names.get(device) or f"device {device}") for device in used.drop_nulls().sort()]


def _list_versions(traces: Iterable[Trace]) -> dict[str, list[str]]:
    """Format -> the schema versions that the files of it state."""
    found: dict[str, set[str]] = {}
    for trace in traces:
        for format in trace.meta.get("formats", ()):
            version = trace.meta.get("kineto_schema_version" if format == "kineto" else "schema_version")
            if version is not None:
                found.setdefault(format, set()).add(str(version))
    return {format: sorted(versions) for format, versions in sorted(found.items())}


def _agreed_value(values: Iterable[Any]) -> Any:
    """What all agree on; None where they do not, or do not know."""
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else None
