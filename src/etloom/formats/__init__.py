"""Trace formats: one module or sub-package per format, which reads its files into tables and may also write them.

A format's module has `sniff` and `read` (`etloom.core.registry`), and where etloom writes the format its sub-package
holds the writer. `io` and `tables` are shared by the formats: bytes and files, and the building of tables.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - before polars, which otherwise converts arrays half as fast
import polars as pl

from etloom.core import registry
from etloom.core.errors import ReadError
from etloom.core.registry import check_options
from etloom.core.trace import Job, Trace
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, detect_compression, open_decompressed
from etloom.formats.io.other_formats import OtherFormat, identify
from etloom.formats.tables.doubtful_times import judge_times
from etloom.formats.tables.value_checks import check_values

__all__ = ["UNKNOWN_FORMAT", "convert_panics", "detect_format", "is_compressed", "read"]

HELPERS = frozenset({"io", "tables"})
"""Modules of this package that are not plugins."""

UNKNOWN_FORMAT = "not a trace in a known format"

_HEAD_BYTES = 1 << 16
_PARQUET_MAGIC = b"PAR1"
_ESCAPE = re.compile(rb"\\(?:u00([2-7][0-9a-fA-F])|(/))")
"""Escapes of letters in JSON: the keys of a format may be written with them."""
_HTML = (b"<!doctype html", b"<html")
_SAMPLE_SUFFIXES = (".csv", ".jsonl", ".ndjson")
_SEARCHED = {"execution-trace": ("etplus",), "nsys": ("rocprof", "ascend")}
"""A reader -> the readers of files that begin alike, which search the whole file (`is_in`)."""
_COMMON_FORMATS = ("kineto", "execution-trace")
FOLDER_FORMATS = ("parquet", "nsys", "rocprof")
"""The readers here that have a `sniff_folder`: to look for it in the others would import all of them."""


def read(
    path: str | PathLike[str],
    format: str | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Trace | Job:
    """Read a trace file or trace folder (such as etloom's Parquet) into tables, without linking nodes to events.

    Args:
        path: The file or folder.
        format: The name of a reader; by default the content decides.
        progress: Called with the number of bytes of the file (compressed or not) as they are read, by readers that
            support it.
        **options: Options of the reader.

    Returns:
        The Trace of one rank, or a Job where the file holds several ranks.

    Raises:
        ReadError: If the file is missing, cannot be read or is not a trace.
        UnknownName: If there is no reader of that name.
        EtloomError: If the reader does not have one of the options.
    """
    path = Path(path)
    _check_exists(path)
    name = format or detect_format(path)
    if name is None:
        raise ReadError(_explain_unknown(path), where=path, remedy=_suggest_remedy(path))
    check_options("readers", name, options)
    if progress is not None and any(o.name == "progress" for o in registry.list_options("readers", name)):
        options["progress"] = progress
    with convert_panics(path):
        with registry.name_plugin_in_errors("readers", name):
            trace: Trace | Job = registry.get("readers", name).read(path, **options)
            if not isinstance(trace, Trace | Job):
                raise TypeError(f"read returns {type(trace).__name__}; expected a Trace or a Job")
        # Here, once, so that neither a reader nor later code has to expect odd values.
        return _check(trace) if isinstance(trace, Trace) else trace.map(_check)


def _check(trace: Trace) -> Trace:
    return judge_times(check_values(trace))


@contextlib.contextmanager
def convert_panics(path: Path) -> Iterator[None]:
    """Convert a PanicException of polars, which is not an Exception, to a ReadError that names the file."""
    try:
        yield
    except pl.exceptions.PanicException as error:
        reason = str(error).partition("\n")[0]
        raise ReadError(
            f"polars, which reads tables, failed on this file: {reason}",
            where=path,
            remedy="please report it",
        ) from error


def detect_format(path: Path, likely: str = "") -> str | None:
    """Return the name of the reader of a file or folder, or None if it is not a trace.

    A file is recognized by its first 64 KiB, decompressed (a Parquet file also by its last 64 KiB), a folder by the
    optional `sniff_folder` of a reader. Two formats need more: an execution trace is searched to its end for the times
    that distinguish an ET+, since operators from before the profiler's window have none; a database is searched for
    the tables of rocprofv3 and of Ascend.

    Args:
        path: The file or folder.
        likely: The reader to try first, where many files have the same format.

    Raises:
        ReadError: If the path is missing, is neither a file nor a folder, or cannot be opened.
    """
    _check_exists(path)
    if path.is_dir():
        for name in registry.list_plugins("readers"):
            if name in FOLDER_FORMATS or registry.find_package("readers", name) is not None:
                sniff_folder = getattr(registry.get("readers", name), "sniff_folder", None)
                if sniff_folder is not None and sniff_folder(path):
                    return name
        return None
    head = _read_head(path)
    if not head:
        return None
    names = _order_for_sniffing(likely)
    if head[:64].lstrip().lower().startswith(_HTML):  # such as a report next to the traces
        names = [name for name in names if registry.find_package("readers", name) is not None]
    heads = dict.fromkeys((head, _ESCAPE.sub(lambda match: match[2] or bytes([int(match[1], 16)]), head)))
    matching = (name for text in heads for name in names if _sniff(name, text))
    reader = next(matching, None)
    others = _SEARCHED.get(reader, ()) if reader and len(head) == _HEAD_BYTES else ()
    return next((other for other in others if registry.get("readers", other).is_in(path)), reader)


def _sniff(name: str, head: bytes) -> bool:
    with registry.name_plugin_in_errors("readers", name):
        return bool(registry.get("readers", name).sniff(head))


def is_compressed(path: Path) -> bool:
    """Return whether a file is gzip or zstd. Raises ReadError if it cannot be opened."""
    return detect_compression(path) is not None


def _order_for_sniffing(likely: str) -> list[str]:
    """Return the readers' names in the order in which their `sniff` is tried.

    No two sniffers accept the same file, so the order matters for speed only: the most common formats come first.
    """
    names = registry.list_plugins("readers")
    return sorted(names, key=lambda name: (name != likely, name not in _COMMON_FORMATS))


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise ReadError("no such file or folder", where=path, remedy="check the path")
    if not (path.is_file() or path.is_dir()):  # opening a pipe would block forever
        raise ReadError("is not a regular file", where=path, remedy="save the stream to a file first")


def _read_head(path: Path) -> bytes:
    """Return the first 64 KiB of a file, decompressed; for a Parquet file, followed by up to its last 64 KiB."""
    with open_decompressed(path, _HEAD_BYTES) as stream:
        try:
            head = stream.read(_HEAD_BYTES)
            return head + _read_footer(path) if head.startswith(_PARQUET_MAGIC) else head
        except DECOMPRESSION_ERRORS:
            return b""
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None


def _read_footer(path: Path) -> bytes:
    """Return up to the last 64 KiB of a file, without the first 64 KiB, which `_read_head` returns."""
    with path.open("rb") as file:
        file.seek(max(_HEAD_BYTES, path.stat().st_size - _HEAD_BYTES))
        return file.read(_HEAD_BYTES)


def _identify(path: Path) -> OtherFormat | None:
    return None if path.is_dir() else identify(_read_head(path), name=path.name)


def _explain_unknown(path: Path) -> str:
    if path.is_dir():
        return "is a folder, not a trace file"
    if path.stat().st_size == 0:
        return "the file is empty"
    if detect_compression(path) and not _read_head(path):
        return "nothing could be decompressed"
    other = _identify(path)
    return UNKNOWN_FORMAT if other is None else f"is {other.name}, which is not read"


def _suggest_remedy(path: Path) -> str:
    if path.is_dir():
        return "open it as a run (etloom.open), or specify one file in it"
    if (other := _identify(path)) is not None:
        return other.remedy
    if path.stat().st_size and path.name.lower().removesuffix(".gz").endswith(_SAMPLE_SUFFIXES):
        return (
            "for samples, name the column with their time: etloom convert FILE OUT.parquet --time-column NAME"
        )
    return f"known formats: {', '.join(registry.list_plugins('readers'))}"
