"""What processes left that died in their window, and how those ended that did not: put into the seals of the ranks."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import process_endings, record_validation, run_folder

Facts = dict[str, Any]
_MIN_IDLE_S = 300.0
"""Unfinished files of another host that are older are of no living process: the kernel writes back sooner."""
_HIDDEN_NAME = re.compile(r"\.etloom-.+-\d+-[0-9a-f]+", re.ASCII)
"""A folder of unfinished files: options.new_scratch. Others of a like name are their people's."""
_WINDOW_NAME = re.compile(r"(\d{1,9})(?:-[0-9a-f]{12})?", re.ASCII)
"""The folder of a window in there, by process and chance: ranks in containers of their own may all be process 1."""
_UNFINISHED_NAME = re.compile(
    r"(?:et|kineto|flight_recorder)\.(?:etob|json)(?:\.gz|\.tmp)?|killed\.json|started|\.?seen-.+|\..+\.[0-9a-f]{12}"
)
"""What is unfinished in there, and nobody's loss once the run is finished."""


def seal_killed_window(folder: Path, here: Path) -> Facts | None:
    """Seal what a process that was killed in its window left in `folder`; its facts, or null where there is nothing to
    keep: no record of ours, or the rank was recorded by another process since. What is left of a window that is sealed
    is removed, and what a life of the job left that was restarted and recorded anew.

    here: the run's folder.
    """
    facts = record_validation.validate_rank_facts(run_folder.read_json(folder / process_endings.KILLED_NOTE))
    if facts is None:
        return None
    window, _ = str(facts.pop("window", ".")), facts.pop("command", None)
    place = here / window if re.fullmatch(r"step_\d+", window) else here
    name = f"observer_{facts['rank']}.etob"
    unfinished = folder / "et.etob"
    if place.is_symlink():
        return None
    seal = place / f"rank_{facts['rank']}.json"
    if seal.exists():
        later = record_validation.validate_rank_facts(run_folder.read_json(seal), facts["rank"]) or {}
        same = all(later.get(name) == facts.get(name) for name in ("host", "pid", "start_ns"))
        if same or (later.get("restart") or 0) > (facts.get("restart") or 0):
            # Killed as it cleaned up, with all sealed; or of a life of the job before the one that is kept.
            _remove_unfinished(folder)
        return None
    # One of the two: where it was killed as it sealed, its file has its name already.
    if unfinished.is_file() == (place / name).is_file():
        return None
    place.mkdir(exist_ok=True)
    if unfinished.is_file():
        unfinished.replace(place / name)
    own = [path.name for path, rank in run_folder.list_trace_files(place) if rank == facts["rank"]]
    end_ns = facts.get("end_ns")
    facts = {
        "steps": None,
        "end_ns": None,
        "warnings": [],
        **facts,
        "files": own,
        "ended": process_endings.KILLED_IN_WINDOW,
    }
    facts |= {
        "start": run_folder.format_time(facts["start_ns"]),
        "end": None if end_ns is None else run_folder.format_time(end_ns),
    }
    run_folder.write_json(place / f"rank_{facts['rank']}.json", facts, folder)
    _remove_unfinished(folder)
    return facts


def record_endings(
    place: Path, launch: str, returncode: int, processes: Iterable[Facts], scratch: Path
) -> None:
    """Write into the seals of a launch's ranks how their processes and its command ended.

    processes: what each left (seen.Seen), with its host and pid.
    """
    known: dict[Any, list[Facts]] = {}
    for seen in processes:
        known.setdefault((seen.get("host"), seen.get("pid")), []).append(seen)
    for facts in run_folder.sealed_ranks(place):
        if (facts.get("job") or {}).get("launch") != launch:
            continue
        same = known.get((facts["host"], facts.get("pid")), [])
        if len(same) > 1:  # in containers
            same = [seen for seen in same if seen.get("rank") == facts["rank"]]
        if facts.get("ended") is None and len(same) == 1:
            facts["ended"] = process_endings.ending_of_process(same[0])
        facts["returncode"] = returncode
        run_folder.write_json(place / f"rank_{facts['rank']}.json", facts, scratch)


def find_hidden_folders(out: Path) -> list[Path]:
    """The folders of unfinished files that runs have in a folder, or left there; links too."""
    return sorted(
        path for path in out.glob(".etloom-*") if _HIDDEN_NAME.fullmatch(path.name) and path.is_dir()
    )


def salvage_run(out: Path) -> tuple[list[Facts], list[str]]:
    """Finish a run whose launcher was killed: seal what killed processes left in its hidden folders, write run.json.

    Gives the ranks that were kept, and what is worth a warning. Raises CollectError where a process of the run lives,
    where there is no such folder, where one holds a link, and where it cannot be written.
    """
    from etloom.core.errors import CollectError

    hidden = find_hidden_folders(out)
    if not hidden:
        raise CollectError(
            "nothing was left here by a job that was killed", where=out, remedy="check the path"
        )
    for scratch in hidden:
        _check_links(scratch)
        _check_not_recording(scratch)
    kept: list[Facts] = []
    warnings: list[str] = []
    try:
        for scratch in hidden:
            kept += _salvage_scratch(scratch, out, warnings)
    except OSError as error:
        raise CollectError(f"cannot be written: {error.strerror}", where=error.filename or out) from error
    return kept, warnings


def _salvage_scratch(scratch: Path, out: Path, warnings: list[str]) -> list[Facts]:
    """As the launcher would, had it lived; what cannot be kept stays where it is."""
    folders = [path for path in sorted(scratch.iterdir()) if path.is_dir() and any(path.iterdir())]
    commands = [run_folder.read_run(path, process_endings.KILLED_NOTE).get("command") for path in folders]
    kept = [facts for path in folders if (facts := seal_killed_window(path, out)) is not None]
    # A window that is a link would be written where it leads.
    for place in (out, *(window for window in run_folder.list_windows(out) if not window.is_symlink())):
        if run_folder.sealed_ranks(place):
            run = run_folder.read_run(place)
            known = {name: run.get(name) for name in ("host", "returncode")}
            command = next((one for one in (run.get("command"), *commands) if one), None)
            run_folder.write_run(place, {"command": command, **known}, scratch)
    left = [path for path in folders if path.exists()]
    if not left:
        _remove_unfinished(scratch)
        left = [scratch] if scratch.exists() else []
    for path in left:
        names = ", ".join(sorted(inside.name for inside in path.iterdir()))
        number = pid_of_window(path)
        process = "" if number is None else f", of process {number}"
        warnings.append(f"{path}: stays{process}, with {names}")
    return kept


def _remove_unfinished(folder: Path) -> None:
    """Remove what we leave in a hidden folder, and the folder where nothing else is in it."""
    for path in list(folder.iterdir()):
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif _UNFINISHED_NAME.fullmatch(path.name):
                path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _check_links(scratch: Path) -> None:
    """No run of ours has any: who follows one may write or remove what is another's."""
    from etloom.core.errors import CollectError

    link = next((path for path in (scratch, *scratch.rglob("*")) if path.is_symlink()), None)
    if link is not None:
        raise CollectError(
            "is a link, which no recording leaves", where=link, remedy="see where it leads, and remove it"
        )


def _check_not_recording(scratch: Path) -> None:
    from etloom.core.errors import CollectError

    launch = scratch.name.removeprefix(".etloom-")
    here = launch.startswith(f"{socket.gethostname()}-")
    for folder in scratch.iterdir():
        number = pid_of_window(folder)
        if number is None:
            continue
        if here and is_still_recording(folder):
            raise CollectError(
                f"process {number} still records", where=scratch.parent, remedy="wait until it has ended"
            )
        ages = [time.time() - path.stat().st_mtime for path in folder.iterdir()]
        if not here and min(ages, default=_MIN_IDLE_S) < _MIN_IDLE_S:
            raise CollectError(
                f"process {number} of the host of {launch} recorded until a moment ago",
                where=scratch.parent,
                remedy=f"run this on that host, or {_MIN_IDLE_S / 60:.0f} minutes after its end",
            )


def pid_of_window(folder: Path) -> int | None:
    """The number that the process of a window gave itself, which in a container is another one than outside.

    Null where it is no folder of a window.
    """
    match = _WINDOW_NAME.fullmatch(folder.name)
    return int(match[1]) if match is not None and folder.is_dir() else None


def is_still_recording(folder: Path) -> bool:
    """Whether the process of a window's folder lives, here or in a container of this host.

    Numbers of processes are given anew: one of another run, or of somebody else, is another one.
    """
    pid, scratch = pid_of_window(folder), folder.parent.name
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
    """The processes, as folders of /proc, that have this number for themselves."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = re.search(rb"^NSpid:.*?(\d+)$", (process / "status").read_bytes(), re.MULTILINE)
            if int(own[1] if own else process.name) == pid:
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
