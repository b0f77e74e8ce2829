"""Folders of several hosts, of one job, put together into one."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import job_identity, run_folder
from ..options import new_scratch_name
from ..record_validation import validate_rank_facts
from ..session.messages import format_ranges
from . import killed_windows

Facts = dict[str, Any]
_MAX_GAP_NS = 60 * 10**9
"""Windows of one job that lie further apart than this are not taken for one without proof: clocks differ by less."""


@dataclass(frozen=True)
class GatherResult:
    """The ranks in `out`, by window where there are several, and what is worth a warning."""

    out: Path
    windows: dict[Path, tuple[int, ...]]
    warnings: tuple[str, ...]


@dataclass
class _WindowContents:
    """What the folders hold of a window: files by name, what rank_<r>.json says, and from which folder it is."""

    files: dict[str, Path] = field(default_factory=dict)
    seals: dict[int, Facts] = field(default_factory=dict)
    homes: dict[int, Path] = field(default_factory=dict)


def gather(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    same_job: bool = False,
) -> GatherResult:
    """Copy the traces of `folders` into `out`, and write run.json and the card of the whole job.

    Windows (step_<first>) of a name go together. A rank that two folders have is taken once where it is the same
    recording: of one process and moment, else equal to the last byte. Nothing of `folders` is changed.

    Raises CollectError, before anything is copied: a folder is missing or without traces of `collect`; two have a rank
    of a window that is not the same; they are of different jobs (identity.py says how that is known), or nothing shows
    that they are of one and their windows lie more than a minute apart, unless `same_job`; `out` is one of them, or
    lies in one, or holds one; it holds traces already (unless `overwrite`) or cannot be written. What it held is
    removed once all is copied.
    """
    from etloom.core.errors import CollectError

    target = Path(os.path.abspath(out))  # noqa: PTH100
    warnings: list[str] = []
    plan = _assign_files(_distinct_folders(folders, target, warnings), warnings)
    _check_one_job(plan, warnings, same_job)
    if not overwrite:
        run_folder.claim_folder(str(target), overwrite=False)
    scratch = Path(new_scratch_name(str(target)))
    windows = {}
    try:
        for window, found in sorted(plan.items()):
            (scratch / window).mkdir(parents=True, exist_ok=True)
            for name, path in found.files.items():
                shutil.copy2(path, scratch / window / name)
        run_folder.claim_folder(str(target), overwrite)  # what it held goes only now
        for window, found in sorted(plan.items()):
            place = target / window
            place.mkdir(exist_ok=True)
            for name in found.files:
                (scratch / window / name).replace(place / name)
            parents = sorted({path.parent for path in found.files.values()})
            ranks = run_folder.write_run(place, _merge_run_facts(parents, warnings), scratch)
            windows[place] = tuple(sorted(found.homes))
            _check_completeness(place, ranks, found, warnings)
    except OSError as error:
        raise CollectError(f"cannot be written: {error.strerror}", where=error.filename or target) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return GatherResult(target, windows, tuple(warnings))


def _distinct_folders(
    folders: Iterable[str | os.PathLike[str]], target: Path, warnings: list[str]
) -> dict[Path, list[Path]]:
    """The folders, each once, with the folders of their windows."""
    from etloom.core.errors import CollectError

    found: dict[Path, list[Path]] = {}
    known: dict[Path, Path] = {}
    for folder in map(Path, folders):
        real = folder.resolve()
        if real in known:
            also = "" if known[real] == folder else f", as {known[real]}"
            warnings.append(f"{folder}: given twice{also}, taken once")
            continue
        known[real] = folder
        parts = (folder, *run_folder.list_windows(folder))
        _check_target(folder, parts, target)
        found[folder] = [part for part in parts if _rank_files(part, warnings)]
        left = [path for path in killed_windows.find_hidden_folders(folder) if any(path.iterdir())]
        if left:
            warnings.append(
                f"{folder}: holds what processes left that were killed; etloom salvage {folder} keeps it"
            )
        if not found[folder]:
            remedy = f"etloom salvage {folder}" if left else "check the path"
            raise CollectError("holds no traces of etloom collect", where=folder, remedy=remedy)
    return found


def _check_target(folder: Path, parts: Iterable[Path], target: Path) -> None:
    """What is gathered into itself, or a part of itself, would be written over or removed; wherever links lead."""
    from etloom.core.errors import CollectError

    places = {place.resolve() for place in (target, *run_folder.list_windows(target))}
    for part in (part.resolve() for part in parts):
        if part in places:
            raise CollectError("is gathered into itself", where=folder, remedy="choose another --out")
        if any(part in place.parents or place in part.parents for place in places):
            raise CollectError(
                f"is gathered into {target}, and one lies in the other",
                where=folder,
                remedy="choose another --out",
            )


def _assign_files(folders: dict[Path, list[Path]], warnings: list[str]) -> dict[str, _WindowContents]:
    """Which file of a window comes from where. Raises CollectError where two folders have a rank differently."""
    plan: dict[str, _WindowContents] = {}
    for folder, parts in folders.items():
        twice: set[int] = set()
        for part in parts:
            window = plan.setdefault("" if part == folder else part.name, _WindowContents())
            seals = {facts["rank"]: facts for facts in run_folder.sealed_ranks(part)}
            mine: dict[int, list[Path]] = {}
            for path, rank in _rank_files(part, []):
                mine.setdefault(rank, []).append(path)
            for rank, paths in mine.items():
                if rank in window.homes:
                    _check_same_recording(window, part, rank, paths, seals)
                    twice.add(rank)
                window.homes.setdefault(rank, part)
                for path in paths:
                    window.files.setdefault(path.name, path)
                if rank in seals:
                    window.seals.setdefault(rank, seals[rank])
        if twice:
            warnings.append(
                f"{folder}: rank {format_ranges(sorted(twice))} is in another folder too, and taken once"
            )
    return plan


def _check_same_recording(
    window: _WindowContents, part: Path, rank: int, paths: list[Path], seals: dict[int, Facts]
) -> None:
    from etloom.core.errors import CollectError

    known, here = window.seals.get(rank), seals.get(rank)
    if known is not None and here is not None:
        alike = [known.get(name) == here.get(name) for name in ("host", "pid", "start_ns")]
        same = all(alike)
        if alike == [True, True, False] and job_identity.is_same_launch([known, here]):
            raise CollectError(
                f"is another window of the job that {window.homes[rank]} is of",
                where=part,
                remedy=f"gather whole runs, as {part.parent}, with all their windows, not window by window",
            )
        whose = f", of process {known.get('pid')} on {known['host']}"
        whose += f"; here of process {here.get('pid')} on {here['host']}"
    else:
        pairs = [(path, window.files[path.name]) for path in paths if path.name in window.files]
        same = bool(pairs) and all(filecmp.cmp(path, other, shallow=False) for path, other in pairs)
        whose = ", and differs" if pairs else ", in other files: nothing shows that it is the same recording"
    if not same:
        raise CollectError(
            f"rank {rank} is in {window.homes[rank]} too{whose}",
            where=part,
            remedy="gather one job at a time",
        )


def _check_one_job(plan: dict[str, _WindowContents], warnings: list[str], same_job: bool) -> None:
    from etloom.core.errors import CollectError

    every = [facts for window in plan.values() for facts in window.seals.values()]
    # A job that was restarted may have left windows of each of its lives.
    lives = [
        [one for one in every if one.get("restart") == life] for life in {one.get("restart") for one in every}
    ]
    parts = [list(window.seals.values()) for window in plan.values()]
    found = [why for some in (*parts, *lives) if (why := job_identity.find_contradiction(some)) is not None]
    found += [
        why
        for some in parts
        if not job_identity.is_same_launch(some) and (why := _describe_gap(some)) is not None
    ]
    if found and not same_job:
        raise CollectError(
            f"these are traces of several jobs: {found[0]}",
            where=", ".join(
                sorted({str(home) for window in plan.values() for home in window.homes.values()})
            ),
            remedy="gather one job at a time, or say --same-job where you know that they are of one",
        )
    warnings += [f"taken as one job, as you said, though {why}" for why in dict.fromkeys(found)]
    if not found:
        clocks = [why for some in parts if (why := _describe_gap(some, 0)) is not None]
        warnings += [f"the clocks of the hosts differ: {why}" for why in clocks]
    unknown = sorted({str(w.homes[rank]) for w in plan.values() for rank in w.homes.keys() - w.seals.keys()})
    if unknown:
        warnings.append(
            f"{', '.join(unknown)}: without rank_<r>.json nothing says of which job the traces are"
        )


def _describe_gap(ranks: list[Facts], most_ns: int = _MAX_GAP_NS) -> str | None:
    """Which two ranks have windows of more than `most_ns` between them; null where none have."""
    timed = [rank for rank in ranks if rank.get("start_ns") is not None and rank.get("end_ns") is not None]
    if not timed:
        return None
    last = max(timed, key=lambda rank: int(rank["start_ns"]))
    first = min(timed, key=lambda rank: int(rank["end_ns"]))
    gap_ns = last["start_ns"] - first["end_ns"]
    if gap_ns <= most_ns:
        return None
    ended = f"{_format_duration(gap_ns)} after that of rank {first['rank']} on {first['host']} had ended"
    return f"the window of rank {last['rank']} on {last['host']} began {ended}"


def _format_duration(ns: int) -> str:
    seconds = ns / 1e9
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"


def _rank_files(folder: Path, warnings: list[str]) -> list[tuple[Path, int]]:
    """The files of ranks in a folder, with their ranks."""
    found = []
    for path, rank in run_folder.list_trace_files(folder):
        if rank is None:
            continue
        if not path.is_file():  # to open a pipe would wait for ever
            warnings.append(f"{path}: is no file, and left out")
        elif path.name.startswith("rank_") and validate_rank_facts(run_folder.read_json(path), rank) is None:
            warnings.append(
                f"{path}: does not say of which rank, world, host and time it is, and is left out"
            )
        else:
            found.append((path, rank))
    return found


def _merge_run_facts(folders: list[Path], warnings: list[str]) -> Facts:
    """What the runs of the hosts say of their commands: the first command, all hosts, the worst exit status."""
    found = [run for folder in folders if (run := run_folder.read_run(folder))]
    commands = [run.get("command") for run in found]
    if any(command != commands[0] for command in commands):
        line = f"the hosts ran different commands; run.json has that of {folders[0]}"
        warnings += [line] if line not in warnings else []
    statuses = [run["returncode"] for run in found if run.get("returncode") is not None]
    return {
        "command": commands[0] if commands else None,
        "host": ", ".join(sorted({run["host"] for run in found if run.get("host")})) or None,
        "returncode": max(statuses, default=None),
    }


def _check_completeness(
    place: Path, ranks: list[Facts], window: _WindowContents, warnings: list[str]
) -> None:
    world = max((rank["world_size"] for rank in ranks), default=0)
    missing = sorted(set(range(world)) - window.homes.keys())
    if missing:
        warnings.append(f"{place}: no traces of rank {format_ranges(missing)} of {world}")
    steps = {tuple(rank["steps"]) for rank in ranks if rank.get("steps") is not None}
    if len(steps) > 1:
        warnings.append(f"{place}: the ranks recorded different steps")
