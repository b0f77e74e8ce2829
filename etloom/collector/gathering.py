"""Folders of several hosts, of one job, put together into one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .options import new_scratch


@dataclass(frozen=True)
class Gathered:
    """The ranks in `out`, by window where there are several, and what is worth a warning."""

    out: Path
    windows: dict[Path, tuple[int, ...]]
    warnings: tuple[str, ...]


def gather(
    folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, overwrite: bool = False
) -> Gathered:
    """Copy the traces of `folders` into `out`, and write run.json and the card of the whole job.

    Windows (step_<first>) of a name go together. Nothing of `folders` is changed.

    Raises CollectError, before anything is copied: a folder is missing or without traces of `collect`, two have
    the same rank of a window, `out` is one of them, holds traces already (unless `overwrite`) or cannot be written.
    """
    from etloom.errors import CollectError

    target = Path(os.path.abspath(out))  # noqa: PTH100
    plan: dict[str, dict[str, Path]] = {}
    for folder in map(Path, folders):
        if folder.resolve() == target.resolve():
            raise CollectError("is gathered into itself", where=folder, remedy="choose another --out")
        parts = [part for part in (folder, *files.windows_in(folder)) if _traces(part)]
        if not parts:
            raise CollectError("holds no traces of etloom collect", where=folder, remedy="check the path")
        for part in parts:
            window = "" if part == folder else part.name
            for path in _traces(part):
                other = plan.setdefault(window, {}).setdefault(path.name, path)
                if other != path:
                    raise CollectError(
                        f"holds {path.name} as {other.parent} does",
                        where=part,
                        remedy="gather one job at a time",
                    )
    files.claim(str(target), overwrite)
    scratch = Path(new_scratch(str(target)))
    scratch.mkdir()
    warnings: list[str] = []
    windows = {}
    try:
        for window, found in sorted(plan.items()):
            place = target / window
            place.mkdir(exist_ok=True)
            for name, path in found.items():
                shutil.copy2(path, scratch / name)
                (scratch / name).replace(place / name)
            parents = sorted({path.parent for path in found.values()})
            ranks = files.write_run(place, _facts(parents, warnings), scratch)
            windows[place] = tuple(rank["rank"] for rank in ranks)
            _check(place, ranks, warnings)
    except OSError as error:
        raise CollectError(f"cannot be written: {error.strerror}", where=error.filename or target) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Gathered(target, windows, tuple(warnings))


def _traces(folder: Path) -> list[Path]:
    return [path for path, rank in files.traces_in(folder) if rank is not None]


def _facts(folders: list[Path], warnings: list[str]) -> dict[str, Any]:
    """What the runs of the hosts say of their commands: the first command, all hosts, the worst exit status."""
    runs = [run for folder in folders if (run := files.read_json(folder / "run.json")) is not None]
    commands = [run.get("command") for run in runs]
    if any(command != commands[0] for command in commands):
        warnings.append(f"the hosts ran different commands; run.json has that of {folders[0]}")
    statuses = [run["returncode"] for run in runs if run.get("returncode") is not None]
    return {
        "command": commands[0] if commands else None,
        "host": ", ".join(sorted({str(run["host"]) for run in runs if run.get("host")})) or None,
        "returncode": max(statuses, default=None),
    }


def _check(place: Path, ranks: list[dict[str, Any]], warnings: list[str]) -> None:
    worlds = {rank["world_size"] for rank in ranks}
    if len(worlds) > 1:
        warnings.append(f"{place}: the ranks are of worlds of {sorted(worlds)} ranks, so of several jobs")
    missing = sorted(set(range(max(worlds, default=0))) - {rank["rank"] for rank in ranks})
    if missing:
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        warnings.append(f"{place}: no traces of rank {shown} of {max(worlds)}")
    steps = {tuple(rank["steps"]) for rank in ranks}
    if len(steps) > 1:
        warnings.append(f"{place}: the ranks recorded different steps")
