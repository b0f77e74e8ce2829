"""Maintains local copies of runs in object stores: selects the objects to copy, updates and removes the copies.

A folder of a URL is copied to ``CACHE/remote/DIGEST/NAME``, and every verb reads it there like any other folder. Each
time it is opened it is listed again, and objects that changed (size, time, ETag) are copied again. Of a stored run only
the manifest and the summaries are copied; its tables follow on access (`ensure_local`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from etloom.core.errors import EtloomError, ReadError, warn
from etloom.core.paths import cache_folder, create_cache_folder
from etloom.core.text import count_noun
from etloom.core.urls import forget_origin, register_origin
from etloom.formats.io import transfers
from etloom.formats.io.object_store import ObjectStore, RemoteFile, connect, split_url

LIMIT_BYTES = 50 * 10**9
_NOT_TRACES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npy", ".npz", ".h5", ".tar", ".nsys-rep")
"""Endings of large files next to traces, such as checkpoints, that no reader reads."""
_CAPTURES = "capture_traces"
_MAX_FOLDERS = 256
"""Folders of a run that are searched for traces which are folders themselves."""
_RANK_TABLE = re.compile(r"(?:run=[^/]+/)?rank=\d+/[^/]+\.parquet")
_MANIFESTS = ("meta.json", "run.json", "store.json")
"""Files that make a folder complete: they are written last."""
_MAX_NAME = 255


@dataclass
class _Mirror:
    """The local copy of a folder in an object store: the store's connection, the folder's key, and the local folder."""

    store: ObjectStore
    key: str
    root: Path

    def path_of(self, file: RemoteFile) -> Path | None:
        """Return the local path for the copy of an object; None if its key cannot be a path in the folder."""
        relative = file.key.removeprefix(self.key).lstrip("/")
        parts = relative.split("/")
        is_safe = all(
            part not in ("", ".", "..") and len(os.fsencode(part)) <= _MAX_NAME and part.isprintable()
            for part in parts
        )
        return self.root.joinpath(*parts) if is_safe and "\\" not in relative else None


@dataclass
class _Selection:
    """The objects to copy from a remote folder, its subfolders, and names of skipped files, which cannot be traces."""

    files: list[RemoteFile] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    is_lazy: bool = False


_mirrors: dict[Path, _Mirror] = {}
_guard = threading.Lock()


def fetch(url: str, *, complete: bool = False) -> Path:
    """Copy a remote file or folder to the local cache and return its path; tables of stored runs are copied on access.

    Args:
        url: a clean URL.
        complete: also copy the tables of stored runs.

    Raises:
        ReadError: it does not exist or cannot be read.
        LimitError: the disk has not enough space.
        EtloomError: a package is missing, or the cache cannot be written.
    """
    store, (base, key) = connect(url), split_url(url)
    file = transfers.retry(lambda: store.find(key))
    if file is not None:
        folder, name = key.rpartition("/")[::2]
        mirror = _open_mirror(store, base, folder)
        selection = _select_siblings(store, file)
    else:
        mirror, name = _open_mirror(store, base, key), ""
        selection = _select_folder(store, key, complete)
        if not (selection.files or selection.folders or selection.skipped):
            check_bucket(store, url, key)
            raise ReadError("no such file or folder", where=url, remedy="check the URL")
    _update(mirror, selection, removes_others=file is None)
    prune_copies(_limit_bytes())
    if selection.skipped:
        names = ", ".join(selection.skipped[:3]) + (", ..." if len(selection.skipped) > 3 else "")
        warn(
            f"{url}: {count_noun(len(selection.skipped), 'file')} not copied, which cannot be traces: {names}"
        )
    return mirror.root / name if name else mirror.root


def ensure_local(*paths: Path) -> None:
    """Download files of opened remote runs that have no local copy yet, by their local paths. Raises ReadError."""
    if not _mirrors:
        return
    missing: dict[Path, list[str]] = {}
    for path in paths:
        if not path.exists():
            root = next((root for root in _mirrors if path.is_relative_to(root)), None)
            if root is not None:
                key = f"{_mirrors[root].key}/{path.relative_to(root).as_posix()}"
                missing.setdefault(root, []).append(key)
    for root, keys in missing.items():
        mirror = _mirrors[root]
        files = [file for file in transfers.run_parallel(mirror.store.find, keys) if file is not None]
        transfers.download(mirror.store, _targets(mirror, files))


def _open_mirror(store: ObjectStore, base: str, key: str) -> _Mirror:
    """Return the local copy of a remote folder, locked so that no process removes it while this one runs."""
    url = f"{base}{key}"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    digest = hashlib.sha256(f"{endpoint} {url}".encode()).hexdigest()[:32]
    root = cache_folder().absolute() / "remote" / digest / (PurePosixPath(key).name or "root")
    with _guard:
        mirror = _mirrors.get(root)
        if mirror is None:
            try:
                create_cache_folder()
                root.mkdir(parents=True, exist_ok=True, mode=0o700)
                descriptor = os.open(
                    root.parent / ".lock", os.O_RDWR | os.O_CREAT
                )  # open until the process ends
            except OSError as error:
                raise EtloomError(
                    f"cannot be written: {error.strerror}",
                    where=root.parent,
                    remedy="set ETLOOM_CACHE to a folder that can be written",
                ) from None
            _lock(descriptor, exclusive=False)
            mirror = _mirrors[root] = _Mirror(store, key, root)
            register_origin(root, url)
        mirror.store = store
        with contextlib.suppress(OSError):
            os.utime(root.parent)  # the time of use
        return mirror


def _select_siblings(store: ObjectStore, file: RemoteFile) -> _Selection:
    """Select a file, the files next to it whose names are equal up to the first dot, and folder ``capture_traces``."""
    folder, name = file.key.rpartition("/")[::2]
    stem = name.partition(".")[0] + "."
    if name == "meta.json":
        return _select_folder(store, folder, False)
    files, folders = transfers.retry(lambda: store.list_folder(folder))
    file = next((other for other in files if other.key == file.key), file)
    near = [other for other in files if _name(other.key).startswith(stem) and other.key != file.key]
    captures = [key for key in folders if _name(key) == _CAPTURES]
    for key in captures:
        near += transfers.retry(lambda key=key: store.list_tree(key))  # type: ignore[misc]
    return _Selection([file, *(other for other in near if not _is_skipped(other))])


def _select_folder(store: ObjectStore, key: str, complete: bool) -> _Selection:
    """Select the objects of a folder to copy, by its type: a store, a stored run, a saved run, or traces."""
    files, folders = transfers.retry(lambda: store.list_folder(key))
    files = [file for file in files if not _name(file.key).startswith(".")]
    folders = [folder for folder in folders if not _name(folder).startswith(".")]
    names = {_name(file.key) for file in files}
    is_run = "meta.json" in names and "summaries" in map(_name, folders)
    if "store.json" in names and not complete:
        runs = [folder for folder in folders if _name(folder).startswith("run=")]
        parts = transfers.run_parallel(lambda run: _list_stored_run(store, run), runs)
        return _Selection([*files, *(file for part in parts for file in part)], is_lazy=True)
    if is_run and not complete:
        return _Selection(_list_stored_run(store, key), is_lazy=True)
    if names & {"store.json", "meta.json"}:
        tree = transfers.retry(lambda: store.list_tree(key))
        return _Selection([file for file in tree if "/." not in file.key.removeprefix(key)])
    parts = transfers.run_parallel(lambda folder: _list_trace_folder(store, folder), folders[:_MAX_FOLDERS])
    return _Selection(
        [*(file for file in files if not _is_skipped(file)), *(file for part in parts for file in part)],
        folders,
        [_name(file.key) for file in files if _is_skipped(file)],
    )


def _list_stored_run(store: ObjectStore, key: str) -> list[RemoteFile]:
    """Return the meta.json and the summaries of a stored run; nothing if it has no meta.json (is incomplete)."""
    # Listed, because a request for a single object states its time in whole seconds.
    manifest = [file for file in store.list_folder(key)[0] if _name(file.key) == "meta.json"]
    return [*store.list_tree(f"{key}/summaries"), *manifest] if manifest else []


def _list_trace_folder(store: ObjectStore, key: str) -> list[RemoteFile]:
    """Return the files of a subfolder of a run if it is a trace or holds captures of device graphs; else none."""
    files, _ = store.list_folder(key)
    names = [_name(file.key) for file in files]
    if "meta.json" in names:
        return store.list_tree(key)
    is_table_folder = bool(names) and all(name.endswith(".parquet") for name in names)
    return files if is_table_folder or _name(key) == _CAPTURES else []


def _name(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]


def _is_skipped(file: RemoteFile) -> bool:
    return file.key.endswith(_NOT_TRACES)


def check_bucket(store: ObjectStore, url: str, key: str) -> None:
    """Raise ReadError if the bucket of a URL does not exist."""
    if not transfers.retry(lambda: store.has_bucket(key)):
        raise ReadError("no such bucket", where=url, remedy="check the name")


def _targets(mirror: _Mirror, files: Iterable[RemoteFile]) -> list[tuple[RemoteFile, Path]]:
    """Pair objects with their local paths, with meta.json, run.json and store.json last; leave out invalid paths."""
    targets = [(file, path) for file in files if (path := mirror.path_of(file)) is not None]
    return sorted(targets, key=lambda item: item[1].name in _MANIFESTS)


def _update(mirror: _Mirror, selection: _Selection, removes_others: bool) -> None:
    """Download selected objects that are new or changed; optionally delete copies of objects that no longer exist."""
    targets = _targets(mirror, selection.files)
    changed = [(file, path) for file, path in targets if not transfers.is_current(path, file)]
    for _, path in changed:
        if path.name == "meta.json" and selection.is_lazy:  # the run was replaced, so its tables are others
            for folder in path.parent.glob("rank=*"):
                shutil.rmtree(folder, ignore_errors=True)
    transfers.download(mirror.store, changed)
    if not removes_others:
        return
    for key in selection.folders:
        if (copy := mirror.path_of(RemoteFile(key, 0, 0))) is not None:
            copy.mkdir(parents=True, exist_ok=True)
    expected = {path for _, path in targets}
    for path in mirror.root.rglob("*"):
        relative = path.relative_to(mirror.root).as_posix()
        is_table = selection.is_lazy and _RANK_TABLE.fullmatch(relative)
        if path.is_file() and path not in expected and not is_table and not path.name.startswith("."):
            path.unlink(missing_ok=True)


def _limit_bytes() -> int:
    try:
        return int(os.environ.get("ETLOOM_REMOTE_CACHE_BYTES", LIMIT_BYTES))
    except ValueError:
        return LIMIT_BYTES


def list_copies() -> list[tuple[float, int, Path]]:
    """List (time of last use, bytes, folder) of each local copy of a remote run."""
    copies = []
    with contextlib.suppress(OSError):  # there is none
        for folder in (cache_folder().absolute() / "remote").iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                copies.append((folder.stat().st_mtime, size, folder))
    return copies


def prune_copies(limit: int) -> None:
    """Delete the least recently used local copies until the rest fits ``limit`` bytes; skip copies in use."""
    copies = list_copies()
    total = sum(size for _, size, _ in copies)
    for _, size, unit in sorted(copies):
        if total <= limit:
            return
        with contextlib.suppress(OSError), (unit / ".lock").open("wb") as lock:
            if _lock(lock.fileno(), exclusive=True):
                shutil.rmtree(unit, ignore_errors=True)
                total -= size


def _lock(descriptor: int, exclusive: bool) -> bool:
    """Lock an open file, shared or exclusive, until it is closed; return False if another lock prevents it."""
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def staged(url: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a local path to write to; if the block ends without an error, upload the written files to the URL.

    The files appear under the URL's folder, those that make a folder complete last.

    Args:
        url: a clean URL.
        overwrite: also write to a folder that etloom did not export.

    Raises:
        ReadError: the store cannot be reached or refuses the upload.
        EtloomError: the URL is a folder that etloom did not export.
    """
    store, (base, key) = connect(url), split_url(url)
    files, folders = transfers.retry(lambda: store.list_folder(key))
    if (files or folders) and not overwrite and not any(_name(file.key) == "meta.json" for file in files):
        raise EtloomError("is a folder that contains other files", where=url, remedy="choose another URL")
    if not (files or folders):
        check_bucket(store, url, key)
    parent, name = key.rpartition("/")[::2]
    if not parent or not name:
        raise EtloomError("is not a file or folder in a bucket", where=url, remedy="add a name to the URL")
    with tempfile.TemporaryDirectory(prefix="etloom-upload-") as folder:
        register_origin(Path(folder), f"{base}{parent}")
        try:
            yield Path(folder) / name
            upload_folder(Path(folder), f"{base}{parent}")
        finally:
            forget_origin(Path(folder))


def fetch_store(url: str) -> Path:
    """Copy a remote store, to add runs to it, and return the path of the copy; the store need not exist yet.

    Runs that were added here but not uploaded are kept, so that an addition that was interrupted goes on.
    """
    store, (base, key) = connect(url), split_url(url)
    files, folders = transfers.retry(lambda: store.list_folder(key))
    if (files or folders) and not any(_name(file.key) == "store.json" for file in files):
        raise EtloomError("exists and is not a store", where=url, remedy="choose a new or an empty folder")
    if not (files or folders):
        check_bucket(store, url, key)
    mirror = _open_mirror(store, base, key)
    _update(mirror, _select_folder(store, key, complete=False), removes_others=False)
    return mirror.root


def upload_runs(root: Path, url: str, runs: Sequence[Path]) -> None:
    """Upload the runs of a store's local copy that are missing or different in the remote store."""
    store, (_, key) = connect(url), split_url(url)
    if transfers.retry(lambda: store.find(f"{key}/store.json")) is None:
        upload_folder(root, url, [root / "store.json"])
    for run in runs:
        manifest = run / "meta.json"
        if _find_listed(store, f"{key}/{run.name}/meta.json", manifest) is None:
            upload_folder(root, url, [run])
            listed = _find_listed(store, f"{key}/{run.name}/meta.json")
            if listed is not None:
                os.utime(manifest, ns=(listed.stamp_ns, listed.stamp_ns))


def _find_listed(store: ObjectStore, key: str, local: Path | None = None) -> RemoteFile | None:
    """Find an object in the listing of its folder; None if absent, or if ``local`` is not a current copy of it."""
    files, _ = transfers.retry(lambda: store.list_folder(key.rpartition("/")[0]))
    file = next((file for file in files if file.key == key), None)
    return file if file is None or local is None or transfers.is_current(local, file) else None


def upload_folder(folder: Path, url: str, only: Sequence[Path] | None = None) -> None:
    """Upload the files of a local folder, or only some of them, to the folder at a URL.

    A reader never sees a part of a run: the manifests of the folders that are written are deleted first and written
    last, and objects of an earlier version of such a folder are removed.

    Args:
        folder: the folder.
        url: the folder of the URL.
        only: files and folders in it that are uploaded; default: all.
    """
    store, (_, key) = connect(url), split_url(url)
    paths = sorted(
        path
        for top in (only if only is not None else [folder])
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file()
    )
    files = [(path, f"{key}/{path.relative_to(folder).as_posix()}") for path in paths]
    manifests = [item for item in files if item[0].name in _MANIFESTS]
    manifests.sort(key=lambda item: -len(item[0].parts))
    runs = [item for item in manifests if item[0].name == "meta.json" and not _is_part(item[0], folder)]
    for _, manifest in runs:
        transfers.retry(lambda manifest=manifest: store.delete(manifest))  # type: ignore[misc]
    written = {name for _, name in files}
    for _, manifest in runs:
        tree = transfers.retry(lambda manifest=manifest: store.list_tree(manifest.rpartition("/")[0]))  # type: ignore[misc]
        transfers.run_parallel(store.delete, [file.key for file in tree if file.key not in written])
    transfers.upload(store, [item for item in files if item not in set(manifests)])
    for item in manifests:
        transfers.upload(store, [item])


def _is_part(manifest: Path, folder: Path) -> bool:
    """Return whether a meta.json is that of a single rank of a run: a folder above it has a meta.json, too."""
    parents = list(manifest.parent.relative_to(folder).parents)
    return any((folder / parent / "meta.json").is_file() for parent in parents if manifest.parent != folder)
