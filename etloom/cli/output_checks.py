"""Whether a file can be written, asked before the work whose outcome it is to hold."""

from __future__ import annotations

from pathlib import Path

from etloom.cli.error_handling import as_usage_error
from etloom.core.errors import EtloomError


def check_export(target: Path, option: str = "--out") -> None:
    """`check_writable`, and raise UnknownName where no export is known by the end of the name."""
    from etloom.core import registry

    with as_usage_error(option.removeprefix("--")):
        registry.find_by_suffix("exports", target)
    if not target.is_dir():  # an earlier export, which the export itself tells from a folder of somebody's
        check_writable(target, option)


def check_writable(target: Path, option: str, in_place: bool = False) -> None:
    """Raise EtloomError where the file cannot be written, nor the folders that it lacks be made.

    option: what names another place, in the message. in_place: a file that is there is written over, not replaced.
    """
    import tempfile

    remedy = f"name another place with {option}"
    if target.is_dir():
        raise EtloomError("is a folder, not a file to write", where=target, remedy=remedy)
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if target.exists():
            target.open("ab").close()
            if in_place:
                return
        # What the mode of a folder says is not all: it may be of a read-only disk, or full.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=target, remedy=remedy
        ) from error
