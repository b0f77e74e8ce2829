"""One file of a run: reading it, with progress and with its name in what goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from etloom import formats
from etloom.core.errors import ReadError
from etloom.core.trace import Job, Trace

Progress = Callable[[Path, int], None]
"""Called with a file and a number of bytes read of it, and first of all with 0 for every file that will be read."""

_TYPICAL_COMPRESSION = 12  # times that gzip and zstd shrink a trace


def estimate_text_bytes(path: Path) -> int:
    """About how long a file is once unpacked."""
    return path.stat().st_size * (_TYPICAL_COMPRESSION if formats.is_compressed(path) else 1)


def read_file(path: Path, progress: Progress | None) -> Trace | Job:
    """What a file holds. Raises ReadError, LimitError."""
    told = 0

    def count(bytes: int) -> None:
        nonlocal told
        told += bytes
        report_progress(progress, path, bytes)

    with convert_panics(path):
        trace = formats.read(path, progress=count)
    if path.is_file():
        count(path.stat().st_size - told)  # of all of it, by the readers that cannot tell
    return trace


def read_single_rank(path: Path, progress: Progress | None) -> Trace:
    """What a file of one rank holds. Raises ReadError, also for a file of several, LimitError."""
    trace = read_file(path, progress)
    if isinstance(trace, Job):
        raise ReadError("holds several ranks", where=path, remedy="open it on its own")
    return trace


def report_progress(progress: Progress | None, path: Path, count: int) -> None:
    """Report bytes to whom it concerns, if anybody."""
    if progress is not None:
        progress(path, count)


@contextlib.contextmanager
def convert_panics(path: Path) -> Iterator[None]:
    """Raise ReadError with the file's name where polars panics, which is no Exception and names nothing."""
    try:
        yield
    except pl.exceptions.PanicException as error:
        reason = str(error).partition("\n")[0]
        raise ReadError(f"polars failed on it: {reason}", where=path, remedy="please report it") from error
