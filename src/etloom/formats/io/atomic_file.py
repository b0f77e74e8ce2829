"""Writes files atomically: a file appears under its final name only when it is complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import polars as pl
from isal import igzip

_LOST_NUMBER = "Invalid thrift: transport error"
"""Text of the error of polars that cannot write the metadata of a Parquet file."""


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
        with naming_output(path):
            yield partial
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming_output(path: Path) -> Iterator[None]:
    """Let a failed write in the block, by Python or polars, be an OSError that names ``path``, not a temporary file."""
    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        if (problem := find_write_problem(error)) is None:
            raise
        raise type(problem)(problem.errno, problem.strerror, str(path)) from error


def find_write_problem(error: BaseException) -> OSError | None:
    """Return an error as an OSError, if it is one of the operating system; polars states it in the text."""
    if isinstance(error, OSError):
        return error if error.errno else None
    if code := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    return OSError(errno.EIO, "a write failed") if _LOST_NUMBER in str(error) else None
