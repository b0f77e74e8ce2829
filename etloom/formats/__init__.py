"""Readers: one file a format, each from a file to a Trace in the file's own terms. `read` tells which by content."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.core import registry
from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Job, Trace
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, detect_compression, open_decompressed

if TYPE_CHECKING:
    from etloom.formats.kineto.large_file import convert_large_file
    from etloom.loading.rank_discovery import Found, discover, rank_in_name

__all__ = [
    "Found",
    "discover",
    "detect_format",
    "is_compressed",
    "rank_in_name",
    "read",
    "convert_large_file",
]

_HEAD = 1 << 16
_HOME = {
    "Found": "etloom.loading.rank_discovery",
    "discover": "etloom.loading.rank_discovery",
    "rank_in_name": "etloom.loading.rank_discovery",
    "convert_large_file": "etloom.formats.kineto.large_file",
}


def __getattr__(name: str) -> Any:
    # One file is read without what only folders and large files need (yaml, pyarrow).
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def read(
    path: str | PathLike[str],
    format: str | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Trace | Job:
    """What one file (or one folder that is a trace, as our own Parquet) holds. Nothing in it is linked.

    format: the name of a reader, where the content is not to tell. progress: called with the number of bytes of
    the file, packed or not, as they are read, by the readers that can say. options: those of the reader.

    Raises ReadError for a file that is missing, cannot be read or is no trace; UnknownName for an unknown format;
    EtloomError for an option that the reader does not have.
    """
    path = Path(path)
    _check_is_there(path)
    name = format or detect_format(path)
    if name is None:
        raise ReadError(*_describe_unknown(path), where=path, remedy=_remedy(path))
    known = [option.name for option in registry.list_options("readers", name)]
    if unknown := sorted(options.keys() - known):
        raise EtloomError(
            f"the reader {name!r} has no option {', '.join(map(repr, unknown))}",
            where=path,
            remedy=f"its options: {', '.join(known)}" if known else "it has none",
        )
    if progress is not None and "progress" in known:
        options["progress"] = progress
    with registry.name_plugin_in_errors("readers", name):
        found: Trace | Job = registry.get("readers", name).read(path, **options)
    return found


def detect_format(path: Path) -> str | None:
    """The name of the reader for a file or folder, by its first bytes; None for what is no trace.

    Raises ReadError for a file that is missing, no regular one or cannot be opened.
    """
    _check_is_there(path)
    names = registry.list_plugins("readers")
    if path.is_dir():
        holders = ((name, getattr(registry.get("readers", name), "holds", None)) for name in names)
        return next((name for name, holds in holders if holds is not None and holds(path)), None)
    head = _head(path)
    if head.lstrip()[:1] in (b"{", b"["):
        # Last the one that needs protobuf, which takes longer to import than the others to answer.
        names.sort(key="chakra".__eq__)
    return next((name for name in names if registry.get("readers", name).sniff(head)), None) if head else None


def _check_is_there(path: Path) -> None:
    if not path.exists():
        raise ReadError("no such file or folder", where=path, remedy="check the path")
    if not (path.is_file() or path.is_dir()):  # opening a pipe would wait for ever
        raise ReadError("is no regular file", where=path, remedy="save the stream to a file first")


def is_compressed(path: Path) -> bool:
    """Whether a file is gzip or zstd. Raises ReadError for one that cannot be opened."""
    return detect_compression(path) is not None


def _head(path: Path) -> bytes:
    with open_decompressed(path) as stream:
        try:
            return b"".join(itertools.islice(iter(lambda: stream.read(_HEAD), b""), 1))
        except DECOMPRESSION_ERRORS:
            return b""
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None


def _describe_unknown(path: Path) -> tuple[str]:
    if path.is_dir():
        return ("this is a folder, and no trace by itself",)
    if path.stat().st_size == 0:
        return ("the file is empty",)
    if detect_compression(path) and not _head(path):
        return ("nothing could be unpacked of it",)
    return ("this is no trace of a known format",)


def _remedy(path: Path) -> str:
    if path.is_dir():
        return "open it as a run (etloom.open), or name one file in it"
    return f"known formats: {', '.join(registry.list_plugins('readers'))}"


HELPERS = frozenset({"io", "tables"})
"""Modules of this package that are not plugins."""
