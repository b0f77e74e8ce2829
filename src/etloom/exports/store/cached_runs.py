"""Cache runs of many ranks as runs of a store in the cache folder, so that a run is read and linked only once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.core.names import list_user_files
from etloom.core.trace import Job
from etloom.exports.store.adding import AddOptions, add_run
from etloom.formats import parquet
from etloom.formats.parquet.store_layout import is_stored_run, run_folder
from etloom.loading import LoadOptions, cache
from etloom.loading.file_reading import estimate_text_bytes
from etloom.loading.plan import limit_table_bytes
from etloom.loading.rank_stores import leave_on_disk

_TABLE_BYTES_PER_TEXT_BYTE = 0.1
"""Size of a stored run per byte of the text of its traces (measured: 0.05)."""


def open_cached_run(
    folder: Path,
    files: Sequence[Path],
    options: LoadOptions,
    rank_pattern: str | None,
    *,
    is_added: bool,
    keeps_all: bool,
) -> Job | None:
    """Open a run of many ranks from the cache.

    Args:
        folder: the run.
        files: a trace of each rank.
        options: how to load it.
        rank_pattern: see `etloom.loading.discover_ranks`.
        is_added: add it to the cache if it is not there.
        keeps_all: add it with all answers that a store keeps, not only with those that a report needs.

    Returns:
        The run; None if it is not there and not added, if the options or the cache do not allow this, or if it cannot
        be read, for a reason that the usual way of loading reports.
    """
    if not options.use_cache or options.linking:
        return None
    store = cache.cache_folder() / cache.RUNS
    try:
        key = cache.folder_key(folder, pattern=rank_pattern, names=list_user_files())
        entry = run_folder(store, key)
        if not is_stored_run(entry):
            if not is_added or not cache.has_room(
                int(sum(map(estimate_text_bytes, files)) * _TABLE_BYTES_PER_TEXT_BYTE)
            ):
                return None
            adding = AddOptions(
                key,
                options.jobs,
                rank_pattern,
                options.progress,
                options.engine,
                waits=True,
                resumable=False,
                for_report=not keeps_all,
            )
            add_run(folder, store, adding)
            cache.register_entry(entry)
        elif options.progress is not None:
            for file in files:
                options.progress(file, 0)
            for file in files:
                options.progress(file, file.stat().st_size)
        run = parquet.read(entry, lazy=True, owner=cache.hold_entry(entry))
        assert isinstance(run, Job)
        return run if options.lazy else leave_on_disk(run, limit_table_bytes(options))
    except (*cache.WRITE_ERRORS, EtloomError):
        return None
