"""Packs the traces that torch wrote: checks that they are complete, repairs their JSON, compresses them.

Works on blocks of complete lines; reading, compressing and writing a block does not hold the GIL, so that the job can
train meanwhile. Single lines are processed only where something must be repaired.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from .source_lines import FRAMES

try:
    from isal import igzip as _igzip
except ImportError:
    _igzip = None  # type: ignore[assignment]

_NODE_LINE = re.compile(rb'^(\s*"id": \d+, "name": )"(.*)"(, "ctrl_deps": \d+,\s*)$', re.DOTALL)
_NAME_START = re.compile(rb'^\s*"id": \d+, "name": "')
_VALID_NAME_LINE = re.compile(rb'^\s*"id": \d+, "name": "[ !#-\[\]-~]*", "ctrl_deps": \d+,\s*$', re.MULTILINE)
_NODE_START = re.compile(rb'^\s*"id": \d+, "name": "', re.MULTILINE)
_BLOCK_BYTES = 1 << 20
_END_BYTES = 5000


def pack_execution_trace(path: Path, unfinished_step: int | None) -> None:
    """Check that `et.json` is complete, escape the node names in it, and compress it to `et.json.gz`.

    Raises:
        OSError: The file is truncated: torch does not report a full disk.
    """
    _require_end(path, b'"finish_ts"')
    with path.open("rb") as source:
        _compress(_rename_unfinished_step(_escape_names(_read_blocks(source)), unfinished_step), path)


def pack_kineto(path: Path, unfinished_step: int | None, frames: set[bytes] | None = None) -> int:
    """Check that `kineto.json` is complete, compress it to `kineto.json.gz`, and return its number of operators.

    ``frames`` receives the names of Python calls.

    Raises:
        OSError: The file is truncated.
    """
    _require_end(path, b'"traceName"')
    operators = 0

    def count_operators(blocks: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal operators
        for block in blocks:
            operators += block.count(b'"cat": "cpu_op"')
            if frames is not None:
                frames.update(FRAMES.findall(block))
            yield block

    with path.open("rb") as source:
        _compress(_rename_unfinished_step(count_operators(_read_blocks(source)), unfinished_step), path)
    return operators


def _require_end(path: Path, key: bytes) -> None:
    end = b""
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END_BYTES))
            end = file.read().rstrip()
    if key not in end or not end.endswith(b"}"):
        disk = os.statvfs(path.parent)
        free_mib = disk.f_bavail * disk.f_frsize >> 20
        raise OSError(f"torch wrote an incomplete {path.name} ({free_mib} MiB free on the disk)")


def _read_blocks(source: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's contents in blocks of about 1 MiB, each of complete lines."""
    while block := source.read(_BLOCK_BYTES):
        yield block + source.readline()


def _escape_names(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Escape quotes, backslashes and newlines in node names, so that the JSON is valid; torch does not escape them."""
    pending = b""
    for block in blocks:
        if not pending and len(_NODE_START.findall(block)) == len(_VALID_NAME_LINE.findall(block)):
            yield block
            continue
        for line in block.splitlines(keepends=True):
            if not (pending or _NAME_START.match(line)):
                yield line
                continue
            pending += line
            match = _NODE_LINE.match(pending)
            if match is None:
                continue  # the name contains a newline
            pending = b""
            name = match[2].decode("utf-8", "replace")
            if name.isprintable() and '"' not in name and "\\" not in name:
                yield match[0]
            else:
                yield b"%s%s%s" % (match[1], json.dumps(name, ensure_ascii=False).encode(), match[3])
    yield pending


def _rename_unfinished_step(blocks: Iterable[bytes], unfinished_step: int | None) -> Iterable[bytes]:
    """Rename the step annotation still open when the window closed, so that it does not count as complete."""
    if unfinished_step is None:
        return blocks
    old = f'"ProfilerStep#{unfinished_step}"'.encode()
    new = f'"etloom:unfinished step {unfinished_step}"'.encode()
    return (block.replace(old, new) for block in blocks)


def _compress(blocks: Iterable[bytes], path: Path) -> None:
    """Write the blocks to `path`.gz and delete `path`, so that a small disk can hold both traces."""
    with _gzip_writer(f"{path}.gz") as packed, io.BufferedWriter(cast(Any, packed), _BLOCK_BYTES) as buffer:
        buffer.writelines(blocks)
    path.unlink()


def _gzip_writer(path: str) -> IO[bytes]:
    if _igzip is None:
        return cast("IO[bytes]", gzip.open(path, "wb", 3))
    return cast("IO[bytes]", _igzip.open(path, "wb", 2))  # type: ignore[no-untyped-call]


# Writes the traces of a window in the background, one window at a time.

_TIMEOUT_S = 300.0


class BackgroundWriter:
    """Writes traces in at most one thread, so memory holds at most one finished window next to the open window."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, in a background thread; if Python is exiting, run it in this thread."""
        thread = threading.Thread(target=work, name="etloom-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            work()
        else:
            self._thread = thread

    def wait(self, timeout_s: float = _TIMEOUT_S) -> bool:
        """Wait until the background thread has written its traces; return False after `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def reset_after_fork(self) -> None:
        """Forget the background thread, which does not exist in a forked child."""
        self._thread = None
