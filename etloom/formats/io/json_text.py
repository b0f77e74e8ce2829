"""Columns as JSON text."""

from __future__ import annotations

import json

import polars as pl


def quote_texts(column: pl.Series) -> pl.Series:
    """Return each text as a JSON string; each distinct text is encoded once."""
    distinct = column.unique().drop_nulls()
    if distinct.is_empty():
        return column.cast(pl.String)
    texts = [json.dumps(text, ensure_ascii=False) for text in distinct.cast(pl.String)]
    encoded = pl.DataFrame({"text": distinct, "quoted": texts})
    joined = column.to_frame("text").join(encoded, on="text", how="left", maintain_order="left")
    return joined["quoted"].rename(column.name)


def join_lines(texts: pl.Series) -> bytes:
    """Join the texts of JSON objects, one per line with commas between them, as UTF-8."""
    lines: bytes = texts.str.join(",\n").cast(pl.Binary).item()
    return lines


def format_microseconds(column: str) -> pl.Expr:
    """Return integer nanoseconds as exact decimal microseconds."""
    ns = pl.col(column)
    sign = pl.when(ns < 0).then(pl.lit("-")).when(ns >= 0).then(pl.lit(""))
    integer, rest = (ns.abs() // 1000).cast(pl.String), (ns.abs() % 1000).cast(pl.String).str.zfill(3)
    return pl.concat_str(sign, integer, pl.lit("."), rest)
