"""What processes left that died in their window, and how those ended that did not: put into the seals of the ranks."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import ends, files

Facts = dict[str, Any]
_QUIET_S = 300.0
"""Unfinished files of another host that are older are of no living process: the kernel writes back sooner."""


def keep_killed(folder: Path, here: Path) -> Facts | None:
    """Seal what a process that was killed in its window left in `folder`; its facts, or null where there is nothing to
    keep: no record of ours, or the rank was recorded by another process since.

    here: the run's folder.
    """
    facts = files.read_json(folder / ends.NOTE)
    if facts is None or not isinstance(facts.get("rank"), int):
        return None
    window, _ = str(facts.pop("window", ".")), facts.pop("command", None)
    place = here / window if re.fullmatch(r"step_\d+", window) else here
    name = f"observer_{facts['rank']}.etob"
    unfinished = folder / "et.etob"
    # One of the two: where it was killed as it sealed, its file has its name already.
    if unfinished.is_file() == (place / name).is_file() or (place / f"rank_{facts['rank']}.json").exists():
        return None
    place.mkdir(exist_ok=True)
    if unfinished.is_file():
        unfinished.replace(place / name)
    own = [path.name for path, rank in files.traces_in(place) if rank == facts["rank"]]
    end_ns = facts.get("end_ns")
    facts = {"steps": None, "end_ns": None, "warnings": [], **facts, "files": own, "ended": ends.IN_WINDOW}
    facts |= {"start": files.iso(facts["start_ns"]), "end": None if end_ns is None else files.iso(end_ns)}
    files.write_json(place / f"rank_{facts['rank']}.json", facts, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return facts


def note(place: Path, launch: str, returncode: int, processes: Iterable[Facts], scratch: Path) -> None:
    """Write into the seals of a launch's ranks how their processes and its command ended.

    processes: what each left (seen.Seen), with its host and pid.
    """
    known = {(facts.get("host"), facts.get("pid")): facts for facts in processes}
    for facts in files.sealed_ranks(place):
        if (facts.get("job") or {}).get("launch") != launch:
            continue
        if facts.get("ended") is None and (seen := known.get((facts["host"], facts["pid"]))) is not None:
            facts["ended"] = ends.of_process(seen)
        facts["returncode"] = returncode
        files.write_json(place / f"rank_{facts['rank']}.json", facts, scratch)


def salvage(out: Path) -> tuple[list[Facts], list[str]]:
    """Finish a run whose launcher was killed: seal what killed processes left in its hidden folders, write run.json.

    Gives the ranks that were kept, and what is worth a warning. Raises CollectError where a process of the run lives,
    where there is no such folder, and where it cannot be written.
    """
    from etloom.errors import CollectError

    hidden = [path for path in sorted(out.glob(".etloom-*")) if path.is_dir()]
    if not hidden:
        raise CollectError(
            "nothing was left here by a job that was killed", where=out, remedy="check the path"
        )
    for scratch in hidden:
        _refuse_alive(scratch)
    kept: list[Facts] = []
    warnings: list[str] = []
    try:
        for scratch in hidden:
            kept += _finish(scratch, out, warnings)
    except OSError as error:
        raise CollectError(f"cannot be written: {error.strerror}", where=error.filename or out) from error
    return kept, warnings


def _finish(scratch: Path, out: Path, warnings: list[str]) -> list[Facts]:
    """As the launcher would, had it lived; what cannot be kept stays where it is."""
    folders = [path for path in sorted(scratch.iterdir()) if path.is_dir() and any(path.iterdir())]
    commands = [note.get("command") for path in folders if (note := files.read_json(path / ends.NOTE))]
    kept = [facts for path in folders if (facts := keep_killed(path, out)) is not None]
    for place in (out, *files.windows_in(out)):
        if files.sealed_ranks(place):
            run = files.read_json(place / "run.json") or {}
            known = {name: run.get(name) for name in ("host", "returncode")}
            command = next((one for one in (run.get("command"), *commands) if one), None)
            files.write_run(place, {"command": command, **known}, scratch)
    left = [path for path in folders if path.exists()]
    for path in left:
        names = ", ".join(sorted(inside.name for inside in path.iterdir()))
        warnings.append(f"{path}: stays, of process {path.name}, with {names}")
    if not left:
        shutil.rmtree(scratch, ignore_errors=True)
    return kept


def _refuse_alive(scratch: Path) -> None:
    from etloom.errors import CollectError

    launch = scratch.name.removeprefix(".etloom-")
    here = launch.startswith(f"{socket.gethostname()}-")
    for folder in scratch.iterdir():
        if not (folder.is_dir() and folder.name.isdigit()):
            continue
        if here and _records(int(folder.name), scratch.name):
            raise CollectError(
                f"process {folder.name} still records", where=scratch.parent, remedy="wait until it has ended"
            )
        ages = [time.time() - path.stat().st_mtime for path in folder.iterdir()]
        if not here and min(ages, default=_QUIET_S) < _QUIET_S:
            raise CollectError(
                f"process {folder.name} of the host of {launch} recorded until a moment ago",
                where=scratch.parent,
                remedy=f"run this on that host, or {_QUIET_S / 60:.0f} minutes after its end",
            )


def _records(pid: int, scratch: str) -> bool:
    """Whether there is such a process and it may be of this run: numbers of processes are given anew."""
    try:
        return scratch.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
    except OSError:
        return True  # of somebody else
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
