"""The staging folder in which a run is prepared before it appears in a store: key, lock and publication.

A run is prepared in ``STORE/.adding/NAME-KEY``. The key depends on the files of the run, so that a killed addition goes
on where it stopped, and starts again if the files have changed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.errors import EtloomError
from etloom.core.names import list_user_files
from etloom.formats.parquet.store_layout import ADDING, STORE_VERSION, is_stored_run, read_json, run_folder
from etloom.loading import cache
from etloom.loading.rank_discovery import DiscoveredRun, discover_ranks


@dataclass(frozen=True)
class Source:
    """A run to be added to a store: its path, its discovered traces, and a key that changes with its files.

    Attributes:
        path: the folder or file.
        key: changes with the files, the version of etloom, and the layout of stores.
        discovered: the traces of a folder; None for a file or a folder that is one trace.
    """

    path: Path
    key: str
    discovered: DiscoveredRun | None


def describe_source(path: Path, rank_pattern: str | None) -> Source:
    """Find the files of a run and compute its key. Raises ReadError."""
    discovered = None
    facts: dict[str, Any] = {"store": STORE_VERSION, "names": list_user_files()}
    if formats.detect_format(path) is not None:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    else:
        discovered = discover_ranks(path, rank_pattern)
        by_rank = (*discovered.ranks.values(), *discovered.captures.values())
        files = [file for rank_files in by_rank for file in rank_files]
        facts |= {"pattern": rank_pattern, "card": discovered.card, "run": discovered.run}
    key = cache.entry_key(files, **facts)
    if key is None:
        raise EtloomError(
            "contains files that cannot be opened", where=path, remedy="add a folder of regular files"
        )
    return Source(path, key, discovered)


class Staging:
    """The folder in which a run is prepared until it is complete and moved to its name in the store.

    Args:
        store: the store.
        name: name of the run.
        key: key of its source.
    """

    def __init__(self, store: Path, name: str, key: str) -> None:
        self.target = run_folder(store, name)
        self.folder = store / ADDING / f"{name}-{key}"
        self._lock = store / ADDING / f"{name}.lock"
        self._name = name

    @property
    def parts(self) -> Path:
        """The folder with the analysis results of each batch of ranks."""
        return self.folder / "parts"

    @contextlib.contextmanager
    def locked(self, waits: bool = False) -> Iterator[int]:
        """Hold the lock on the run's name within the context, and yield the descriptor of the lock file.

        Args:
            waits: wait while another process holds it.

        Raises:
            EtloomError: another process adds a run of this name.
        """
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            if not _lock_file(file.fileno(), waits):
                raise EtloomError(
                    f"run {self._name!r} is being added by another process",
                    where=self.target.parent,
                    remedy="wait for it, or choose another --name",
                )
            yield file.fileno()

    def read_published(self) -> dict[str, Any] | None:
        """Return the manifest (meta.json) of the run with the same name in the store; None if there is none."""
        return read_json(self.target / "meta.json") if is_stored_run(self.target) else None

    def publish(self) -> None:
        """Move the complete run to its name in the store, and remove the remains of earlier attempts."""
        shutil.rmtree(self.parts, ignore_errors=True)
        for scratch in self.folder.glob(".*"):  # of processes that were killed
            shutil.rmtree(scratch, ignore_errors=True)
        old = self.folder.with_name(f"{self._name}-replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.folder.rename(self.target)
        for rest in self.folder.parent.glob(f"{self._name}-*"):
            if len(rest.name) == len(self.folder.name) or rest == old:
                shutil.rmtree(rest, ignore_errors=True)

    def discard(self) -> None:
        """Remove the staging folder, if the run has not been moved to its name in the store."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _lock_file(descriptor: int, waits: bool) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # a system without locks
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
