"""Reading of one file, with progress and with its name in error messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from etloom import formats
from etloom.core.errors import ReadError
from etloom.core.trace import Job, Trace

Progress = Callable[[Path, int], None]
"""Called with a file and the number of bytes read of it; first with 0 for every file that will be read."""

_TYPICAL_COMPRESSION = 12  # factor by which gzip and zstd shrink a trace


def estimate_text_bytes(path: Path) -> int:
    """Estimate the size of a file in bytes after decompression."""
    return path.stat().st_size * (_TYPICAL_COMPRESSION if formats.is_compressed(path) else 1)


def read_file(path: Path, progress: Progress | None) -> Trace | Job:
    """Read a file, which may hold several ranks. Raises ReadError, LimitError."""
    reported = 0

    def count(bytes: int) -> None:
        nonlocal reported
        reported += bytes
        report_progress(progress, path, bytes)

    with convert_panics(path):
        trace = formats.read(path, progress=count)
    if path.is_file():
        count(path.stat().st_size - reported)  # readers without progress report nothing
    return trace


def read_single_rank(path: Path, progress: Progress | None) -> Trace:
    """Read a file of one rank. Raises ReadError (also if it holds several ranks), LimitError."""
    trace = read_file(path, progress)
    if isinstance(trace, Job):
        raise ReadError("contains several ranks", where=path, remedy="open it on its own")
    return trace


def report_progress(progress: Progress | None, path: Path, count: int) -> None:
    """Call ``progress``, unless it is None."""
    if progress is not None:
        progress(path, count)


@contextlib.contextmanager
def convert_panics(path: Path) -> Iterator[None]:
    """Convert a panic of polars, which is not an Exception and names no file, to ReadError."""
    try:
        yield
    except pl.exceptions.PanicException as error:
        reason = str(error).partition("\n")[0]
        raise ReadError(f"polars failed on it: {reason}", where=path, remedy="please report it") from error
