"""Checks before the work that output files can be written, and exports runs to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from etloom.cli.error_handling import as_usage_error, print_message
from etloom.core.errors import EtloomError
from etloom.core.text import count_noun
from etloom.core.urls import clean_url

if TYPE_CHECKING:
    from etloom.core.trace import Job, Trace

_OTHER_PATH = "choose another path to write to"


def check_export(target: Path, option: str = "--out") -> None:
    """Check that the file can be written, and that its ending belongs to an export format.

    Raises:
        EtloomError: the ending is unknown, or the file cannot be written.
    """
    from etloom.core import registry

    with as_usage_error(option.removeprefix("--")):
        registry.find_by_suffix("exports", target)
    if not target.is_dir():  # the export itself checks that a folder is an earlier export
        check_writable(target, option)


def check_outputs(inputs: Iterable[Path], outputs: Iterable[Path]) -> None:
    """Check that no file or folder to write is a trace to read, contains one, or is a trace in a folder to read.

    Raises:
        EtloomError: the trace would be overwritten.
    """
    inputs = [path for path in inputs if clean_url(path) is None and path.exists()]
    for target in outputs:
        if clean_url(target) is not None or not target.exists():
            continue
        resolved, problem = target.resolve(), ""
        if any(target.samefile(path) for path in inputs):
            problem = "is the trace to read"
        elif target.is_dir():
            if any(path.resolve().is_relative_to(resolved) for path in inputs):
                problem = "contains the trace to read"
        elif any(path.is_dir() and resolved.is_relative_to(path.resolve()) for path in inputs):
            problem = "is a trace in the folder to read" if _is_trace(target) else ""
        # Of folders, an earlier export is replaced as a whole; into others, files are written.
        if problem and (target.is_file() or _is_trace(target)):
            raise EtloomError(f"{problem}, and would be overwritten", where=target, remedy=_OTHER_PATH)


def _is_trace(path: Path) -> bool:
    """Return whether a file or folder is a trace, as opposed to what was written next to the traces: a report, a table,
    an export of several ranks."""
    from etloom.formats import detect_format, kineto

    format = detect_format(path)
    return format not in (None, "metrics") and not (format == "kineto" and kineto.is_merged(path))


def check_writable(target: Path, option: str, in_place: bool = False) -> None:
    """Check that the file can be written and missing folders can be created.

    Args:
        target: the file.
        option: the flag that names another file, for the message.
        in_place: an existing file is overwritten, not replaced.

    Raises:
        EtloomError: it cannot be written.
    """
    import tempfile

    if clean_url(target) is not None:  # checked before the upload
        return
    remedy = f"choose another path with {option}"
    if target.is_dir():
        raise EtloomError("is a folder; expected a file to write", where=target, remedy=remedy)
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if target.exists():
            target.open("ab").close()
            if in_place:
                return
        # The folder's mode is not sufficient: the disk may be read-only or full.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=target, remedy=remedy
        ) from error


@contextmanager
def writing_locally(target: Path) -> Iterator[Path]:
    """Yield a local path to write to, in a folder that exists; the file of a URL is uploaded when the block ends.

    Raises:
        EtloomError: it cannot be written.
    """
    from etloom.api.arguments import writing

    if (url := clean_url(target)) is None:
        with writing(target):
            yield target
        return
    from etloom.formats.io import mirror

    with mirror.staged(url) as local:
        yield local


def describe_page(target: Path) -> str:
    """Return a message with the path of a written HTML page and its URL for a browser."""
    if clean_url(target) is not None:
        return f"wrote {target}"
    return f"wrote {target}; open it in a browser: {target.resolve().as_uri()}"


def write_run(run: Job | Trace, target: Path) -> None:
    """Export a run in the format of the file's ending, and print the names of the written files."""
    import etloom

    print_message(describe_files(etloom.export(run, target), target, run))


def describe_files(first: Path, target: Path, run: Job | Trace) -> str:
    """Return a message about the files that an export wrote; ``first`` is the path that the export returned."""
    from etloom.core.trace import Job

    others = len(run) - 1 if first != target and isinstance(run, Job) else 0
    return f"wrote {first}" + (f" and {count_noun(others, 'file')} of other ranks" if others else "")
