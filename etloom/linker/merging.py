"""Merge the traces of one rank: an execution trace, a profiler trace, or one trace that holds both."""

from __future__ import annotations

from os import PathLike

import polars as pl

from etloom.core.errors import EtloomError, LinkError
from etloom.core.schema import TABLES
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace

_DERIVED_TABLES = ("links", "launches", "thread_dependencies", "sync_dependencies")
_TABLES_FROM_FILE = ("links", "launches")
"""Of these, what a file that holds nodes and events as one (ET+, Chakra) says itself."""
_CONCATENATED_META = ("files", "formats")


def merge_traces(traces: tuple[Trace, ...]) -> Trace:
    """Return one Trace with the tables of all; results of an earlier link are dropped, links stated by a file are
    kept.

    Raises:
        LinkError: There is nothing to link, or two traces hold profiler events, or two hold operators.
    """
    if not traces:
        raise LinkError("no trace to link", remedy="give an execution trace, a profiler trace, or both")
    traces = _drop_observer_times(traces)
    for name, description in (("events", "profiler traces"), ("nodes", "execution traces")):
        holders = [trace for trace in traces if trace.table(name).height]
        if len(holders) > 1:
            raise LinkError(
                f"{len(holders)} {description} of one rank cannot be linked to each other",
                where=", ".join(file for trace in holders for file in map(str, trace.meta.get("files", ()))),
                remedy="give one execution trace and one profiler trace",
            )
    stated = _TABLES_FROM_FILE if any((trace.links["how"] == "file").any() for trace in traces) else ()
    tables = {}
    for name in TABLES:
        parts = [part for trace in traces if (part := trace.table(name)).height]
        if parts and (name in stated or name not in _DERIVED_TABLES):
            tables[name] = parts[0] if len(parts) == 1 else _concat_table(name, parts)
    if "stats" in tables:
        tables["stats"] = tables["stats"].filter(~pl.col("name").str.starts_with("link."))
    meta: dict[str, object] = {}
    for trace in traces:
        for key, value in trace.meta.items():
            if key in _CONCATENATED_META:
                meta[key] = [*meta.get(key, []), *value]  # type: ignore[misc]
            elif isinstance(value, dict) and isinstance(previous := meta.get(key), dict):
                meta[key] = {**previous, **value}
            elif value is not None or key not in meta:
                meta[key] = value
    merged = Trace(tables, meta)
    ranks = sorted({trace.rank for trace in traces if trace.rank is not None})
    if len(ranks) > 1:
        merged = merged.count("link.ranks_differ", 1, f"the files say ranks {ranks}", "error")
    return merged


def select_rank(read: Trace | Job, rank: int | None, file: str | PathLike[str]) -> Trace:
    """Return the Trace of one rank of a file, with ``meta["rank"]``, and a row of stats if the file states another
    rank.

    Raises:
        EtloomError: The file holds several ranks and none is requested.
        AnalysisError: The file does not hold the rank.
    """
    if isinstance(read, Job):
        if rank is None:
            available = ", ".join(map(str, read))
            raise EtloomError(f"holds the ranks {available}", where=file, remedy="say which one: --rank")
        if rank not in read:
            raise unknown_rank_error(rank, read)
        read = read[rank]
    if rank is None:
        return read
    other = f"{file} says it is of rank {read.rank}, and is taken to be of {rank}"
    differ = read.rank not in (None, rank)
    return read.replace(meta={"rank": rank}).count("job.rank_mismatch", int(differ), other, "error")


def _drop_observer_times(traces: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """Drop the events of etloom's observer if there is a profiler trace, whose times are on the device's clock."""
    if not any(trace.events.height and trace.meta.get("formats") != ["observer"] for trace in traces):
        return traces
    return tuple(
        trace.replace(events=TABLES["events"].empty()) if trace.meta.get("formats") == ["observer"] else trace
        for trace in traces
    )


def _concat_table(name: str, parts: list[pl.DataFrame]) -> pl.DataFrame:
    both = pl.concat(parts)
    if name == "groups":
        return both.unique(maintain_order=True)
    if "id" in both.columns:
        return both.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("id"))
    return both
