"""Device work as nodes of an ET+: with its own facts, hung on the operator that launched it."""

from __future__ import annotations

import json

import polars as pl

from etloom.core.trace import Trace
from etloom.formats.execution_trace.node_json import (
    DEFAULT_ATTRIBUTES,
    EMPTY_ARGUMENTS,
    NodeTexts,
    allocate_ids,
)
from etloom.formats.kineto.event_json import format_microseconds, quote_texts
from etloom.linker.recorded_scope import find_launching_nodes, is_in_scope


def number_device_nodes(trace: Trace) -> pl.DataFrame:
    """The device events in order of time, with ``number``, the id of their node, ``node`` and ``above``, the row and
    the id of the one above, ``pg_name`` as JSON and ``known`` of a communication, and the facts of `kernels`.

    Work of other iterations than the execution trace shows is left out (`etloom.linker.recorded_scope`).

    The node above is that of the operator around the launch, or of the nearest linked event around that; null
    where there is none.
    """
    node = find_launching_nodes(trace)
    work = trace.launches.select(pl.col("device_event").alias("id"), node, belongs=is_in_scope(trace, node))
    work = work.unique("id", keep="last").join(trace.events, on="id").filter("belongs").sort("ts", "id")
    above = trace.nodes.select(pl.col("id").alias("node"), pl.col("et_id").alias("above"))
    comms = trace.comms.drop_nulls("event").unique("event", keep="last")
    comms = comms.select(
        pl.col("event").alias("id"), quote_texts(comms["pg_name"]).alias("pg_name"), known=True
    )
    kernels = trace.kernels.unique("event", keep="last").rename({"event": "id"})
    for frame, key in ((above, "node"), (comms, "id"), (kernels, "id")):
        work = work.join(frame, on=key, how="left", maintain_order="left")
    return work.with_columns(number=allocate_ids(trace, work.height))


def format_device_nodes(trace: Trace, nodes: NodeTexts, device: pl.DataFrame) -> pl.Series:
    """The JSON objects of rows of `numbered`."""
    base = int(trace.meta.get("base_ns") or 0)
    called = trace.nodes.join(device.filter("known").select(id="node"), on="id", how="semi")
    inputs, outputs = nodes.sides(called)
    sides = pl.DataFrame({"node": called["id"], "inputs": inputs, "outputs": outputs})
    rows = device.join(sides, on="node", how="left", maintain_order="left").with_columns(
        pl.when("known").then(name) for name in ("inputs", "outputs")
    )
    told = rows.with_columns(
        quote_texts(rows["name"]).fill_null("null"),
        quote_texts(rows["cat"]),
        quote_texts(rows["ph"]).fill_null("null"),
        pl.col("ts") - base,
        pl.col("dur").fill_null(0),
        pl.col("inputs", "outputs").fill_null(EMPTY_ARGUMENTS),
        pl.col("above").fill_null(trace.nodes["et_id"].min()),
    )
    members = (
        *(("id", pl.col("number")), ("name", pl.col("name")), ("ctrl_deps", pl.col("above"))),
        *(("inputs", pl.col("inputs")), ("outputs", pl.col("outputs"))),
        (
            "attrs",
            pl.concat_str(
                pl.lit(f"[{DEFAULT_ATTRIBUTES}"),
                _format_attributes(rows, trace.kernels.columns[1:]),
                pl.lit("]"),
            ),
        ),
        *(("cat", pl.col("cat")), ("ph", pl.col("ph"))),
        ("stream", pl.col("stream").cast(pl.String).fill_null("null")),
        ("ts", format_microseconds("ts")),
        *((name, format_microseconds("dur")) for name in ("inclusive_dur", "exclusive_dur")),
    )
    parts = [part for name, value in members for part in (pl.lit(f', "{name}": '), value)]
    group = pl.concat_str(pl.lit(', "pg_name": '), "pg_name")
    line = pl.concat_str(pl.lit("{"), pl.concat_str(parts).str.slice(2), group.fill_null(""), pl.lit("}"))
    return told.select(line.alias("")).to_series()


def _format_attributes(rows: pl.DataFrame, facts: list[str]) -> pl.Expr:
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
