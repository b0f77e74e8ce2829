"""Read the stacks of all ranks that torch.distributed's debug server writes: ``stacks_*.txt`` and ``pyspy_dump_*.txt``.

After a summary of the workers that did not answer, a file has for each rank a line with its address and the stacks of
its threads (as faulthandler or py-spy prints them), or the status of the request: 408 (no answer in time), 503 (no
connection).

Format: torch/distributed/debug/_debug_handlers.py of torch 2.13.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from etloom.core.calls import RankStacks
from etloom.core.errors import EtloomError
from etloom.core.schema import Stat
from etloom.formats.io.compression import read_content

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
