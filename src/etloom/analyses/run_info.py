"""Facts of a run for `etloom.info`, under stable keys, and a table with one row per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from etloom.core.trace import Job, Trace

SCHEMA = 1
"""Version of the keys of `describe_run`: it changes when a key is removed or gets another meaning."""
_RING = ("overwritten_operators", "overwritten_ns", "whole_since_ns")


def describe_run(job: Job) -> dict[str, Any]:
    """Return the facts of `etloom.info` under stable keys; times in ns, unknown facts are None."""
    import polars as pl

    from etloom.core.categories import count_events
    from etloom.core.schema import TABLES

    traces = list(job.values())
    ranks = describe_ranks(job)
    first, last = ranks["start_ns"].min(), ranks["end_ns"].max()
    has_one_clock = first is not None and len({trace.meta.get("clock") for trace in traces}) == 1
    return {
        "schema": SCHEMA,
        "path": job.meta.get("path"),
        "ranks": job.ranks,
        "world_size": _agreed_value(trace.meta.get("world_size") for trace in traces),
        "formats": sorted({name for trace in traces for name in trace.meta.get("formats", ())}),
        "schema_versions": _list_versions(traces),
        "devices": dict(Counter(device for trace in traces for device in trace.compute_once(list_devices))),
        "hosts": sorted({str(trace.meta["host"]) for trace in traces if trace.meta.get("host")}),
        "clock": _agreed_value(trace.meta.get("clock") for trace in traces),
        "start_ns": first if has_one_clock else None,
        "span_ns": last - first if has_one_clock else None,  # type: ignore[operator]
        "steps": sorted(
            {step for trace in traces for step in trace.compute_once(find_annotated_steps)["step"]}
        ),
        "mean_step_ns": ranks["mean_step_ns"].mean(),
        "rings": _list_rings(job),
        "tables": {name: count for name in TABLES if (count := sum(trace.rows(name) for trace in traces))},
        "categories": _sum_categories(trace.compute_once(count_events) for trace in traces),
        "by_rank": ranks.to_dicts(),
        "stats": job.stats.with_columns(pl.col("rank").cast(pl.Int64)).to_dicts(),
    }


_RANK: dict[str, Any] = {
    "rank": int, "events": int, "nodes": int, "device_events": int, "start_ns": (int, NoneType),
    "end_ns": (int, NoneType), "steps": int, "mean_step_ns": (float, NoneType), "linked_by": (str, NoneType),
    "linked_pct": (float, NoneType), "launched_pct": (float, NoneType), "lost": int,
}  # fmt: skip
_STAT: dict[str, Any] = {
    "rank": (int, NoneType), "name": str, "severity": str, "count": (int, NoneType), "example": (str, NoneType)
}  # fmt: skip
_FACTS: dict[str, Any] = {
    "schema": int, "path": (str, NoneType), "ranks": [int], "world_size": (int, NoneType), "formats": [str],
    "schema_versions": {str: [str]}, "devices": {str: int}, "hosts": [str], "clock": (str, NoneType),
    "start_ns": (int, NoneType), "span_ns": (int, NoneType), "steps": [int], "mean_step_ns": (float, NoneType),
    "rings": [dict], "tables": {str: int}, "categories": {str: int}, "by_rank": [_RANK], "stats": [_STAT],
}  # fmt: skip
"""Types of the facts of a run: of items in brackets, of one of several in parentheses."""


def find_stored_facts(job: Job) -> dict[str, Any] | None:
    """Return the facts stored with a run; None if there are none, or if their keys or types are unexpected."""
    facts = job.stored and job.stored.facts()
    if not facts or not _has_form(facts, _FACTS):
        return None
    return facts if all(_is_ring(ring) and type(ring.get("rank")) is int for ring in facts["rings"]) else None


def _has_form(value: Any, form: Any) -> bool:
    """Return whether a JSON value has the types of a form such as `_FACTS`."""
    if isinstance(form, tuple):
        return any(_has_form(value, item) for item in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(item, form[0]) for item in value)
    if isinstance(form, dict) and str in form:
        return isinstance(value, dict) and all(_has_form(item, form[str]) for item in value.values())
    if isinstance(form, dict):
        same_keys = isinstance(value, dict) and value.keys() == form.keys()
        return same_keys and all(_has_form(value[key], item) for key, item in form.items())
    return type(value) is form


def describe_ranks(job: Job) -> pl.DataFrame:
    """Return a table with one row per rank, columns of `get_rank_schema`."""
    import polars as pl

    from etloom.core.categories import DEVICE_CATEGORIES, count_events

    is_on_device = pl.col("cat").is_in(list(DEVICE_CATEGORIES))
    rows = []
    for rank, trace in job.items():
        link, steps = trace.meta.get("link", {}), trace.compute_once(find_annotated_steps)["dur"]
        counts = trace.compute_once(count_events)
        starts, ends = counts["work_start"].min(), counts["work_end"].max()
        if trace.is_snapshot:  # its events are annotations of a part of it
            starts, ends = trace.allocator["ts"].min(), trace.allocator["ts"].max()
        rows.append(
            {
                "rank": rank,
                "events": trace.rows("events"),
                "nodes": trace.rows("nodes"),
                "device_events": counts.filter(is_on_device)["count"].sum(),
                "start_ns": starts,
                "end_ns": ends,
                "steps": steps.len(),
                "mean_step_ns": steps.mean(),
                "linked_by": link.get("how"),
                "linked_pct": None if (coverage := link.get("coverage")) is None else 100 * coverage,
                "launched_pct": _find_launched_pct(link),
                "lost": trace.stats.filter(pl.col("severity") != "info")["count"].sum(),
            }
        )
    return pl.DataFrame(rows, schema=get_rank_schema())


def _find_launched_pct(link: Mapping[str, Any]) -> float | None:
    launched, device_work = link.get("launched"), link.get("device_work")
    return None if launched is None or not device_work else 100 * launched / device_work


def _list_rings(job: Job) -> list[dict[str, Any]]:
    """List the ring buffers of the collector, one per rank: what they overwrote, and since when they are complete."""
    rings = []
    for rank, trace in job.items():
        # The header of other formats is defined by their writers.
        header: Any = trace.meta.get("header") if "observer" in trace.meta.get("formats", ()) else None
        for name in ("observer", "overwritten"):
            header = header.get(name) if isinstance(header, dict) else None
        if isinstance(header, dict) and _is_ring(header):
            rings.append({**header, "rank": rank})
    return rings


def _is_ring(header: dict[str, Any]) -> bool:
    """Return whether the header entry describes a ring buffer; headers of Kineto traces or saved tables may be
    anything."""
    steps = header.get("whole_steps")
    has_steps = isinstance(steps, list) and all(type(step) is int for step in steps)
    return has_steps and all(type(header.get(name)) is int for name in _RING)


def get_rank_schema() -> dict[str, Any]:
    """Return the schema of the table of `describe_ranks`."""
    import polars as pl

    numbers = dict.fromkeys(
        ("rank", "events", "nodes", "device_events", "start_ns", "end_ns", "steps"), pl.Int64
    )
    links = {"linked_by": pl.String, "linked_pct": pl.Float64, "launched_pct": pl.Float64}
    return {**numbers, "mean_step_ns": pl.Float64, **links, "lost": pl.Int64}


def _sum_categories(counts: Iterable[pl.DataFrame]) -> dict[str, int]:
    """Return the number of events of each category, the most frequent first, from the counts of all ranks."""
    sums: Counter[str] = Counter()
    for rank_counts in counts:
        for name, count in rank_counts.select("cat", "count").iter_rows():
            sums["(none)" if name is None else name] += count
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def find_annotated_steps(trace: Trace) -> pl.DataFrame:
    """Return step number, start and duration (ns) of the annotated steps, also if the trace is not linked.

    An execution trace alone has no times, so these are null.
    """
    import polars as pl

    from etloom.core import categories
    from etloom.core.steps import parse_step
    from etloom.linker import is_linked
    from etloom.timeline.activity import find_step_nodes, find_steps

    if not trace.rows("events"):
        dur = pl.lit(None, pl.Int64)
        return (
            find_step_nodes(trace.nodes).select("step", ts=dur, dur=dur).unique("step", maintain_order=True)
        )
    annotations = trace.scan("events").filter(pl.col("cat").is_in(list(categories.ANNOTATION_CATEGORIES)))
    annotated = (
        annotations.select(parse_step().alias("step"), "ts", "dur")
        .filter(pl.col("step").is_not_null())
        .collect(engine=trace.engine)
        .unique("step", keep="first", maintain_order=True)
    )
    if annotated.height or not is_linked(trace):
        return annotated
    return find_steps(trace).select("step", ts="start", dur=pl.col("end") - pl.col("start"))


def list_devices(trace: Trace) -> list[str]:
    """List the names of the devices with activity; the CPU if there is no GPU activity; empty if unknown.

    For an execution trace alone these are the devices of its tensors. Flight Recorder dumps list calls, not devices.
    """
    import polars as pl

    from etloom.core import categories
    from etloom.core.stats import RECORDER_STATEMENTS
    from etloom.linker.merging import GPU_CUT_OFF, list_device_names

    if list(trace.meta.get("formats", ())) == ["flight_recorder"]:
        return []
    if trace.is_snapshot:
        return [f"CUDA device {number}" for number in trace.memory["device"].drop_nulls().unique().sort()]
    if not trace.rows("events"):
        devices = {str(name) for name in trace.tensors["device"].unique() if name}
        return sorted(devices - {"cpu"}) or sorted(devices)
    counts = trace.compute_once(categories.count_events)
    used = counts.filter(pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES)))["device"].unique()
    if not used.len():
        called = counts["cat"].is_in(list(categories.RUNTIME_CATEGORIES)).any()
        if trace.table("stats")["name"].is_in([GPU_CUT_OFF]).any():
            return [f"{' or '.join(list_device_names(trace))} (the file ends before its work)"]
        stated = trace.stats.filter(pl.col("name").is_in(list(RECORDER_STATEMENTS)))["example"].drop_nulls()
        parts = ["calls to a device, but none of its work was recorded"] if called else []
        parts += [f"the recorder states: {text}" for text in stated.head(1)]
        return [f"cpu ({'; '.join(parts)})" if parts else "cpu"]
    properties = [entry for entry in trace.meta.get("device_properties", ()) if isinstance(entry, dict)]
    names = {entry.get("id"): entry.get("name") for entry in properties}
    return [str(names.get(device) or f"device {device}") for device in used.drop_nulls().sort()]


def _list_versions(traces: Iterable[Trace]) -> dict[str, list[str]]:
    """Return, by trace format, the schema versions that the files of that format contain."""
    versions_by_format: dict[str, set[str]] = {}
    for trace in traces:
        for format in trace.meta.get("formats", ()):
            version = trace.meta.get("kineto_schema_version" if format == "kineto" else "schema_version")
            if version is not None:
                versions_by_format.setdefault(format, set()).add(str(version))
    return {format: sorted(versions) for format, versions in sorted(versions_by_format.items())}


def _agreed_value(values: Iterable[Any]) -> Any:
    """Return the value that all values except None have in common; None if they differ or all are None."""
    distinct = {value for value in values if value is not None}
    return distinct.pop() if len(distinct) == 1 else None
