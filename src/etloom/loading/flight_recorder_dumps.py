"""Read the NCCL Flight Recorder dumps of a job without building Traces; 10,000 dumps take seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from etloom import formats
from etloom.core.calls import DumpedCalls
from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats.flight_recorder import read_calls
from etloom.loading.file_names import find_rank_in_name

WATCH_FOLDER = ".watch"
"""Folder of a run in which `etloom collect --watch` keeps the latest dump of each rank."""
_FORMAT = "flight-recorder"
_DUMP_NAME = re.compile(r"_dump_\d+$|flight_recorder_\d+(?:\.\w+)*$")
"""Names of files that are dumps, or the remains of one."""
_MAX_NAMED_FOLDERS = 5


def read_dumps(
    path: Path, rank_pattern: str | None = None, *, may_be_empty: bool = False
) -> tuple[dict[int, DumpedCalls], list[Stat]]:
    """Read the Flight Recorder dump of each rank in a folder, or a single dump.

    Args:
        path: a folder with files such as _dump_3 or flight_recorder_3.json; or a run of ``etloom collect --watch``.
        rank_pattern: regular expression for the file names with one group, the rank.
        may_be_empty: return no dumps instead of an error if there are none.

    Returns:
        rank -> its calls, and rows of stats: damage, unreadable files.

    Raises:
        ReadError: no dumps are found, or a rank is unknown or has two.
    """
    folder = path / WATCH_FOLDER if (path / WATCH_FOLDER).is_dir() else path
    files = [folder] if folder.is_file() else sorted(folder.iterdir()) if folder.is_dir() else []
    if not files and not path.exists():
        raise ReadError("no such file or folder", where=path, remedy="check the path")
    dumps: dict[int, DumpedCalls] = {}
    stats: list[Stat] = []
    for file in files:
        try:
            # Hidden: a file that a rank is still writing, or was when it was killed.
            if file.name.startswith(".") or not file.is_file():
                continue
            if formats.detect_format(file, likely=_FORMAT) != _FORMAT:
                if _DUMP_NAME.search(file.name):
                    raise ReadError("is not a readable Flight Recorder dump", where=file)
                continue
            dump = read_calls(file)
        except EtloomError as error:
            stats.append(Stat("job.unreadable_file", "error", 1, str(error)))
            continue
        rank = find_rank_in_name(file, rank_pattern)
        if rank is None:
            if len(files) > 1:
                raise ReadError(
                    "the rank of the dump is unknown", where=file, remedy="specify it with --rank-pattern"
                )
            rank = 0
        if rank in dumps:
            raise ReadError(
                f"is the second dump of rank {rank}", where=file, remedy="keep one dump of each rank"
            )
        dumps[rank] = dump
        stats += dump.stats
    if not dumps and not may_be_empty:
        _raise_no_dumps(path, files, stats)
    return dumps, stats


def _raise_no_dumps(path: Path, files: list[Path], stats: list[Stat]) -> NoReturn:
    """Raise ReadError for a folder in which no dump was found; the remedy names its folders, if it has any."""
    if not stats and (folders := sorted(file.name for file in files if file.is_dir())):
        raise ReadError(
            "the folder contains no Flight Recorder dump",
            where=path,
            remedy=f"try one of its folders: {', '.join(folders[:_MAX_NAMED_FOLDERS])}",
        )
    raise ReadError(
        "the run contains no Flight Recorder dump" + (f"; {stats[0].example}" if stats else ""),
        where=path,
        remedy="set TORCH_FR_BUFFER_SIZE=20000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, or record with "
        "etloom collect --watch",
    )
