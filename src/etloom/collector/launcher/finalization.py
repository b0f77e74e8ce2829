"""Finalizes a run after its command has ended: completes run.json and reports what is missing."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..diagnosis import describe_ring, explain_empty_run, explain_unrecorded_process
from ..job_identity import launch_id
from ..options import RecordingOptions
from ..process_endings import STARTED_FILE, describe_endings, describe_recovered
from ..recovery import killed_windows
from ..run_folder import list_windows, read_rank_records, write_run
from ..session import on_demand
from ..session.messages import read_statuses
from ..text import count_noun, format_ranges
from .child_process import explain_missing_reports

Facts = dict[str, Any]
_MAX_EXPLAINED_RANKS = 4


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run: folders with traces, ranks that recorded traces, and messages about what is missing."""

    windows: tuple[Path, ...]
    ranks: tuple[int, ...]
    warnings: tuple[str, ...]


@dataclass
class _Leftovers:
    """Unfinished windows of a run: recovered rank records, folders not recovered, and pids of processes still alive."""

    recovered: list[Facts]
    lost: list[Path]
    active_pids: list[str]


def finalize_run(options: RecordingOptions, exit_status: int) -> RunOutcome:
    """Write run.json of each recording window, report missing traces, and remove unfinished files that nobody needs.

    Raises:
        OSError: The folder of the run cannot be read or written.
    """
    out, scratch = Path(options.out), Path(options.scratch)
    warnings: list[str] = []
    requested_late = on_demand.clear_requests(out) and options.on_demand is not None
    scratch.mkdir(exist_ok=True)  # the last rank may have removed it
    statuses = read_statuses(scratch)
    if requested_late:
        for status in statuses:
            status["late"] = True
    leftovers = _recover_leftovers(out, scratch)
    if endings := describe_endings(leftovers.recovered):
        warnings.append(f"{out}: {endings}; {describe_recovered(leftovers.recovered)}")
    warnings += [
        f"{path}: unfinished traces of process {killed_windows.window_pid(path)}, which ended during its window"
        for path in leftovers.lost
    ]
    windows = [folder for folder in [out, *list_windows(out)] if read_rank_records(folder)]
    ranks: set[int] = set()
    for folder in windows:
        ranks.update(_finalize_window(options, folder, exit_status, statuses, warnings))
    if requested_late and windows:
        warnings.append(f"{out}: the last request came too late: no step ended after it")
    if leftovers.active_pids:
        pids = ", ".join(leftovers.active_pids)
        warnings.append(
            f"{out}: process {pids} is still running and may be recording; after it has ended, "
            f"etloom salvage {out} recovers its traces"
        )
    if not (windows or leftovers.lost or leftovers.recovered or leftovers.active_pids):
        # On a full disk the processes cannot leave a status file.
        is_full = not statuses and not os.statvfs(out).f_bavail
        reason = "the disk is full" if is_full else explain_empty_run(options, statuses, exit_status)
        warnings.append(f"{out}: nothing recorded: {reason}")
    if not (leftovers.lost or leftovers.active_pids):
        shutil.rmtree(scratch, ignore_errors=True)
    return RunOutcome(tuple(windows), tuple(sorted(ranks)), tuple(warnings))


def _recover_leftovers(out: Path, scratch: Path) -> _Leftovers:
    """Recover the windows of killed processes; delete the folders of windows that were prepared but never started."""
    killed, active_pids = [], []
    for path in sorted(path for path in scratch.iterdir() if path.is_dir() and any(path.iterdir())):
        if killed_windows.is_still_recording(path):  # the command did not wait for it
            active_pids.append(str(killed_windows.window_pid(path)))
        elif (path / STARTED_FILE).exists():
            killed.append(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    recovered = [facts for path in killed if (facts := killed_windows.recover_window(path, out)) is not None]
    return _Leftovers(recovered, [path for path in killed if path.exists()], active_pids)


def _finalize_window(
    options: RecordingOptions, folder: Path, exit_status: int, statuses: list[Facts], warnings: list[str]
) -> list[int]:
    """Write the command's exit status to run.json of a window, warn about missing traces, and return its ranks."""
    ranks = read_rank_records(folder)
    scratch = Path(options.scratch)
    try:
        killed_windows.record_endings(folder, launch_id(options), exit_status, statuses, scratch)
        facts = {"command": options.command, "host": socket.gethostname(), "returncode": exit_status}
        ranks = write_run(folder, facts, scratch)
    except OSError as error:
        warnings.append(f"{folder / 'run.json'}: cannot be written: {error.strerror}")
    if message := _explain_missing_ranks(options, ranks, statuses):
        warnings.append(f"{folder}: {message}")
    if options.nsys and (message := explain_missing_reports(folder, [rank["rank"] for rank in ranks])):
        warnings.append(f"{folder}: {message}")
    if message := describe_ring(ranks):
        warnings.append(f"{folder}: {message}")
    return [rank["rank"] for rank in ranks]


def _explain_missing_ranks(
    options: RecordingOptions, ranks: list[Facts], statuses: list[Facts]
) -> str | None:
    """Return a message on which expected ranks of a window have no traces, and why; None if no rank is missing."""
    world_size = max(rank["world_size"] for rank in ranks)
    expected = set(range(world_size) if options.ranks is None else options.ranks)
    missing = sorted(expected - {rank["rank"] for rank in ranks})
    if not missing:
        return None
    hosts = {(rank["host"], rank.get("local_world_size")) for rank in ranks}
    if hosts == {(socket.gethostname(), len(ranks))}:
        return (
            f"{count_noun(len(ranks), 'rank')} of {world_size}, those of this host; "
            "etloom gather joins the folders of several hosts"
        )
    reasons = {
        status["rank"]: f"; rank {status['rank']}: {explain_unrecorded_process(options, status)}"
        for status in statuses
        if status.get("rank") in missing and status.get("began") and not status.get("recorded")
    }
    explained = "".join(list(reasons.values())[:_MAX_EXPLAINED_RANKS])
    return f"no traces of rank {format_ranges(missing)} of {world_size}{explained}"
