"""Recovers windows of processes that were killed, and records how the processes of a run ended."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..process_endings import KILLED_IN_WINDOW, KILLED_NOTE, process_ending
from ..record_validation import validate_rank_facts
from ..run_folder import (
    format_time,
    list_trace_files,
    list_windows,
    read_json,
    read_rank_records,
    read_run,
    write_json,
    write_run,
)

Facts = dict[str, Any]
_MIN_IDLE_S = 300.0
"""Unfinished files of another host that have not changed for this long belong to no live process: the kernel writes
changes back sooner."""
_HIDDEN_NAME = re.compile(r"\.etloom-.+-\d+-[0-9a-f]+", re.ASCII)
"""A folder of unfinished files (options.new_scratch_name). Folders with similar names belong to users."""
_WINDOW_NAME = re.compile(r"(\d{1,9})(?:-[0-9a-f]{12})?", re.ASCII)
"""The folder of a window in it: pid and a random part, because ranks in containers may all be process 1."""
_WINDOW_PATH = re.compile(r"(?:actor_[A-Za-z0-9_-]+/)?step_\d+|actor_[A-Za-z0-9_-]+", re.ASCII)
_UNFINISHED_NAME = re.compile(
    r"(?:et|kineto|flight_recorder)\.(?:etob|json)(?:\.gz|\.tmp)?|killed\.json|started|\.?status-.+|\..+\.[0-9a-f]{12}"
)
"""Unfinished files, which may be removed once the run is finished."""


@dataclass(frozen=True)
class SalvageResult:
    """The result of `salvage_run`: records of the recovered ranks, and messages about what could not be recovered."""

    recovered: tuple[Facts, ...]
    warnings: tuple[str, ...]


def recover_window(folder: Path, run: Path) -> Facts | None:
    """Move the traces that a killed process left in `folder` to the folder of the run, and write the rank's record.

    Removes leftovers of a window that is published, and of an earlier life of a job that was restarted and recorded
    again.

    Args:
        folder: The hidden folder of the window.
        run: The folder of the run.

    Returns:
        The record, or None if there is nothing to recover: no trace of the native observer, or the rank was recorded
        by another process since.
    """
    facts = validate_rank_facts(read_json(folder / KILLED_NOTE))
    if facts is None:
        return None
    window, _ = str(facts.pop("window", ".")), facts.pop("command", None)
    window = window if _WINDOW_PATH.fullmatch(window) else "."
    place = run / window
    if any((run / part).is_symlink() for part in (window, window.partition("/")[0])):
        return None
    record_path = place / f"rank_{facts['rank']}.json"
    if record_path.exists():
        published = validate_rank_facts(read_json(record_path), facts["rank"]) or {}
        is_same = all(published.get(name) == facts.get(name) for name in ("host", "pid", "start_ns"))
        if is_same or (published.get("restart") or 0) > (facts.get("restart") or 0):
            # Killed while it cleaned up, after publishing everything; or superseded after a restart of the job.
            _remove_unfinished(folder)
        return None
    unfinished, final = folder / "et.etob", place / f"observer_{facts['rank']}.etob"
    # Exactly one of the two: if the process was killed while it published, the file has its final name already.
    if unfinished.is_file() == final.is_file():
        return None
    place.mkdir(parents=True, exist_ok=True)
    if unfinished.is_file():
        unfinished.replace(final)
    names = [path.name for path, rank in list_trace_files(place) if rank == facts["rank"]]
    end_ns = facts.get("end_ns")
    facts = {
        "steps": None,
        "end_ns": None,
        "warnings": [],
        **facts,
        "files": names,
        "ended": KILLED_IN_WINDOW,
    }
    facts["start"] = format_time(facts["start_ns"])
    facts["end"] = None if end_ns is None else format_time(end_ns)
    write_json(record_path, facts, folder)
    _remove_unfinished(folder)
    return facts


def record_endings(
    folder: Path, launch: str, exit_status: int, statuses: Iterable[Facts], scratch: Path
) -> None:
    """Add to the rank records (rank_<r>.json) how each process of a launch ended, and the command's exit status.

    Args:
        folder: The folder of a window.
        launch: Id of the launch (job_identity.launch_id); ranks of other launches are left alone.
        exit_status: Exit status of the command.
        statuses: Status of each process, with host and pid.
        scratch: Folder for unfinished files.
    """
    by_process: dict[Any, list[Facts]] = {}
    for status in statuses:
        by_process.setdefault((status.get("host"), status.get("pid")), []).append(status)
    for facts in read_rank_records(folder):
        if (facts.get("job") or {}).get("launch") != launch:
            continue
        candidates = by_process.get((facts["host"], facts.get("pid")), [])
        if len(candidates) > 1:  # in containers
            candidates = [status for status in candidates if status.get("rank") == facts["rank"]]
        if facts.get("ended") is None and len(candidates) == 1:
            facts["ended"] = process_ending(candidates[0])
        facts["returncode"] = exit_status
        write_json(folder / f"rank_{facts['rank']}.json", facts, scratch)


def find_hidden_folders(out: Path) -> list[Path]:
    """Return the hidden folders of unfinished files in a run's folder, including links."""
    return sorted(
        path for path in out.glob(".etloom-*") if _HIDDEN_NAME.fullmatch(path.name) and path.is_dir()
    )


def salvage_run(out: Path) -> SalvageResult:
    """Finish a run whose launcher was killed: recover windows of killed processes and write run.json.

    Raises:
        CollectError: A process of the run is still recording, there is nothing to recover, a hidden folder contains a
            link, or the folder cannot be written.
    """
    from etloom.core.errors import CollectError

    hidden_folders = find_hidden_folders(out)
    if not hidden_folders:
        raise CollectError("no unfinished recording of a killed job", where=out, remedy="check the path")
    for scratch in hidden_folders:
        _check_links(scratch)
        _check_not_recording(scratch)
    recovered: list[Facts] = []
    warnings: list[str] = []
    try:
        for scratch in hidden_folders:
            recovered += _salvage_scratch(scratch, out, warnings)
    except OSError as error:
        raise CollectError(f"cannot be written: {error.strerror}", where=error.filename or out) from error
    return SalvageResult(tuple(recovered), tuple(warnings))


def _salvage_scratch(scratch: Path, out: Path, warnings: list[str]) -> list[Facts]:
    """Recover the windows in a hidden folder and write run.json; what cannot be recovered stays, with a warning."""
    folders = [path for path in sorted(scratch.iterdir()) if path.is_dir() and any(path.iterdir())]
    commands = [read_run(path, KILLED_NOTE).get("command") for path in folders]
    recovered = [facts for path in folders if (facts := recover_window(path, out)) is not None]
    # A window that is a link is skipped: its files would be written to the link's target.
    for place in (out, *(window for window in list_windows(out) if not window.is_symlink())):
        if read_rank_records(place):
            run = read_run(place)
            command = next((words for words in (run.get("command"), *commands) if words), None)
            facts = {name: run.get(name) for name in ("host", "returncode")}
            write_run(place, {"command": command, **facts}, scratch)
    remaining = [path for path in folders if path.exists()]
    if not remaining:
        _remove_unfinished(scratch)
        remaining = [scratch] if scratch.exists() else []
    for path in remaining:
        names = ", ".join(sorted(child.name for child in path.iterdir()))
        pid = window_pid(path)
        process = "" if pid is None else f" (process {pid})"
        warnings.append(f"{path}: not recovered: {names}{process}")
    return recovered


def _remove_unfinished(folder: Path) -> None:
    """Remove the collector's files from a hidden folder, and the folder if nothing else is in it."""
    for path in list(folder.iterdir()):
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif _UNFINISHED_NAME.fullmatch(path.name):
                path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _check_links(scratch: Path) -> None:
    """Raise CollectError if a hidden folder contains links, which could lead to files outside of the run."""
    from etloom.core.errors import CollectError

    link = next((path for path in (scratch, *scratch.rglob("*")) if path.is_symlink()), None)
    if link is not None:
        raise CollectError(
            "is a link, which a recording never creates", where=link, remedy="check its target and remove it"
        )


def _check_not_recording(scratch: Path) -> None:
    from etloom.core.errors import CollectError

    launch = scratch.name.removeprefix(".etloom-")
    is_this_host = launch.startswith(f"{socket.gethostname()}-")
    for folder in scratch.iterdir():
        pid = window_pid(folder)
        if pid is None:
            continue
        if is_this_host and is_still_recording(folder):
            raise CollectError(
                f"process {pid} is still recording", where=scratch.parent, remedy="wait until it has ended"
            )
        ages_s = [time.time() - path.stat().st_mtime for path in folder.iterdir()]
        if not is_this_host and min(ages_s, default=_MIN_IDLE_S) < _MIN_IDLE_S:
            raise CollectError(
                f"process {pid} on the host of {launch} was recording less than {_MIN_IDLE_S / 60:.0f} minutes ago",
                where=scratch.parent,
                remedy=f"run this on that host, or {_MIN_IDLE_S / 60:.0f} minutes after the process has ended",
            )


def window_pid(folder: Path) -> int | None:
    """Return the process id in the name of a recording window's hidden folder; None for any other folder."""
    match = _WINDOW_NAME.fullmatch(folder.name)
    return int(match[1]) if match is not None and folder.is_dir() else None


def is_still_recording(folder: Path) -> bool:
    """Return whether the process that records into a window's folder is alive, on this host or in its containers.

    Pids are reused, so a live process with the same pid counts only if it belongs to the same run.
    """
    pid, scratch = window_pid(folder), folder.parent.name
    if pid is None:
        return False
    if Path("/proc/self").exists():
        return any(_belongs_to(process, scratch, folder) for process in _processes_with_pid(pid))
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _processes_with_pid(pid: int) -> Iterator[Path]:
    """Yield the folders in /proc of processes that have this pid inside their PID namespace."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            namespace_pid = re.search(rb"^NSpid:.*?(\d+)$", (process / "status").read_bytes(), re.MULTILINE)
            if int(namespace_pid[1] if namespace_pid else process.name) == pid:
                yield process


def _belongs_to(process: Path, scratch: str, folder: Path) -> bool:
    try:
        return scratch.encode() in (process / "environ").read_bytes()
    except PermissionError:
        pass
    except OSError:  # it has ended
        return False
    with suppress(OSError):
        return process.stat().st_uid == folder.stat().st_uid
    return False
