"""Caches the output of commands, and prints it again if the files of the run have not changed.

A verb prints again what it printed last time if the files of the run, the options, the environment, the terminal and
etloom's own files are the same. Nothing of the run is opened then, and neither polars nor numpy is imported. An output
is an entry of the cache folder like the tables of a rank, and is removed like them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.cli.error_handling import print_message, recording_messages
from etloom.core.errors import EtloomError
from etloom.core.paths import cache_folder, create_cache_folder
from etloom.core.urls import clean_url

if TYPE_CHECKING:
    from etloom.cli.run_arguments import RunOptions

_PACKAGE = Path(__file__).resolve().parents[1]
_MAX_FILES = 20_000
_MAX_DEPTH = 4
_SETTLED_NS = 2 * 10**9
"""A file that changed within this time may change again without a new time stamp: nothing is kept."""
_PLUGIN_GROUPS = ("etloom.readers", "etloom.analyses", "etloom.exports", "etloom.names")
_TERMINAL = ("COLUMNS", "LINES", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
_CONVERTED_BY_OTHERS = ".nsys-rep"
"""Ending of files that an installed program converts, whose version is not known here."""

FileState = tuple[str, int, int, int]
"""Path, size, times of modification and change."""


@dataclass(frozen=True)
class Output:
    """The output of a command: text on stdout, messages on stderr before it, and the HTML page that it writes."""

    text: str
    page: str | None = None
    messages: tuple[str, ...] = field(default=())


def reuse_output(
    verb: str,
    path: Path,
    run: RunOptions,
    compute: Callable[[], Output],
    show: Callable[[Output], None],
    *,
    format: str = "",
    out: Path | None = None,
) -> None:
    """Show the cached output of a command if nothing has changed since; else compute, show and cache the output.

    Args:
        verb: the name of the verb.
        path: the folder or file that it opens.
        run: the options of opening it.
        compute: computes and shows the output.
        show: shows an output of an earlier run, whose messages have been printed.
        format: the format of the output.
        out: the file that the verb writes, whose state does not matter; None for stdout.
    """
    is_reusable = run.cache and run.engine == "local" and clean_url(path) is None
    code = _list_code_states() if is_reusable else None
    parts = (verb, path, run, format, out, code)
    key = _compute_key(*parts)
    if key is None:
        _compute_output(compute, path, run)
        return
    if (output := _load(cache_folder() / key)) is not None:
        for message in output.messages:
            print_message(message)
        show(output)
        return
    with recording_messages() as messages:
        output = _compute_output(compute, path, run)
    if key == _compute_key(*parts) and not _has_plugins():
        _store(cache_folder() / key, replace(output, messages=tuple(messages)))


def _compute_output(compute: Callable[[], Output], path: Path, run: RunOptions) -> Output:
    """Call ``compute``, for a small run in a thread of polars: to hand each query to one takes longer than the query.

    Ctrl-C and SIGTERM take effect when it has ended, after a second or two.
    """
    from etloom.cli.run_arguments import limit_threads

    limit_threads(run)
    # The stacks of polars' threads are large enough if the command line has set their size before polars was imported.
    has_stack = "polars" not in sys.modules and "RUST_MIN_STACK" in os.environ
    if not (has_stack and run.engine == "local" and _is_small(path)):
        return compute()
    import polars as pl

    from etloom.core.machine import run_in_query_thread

    # A plugin may wait for threads of its own, whose queries need another thread of polars.
    return run_in_query_thread(compute) if pl.thread_pool_size() > 1 else compute()


def _is_small(path: Path) -> bool:
    """Return whether a run is read, linked and described in about a second."""
    from etloom import formats, loading
    from etloom.loading.file_reading import estimate_text_bytes
    from etloom.loading.plan import MIN_TEXT_BYTES_TO_CACHE, PARSED_NATIVELY

    try:
        files = list(path.iterdir()) if path.is_dir() else [path]
        if len(files) >= loading.MIN_REPORTED_RANKS or not all(file.is_file() for file in files):
            return False
        if sum(map(estimate_text_bytes, files)) >= MIN_TEXT_BYTES_TO_CACHE:
            return False
        return all(formats.detect_format(file, "kineto") in (*PARSED_NATIVELY, None) for file in files)
    except (OSError, EtloomError):
        return False  # which is reported when it is opened


def _compute_key(
    verb: str, path: Path, run: RunOptions, format: str, out: Path | None, code: list[Any] | None
) -> str | None:
    """Return the cache key of a command's output, a hash of all its inputs; None if their changes could be missed.

    ``code``: see `_list_code_states`.
    """
    if code is None:
        return None
    try:
        states = [*_list_states(path, out), *(_read_state(file) for file in run.names)]
    except OSError:
        return None
    newest = max((max(state[2:]) for state in states), default=0)
    if newest > time.time_ns() - _SETTLED_NS or any(
        state[0].endswith(_CONVERTED_BY_OTHERS) for state in states
    ):
        return None
    options = {name: str(value) for name, value in asdict(run).items() if name not in ("jobs", "cache")}
    terminal = (out is None and sys.stdout.isatty(), sys.stdout.encoding, tuple(shutil.get_terminal_size()))
    variables = [
        (name, value)
        for name, value in sorted(os.environ.items())
        if name in _TERMINAL or (name.startswith("ETLOOM_") and not name.startswith("ETLOOM_CACHE"))
    ]
    facts = [verb, str(path), os.getcwd(), format, options, terminal, variables]  # noqa: PTH109
    text = json.dumps([facts, states, code, sys.version])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _list_states(path: Path, out: Path | None) -> list[FileState]:
    """Return path, size and times of each file from which the run at ``path`` may be read, except the file ``out``.

    Raises:
        OSError: a file cannot be read, there are too many, or a link leads to a folder.
    """
    written = None if out is None else str(out.resolve())
    states = []
    if path.name == "meta.json" and not path.is_dir():  # of a folder of tables, which is what is read
        path = path.parent
    if path.is_dir():
        places = [str(path.resolve())]
    else:  # also the files that belong to it, and traces of captures next to it
        path = path.resolve(strict=True)
        states = [_read_state(file) for file in path.parent.iterdir() if file.name.startswith(path.name)]
        places = [str(path.parent / "capture_traces")] if (path.parent / "capture_traces").is_dir() else []
    for depth in range(_MAX_DEPTH + 1):
        inner: list[str] = []
        for place in places:
            is_stored = os.path.basename(place).startswith("run=")  # noqa: PTH119
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if is_stored and entry.name.startswith("rank="):
                            status = entry.stat()  # of a store, whose files are written once
                            states.append((entry.path, 0, status.st_mtime_ns, status.st_ctime_ns))
                        else:
                            inner.append(entry.path)
                    elif entry.is_dir():
                        raise OSError(
                            "the folder contains a link to a folder, which is not checked for changes"
                        )
                    elif entry.path != written:
                        status = entry.stat()
                        state = (entry.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                        states.append(state)
            if len(states) + len(inner) > _MAX_FILES or (inner and depth == _MAX_DEPTH):
                raise OSError("the folder contains too many files to check for changes")
        states += [(folder, 0, 0, 0) for folder in inner]
        places = inner
    return sorted(states)


def _read_state(file: Path | str) -> FileState:
    status = os.stat(file)  # noqa: PTH116
    return str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _find_time(place: str) -> int:
    """Return the modification time (ns) of a folder of sys.path, to detect installed packages; 0 if it is missing."""
    try:
        return os.stat(place).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


def _list_code_states() -> list[Any] | None:
    """Return the states of the folders of sys.path and of all files of etloom; None if a file cannot be read."""
    states: list[Any] = [(place, _find_time(place)) for place in sys.path[1:]]
    try:
        for folder, folders, files in os.walk(_PACKAGE):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            states += [_read_state(f"{folder}/{file}") for file in sorted(files)]
    except OSError:
        return None
    return states


def _has_plugins() -> bool:
    """Return whether plugins of other packages are installed; the cache does not detect changes of their code."""
    from etloom.core.registry import list_entry_points

    return any(len(list_entry_points(group)) for group in _PLUGIN_GROUPS)


def _load(entry: Path) -> Output | None:
    """Read an output from its folder in the cache; None if it is missing or damaged."""
    try:
        facts = json.loads((entry / "meta.json").read_bytes())
        page = (entry / "page.html").read_text(encoding="utf-8") if facts["has_page"] else None
        os.utime(entry / "meta.json")  # the time of use, for the order of removal
        return Output(facts["text"], page, tuple(facts["messages"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(entry: Path, output: Output) -> None:
    """Write an output to its folder in the cache; do nothing if the cache cannot be written."""
    from etloom.loading.cache import register_entry

    facts: dict[str, Any] = {
        "text": output.text,
        "messages": output.messages,
        "has_page": output.page is not None,
    }
    with contextlib.suppress(OSError, UnicodeEncodeError):
        create_cache_folder()
        with tempfile.TemporaryDirectory(prefix=".output-", dir=entry.parent) as temporary:
            part = Path(temporary, entry.name)
            part.mkdir()
            if output.page is not None:
                (part / "page.html").write_text(output.page, encoding="utf-8")
            (part / "meta.json").write_text(json.dumps(facts), encoding="utf-8")
            shutil.rmtree(entry, ignore_errors=True)  # damaged, or just written by another process
            part.rename(entry)
        register_entry(entry)
