"""The cell magic ``%%etloom`` of IPython and Jupyter: records a cell and shows where its time went.

%load_ext etloom

%%etloom
train(model, batches)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import etloom

if TYPE_CHECKING:
    import polars as pl

_COLUMNS = ("pattern", "job_gain_pct", "cost_ns", "confidence", "title", "advice")


def register(shell: Any) -> None:
    """Add the cell magic ``%%etloom [FOLDER]`` to a shell of IPython."""

    def record_cell(line: str, cell: str) -> pl.DataFrame | None:
        """Record the cell with etloom.record, print the summary of the run, and return its findings.

        The traces are kept in FOLDER, if one is named, which replaces those of an earlier cell.
        """
        if folder := line.strip().strip("'\""):
            return _record(shell, cell, Path(folder).expanduser())
        with tempfile.TemporaryDirectory() as scratch:
            return _record(shell, cell, Path(scratch, "run"))

    shell.register_magic_function(record_cell, "cell", "etloom")


def _record(shell: Any, cell: str, folder: Path) -> pl.DataFrame | None:
    """Run the code in the shell's namespace; None if it raised, which the shell has shown."""
    with etloom.record(folder, overwrite=True):
        outcome = shell.run_cell(cell)
    if not outcome.success:
        return None
    from etloom.reports.summary import summarize_run

    job = etloom.open(folder, use_cache=False)
    for sentence in summarize_run(job).lines:
        print(f"{sentence.topic}: {sentence.figure}  {sentence.text}")
    findings: pl.DataFrame = etloom.analyze(job, "findings")
    return findings.select(_COLUMNS)
