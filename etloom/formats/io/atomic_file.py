"""Writes files atomically: a file appears under its final name only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from isal import igzip


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file to write (gzip if ``path`` ends in .gz), renamed to ``path`` if the block succeeds.

    Of several processes that write the same path, the last one wins; each writes a file of its own until then.
    """
    with replacing(path) as partial:
        is_compressed = path.name.endswith(".gz")
        with igzip.open(partial, "wb") if is_compressed else partial.open("wb") as file:  # type: ignore[no-untyped-call]
            yield file


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file with text (UTF-8) or bytes, as it is; on failure an earlier file stays."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in place of ``path``, which it becomes if the block succeeds.

    A pipe or device is written directly, and of a link the file that it names is replaced.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve() if path.is_symlink() else path
    partial = path.with_name(f".{path.name[:200]}.{os.urandom(6).hex()}.partial")
    try:
        yield partial
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
