"""Combine a communication's record, its operator and its kernels in `comms`.

NCCL wraps its launches in a record_param_comms operator, which both tracers describe. Everything launched directly
inside a described operator is GPU activity of that communication, whatever its name (on one rank NCCL copies).
"""

from __future__ import annotations

import polars as pl

from etloom.core import arrays, categories
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace

_FACT_COLUMNS = [name for name in TABLES["comms"].schema if name not in ("id", "node", "event")]


def join_comms(trace: Trace) -> Trace:
    """Return the Trace with one row of `comms` per call and per device event of a call, from both files."""
    comms = trace.comms
    if not comms.height:
        return trace
    # Where a file has a node for device work too, its communication is still that of the call.
    device = trace.launches.select(event="device_event")
    links = trace.links.select("node", "event").join(device, on="event", how="anti")
    calls = comms.filter(pl.col("event").is_not_null()).drop("node").join(links, on="event", how="left")
    # Of a trace that was linked before, a node's row may be that of another iteration: what it says is the node's.
    recorded = (
        comms.drop_nulls("node")
        .sort(pl.col("event").is_not_null(), maintain_order=True)
        .unique("node", keep="first", maintain_order=True)
        .drop("event")
        .join(links, on="node", how="left")
    )
    alone = recorded.filter(pl.col("event").is_null())
    with_event = _merge_by_event(pl.concat([calls, recorded.drop_nulls("event")], how="diagonal_relaxed"))
    with_event = pl.concat([with_event, _select_device_rows(trace, with_event)], how="diagonal_relaxed")
    with_event = _merge_by_event(with_event).sort("event")
    comms_table = pl.concat([with_event, alone], how="diagonal_relaxed").drop("id", strict=False)
    comms_table = comms_table.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("id"), pl.all())
    example = alone["collective"][0] if alone.height else None
    return trace.replace(comms=comms_table).with_stats(
        [Stat("link.comms_without_event", "info", alone.height, example)]
    )


def _select_device_rows(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each device event launched directly inside a communication call, with the facts of the call."""
    caused = trace.launches.drop_nulls("operator").select("operator", "device_event")
    return (
        calls.join(caused, left_on="event", right_on="operator")
        .drop("event")
        .rename({"device_event": "event"})
    )


def _merge_by_event(rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row per event, with the first known value of each fact."""
    if rows["event"].is_unique().all():
        return rows
    facts = [pl.col(name).drop_nulls().first() for name in ("node", *_FACT_COLUMNS)]
    return rows.group_by("event", maintain_order=True).agg(facts)


def find_device_communication(trace: Trace) -> pl.DataFrame:
    """Return the device events that are communication by name: id, and ``known``, true if `comms` has a row of it."""
    work = trace.events.filter(arrays.is_in(trace.events["cat"], categories.DEVICE_CATEGORIES)).select(
        "id", "cat", "name"
    )
    return (
        categories.add_kernel_type(work)
        .filter(pl.col("kind") == "communication")
        .select("id", pl.col("id").is_in(trace.comms["event"].drop_nulls().implode()).alias("known"))
    )
