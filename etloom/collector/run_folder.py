"""The names of a collected folder, and the step that makes files final."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import record_validation
from .atomic_file import write_atomically
from .job_identity import merge_job_facts
from .options import Options, new_scratch_name
from .process_endings import describe_endings, describe_losses
from .workload_card import generated_cards, write_card

_FILE_NAMES = re.compile(
    r"(?:torch_et|kineto_trace)_(\d+)\.json(?:\.gz)?|observer_(\d+)\.etob|flight_recorder_(\d+)\.json"
    r"|nsys_(\d+)\.nsys-rep|rank_(\d+)\.json|run\.json"
)


def list_trace_files(folder: Path) -> list[tuple[Path, int | None]]:
    """The files of this scheme in `folder` by name, with their rank (None: run.json)."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE_NAMES.fullmatch(path.name)
        if match:
            found.append((path, next((int(text) for text in match.groups() if text), None)))
    return sorted(found)


def list_windows(folder: Path) -> list[Path]:
    """The folders of the windows of a run that has several, in the order of their steps."""
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def claim_folder(out: str, overwrite: bool, rank: int | None = None, world: int = 1) -> None:
    """Make the folder and see that no earlier run's traces would mix with the new ones.

    With a `rank` of `world` ranks that share the folder each looks after its own files, and rank 0 also
    after those of ranks that this run does not have; the others may have sealed theirs already.
    Raises CollectError where there are some and `overwrite` is false, and where the folder cannot be written.
    """

    def ours(other: int | None) -> bool:
        return rank is None or other == rank or (rank == 0 and other is not None and other >= world)

    from etloom.core.errors import CollectError

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folders = [folder, *list_windows(folder)]
        earlier = [path for place in folders for path, other in list_trace_files(place) if ours(other)]
        if earlier and not overwrite:
            raise CollectError(
                f"holds {earlier[0].relative_to(folder)} of an earlier run",
                where=out,
                remedy="overwrite it (--overwrite, overwrite=True) or choose another folder",
            )
        for path in earlier:
            path.unlink(missing_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "the folder is not writable")
    except OSError as error:
        raise CollectError(
            f"cannot write here: {error.strerror}", where=out, remedy="choose another folder"
        ) from error


def publish_rank(scratch: Path, out: Path, facts: dict[str, Any], options: Options) -> list[str]:
    """Give the packed traces in `scratch` their final names, then write rank_<r>.json and renew run.json.

    Returns warnings. A rank that another process has sealed already keeps its first traces, except where the
    launcher restarted the job since: then all its ranks run anew, and the later ones are kept.
    """
    rank = facts["rank"]
    out.mkdir(exist_ok=True)
    seal_path = out / f"rank_{rank}.json"
    sealed = record_validation.validate_rank_facts(read_json(seal_path), rank)
    if sealed is not None and (sealed.get("restart") or 0) >= facts["restart"]:
        return [f"rank {rank} is already recorded by process {sealed.get('pid')}: these traces are dropped"]
    known = {
        "et.etob": f"observer_{rank}.etob",
        "et.json.gz": f"torch_et_{rank}.json.gz",
        "kineto.json.gz": f"kineto_trace_{rank}.json.gz",
        "flight_recorder.json": f"flight_recorder_{rank}.json",
    }
    names = {packed: name for packed, name in known.items() if (scratch / packed).exists()}
    facts = facts | {
        "start": format_time(facts["start_ns"]),
        "end": format_time(facts["end_ns"]),
        "files": list(names.values()),
    }
    made: list[Path] = []
    try:
        for packed, name in names.items():
            (scratch / packed).replace(out / name)
            made.append(out / name)
        write_json(seal_path, facts, scratch)
    except OSError:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    write_run(out, {"command": options.command, "host": facts["host"], "returncode": None}, scratch)
    return []


def prune_windows(out: Path, rank: int, keep: int) -> bool:
    """Remove this rank's traces of all windows of a run but the `keep` it sealed last; True where there were any.

    Each rank looks after its own, and the last one after the folder. Not by their steps, which begin anew where the
    launcher restarts a job. A folder without any rank's traces, which nobody has touched since the oldest window
    that is kept, goes too. What cannot be removed stays: the new window is sealed already.
    """
    seals = [place / f"rank_{rank}.json" for place in list_windows(out)]
    seals = sorted(
        (seal for seal in seals if seal.exists()), key=lambda seal: seal.stat().st_mtime_ns
    )
    if len(seals) <= keep:
        return False
    for seal in seals[:-keep]:
        with suppress(OSError):
            # The seal last: where we are killed in between, the next to prune finds it and goes on.
            for path in [
                path for path, other in list_trace_files(seal.parent) if other == rank and path != seal
            ]:
                path.unlink(missing_ok=True)
            seal.unlink(missing_ok=True)
            _remove_empty_window(seal.parent)
    oldest_ns = seals[-keep].stat().st_mtime_ns
    for place in list_windows(out):
        with suppress(OSError):
            if place.stat().st_mtime_ns < oldest_ns:  # else a rank may be about to seal there
                _remove_empty_window(place)
    return True


def _remove_empty_window(place: Path) -> None:
    """Remove the folder of a window that has no rank's traces. Raises OSError where its people put something there."""
    # Listed after this rank's traces are gone: of two that prune at once the later one sees none.
    if any(rank is not None for _, rank in list_trace_files(place)):
        return
    for path in (place / "run.json", *generated_cards(place)):
        path.unlink(missing_ok=True)
    place.rmdir()


def note_sequence(out: Path, length: int) -> None:
    """Add what the trace says of a sequence's length to the facts of the ranks and to the card."""
    known = sealed_ranks(out)
    _update_rank_facts(
        out, [facts | {"model": {**(facts.get("model") or {}), "sequence": length}} for facts in known]
    )


def note_steps(out: Path, steps: dict[int, list[int]]) -> None:
    """Add to the facts of ranks whose processes were killed which steps their files hold whole, by rank."""
    ranks = [facts for facts in sealed_ranks(out) if facts["rank"] in steps]
    _update_rank_facts(out, [facts | {"steps": steps[facts["rank"]]} for facts in ranks])


def _update_rank_facts(out: Path, ranks: list[dict[str, Any]]) -> None:
    """Write the facts of these ranks anew, and with them run.json and the card."""
    if not ranks:  # of a killed job
        return
    run = read_run(out)
    scratch = Path(new_scratch_name(str(out)))
    scratch.mkdir()
    try:
        for facts in ranks:
            write_json(out / f"rank_{facts['rank']}.json", facts, scratch)
        write_run(out, {name: run.get(name) for name in ("command", "host", "returncode")}, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sealed_ranks(out: Path) -> list[dict[str, Any]]:
    """The contents of all rank_<r>.json that are whole (seals.py), by rank."""
    named = [(path, rank) for path, rank in list_trace_files(out) if path.name.startswith("rank_")]
    found = (record_validation.validate_rank_facts(read_json(path), rank) for path, rank in named)
    return sorted((facts for facts in found if facts is not None), key=lambda facts: facts["rank"])


def read_run(out: Path, name: str = "run.json") -> dict[str, Any]:
    """What run.json, or another of that `name`, says of the command; empty where there is none."""
    return record_validation.validate_run_facts(read_json(out / name))


def write_run(out: Path, facts: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Write run.json from all sealed ranks, and again until none was sealed meanwhile. Returns the ranks."""
    while True:
        ranks = sealed_ranks(out)
        first = min((rank["start_ns"] for rank in ranks), default=None)
        run = {
            "schema": "etloom-run-1",
            **facts,
            "start_ns": first,
            "start": None if first is None else format_time(first),
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
        if len(ranks) == len(sealed_ranks(out)):
            return ranks


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or not a whole one, as of a process that was killed while it wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and record_validation.is_shallow(found) else None


def write_json(path: Path, value: dict[str, Any], scratch: Path) -> None:
    """Whole or not at all."""
    write_atomically(path, json.dumps(value, indent=1) + "\n", scratch)


def format_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).isoformat()
