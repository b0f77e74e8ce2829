"""Writes files atomically: a file appears under its final name only when it is complete."""

from __future__ import annotations

import os
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
    partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
    is_compressed = path.name.endswith(".gz")
    try:
        with igzip.open(partial, "wb") if is_compressed else partial.open("wb") as file:  # type: ignore[no-untyped-call]
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
