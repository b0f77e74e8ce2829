"""Find and read the reports of NCCL's RAS in a folder, next to Flight Recorder dumps or alone."""

from __future__ import annotations

from pathlib import Path

from etloom import formats
from etloom.core.communicators import RasReport
from etloom.core.errors import EtloomError
from etloom.core.schema import Stat
from etloom.formats.nccl_ras import read_report
from etloom.loading.file_names import find_rank_in_name
from etloom.loading.rank_inference import natural_key

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
