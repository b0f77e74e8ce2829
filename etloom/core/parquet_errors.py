"""Exceptions of polars on a damaged Parquet file. A panic is one of them, although it is not an Exception."""

from __future__ import annotations

import polars as pl

PARQUET_ERRORS = (OSError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
