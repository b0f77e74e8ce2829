"""Read what a hanging job leaves: Flight Recorder dumps, reports of NCCL's RAS, stacks of the debug server.

No Traces are built; 10,000 dumps take seconds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from etloom import formats
from etloom.core.calls import DumpedCalls, RankStacks
from etloom.core.communicators import RasReport
from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats.flight_recorder import read_calls
from etloom.formats.io.compression import read_content
from etloom.formats.nccl_ras import read_report
from etloom.loading.file_names import find_rank_in_name
from etloom.loading.rank_inference import natural_key

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


# Find and read the reports of NCCL's RAS in a folder, next to Flight Recorder dumps or alone.

FORMAT = "nccl-ras"


def read_reports(path: Path) -> tuple[list[RasReport], list[Stat]]:
    """Read the reports of a folder, or a single one.

    Files whose name states a rank are not opened, because a report is of the whole job: a folder may have 10,000 dumps.

    Returns:
        The reports, the latest last, by the time that they state or else by name; and rows of stats: damage, and files
        that cannot be read.
    """
    is_file = path.is_file()
    files = [path] if is_file else sorted(path.iterdir()) if path.is_dir() else []
    reports: list[tuple[Path, RasReport]] = []
    stats: list[Stat] = []
    for file in files:
        if not is_file and (file.name.startswith(".") or not file.is_file() or _has_rank(file)):
            continue
        try:
            if formats.detect_format(file, likely=FORMAT) == FORMAT:
                reports.append((file, read_report(file)))
                stats += reports[-1][1].stats
        except EtloomError as error:
            if is_file:
                raise
            stats.append(Stat("job.unreadable_file", "error", 1, str(error)))
    has_times = all(report.timestamp for _, report in reports)
    reports.sort(key=lambda item: (item[1].timestamp or "" if has_times else "", natural_key(item[0].name)))
    return [report for _, report in reports], stats


def _has_rank(file: Path) -> bool:
    return find_rank_in_name(file) is not None and "ras" not in file.name.lower()


# Read the stacks of all ranks that torch.distributed's debug server writes: ``stacks_*.txt`` and ``pyspy_dump_*.txt``.
#
# After a summary of the workers that did not answer, a file has for each rank a line with its address and the stacks of
# its threads (as faulthandler or py-spy prints them), or the status of the request: 408 (no answer in time), 503 (no
# connection).
#
# Format: torch/distributed/debug/_debug_handlers.py of torch 2.13.

_MAX_BYTES = 256 << 20
_MAX_RANKS = 1_000_000
_MAX_LINE, _MAX_FRAMES = 2_000, 500
"""Longer lines and deeper stacks are of no Python; the patterns below would take long on them."""
_NAME = re.compile(r"(stacks|pyspy_dump)_(\d{8}_\d{6})\.txt")
_RANK = re.compile(r"^=== Rank (\d{1,7}): (.*) ===\r?$", re.MULTILINE)
_STATUS = re.compile(r"Error: (\d{3})")
_FAULT_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.+)')
_SPY_FRAME = re.compile(r"    (?=.*:\d+\)$)(\S.*) \((?!.* \()(.+):(\d+)\)")
_WRITTEN_FRAMES = 100
"""faulthandler leaves out deeper frames."""
_MAIN = ("<module>", "_run_module_as_main", "_run_code")


def read_stacks(path: Path) -> tuple[list[RankStacks], list[Stat]]:
    """Read the last two files of stacks in a folder, or a single file.

    Returns:
        The stacks, the latest last; an empty list without files of such a name. Rows of stats about damage.
    """
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    named = [(match[1], match[2], file) for file in files if (match := _NAME.fullmatch(file.name))]
    # faulthandler needs no other program, so its files are complete more often than those of py-spy.
    kind = max((kind for kind, _, _ in named), default="")
    latest = sorted((time, file) for each, time, file in named if each == kind)[-2:]
    reports: list[RankStacks] = []
    stats: list[Stat] = []
    for time, file in latest:
        try:
            content, damage = read_content(file, _MAX_BYTES)
        except EtloomError as error:
            stats.append(Stat("job.unreadable_file", "error", 1, str(error)))
            continue
        if damage is not None:
            stats.append(Stat("read.truncated", "data_loss", 1, f"{file}: {damage}"))
        report = parse_stacks(content.decode("utf-8", "replace"), file.name, time)
        if report.cut_rank is not None:
            example = f"{file}: ends inside rank {report.cut_rank}, which is left out with those after it"
            stats.append(Stat("read.truncated", "data_loss", 1, example))
        if report.frames or report.errors:
            reports.append(report)
        else:
            stats.append(Stat("job.unreadable_file", "error", 1, f"{file}: no rank is named in it"))
    return reports, stats


def parse_stacks(text: str, name: str = "", time: str = "") -> RankStacks:
    """Parse the content of a file of stacks."""
    report = RankStacks(name, time)
    sections = _RANK.split(text)
    for rank_text, section in zip(sections[1::3], sections[3::3], strict=True):
        if (rank := int(rank_text)) >= _MAX_RANKS:
            continue
        if match := _STATUS.match(section.lstrip()):
            report.errors[rank] = int(match[1])
        elif frames := _find_main_thread(section):
            report.frames[rank] = frames
    last = max(report.frames, default=None)
    if last is not None and last > max(report.errors, default=-1) and not _is_whole(report.frames[last]):
        del report.frames[last]
        report = replace(report, cut_rank=last)
    return report


def _is_whole(frames: tuple[str, ...]) -> bool:
    """Return whether a stack ends with the script, or is so deep that the end was left out where it was written."""
    return frames[-1].startswith(_MAIN) or len(frames) >= _WRITTEN_FRAMES


def _find_main_thread(section: str) -> tuple[str, ...]:
    """Return the frames of the thread that runs the script, else of the last thread, which is the oldest one."""
    threads: list[list[str]] = []
    for line in section.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif len(line) > _MAX_LINE or not threads or len(threads[-1]) >= _MAX_FRAMES:
            continue
        elif match := _FAULT_FRAME.fullmatch(line):
            threads[-1].append(f"{match[3]} ({match[1]}:{match[2]})")
        elif match := _SPY_FRAME.fullmatch(line):
            threads[-1].append(f"{match[1]} ({match[2]}:{match[3]})")
    stacks = [frames for frames in threads if frames]
    scripts = [frames for frames in stacks if frames[-1].startswith(_MAIN)]
    return tuple([*stacks[-1:], *scripts[-1:]][-1]) if stacks else ()
