"""Manages the files in a run's folder: names, publishing of a rank's traces, run.json, deletion of old windows."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .atomic_file import write_atomically
from .job_identity import merge_job_facts
from .options import RecordingOptions, new_scratch_name
from .process_endings import describe_endings, describe_losses
from .record_validation import is_shallow, validate_rank_facts, validate_run_facts
from .workload_card import generated_cards, write_card

_FILE_NAMES = re.compile(
    r"(?:torch_et|kineto_trace)_(\d+)\.json(?:\.gz)?|observer_(\d+)\.etob|flight_recorder_(\d+)\.json"
    r"|nsys_(\d+)\.nsys-rep|rank_(\d+)\.json|run\.json"
)
_PUBLISHED_NAMES = {
    "et.etob": "observer_{rank}.etob",
    "et.json.gz": "torch_et_{rank}.json.gz",
    "kineto.json.gz": "kineto_trace_{rank}.json.gz",
    "flight_recorder.json": "flight_recorder_{rank}.json",
}

_RESOURCES = "et_resources"


def list_trace_files(folder: Path) -> list[tuple[Path, int | None]]:
    """Return the collector's files in `folder`, sorted by name, as (path, rank); the rank of run.json is None."""
    files = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE_NAMES.fullmatch(path.name)
        if match:
            files.append((path, next((int(text) for text in match.groups() if text), None)))
    return sorted(files)


def list_windows(folder: Path) -> list[Path]:
    """Return the folders of windows of a run, step_<first> by first step, then those of Ray actors with their own."""
    windows = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    windows.sort(key=lambda path: int(path.name[5:]))
    if not folder.name.startswith("actor_"):
        for actor in sorted(folder.glob("actor_*")):
            windows += [actor, *list_windows(actor)] if actor.is_dir() and not actor.is_symlink() else []
    return windows


def claim_folder(out: str, overwrite: bool, rank: int | None = None, world_size: int = 1) -> None:
    """Create the folder, and ensure that it has no traces of an earlier run: with `overwrite` they are deleted.

    With a `rank` of `world_size` ranks that share the folder, each rank handles its own files, and rank 0 also those
    of ranks that this run does not have; the other ranks may have published theirs already.

    Raises:
        CollectError: There are earlier traces and `overwrite` is false, or the folder cannot be written.
    """
    from etloom.core.errors import CollectError

    def belongs_to_rank(file_rank: int | None) -> bool:
        if rank is None or file_rank == rank:
            return True
        return rank == 0 and file_rank is not None and file_rank >= world_size

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folders = [folder, *list_windows(folder)]
        earlier = [
            path for place in folders for path, number in list_trace_files(place) if belongs_to_rank(number)
        ]
        if earlier and not overwrite:
            raise CollectError(
                f"contains {earlier[0].relative_to(folder)} of an earlier run",
                where=out,
                remedy="overwrite it (--overwrite, overwrite=True) or choose another folder",
            )
        for path in earlier:
            path.unlink(missing_ok=True)
        if rank is None:
            _remove_actor_folders(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "the folder is not writable")
    except OSError as error:
        raise CollectError(
            f"cannot write here: {error.strerror}", where=out, remedy="choose another folder"
        ) from error


def _remove_actor_folders(out: Path) -> None:
    """Remove the folders of Ray actors without traces: an actor takes the first name that is free."""
    for folder in reversed(list_windows(out)):
        if folder.relative_to(out).parts[0].startswith("actor_"):
            with suppress(OSError):
                _remove_empty_window(folder)


def publish_rank(scratch: Path, out: Path, facts: dict[str, Any], options: RecordingOptions) -> list[str]:
    """Move the packed traces in `scratch` to their final names, then write rank_<r>.json and update run.json.

    If another process has published this rank already, its traces are kept, except if the launcher has restarted the
    job since: then all ranks run again, and the later traces are kept.

    Returns:
        Warnings.
    """
    rank = facts["rank"]
    out.mkdir(parents=True, exist_ok=True)
    record_path = out / f"rank_{rank}.json"
    published = validate_rank_facts(read_json(record_path), rank)
    if published is not None and (published.get("restart") or 0) >= facts["restart"]:
        return [
            f"rank {rank} was recorded by process {published.get('pid')} already: these traces are dropped"
        ]
    names = {
        packed: name.format(rank=rank)
        for packed, name in _PUBLISHED_NAMES.items()
        if (scratch / packed).exists()
    }
    facts = facts | {
        "start": format_time(facts["start_ns"]),
        "end": format_time(facts["end_ns"]),
        "files": list(names.values()),
    }
    moved: list[Path] = []
    try:
        for packed, name in names.items():
            (scratch / packed).replace(out / name)
            moved.append(out / name)
        write_json(record_path, facts, scratch)
    except OSError:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
    write_run(out, {"command": options.command, "host": facts["host"], "returncode": None}, scratch)
    if (scratch / _RESOURCES).is_dir():  # contents of tensors, under torch's environment variable
        trace_name = next(name for packed, name in names.items() if packed.startswith("et."))
        resources = out / f"{trace_name.partition('.')[0]}_resources"
        shutil.rmtree(resources, ignore_errors=True)
        (scratch / _RESOURCES).replace(resources)
    return []


def prune_windows(out: Path, rank: int, keep: int) -> bool:
    """Delete a rank's traces in all recording windows except the `keep` newest; return whether older windows existed.

    Each rank removes its own traces, and the last one the folder. The order is that of publication, not of steps,
    which start again if the launcher restarts the job. A folder without traces that has not changed since the oldest
    kept window is removed too. Errors are ignored: the new window is published already.
    """
    candidates = [folder / f"rank_{rank}.json" for folder in list_windows(out)]
    records = sorted((path for path in candidates if path.exists()), key=lambda path: path.stat().st_mtime_ns)
    if len(records) <= keep:
        return False
    for record in records[:-keep]:
        with suppress(OSError):
            # The record last: if this process is killed in between, the next one to prune continues here.
            files = [path for path, number in list_trace_files(record.parent) if number == rank]
            for path in files:
                if path != record:
                    path.unlink(missing_ok=True)
            record.unlink(missing_ok=True)
            _remove_empty_window(record.parent)
    oldest_ns = records[-keep].stat().st_mtime_ns
    for folder in list_windows(out):
        with suppress(OSError):
            if folder.stat().st_mtime_ns < oldest_ns:  # otherwise a rank may be about to publish there
                _remove_empty_window(folder)
    return True


def _remove_empty_window(folder: Path) -> None:
    """Delete the folder of a window if no rank has traces in it. Raises OSError if users have put files there."""
    # Listed after this rank's traces are removed: if two ranks prune at once, the later one sees none.
    if any(rank is not None for _, rank in list_trace_files(folder)):
        return
    for path in (folder / "run.json", *generated_cards(folder)):
        path.unlink(missing_ok=True)
    folder.rmdir()


def add_sequence_length(out: Path, length: int) -> None:
    """Write the sequence length, read from the trace, to the records of all ranks and to the workload card."""
    records = read_rank_records(out)
    _update_rank_records(
        out, [facts | {"model": {**(facts.get("model") or {}), "sequence": length}} for facts in records]
    )


def add_complete_steps(out: Path, steps: dict[int, list[int]]) -> None:
    """Write the numbers of the complete steps, read from the trace, to the records of ranks that were killed."""
    records = [facts for facts in read_rank_records(out) if facts["rank"] in steps]
    _update_rank_records(out, [facts | {"steps": steps[facts["rank"]]} for facts in records])


def _update_rank_records(out: Path, records: list[dict[str, Any]]) -> None:
    """Rewrite the files rank_<r>.json of ranks, and update run.json and the workload card accordingly."""
    if not records:  # of a killed job
        return
    run = read_run(out)
    scratch = Path(new_scratch_name(str(out)))
    scratch.mkdir()
    try:
        for facts in records:
            write_json(out / f"rank_{facts['rank']}.json", facts, scratch)
        write_run(out, {name: run.get(name) for name in ("command", "host", "returncode")}, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_rank_records(out: Path) -> list[dict[str, Any]]:
    """Return the contents of all valid files rank_<r>.json in the folder `out`, sorted by rank."""
    paths = [(path, rank) for path, rank in list_trace_files(out) if path.name.startswith("rank_")]
    records = (validate_rank_facts(read_json(path), rank) for path, rank in paths)
    return sorted((facts for facts in records if facts is not None), key=lambda facts: facts["rank"])


def read_run(out: Path, name: str = "run.json") -> dict[str, Any]:
    """Return the valid fields of run.json (or of the file `name`) in the folder `out`; empty if the file is missing."""
    return validate_run_facts(read_json(out / name))


def write_run(out: Path, facts: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Write run.json and the workload card from all rank records; repeat if a rank adds its record meanwhile."""
    while True:
        ranks = read_rank_records(out)
        start_ns = min((rank["start_ns"] for rank in ranks), default=None)
        run = {
            "schema": "etloom-run-1",
            **facts,
            "start_ns": start_ns,
            "start": None if start_ns is None else format_time(start_ns),
            "job": merge_job_facts(ranks),
            "hosts": sorted({rank["host"] for rank in ranks}),
            "world_size": max((rank["world_size"] for rank in ranks), default=None),
            "ended": describe_endings(ranks),
            "lost": describe_losses(ranks),
            "versions": ranks[0].get("versions") if ranks else None,
            "ranks": [{**rank, "lost": describe_losses([rank])} for rank in ranks],
        }
        write_json(out / "run.json", run, scratch)
        write_card(out, run, scratch)
        if len(ranks) == len(read_rank_records(out)):
            return ranks


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if the file is missing or invalid, as after an interrupted write."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and is_shallow(value) else None


def write_json(path: Path, value: dict[str, Any], scratch: Path) -> None:
    """Write a JSON object atomically."""
    write_atomically(path, json.dumps(value, indent=1) + "\n", scratch)


def format_time(time_ns: int) -> str:
    """Format a time in ns since the Unix epoch as ISO 8601 in UTC."""
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).isoformat()
