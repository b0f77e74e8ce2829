"""Watches what this process opens, starts and connects to, by Python's audit events.

Files that native code opens (simdjson, polars, pyarrow) have no such events; their paths are those that Python passes on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.paths import ROOT

_READABLE = ("/proc/", "/sys/", "/dev/", "/usr/", "/lib", "/etc/")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
_CONNECTIONS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "shutil.rmtree",
)
_watching: list[tuple[tuple[str, ...], list[str]]] = []
_installed: list[bool] = []


@contextmanager
def watch(folder: Path) -> Iterator[list[str]]:
    """Yield a list that receives accesses to anything but the folder, temporary files, and the program itself."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_note)
    scratch = (str(folder), os.environ.get("ETLOOM_CACHE", str(folder)), f"{tempfile.gettempdir()}/etloom-")
    program = (sys.prefix, sys.base_prefix, str(ROOT), *filter(os.path.isabs, sys.path))
    accesses: list[str] = []
    _watching.append(((*scratch, *program), accesses))
    try:
        yield accesses
    finally:
        _watching.pop()


def _note(event: str, details: tuple[Any, ...]) -> None:
    if not _watching:
        return
    allowed, accesses = _watching[-1]
    if event == "subprocess.Popen" and details[0] == sys.executable:
        return  # queries and predictions with limits run in a Python of their own
    if event in _STARTS or event in _CONNECTIONS:
        accesses.append(f"{event}: {details[0] if details else ''}"[:200])
    elif event == "open" and isinstance(details[0], (str, bytes)):
        path = _absolute(details[0])
        flags = details[2] if isinstance(details[2], int) else 0
        is_read = flags & (os.O_WRONLY | os.O_RDWR) == 0
        if not path.startswith((*allowed, *_READABLE) if is_read else (*allowed, "/dev/")):
            accesses.append(f"open to {'read' if is_read else 'write'}: {path}"[:200])
    elif event in _CHANGES and isinstance(details[0], (str, bytes)) and details[-1] == -1:
        path = _absolute(details[0])
        accesses += [] if path.startswith(allowed) else [f"{event}: {path}"[:200]]


def _absolute(path: str | bytes) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100
