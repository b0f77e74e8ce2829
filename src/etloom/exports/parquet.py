"""Write Parquet: a folder with one file per table, which `etloom.read` reads back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from etloom.formats.parquet.writer import SUFFIX, write

__all__ = ["SUFFIX", "find_converter", "write"]


def find_converter(source: Path, reader: str | None) -> Callable[..., Any] | None:
    """Return a function (target, progress) that converts a large Kineto file in bounded memory, or None.

    None for other files.
    """
    from etloom.loading import file_reading

    if reader or not file_reading.is_large(source):
        return None
    return partial(file_reading.spill_to_parquet, source)
