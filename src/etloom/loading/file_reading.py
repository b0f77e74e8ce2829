"""Read a single file with progress reports: into memory, or converted to Parquet in bounded memory.

The tables of a large Kineto file should not be in memory all at once: they are converted to Parquet part by part, and
left on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from etloom import formats
from etloom.core.trace import Job, Trace
from etloom.formats.parquet import writer
from etloom.loading import cache
from etloom.loading.rank_stores import CachedRun, save_on_disk

Progress = Callable[[Path, int], None]
"""Called with a file and the number of bytes read of it; first with 0 for every file that will be read."""

SPILL_BYTES = 10**9
"""Kineto files of more than this many bytes, decompressed, are converted to Parquet part by part."""
_EVENT_BYTES = 350  # text of a typical event
_TYPICAL_COMPRESSION = 12  # factor by which gzip and zstd shrink a trace


def estimate_text_bytes(path: Path) -> int:
    """Estimate the decompressed size of a file in bytes, with a typical compression ratio if it is compressed."""
    return path.stat().st_size * (_TYPICAL_COMPRESSION if formats.is_compressed(path) else 1)


def read_file(path: Path, progress: Progress | None) -> Trace | Job:
    """Read a file as a Trace, or as a Job if it holds several ranks. Raises ReadError, LimitError."""
    reported = 0

    def count(bytes: int) -> None:
        nonlocal reported
        reported += bytes
        if progress is not None:
            progress(path, bytes)

    trace = formats.read(path, progress=count)
    if path.is_file():
        count(path.stat().st_size - reported)  # readers without progress report nothing
    return trace


def is_large(path: Path) -> bool:
    """Return whether a file is a Kineto trace too large to hold its tables in memory (above `SPILL_BYTES` of text)."""
    return (
        path.is_file() and formats.detect_format(path) == "kineto" and estimate_text_bytes(path) > SPILL_BYTES
    )


def has_too_many_events(trace: Trace) -> bool:
    """Return whether a trace has too many events to link in memory: as Kineto text it would exceed `SPILL_BYTES`."""
    return trace.rows("events") * _EVENT_BYTES > SPILL_BYTES


def spill_to_parquet(path: Path, out: Path, progress: Progress | None = None) -> None:
    """Convert a Kineto file to a Parquet folder in bounded memory. Raises ReadError, LimitError, EtloomError."""
    from etloom.formats.kineto.large_file import convert_large_file  # only large files need pyarrow

    with writer.create_atomically(out) as folder:
        with formats.convert_panics(path):
            meta = convert_large_file(path, folder, progress=partial(progress, path) if progress else None)
        writer.write_meta(folder, "trace", meta)


def open_on_disk(path: Path, progress: Progress | None, use_cache: bool) -> Trace:
    """Open a large Kineto file with its tables on disk, not linked."""
    key = cache.make_key([path], form="parts") if use_cache else None
    folder = None if key is None else CachedRun(key)
    saved = folder.open(None) if folder is not None else None
    return saved or save_on_disk(None, lambda out: spill_to_parquet(path, out, progress), folder)
