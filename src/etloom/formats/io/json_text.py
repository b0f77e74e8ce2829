"""Parses the JSON text of files, and formats columns of tables as JSON text."""

from __future__ import annotations

import json
import re
from typing import Any

import polars as pl

from etloom.core.errors import ReadError

MAX_DEPTH = 100
"""The deepest accepted nesting of JSON; a document of any format has less than ten levels."""


class NestingError(ReadError, RecursionError):
    """Raised for JSON that is nested too deeply; where no reader skips the entry, the file is refused."""


def to_natural(value: Any, limit: int = 1 << 63) -> int | None:
    """Return a parsed value if it is an integer from 0 to ``limit`` - 1 (a size, time or address), otherwise None."""
    return value if type(value) is int and 0 <= value < limit else None


def quote_texts(column: pl.Series) -> pl.Series:
    """Return a text column with each text as a quoted JSON string; each distinct text is encoded once."""
    distinct = column.unique().drop_nulls()
    if distinct.is_empty():
        return column.cast(pl.String)
    texts = [json.dumps(text, ensure_ascii=False) for text in distinct.cast(pl.String)]
    encoded = pl.DataFrame({"text": distinct, "quoted": texts})
    joined = column.to_frame("text").join(encoded, on="text", how="left", maintain_order="left")
    return joined["quoted"].rename(column.name)


def join_lines(texts: pl.Series) -> bytes:
    """Return a column of JSON objects as UTF-8 bytes: one object per line, separated by commas."""
    lines: bytes = texts.str.join(",\n").cast(pl.Binary).item()
    return lines


def format_microseconds(column: str) -> pl.Expr:
    """Return an expression that formats a column of integer nanoseconds as microseconds with three decimals."""
    ns = pl.col(column)
    sign = pl.when(ns < 0).then(pl.lit("-")).when(ns >= 0).then(pl.lit(""))
    integer, rest = (ns.abs() // 1000).cast(pl.String), (ns.abs() % 1000).cast(pl.String).str.zfill(3)
    return pl.concat_str(sign, integer, pl.lit("."), rest)


def load_json(text: str | bytes) -> Any:
    """Parse JSON text; lone surrogates in it, which are not characters, become U+FFFD.

    Raises:
        ValueError: If it is not JSON.
        NestingError: If it is nested more deeply than `MAX_DEPTH`, so that callers may walk it by recursion.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _nesting_error() from None
    _check_depth(value)
    encoded = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    # Searching for the pattern alone takes as long as parsing.
    has_surrogates = (b"\\u" in encoded or b"\xed" in encoded) and _SURROGATE_BYTES.search(encoded)
    return replace_surrogates(value) if has_surrogates else value


def _nesting_error() -> NestingError:
    return NestingError(
        f"JSON is nested more than {MAX_DEPTH} levels deep", remedy="the writer of the file has a defect"
    )


def _check_depth(value: Any) -> None:
    containers, depth = [value] if isinstance(value, (dict, list)) else [], 0
    while containers:
        depth += 1
        if depth > MAX_DEPTH:
            raise _nesting_error()
        containers = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]


def replace_surrogates(value: Any) -> Any:
    """Return a parsed JSON value with each lone surrogate in its texts replaced by U+FFFD."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return value


_SURROGATES = re.compile("[\ud800-\udfff]")
_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Matches each JSON text that can contain a surrogate, as an escape or encoded."""
