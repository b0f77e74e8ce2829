"""Joins the folders that several hosts recorded for one job into one folder."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import job_identity
from ..options import new_scratch_name
from ..record_validation import validate_rank_facts
from ..run_folder import (
    claim_folder,
    list_trace_files,
    list_windows,
    read_json,
    read_rank_records,
    read_run,
    write_run,
)
from ..text import format_ranges
from ..workload_card import generated_cards
from .killed_windows import find_hidden_folders

Facts = dict[str, Any]
_MAX_GAP_NS = 60 * 10**9
"""Windows that are further apart are not assumed to belong to one job without proof: clocks differ by less."""


@dataclass(frozen=True)
class GatherResult:
    """The result of `gather`: the joined folder, the ranks in each folder with traces, and warnings.

    Attributes:
        out: The joined folder.
        windows: Ranks in each folder with traces: `out` itself, or one per window.
        warnings: Messages about missing ranks and inconsistencies.
    """

    out: Path
    windows: dict[Path, tuple[int, ...]]
    warnings: tuple[str, ...]


@dataclass
class _WindowContents:
    """The contents of a recording window: its files by name, and the record and the source folder of each rank."""

    files: dict[str, Path] = field(default_factory=dict)
    records: dict[int, Facts] = field(default_factory=dict)
    folders: dict[int, Path] = field(default_factory=dict)


def gather(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    same_job: bool = False,
) -> GatherResult:
    """Copy the traces of several hosts into one folder, and write run.json and the workload card of the whole job.

    Windows (step_<first>) of the same name are joined. A rank that is in two folders is copied once if both are the
    same recording: of the same process and start, or identical byte for byte. The source folders do not change.

    Args:
        folders: The folders of the hosts.
        out: The folder for all traces. Its previous traces are removed once everything is copied.
        overwrite: Replace traces of an earlier run in `out`.
        same_job: Join the folders even if they seem to belong to different jobs (job_identity.py), or if their
            windows are more than a minute apart and nothing proves that they belong together.

    Returns:
        The ranks of each window, and all warnings.

    Raises:
        CollectError: Before anything is copied: a folder is missing or has no traces of `collect`, two folders have
            different recordings of a rank, the folders belong to different jobs, `out` contains or is contained in
            one of them, holds traces already, or cannot be written.

    Example:
        >>> from etloom.collector import gather
        >>> gather(["node0/run", "node1/run"], "run").windows  # doctest: +SKIP
        {PosixPath('/home/me/run'): (0, 1, 2, 3)}
    """
    from etloom.core.errors import CollectError

    target = Path(os.path.abspath(out))  # noqa: PTH100
    warnings: list[str] = []
    contents = _assign_files(_distinct_folders(folders, target, warnings), warnings)
    _check_single_job(contents, warnings, same_job)
    scratch = Path(new_scratch_name(str(target)))
    with ExitStack() as undo:  # unless everything succeeds
        if not target.exists():
            undo.callback(_remove_folder, target)
        undo.callback(shutil.rmtree, scratch, ignore_errors=True)
        try:
            if not overwrite:
                claim_folder(str(target), overwrite=False)
            for name, window in sorted(contents.items()):
                (scratch / name).mkdir(parents=True, exist_ok=True)
                for file_name, path in window.files.items():
                    shutil.copy2(path, scratch / name / file_name)
            _move_earlier(target, scratch / "earlier", undo)
            windows = {
                target / name: _publish_window(target / name, window, scratch / name, warnings, undo)
                for name, window in sorted(contents.items())
            }
        except OSError as error:
            raise CollectError(f"cannot be written: {error.strerror}", where=target) from error
        undo.pop_all()
    shutil.rmtree(scratch, ignore_errors=True)
    return GatherResult(target, windows, tuple(warnings))


def _move_earlier(target: Path, aside: Path, undo: ExitStack) -> None:
    """Move the traces and workload cards of an earlier run to the folder `aside`."""
    for number, folder in enumerate((target, *list_windows(target))):
        files = [*(path for path, _ in list_trace_files(folder)), *generated_cards(folder)]
        for path in files:
            (aside / str(number)).mkdir(parents=True, exist_ok=True)
            _move(path, aside / str(number) / path.name, undo)


def _remove_folder(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def _move(source: Path, target: Path, undo: ExitStack) -> None:
    source.replace(target)
    undo.callback(target.replace, source)


def _publish_window(
    place: Path, window: _WindowContents, copies: Path, warnings: list[str], undo: ExitStack
) -> tuple[int, ...]:
    """Move the copied files of a recording window to the folder `place`, write its run.json, and return its ranks."""
    if not place.exists():
        place.mkdir(parents=True)
        undo.callback(_remove_folder, place)
    for name in window.files:
        _move(copies / name, place / name, undo)

    def remove_written() -> None:
        for path in (place / "run.json", *generated_cards(place)):
            path.unlink(missing_ok=True)

    undo.callback(remove_written)
    sources = sorted({path.parent for path in window.files.values()})
    ranks = write_run(place, _merge_run_facts(sources, warnings), copies)
    _check_completeness(place, ranks, window, warnings)
    return tuple(sorted(window.folders))


def _distinct_folders(
    folders: Iterable[str | os.PathLike[str]], target: Path, warnings: list[str]
) -> dict[Path, list[Path]]:
    """Map each distinct source folder to the folders in it that contain traces: itself or its windows' folders."""
    from etloom.core.errors import CollectError

    windows: dict[Path, list[Path]] = {}
    by_real_path: dict[Path, Path] = {}
    for folder in map(Path, folders):
        real_path = folder.resolve()
        if real_path in by_real_path:
            other = by_real_path[real_path]
            alias = "" if other == folder else f", also as {other}"
            warnings.append(f"{folder}: duplicate argument{alias}; used once")
            continue
        by_real_path[real_path] = folder
        parts = (folder, *list_windows(folder))
        _check_target(folder, parts, target)
        windows[folder] = [part for part in parts if _rank_files(part, warnings)]
        has_leftovers = any(any(path.iterdir()) for path in find_hidden_folders(folder))
        if has_leftovers:
            warnings.append(
                f"{folder}: contains unfinished traces of killed processes; etloom salvage {folder} recovers them"
            )
        if not windows[folder]:
            remedy = f"etloom salvage {folder}" if has_leftovers else "check the path"
            raise CollectError("contains no traces of etloom collect", where=folder, remedy=remedy)
    return windows


def _check_target(folder: Path, parts: Iterable[Path], target: Path) -> None:
    """Raise CollectError if the target overlaps with a source, also through links: source files would be lost."""
    from etloom.core.errors import CollectError

    targets = {place.resolve() for place in (target, *list_windows(target))}
    for part in (part.resolve() for part in parts):
        if part in targets:
            raise CollectError("is the --out folder itself", where=folder, remedy="choose another --out")
        if any(part in place.parents or place in part.parents for place in targets):
            raise CollectError(
                f"overlaps with the --out folder {target}: one contains the other",
                where=folder,
                remedy="choose another --out",
            )


def _assign_files(folders: dict[Path, list[Path]], warnings: list[str]) -> dict[str, _WindowContents]:
    """Select the files of each recording window. Raises CollectError if folders have different recordings of a rank."""
    contents: dict[str, _WindowContents] = {}
    for folder, parts in folders.items():
        duplicates: set[int] = set()
        for part in parts:
            window = contents.setdefault(str(part.relative_to(folder)), _WindowContents())
            duplicates |= _add_part(window, part)
        if duplicates:
            ranks = format_ranges(sorted(duplicates))
            warnings.append(f"{folder}: rank {ranks} is in another folder too; used once")
    return contents


def _add_part(window: _WindowContents, part: Path) -> set[int]:
    """Add the files of a folder to a recording window; return the ranks in the folder that the window already had."""
    duplicates = set()
    records = {facts["rank"]: facts for facts in read_rank_records(part)}
    by_rank: dict[int, list[Path]] = {}
    for path, rank in _rank_files(part, []):
        by_rank.setdefault(rank, []).append(path)
    for rank, paths in by_rank.items():
        if rank in window.folders:
            _check_same_recording(window, part, rank, paths, records)
            duplicates.add(rank)
        window.folders.setdefault(rank, part)
        for path in paths:
            window.files.setdefault(path.name, path)
        if rank in records:
            window.records.setdefault(rank, records[rank])
    return duplicates


def _check_same_recording(
    window: _WindowContents, part: Path, rank: int, paths: list[Path], records: dict[int, Facts]
) -> None:
    from etloom.core.errors import CollectError

    first, second = window.records.get(rank), records.get(rank)
    if first is not None and second is not None:
        equal = [first.get(name) == second.get(name) for name in ("host", "pid", "start_ns")]
        is_same = all(equal)
        if equal == [True, True, False] and job_identity.is_same_launch([first, second]):
            raise CollectError(
                f"is another window of the job in {window.folders[rank]}",
                where=part,
                remedy=f"gather whole runs, such as {part.parent}, with all their windows, not single windows",
            )
        difference = f", of process {first.get('pid')} on {first['host']}"
        difference += f"; here of process {second.get('pid')} on {second['host']}"
    else:
        pairs = [(path, window.files[path.name]) for path in paths if path.name in window.files]
        is_same = bool(pairs) and all(filecmp.cmp(path, other, shallow=False) for path, other in pairs)
        difference = ", with different contents" if pairs else ", in other files that cannot be compared"
    if not is_same:
        raise CollectError(
            f"rank {rank} is also in {window.folders[rank]}{difference}",
            where=part,
            remedy="gather one job at a time",
        )


def _check_single_job(contents: dict[str, _WindowContents], warnings: list[str], same_job: bool) -> None:
    """Raise CollectError if the recording windows belong to several jobs; with `same_job`, only add warnings."""
    from etloom.core.errors import CollectError

    windows = [list(window.records.values()) for window in contents.values()]
    contradictions = _find_contradictions(dict(zip(contents, windows, strict=True)))
    if contradictions and not same_job:
        sources = {str(folder) for window in contents.values() for folder in window.folders.values()}
        raise CollectError(
            f"the traces belong to several jobs: {contradictions[0]}",
            where=", ".join(sorted(sources)),
            remedy="gather one job at a time, or use --same-job if you know that they belong to one",
        )
    for contradiction in dict.fromkeys(contradictions):
        warnings.append(f"joined because of --same-job, although {contradiction}")
    if not contradictions:
        gaps = [gap for ranks in windows if (gap := _describe_gap(ranks, 0)) is not None]
        warnings += [f"the clocks of the hosts differ: {gap}" for gap in gaps]
    unknown = {
        str(window.folders[rank])
        for window in contents.values()
        for rank in window.folders.keys() - window.records.keys()
    }
    if unknown:
        warnings.append(f"{', '.join(sorted(unknown))}: the job of traces without rank_<r>.json is unknown")


def _find_contradictions(windows: dict[str, list[Facts]]) -> list[str]:
    """Return the reasons why the ranks of the recording windows, by name, cannot belong to a single job; empty if they
    can."""
    # A job that was restarted may have windows of each of its lives; the ranks of a Ray actor's class are its own.
    lives: dict[tuple[str, Any], list[Facts]] = {}
    for name, ranks in windows.items():
        actor = name.partition("/")[0] if name.startswith("actor_") else ""
        for facts in ranks:
            lives.setdefault((actor, facts.get("restart")), []).append(facts)
    contradictions = [
        job_identity.find_contradiction(ranks) for ranks in (*windows.values(), *lives.values())
    ]
    contradictions += [
        _describe_gap(ranks) for ranks in windows.values() if not job_identity.is_same_launch(ranks)
    ]
    return [contradiction for contradiction in contradictions if contradiction is not None]


def _describe_gap(ranks: list[Facts], max_gap_ns: int = _MAX_GAP_NS) -> str | None:
    """Return a text on two ranks whose recording windows are more than `max_gap_ns` (ns) apart, or None."""
    timed = [rank for rank in ranks if rank.get("start_ns") is not None and rank.get("end_ns") is not None]
    if not timed:
        return None
    latest = max(timed, key=lambda rank: int(rank["start_ns"]))
    earliest = min(timed, key=lambda rank: int(rank["end_ns"]))
    gap_ns = latest["start_ns"] - earliest["end_ns"]
    if gap_ns <= max_gap_ns:
        return None
    return (
        f"the window of rank {latest['rank']} on {latest['host']} began {_format_duration(gap_ns)} after that of "
        f"rank {earliest['rank']} on {earliest['host']} had ended"
    )


def _format_duration(ns: int) -> str:
    seconds = ns / 1e9
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"


def _rank_files(folder: Path, warnings: list[str]) -> list[tuple[Path, int]]:
    """Return the valid trace files in a folder as (path, rank), and add a warning for each invalid file."""
    files = []
    for path, rank in list_trace_files(folder):
        if rank is None:
            continue
        if not path.is_file():  # opening a pipe would block forever
            warnings.append(f"{path}: not a regular file; left out")
        elif path.name.startswith("rank_") and validate_rank_facts(read_json(path), rank) is None:
            warnings.append(f"{path}: invalid rank, world size, host or start; left out")
        else:
            files.append((path, rank))
    return files


def _merge_run_facts(folders: list[Path], warnings: list[str]) -> Facts:
    """Merge the run.json files of several hosts: keep the first command, all host names and the highest exit status."""
    runs = [run for folder in folders if (run := read_run(folder))]
    commands = [run.get("command") for run in runs]
    if any(command != commands[0] for command in commands):
        warning = f"the hosts ran different commands; run.json has that of {folders[0]}"
        warnings += [warning] if warning not in warnings else []
    statuses = [run["returncode"] for run in runs if run.get("returncode") is not None]
    return {
        "command": commands[0] if commands else None,
        "host": ", ".join(sorted({run["host"] for run in runs if run.get("host")})) or None,
        "returncode": max(statuses, default=None),
    }


def _check_completeness(
    place: Path, ranks: list[Facts], window: _WindowContents, warnings: list[str]
) -> None:
    world_size = max((rank["world_size"] for rank in ranks), default=0)
    missing = sorted(set(range(world_size)) - window.folders.keys())
    if missing:
        warnings.append(f"{place}: no traces of rank {format_ranges(missing)} of {world_size}")
    steps = {tuple(rank["steps"]) for rank in ranks if rank.get("steps") is not None}
    if len(steps) > 1:
        warnings.append(f"{place}: the ranks recorded different steps")
