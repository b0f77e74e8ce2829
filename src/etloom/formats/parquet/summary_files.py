"""The summaries of a stored run: Parquet files in one folder, whose checksums the run's meta.json lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from etloom.core.errors import ReadError
from etloom.formats.io.mirror import ensure_local
from etloom.formats.io.parquet_input import PARQUET_ERRORS, check_parquet
from etloom.formats.parquet import checksums
from etloom.formats.parquet.store_layout import SUMMARIES

REMEDY = "add the run again"


def list_checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each summary file of a run by file name, for the meta.json of the run."""
    return checksums.compute_checksums(file for file in (folder / SUMMARIES).iterdir() if file.is_file())


class SummaryFiles:
    """Reads the summary files of a stored run, and checks them against the checksums in its meta.json.

    Args:
        folder: The run.
        listed: The checksums of its meta.json; by default they are read.
    """

    def __init__(self, folder: Path, listed: object = None) -> None:
        self._folder = folder / SUMMARIES
        self._listed = checksums.read_checksums(folder / "meta.json") if listed is None else listed

    def find(self, name: str) -> Path:
        """Return the path of a summary file. Raises ReadError if its checksum differs from the listed checksum."""
        file = self._folder / name
        checksums.check_file(file, self._listed, REMEDY)
        return file

    def read(self, name: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Read a summary table, with all columns or only ``columns``. Raises ReadError."""
        file = self.find(f"{name}.parquet")
        ensure_local(file)
        try:
            check_parquet(file, file, columns)
            return pl.read_parquet(
                file,
                columns=None if columns is None else list(columns),
                glob=False,
                hive_partitioning=False,
            )
        except PARQUET_ERRORS as error:
            reason = str(error).partition("\n")[0]
            raise ReadError(f"is not a summary of a store: {reason}", where=file, remedy=REMEDY) from None
