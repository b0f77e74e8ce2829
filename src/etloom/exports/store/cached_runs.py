"""Add the answers of a store to runs of many ranks in the cache, whose ranks are then loaded on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.exports.store.adding import AddOptions, describe_source, lock_file, prepare_run
from etloom.formats import parquet
from etloom.formats.parquet.store_layout import is_stored_run
from etloom.loading import LoadOptions, cache
from etloom.loading.file_reading import estimate_text_bytes
from etloom.loading.plan import limit_table_bytes
from etloom.loading.rank_stores import CachedRun, leave_on_disk

_TABLE_BYTES_PER_TEXT_BYTE = 0.1
"""Size of a stored run per byte of the text of its traces (measured: 0.05)."""


def open_cached_run(
    path: Path,
    files: Sequence[Path],
    cached: CachedRun,
    options: LoadOptions,
    adding: AddOptions | None,
) -> Job | None:
    """Open a run with answers from the cache.

    Args:
        path: the run.
        files: a trace of each rank.
        cached: the run in the cache.
        options: how to load it.
        adding: how to add its answers to the cache if they are not there; None: not at all.

    Returns:
        The run; None if its answers are not there and not added, if the cache does not allow this, or if it cannot be
        read, for a reason that the usual way of loading reports.
    """
    folder = cached.folder
    with contextlib.suppress(*cache.WRITE_ERRORS, EtloomError):
        if not is_stored_run(folder):
            text_bytes = sum(map(estimate_text_bytes, files))
            if adding is None or not cache.has_room(int(text_bytes * _TABLE_BYTES_PER_TEXT_BYTE)):
                return None
            _add_answers(path, cached, adding)
        elif options.progress is not None:
            for file in files:
                options.progress(file, 0)
            for file in files:
                options.progress(file, file.stat().st_size)
        cached.hold(folder)
        run = parquet.read(folder, lazy=True, owner=cached)
        assert isinstance(run, Job)
        return run if options.lazy else leave_on_disk(run, limit_table_bytes(options))
    cached.release()
    cache.remove_unused(folder)
    return None


def _add_answers(path: Path, cached: CachedRun, options: AddOptions) -> None:
    """Complete a run in the cache, unless another process does, which is waited for."""
    folder = cached.folder
    cached.hold()
    with (folder / ".adding").open("w") as file:
        lock_file(file.fileno(), waits=True)
        if not is_stored_run(folder):
            prepare_run(describe_source(path, options.rank_pattern), folder, options, file.fileno())
            cache.register_write(cached.hold(folder))
