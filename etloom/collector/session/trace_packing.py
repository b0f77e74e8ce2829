"""From what torch wrote to what we keep: checked to be whole, its broken JSON repaired, compressed.

In blocks of whole lines, which Python's lock is not held for as they are read, compressed and written; line by line
only where something is to be repaired. The job trains beside.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

_NODE_LINE = re.compile(rb'^(\s*"id": \d+, "name": )"(.*)"(, "ctrl_deps": \d+,\s*)$', re.DOTALL)
_NAME_START = re.compile(rb'^\s*"id": \d+, "name": "')
_VALID_NAME_LINE = re.compile(rb'^\s*"id": \d+, "name": "[ !#-\[\]-~]*", "ctrl_deps": \d+,\s*$', re.MULTILINE)
_NODE_START = re.compile(rb'^\s*"id": \d+, "name": "', re.MULTILINE)
_BLOCK_BYTES = 1 << 20


def pack_execution_trace(path: Path, unfinished: int | None) -> None:
    """`et.json` to `et.json.gz`. Raises OSError where the file is cut: torch reports no full disk."""
    _require_end(path, b'"finish_ts"')
    with path.open("rb") as source:
        _compress(_rename_unfinished_step(_escape_names(_read_blocks(source)), unfinished), path)


def pack_kineto(path: Path, unfinished: int | None) -> int:
    """`kineto.json` to `kineto.json.gz`; how many operators it holds. Raises OSError where the file is cut."""
    _require_end(path, b'"traceName"')
    operators = 0

    def counted(blocks: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal operators
        for block in blocks:
            operators += block.count(b'"cat": "cpu_op"')
            yield block

    with path.open("rb") as source:
        _compress(_rename_unfinished_step(counted(_read_blocks(source)), unfinished), path)
    return operators


def _require_end(path: Path, mark: bytes) -> None:
    end = b""
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 5000))
            end = file.read().rstrip()
    if mark not in end or not end.endswith(b"}"):
        free = os.statvfs(path.parent)
        raise OSError(
            f"torch left {path.name} incomplete ({free.f_bavail * free.f_frsize >> 20} MiB free on the disk)"
        )


def _read_blocks(source: IO[bytes]) -> Iterator[bytes]:
    """Of whole lines."""
    while block := source.read(_BLOCK_BYTES):
        yield block + source.readline()


def _escape_names(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """torch does not escape the name of a node: a quote, a backslash or a newline in it breaks the file."""
    held = b""
    for block in blocks:
        if not held and len(_NODE_START.findall(block)) == len(_VALID_NAME_LINE.findall(block)):
            yield block
            continue
        for line in block.splitlines(keepends=True):
            if held or _NAME_START.match(line):
                held += line
                match = _NODE_LINE.match(held)
                if match is None:
                    continue  # the name holds a newline
                held = b""
                name = match[2].decode("utf-8", "replace")
                if name.isprintable() and '"' not in name and "\\" not in name:
                    yield match[0]
                else:
                    yield b"%s%s%s" % (match[1], json.dumps(name, ensure_ascii=False).encode(), match[3])
            else:
                yield line
    yield held


def _rename_unfinished_step(blocks: Iterable[bytes], unfinished: int | None) -> Iterable[bytes]:
    """The step that was open when the window closed must not pass for a whole one."""
    if unfinished is None:
        return blocks
    old, new = f'"ProfilerStep#{unfinished}"'.encode(), f'"etloom:unfinished step {unfinished}"'.encode()
    return (block.replace(old, new) for block in blocks)


def _compress(blocks: Iterable[bytes], path: Path) -> None:
    """Beside `path`, with .gz added; the plain file goes, so that a small disk holds both traces."""
    with _gzip_writer(f"{path}.gz") as packed, io.BufferedWriter(cast(Any, packed), _BLOCK_BYTES) as buffer:
        buffer.writelines(blocks)
    path.unlink()


def _gzip_writer(path: str) -> IO[bytes]:
    try:
        from isal import igzip
    except ImportError:
        return cast("IO[bytes]", gzip.open(path, "wb", 3))
    return cast("IO[bytes]", igzip.open(path, "wb", 2))  # type: ignore[no-untyped-call]
