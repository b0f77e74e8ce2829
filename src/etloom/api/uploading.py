"""Upload of a recording to an object store while its job runs.

The upload runs in the process that started the job, so the job never waits for it. A rank's traces are uploaded when
the rank has published them; files that change later (run.json, converted files) when the job has ended.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from etloom.api.arguments import name_uploaded
from etloom.core.errors import CollectError, EtloomError
from etloom.core.text import count_noun
from etloom.formats.io import transfers
from etloom.formats.io.mirror import check_bucket
from etloom.formats.io.object_store import connect, split_url

if TYPE_CHECKING:
    from etloom.collector import CollectResult

POLL_S = 5.0
"""Pause between two looks for finished windows."""
_LATE_NAMES = ("run.json", "meta.json")


def collect_to_url(url: str, overwrite: bool, record: Callable[[Path], CollectResult]) -> CollectResult:
    """Record into a temporary local folder, and upload finished windows to an object store while the job runs.

    Args:
        url: a clean URL; {host} and {time} are replaced.
        overwrite: the folder of the URL may hold an earlier run.
        record: runs the job, which records into the folder that it receives.

    Returns:
        The result, with URLs if everything was uploaded, else with local paths and a warning.

    Raises:
        CollectError: before the job runs: the store cannot be reached, or holds an earlier run.
    """
    from etloom.collector.options import expand_folder_name

    url = expand_folder_name(url)
    _check_target(url, overwrite)
    folder = Path(tempfile.mkdtemp(prefix="etloom-collect-")) / (url.rpartition("/")[2] or "run")
    uploads = RunUploads(folder, url)
    try:
        with uploads.running():
            result = record(folder)
    except EtloomError:  # the job has not run
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise
    failures = uploads.finish()
    if failures:
        return replace(result, warnings=(*result.warnings, *failures))
    shutil.rmtree(folder.parent, ignore_errors=True)
    renamed: CollectResult = name_uploaded(result, folder, url)
    return renamed


def _check_target(url: str, overwrite: bool) -> None:
    """Raise CollectError if the folder of a URL cannot be listed, or contains files and ``overwrite`` is false."""
    try:
        store = connect(url)
        key = split_url(url)[1]
        files, folders = transfers.retry(lambda: store.list_folder(key))
        if not (files or folders):
            check_bucket(store, url, key)
    except EtloomError as error:
        raise CollectError(error.what, where=error.where or url, remedy=error.remedy) from None
    if (files or folders) and not overwrite:
        raise CollectError(
            "contains files, perhaps of an earlier run",
            where=url,
            remedy="choose another URL (on several hosts: URL/{host}), or overwrite it (--overwrite)",
        )


class RunUploads:
    """Uploads the files of a recording to an object store, in the background while the job runs and at its end.

    Args:
        folder: the local folder of the run.
        url: the folder for it in an object store.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._store, (_, self._key) = connect(url), split_url(url)
        self._uploaded: dict[Path, tuple[int, int]] = {}
        """File -> its size and time when it was uploaded."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._upload_until_stopped, name="etloom-upload", daemon=True)

    def running(self) -> _Background:
        """Return a context manager that uploads finished traces in a background thread during its block."""
        return _Background(self._thread, self._stop)

    def _upload_until_stopped(self) -> None:
        while not self._stop.wait(POLL_S):
            self.upload_published()

    def upload_published(self) -> None:
        """Upload the traces of ranks that finished writing them, each rank's record last; failures are tried again."""
        from etloom.collector import run_folder

        for window in (self._folder, *run_folder.list_windows(self._folder)):
            for facts in run_folder.read_rank_records(window):
                names = [
                    *(Path(name).name for name in facts.get("files") or ()),
                    f"rank_{facts['rank']}.json",
                ]
                try:
                    for path in (window / name for name in names):
                        if self._stop.is_set():
                            return
                        transfers.retry(lambda path=path: self._upload(path))  # type: ignore[misc]
                except (EtloomError, OSError):
                    continue

    def finish(self) -> list[str]:
        """Upload the remaining files, run.json of each window last; return a list: empty, or a message on a failure.

        The first file that fails in all tries ends the upload, so that an unreachable store costs a bounded time.
        """
        files = [path for path in self._folder.rglob("*") if path.is_file() and self._is_visible(path)]
        stages: Sequence[list[Path]] = (
            [path for path in files if path.suffix != ".json" or ".json" in path.stem],
            [path for path in files if path.suffix == ".json" and path.name not in _LATE_NAMES],
            sorted((path for path in files if path.name in _LATE_NAMES), key=lambda path: -len(path.parts)),
        )
        try:
            for stage in stages:
                transfers.run_parallel(self._upload, stage)
        except (EtloomError, OSError, KeyboardInterrupt) as error:
            missing = [path for path in files if self._uploaded.get(path) != _state(path)]
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            return [
                f"{count_noun(len(missing), 'file')} could not be uploaded to {self._url} ({reason}); the run is "
                f"in {self._folder}"
            ]
        return []

    def _is_visible(self, path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(self._folder).parts)

    def _upload(self, path: Path) -> None:
        state = _state(path)
        if state is None or self._uploaded.get(path) == state:  # removed, as an old window, or uploaded
            return
        key = f"{self._key}/{path.relative_to(self._folder).as_posix()}"
        transfers.upload_file(self._store, path, key)
        self._uploaded[path] = state


class _Background:
    """A context manager that runs the upload thread during its block; at the end it waits for the current file."""

    def __init__(self, thread: threading.Thread, stop: threading.Event) -> None:
        self._thread, self._stop = thread, stop

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
