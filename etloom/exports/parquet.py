"""A folder of Parquet files, one a table, which `etloom.read` reads back as it was."""

from etloom.formats.parquet.writer import SUFFIX, write

__all__ = ["SUFFIX", "write"]
