"""Kineto files whose tables should not be in memory all at once: converted to Parquet part by part, left on disk."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from etloom import formats
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats.parquet import writer
from etloom.linker import is_linked
from etloom.loading import cache
from etloom.loading.file_reading import Progress, convert_panics, estimate_text_bytes

SPILL_BYTES = 10**9
"""Kineto files of more than this many bytes, decompressed, are converted to Parquet part by part."""
_EVENT_BYTES = 350  # text of a typical event


def is_large(path: Path) -> bool:
    """Return whether a file is a Kineto trace whose tables should not be in memory all at once."""
    return (
        path.is_file() and formats.detect_format(path) == "kineto" and estimate_text_bytes(path) > SPILL_BYTES
    )


def has_too_many_events(trace: Trace) -> bool:
    """Return whether a trace has so many events that its Kineto file would be large."""
    rows = trace.scan("events").select(pl.len()).collect().item()
    return bool(rows * _EVENT_BYTES > SPILL_BYTES)


def spill_to_parquet(path: Path, out: Path, progress: Progress | None = None) -> None:
    """Convert a Kineto file to a folder of Parquet, part by part. Raises ReadError, LimitError, EtloomError."""
    from etloom.formats.kineto.large_file import convert_large_file  # only large files need pyarrow

    with writer.create_atomically(out) as folder:
        with convert_panics(path):
            meta = convert_large_file(path, folder, progress=partial(progress, path) if progress else None)
        writer.write_meta(folder, "trace", meta)


def open_on_disk(path: Path, progress: Progress | None, use_cache: bool, linking: Mapping[str, Any]) -> Trace:
    """Open a large Kineto file as Parquet: its linked cache entry if there is one, else unlinked."""
    keys = (
        [cache.entry_key([path], **linking), cache.entry_key([path], form="parts")] if use_cache else [None]
    )
    return cache.open_or_create(keys, lambda folder: spill_to_parquet(path, folder, progress))


def count_unlinked(job: Job) -> list[Stat]:
    """Return the row of stats that counts ranks that are not linked."""
    ranks = [rank for rank, trace in job.items() if not is_linked(trace)]
    example = (
        "too large to link while reading: parent, depth and step of events, launches, thread_dependencies and "
        "sync_dependencies are empty; etloom link PATH --out RUN.parquet links it, in memory"
    )
    return [Stat("job.not_linked", "info", len(ranks), example)]
