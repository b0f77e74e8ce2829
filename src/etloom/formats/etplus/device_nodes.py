"""Formats GPU activities as the JSON nodes of an ET+ file."""

from __future__ import annotations

import json

import polars as pl

from etloom.core.trace import Trace
from etloom.formats.execution_trace.node_json import (
    DEFAULT_ATTRIBUTES,
    EMPTY_ARGUMENTS,
    NodeTexts,
)
from etloom.formats.io.json_text import format_microseconds, quote_texts


def format_device_nodes(trace: Trace, nodes: NodeTexts, device: pl.DataFrame) -> pl.Series:
    """Return one JSON object per GPU activity: its node in the ET+ file.

    Args:
        trace: The trace, with the nodes of the host only.
        nodes: Its nodes as texts.
        device: Rows of the events table with ``number`` (the id of the new node), ``node`` and ``above`` (row and id of
            the node that launched it), ``is_comm`` and ``pg_name`` (JSON) of communication, and the columns of kernels.
    """
    base = int(trace.meta.get("base_ns") or 0)
    comm_nodes = trace.nodes.join(device.filter("is_comm").select(id="node"), on="id", how="semi")
    inputs, outputs = nodes.format_arguments(comm_nodes)
    sides = pl.DataFrame({"node": comm_nodes["id"], "inputs": inputs, "outputs": outputs})
    rows = device.join(sides, on="node", how="left", maintain_order="left").with_columns(
        pl.when("is_comm").then(name) for name in ("inputs", "outputs")
    )
    texts = rows.with_columns(
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
    return texts.select(line.alias("")).to_series()


def _format_attributes(rows: pl.DataFrame, columns: list[str]) -> pl.Expr:
    """Return a polars expression that formats a GPU activity's non-null attributes as JSON objects after commas."""
    parts = []
    for name in ("device", "correlation", *columns):
        dtype = rows.schema[name]
        value = pl.col(name)
        if dtype.is_float():
            value = pl.when(value.is_finite()).then(value)
        kind = "double" if dtype.is_float() else "int64"
        start = json.dumps({"name": name, "type": kind})[:-1]
        parts.append(pl.concat_str(pl.lit(f', {start}, "value": '), value.cast(pl.String), pl.lit("}")))
    return pl.concat_str(parts, ignore_nulls=True)
