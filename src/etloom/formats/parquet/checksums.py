"""CRC-32 checksums of the files of a saved trace or a stored run, which are listed in its meta.json.

A table that changed after it was written would give wrong numbers, and polars may end the process over a damaged page.
A query over all ranks of a store is not checked: it reads a few columns, and checking would read the files whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.formats.io.json_text import load_json
from etloom.formats.io.mirror import ensure_local

KEY = "crc32"
"""Key of a meta.json: file name -> CRC-32 of the content. Folders saved by older versions lack it."""
_BLOCK_BYTES = 1 << 24
_MAX_SMALL_BYTES = 1 << 20
"""Files whose checksum is computed faster than the metadata of their Parquet is read."""


def compute_checksums(files: Iterable[Path]) -> dict[str, int]:
    """Return the CRC-32 of each file's content by file name, in sorted order."""
    return {file.name: _compute(file) for file in sorted(files)}


def check_file(file: Path, checksums: object, remedy: str) -> None:
    """Raise ReadError if a file's CRC-32 differs from its entry in ``checksums``; without an entry, do nothing."""
    expected = checksums.get(file.name) if isinstance(checksums, Mapping) else None
    if expected is None:
        return
    ensure_local(file)
    try:
        is_intact = _compute(file) == expected
    except OSError as error:
        raise ReadError(
            f"cannot be read: {error.strerror}",
            where=file,
            remedy="check that it exists and that you may read it",
        ) from None
    if not is_intact:
        raise ReadError("changed since it was written: its checksum differs", where=file, remedy=remedy)


def is_intact_small_file(file: Path, checksums: object, remedy: str) -> bool:
    """Return whether a file is small and its CRC-32 equals its entry in ``checksums``; raises like `check_file`."""
    if not isinstance(checksums, Mapping) or type(checksums.get(file.name)) is not int:
        return False
    if file.stat().st_size > _MAX_SMALL_BYTES:
        return False
    check_file(file, checksums, remedy)
    return True


def read_checksums(manifest: Path) -> Any:
    """Return the checksums in a meta.json (file name -> CRC-32); None if it has none or cannot be read."""
    ensure_local(manifest)
    try:
        content = load_json(manifest.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content.get(KEY) if isinstance(content, dict) else None


def _compute(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum
