"""What polars raises on a damaged Parquet file: some damages make it panic, which is not an Exception."""

from __future__ import annotations

import polars as pl

PARQUET_ERRORS = (OSError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
