"""The exceptions that polars raises for a damaged Parquet file, including panics (not a subclass of Exception)."""

from __future__ import annotations

import polars as pl

PARQUET_ERRORS = (OSError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
