"""Writing a file that takes its name only when it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from isal import igzip


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """The file to write, which takes its name when it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    packed = path.name.endswith(".gz")
    try:
        with igzip.open(partial, "wb") if packed else partial.open("wb") as file:  # type: ignore[no-untyped-call]
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
