"""Device work as nodes of an ET+: with its own facts, hung on the operator that launched it."""

from __future__ import annotations

import json

import numpy as np
import polars as pl

from etloom import kinds, stacks
from etloom.exports._et_nodes import BARE_ATTRIBUTES, EMPTY_SIDE, Nodes, next_ids
from etloom.exports._members import microseconds, quoted
from etloom.linker.lanes import rows_of
from etloom.trace import Trace


def numbered(trace: Trace) -> pl.DataFrame:
    """The device events in order of time, with ``number``, the id of their node, ``node`` and ``above``, the row and
    the id of the one above, ``pg_name`` as JSON and ``known`` of a communication, and the facts of `kernels`.

    Work that belongs to no node is left out where it was launched before the first linked operator or after the last
    one: in other iterations than the execution trace shows.

    The node above is that of the operator around the launch, or of the nearest linked event around that; null
    where there is none.
    """
    work = trace.events.filter(stacks.among(trace.events["cat"], kinds.DEVICE))
    cause = trace.launches.select(
        pl.col("device_event").alias("id"), pl.coalesce("operator", "launch").alias("cause")
    ).unique("id", keep="last")
    cause = cause.with_columns(node_around(trace, cause["cause"])).drop("cause")
    above = trace.nodes.select(pl.col("id").alias("node"), pl.col("et_id").alias("above"))
    comms = trace.comms.drop_nulls("event").unique("event", keep="last")
    comms = comms.select(pl.col("event").alias("id"), quoted(comms["pg_name"]).alias("pg_name"), known=True)
    kernels = trace.kernels.unique("event", keep="last").rename({"event": "id"})
    for frame, key in ((cause, "id"), (above, "node"), (comms, "id"), (kernels, "id")):
        work = work.join(frame, on=key, how="left", maintain_order="left")
    work = work.filter(pl.col("node").is_not_null() | _within(trace, work))
    return work.with_columns(number=next_ids(trace, work.height))


def _within(trace: Trace, work: pl.DataFrame) -> pl.Series:
    """Which device events were launched, or began where no launch is known, while linked operators ran."""
    events = trace.events
    linked = rows_of(events, trace.links["event"])
    if not linked.size:
        return pl.repeat(True, work.height, eager=True)
    # What was never closed may last to the end.
    ended = (pl.col("ts") + pl.col("dur")).max()
    end = pl.when(pl.col("dur").null_count() > 0).then(pl.lit(events["ts"].max())).otherwise(ended)
    spans = events[linked].select(begin=pl.col("ts").min(), end=end)
    launched = trace.launches.join(events.select(launch="id", launched="ts"), on="launch")
    launched = launched.unique("device_event", keep="last", maintain_order=True)
    when = work.join(
        launched.select(id="device_event", when="launched"), on="id", how="left", maintain_order="left"
    )
    return when.select(pl.col("when").fill_null(pl.col("ts")).is_between(*spans.row(0))).to_series()


def node_around(trace: Trace, events: pl.Series) -> pl.Series:
    """For ids of events (or null) the node of each, or of the nearest linked event around it."""
    linked = rows_of(trace.events, trace.links["event"])
    node = np.zeros(trace.events.height + 1, np.uint32)  # the last for -1
    node[linked] = trace.links["node"].to_numpy()
    has = np.zeros(trace.events.height, bool)
    has[linked[linked >= 0]] = True
    found = stacks.nearest(rows_of(trace.events, trace.events["parent"]), has, rows_of(trace.events, events))
    return pl.Series("node", node[found]).set(pl.Series(found < 0), None)


def texts(trace: Trace, nodes: Nodes, device: pl.DataFrame) -> pl.Series:
    """The JSON objects of rows of `numbered`."""
    base = int(trace.meta.get("base_ns") or 0)
    called = trace.nodes.join(device.filter("known").select(id="node"), on="id", how="semi")
    inputs, outputs = nodes.sides(called)
    sides = pl.DataFrame({"node": called["id"], "inputs": inputs, "outputs": outputs})
    rows = device.join(sides, on="node", how="left", maintain_order="left").with_columns(
        pl.when("known").then(name) for name in ("inputs", "outputs")
    )
    told = rows.with_columns(
        quoted(rows["name"]).fill_null("null"),
        quoted(rows["cat"]),
        quoted(rows["ph"]).fill_null("null"),
        pl.col("ts") - base,
        pl.col("dur").fill_null(0),
        pl.col("inputs", "outputs").fill_null(EMPTY_SIDE),
        pl.col("above").fill_null(trace.nodes["et_id"].min()),
    )
    members = (
        *(("id", pl.col("number")), ("name", pl.col("name")), ("ctrl_deps", pl.col("above"))),
        *(("inputs", pl.col("inputs")), ("outputs", pl.col("outputs"))),
        (
            "attrs",
            pl.concat_str(
                pl.lit(f"[{BARE_ATTRIBUTES}"), _attributes(rows, trace.kernels.columns[1:]), pl.lit("]")
            ),
        ),
        *(("cat", pl.col("cat")), ("ph", pl.col("ph"))),
        ("stream", pl.col("stream").cast(pl.String).fill_null("null")),
        ("ts", microseconds("ts")),
        *((name, microseconds("dur")) for name in ("inclusive_dur", "exclusive_dur")),
    )
    parts = [part for name, value in members for part in (pl.lit(f', "{name}": '), value)]
    group = pl.concat_str(pl.lit(', "pg_name": '), "pg_name")
    line = pl.concat_str(pl.lit("{"), pl.concat_str(parts).str.slice(2), group.fill_null(""), pl.lit("}"))
    return told.select(line.alias("")).to_series()


def _attributes(rows: pl.DataFrame, facts: list[str]) -> pl.Expr:
    """What is known of each event, as items of a list, each with a comma before it."""
    parts = []
    for name in ("device", "correlation", *facts):
        dtype = rows.schema[name]
        known = pl.col(name)
        if dtype.is_float():
            known = pl.when(known.is_finite()).then(known)
        kind = "double" if dtype.is_float() else "int64"
        start = json.dumps({"name": name, "type": kind})[:-1]
        parts.append(pl.concat_str(pl.lit(f', {start}, "value": '), known.cast(pl.String), pl.lit("}")))
    return pl.concat_str(parts, ignore_nulls=True)
