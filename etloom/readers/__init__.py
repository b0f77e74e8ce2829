"""Readers: one file a format, each from a file to a Trace in the file's own terms. `read` tells which by content."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom import registry
from etloom.errors import EtloomError, ReadError
from etloom.readers._files import UNPACK_ERRORS, packing, unpacked
from etloom.trace import Job, Trace

if TYPE_CHECKING:
    from etloom.readers._folder import Found, discover, rank_in_name
    from etloom.readers._spill import spill

__all__ = ["Found", "discover", "format_of", "is_packed", "rank_in_name", "read", "spill"]

_HEAD = 1 << 16
_HOME = {"Found": "_folder", "discover": "_folder", "rank_in_name": "_folder", "spill": "_spill"}


def __getattr__(name: str) -> Any:
    # One file is read without what only folders and large files need (yaml, pyarrow).
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


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
    name = format or format_of(path)
    if name is None:
        raise ReadError(*_why_not(path), where=path, remedy=_remedy(path))
    known = [option.name for option in registry.options("readers", name)]
    if unknown := sorted(options.keys() - known):
        raise EtloomError(
            f"the reader {name!r} has no option {', '.join(map(repr, unknown))}",
            where=path,
            remedy=f"its options: {', '.join(known)}" if known else "it has none",
        )
    if progress is not None and "progress" in known:
        options["progress"] = progress
    with registry.naming("readers", name):
        found: Trace | Job = registry.get("readers", name).read(path, **options)
    return found


def format_of(path: Path) -> str | None:
    """The name of the reader for a file or folder, by its first bytes; None for what is no trace.

    Raises ReadError for a file that is missing, no regular one or cannot be opened.
    """
    _check_is_there(path)
    names = registry.names("readers")
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


def is_packed(path: Path) -> bool:
    """Whether a file is gzip or zstd. Raises ReadError for one that cannot be opened."""
    return packing(path) is not None


def _head(path: Path) -> bytes:
    with unpacked(path) as stream:
        try:
            return b"".join(itertools.islice(iter(lambda: stream.read(_HEAD), b""), 1))
        except UNPACK_ERRORS:
            return b""
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None


def _why_not(path: Path) -> tuple[str]:
    if path.is_dir():
        return ("this is a folder, and no trace by itself",)
    if path.stat().st_size == 0:
        return ("the file is empty",)
    if packing(path) and not _head(path):
        return ("nothing could be unpacked of it",)
    return ("this is no trace of a known format",)


def _remedy(path: Path) -> str:
    if path.is_dir():
        return "open it as a run (etloom.open), or name one file in it"
    return f"known formats: {', '.join(registry.names('readers'))}"
