"""Reads columns of a CSV file as text, within the limits of tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from etloom.core.errors import ReadError
from etloom.formats.io.limits import check_bytes, check_rows, max_table_bytes


def read_text_columns(path: Path, columns: Iterable[str]) -> pl.DataFrame:
    """Return columns as text, by their names in lower case; absent columns are null.

    Raises:
        ReadError: The file cannot be read as CSV.
        LimitError: It is too large.
    """
    try:
        check_bytes(path.stat().st_size, path, max_table_bytes())
        frame = pl.read_csv(
            path, infer_schema=False, encoding="utf8-lossy", truncate_ragged_lines=True, glob=False
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ReadError(f"cannot be read as CSV: {reason}", where=path, remedy="copy it again") from None
    check_rows(frame.height, path)
    names: dict[str, str] = {}
    for name in frame.columns:
        names.setdefault(name.strip().lower(), name)
    return frame.select(
        (pl.col(names[name]) if name in names else pl.lit(None, dtype=pl.String)).alias(name)
        for name in columns
    )
