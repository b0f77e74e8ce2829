"""Limits on untrusted files: rows, bytes, and the ratio of decoded to stored bytes.

All readers use these; docs/exit-status.md lists the defaults and the environment variables that raise them.
"""

from __future__ import annotations

import os
from pathlib import Path

from etloom.core.errors import LimitError
from etloom.core.machine import available_memory

MAX_RATIO = 200
"""The largest accepted ratio, unless $ETLOOM_MAX_RATIO sets another. Real traces compress 5 to 60 times."""
MIN_CHECKED_BYTES = 1 << 25
"""The ratio is not checked below this size (32 MiB): a few bytes of zeros are not an attack."""
_BYTES_PER_TEXT_BYTE = 16
"""Memory of Python objects per byte of the text that they are parsed from."""
_BYTES_PER_ROW = 200
"""Memory that the tables of a file take while they are built, per row."""
_MEMORY_SHARE = 0.7
"""The share of the available memory for the tables of one file."""


def _read_limit(variable: str, default: int) -> int:
    """Return the limit set in an environment variable; ``default`` if the variable is not a whole number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _share_memory() -> int:
    return int(_MEMORY_SHARE * available_memory())


def max_text_bytes(limit: int) -> int:
    """Return the largest accepted size of a file that is parsed as a whole; at most ``limit``."""
    return _read_limit("ETLOOM_MAX_BYTES", min(limit, available_memory() // _BYTES_PER_TEXT_BYTE))


def max_table_bytes() -> int:
    """Return the largest accepted size of a table that is decoded to columns."""
    return _read_limit("ETLOOM_MAX_BYTES", _share_memory())


def max_rows(default: int | None = None) -> int:
    """Return the largest accepted number of rows; by default as many as the memory holds."""
    return _read_limit("ETLOOM_MAX_ROWS", _share_memory() // _BYTES_PER_ROW if default is None else default)


def check_rows(rows: int, path: Path | None, limit: int | None = None) -> None:
    """Raise LimitError if a file has more than ``limit`` rows (default: `max_rows`)."""
    if rows > (limit := max_rows() if limit is None else limit):
        raise LimitError(
            f"contains more than {limit:,} rows, which need too much memory",
            where=path,
            remedy="use a machine with more memory, or set ETLOOM_MAX_ROWS to a larger number",
        )


def check_bytes(decoded_bytes: int, path: Path | None, limit: int) -> None:
    """Raise LimitError if a file decodes to more than ``limit`` bytes."""
    if decoded_bytes > limit:
        raise LimitError(
            f"contains more than {limit:,} bytes",
            where=path,
            remedy="if you trust the file, set ETLOOM_MAX_BYTES to a larger number",
        )


def check_ratio(file_bytes: int, decoded_bytes: int, path: Path | None, part: str = "its") -> None:
    """Raise LimitError if ``file_bytes`` bytes (which ``part`` of a file) decode to too many times as many."""
    if decoded_bytes <= MIN_CHECKED_BYTES:
        return
    ratio = _read_limit("ETLOOM_MAX_RATIO", MAX_RATIO)
    if decoded_bytes > file_bytes * ratio:
        raise LimitError(
            f"{part} {file_bytes:,} bytes decompress to more than {ratio} times as many",
            where=path,
            remedy="if you trust the file, set ETLOOM_MAX_RATIO to a larger number",
        )
