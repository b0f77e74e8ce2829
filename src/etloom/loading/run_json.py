"""Read run.json, which `etloom collect` writes next to the traces, and detect unfinished recordings.

How the processes and the command ended becomes rows of stats; everything else in run.json is passed on unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from etloom.core.schema import Stat
from etloom.formats.io.json_text import load_json

_MAX_BYTES = 1 << 26
_HIDDEN = re.compile(r"\.etloom-.+-\d+-[0-9a-f]+", re.ASCII)  # host, process, random number


def read_run_json(folder: Path, stats: list[Stat]) -> tuple[dict[str, Any] | None, dict[int, Stat]]:
    """Read the run.json of `etloom collect` in a folder, and report in stats how the job and its ranks ended.

    Args:
        folder: the folder of a run.
        stats: receives rows of stats about the run, for example how the command ended.

    Returns:
        The contents of run.json, None if there is no valid one; and for each rank with data loss a row of stats.
    """
    if (remedy := find_unfinished_recording(folder)) is not None:
        stats.append(Stat("job.unfinished_recording", "data_loss", 1, remedy))
    path = folder / "run.json"
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None, {}
    try:
        run = load_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        stats.append(Stat("job.run_json", "info", 1, f"{path.name} cannot be read"))
        return None, {}
    if not (isinstance(run, dict) and str(run.get("schema", "")).startswith("etloom-run")):
        return None, {}
    ended = run.get("ended")
    if isinstance(ended, str) and ended:
        stats.append(Stat("job.ended_early", "info", 1, ended[:500]))
    cut_short = {
        rank["rank"]: row
        for rank in _list_ranks(run)
        if type(rank.get("rank")) is int and (row := _describe_loss(rank)) is not None
    }
    if not cut_short and (row := _describe_loss(run)):
        stats.append(row)
    if run.get("returncode") is None and _is_launched(run):
        unknown_end = "etloom collect was killed before the job ended, or the job still runs"
        stats.append(Stat("job.end_unknown", "info", 1, unknown_end))
    elif run.get("returncode"):
        stats.append(Stat("job.failed", "info", 1, f"the command ended with status {run['returncode']}"))
    return run, cut_short


def find_unfinished_recording(folder: Path) -> str | None:
    """Return advice to the user if a recording in a folder has not finished; None if all have finished."""
    hidden_folders = (
        path for path in folder.glob(".etloom-*") if _HIDDEN.fullmatch(path.name) and path.is_dir()
    )
    if any(_has_started(place) for hidden in hidden_folders for place in _list_inside(hidden)):
        return f"a job is still recording here; if it was killed, recover its traces with etloom salvage {folder}"
    return None


def _has_started(place: Path) -> bool:
    return place.is_dir() and bool(_list_inside(place))


def _list_inside(folder: Path) -> list[Path]:
    """Return the entries of a folder; empty if it cannot be read or no longer exists."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_launched(run: dict[str, Any]) -> bool:
    """Return whether `etloom collect` launched the command of the run (not etloom.record within the job)."""
    jobs = [rank.get("job") for rank in _list_ranks(run)]
    return any(isinstance(job, dict) and job.get("supervised") for job in jobs)


def _list_ranks(run: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = run.get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _describe_loss(facts: dict[str, Any]) -> Stat | None:
    lost = facts.get("lost")
    return (
        Stat("job.truncated_recording", "data_loss", 1, lost[:500])
        if isinstance(lost, str) and lost
        else None
    )
