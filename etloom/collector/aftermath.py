"""After the command of `launch`: the facts of the run, and what is missing of it."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

from . import demand, ends, files, leftovers, nsys, reasons, seen
from .identity import launch_of
from .options import Options
from .words import counted, runs


def gather(options: Options, returncode: int) -> tuple[list[Path], list[int], list[str]]:
    """After the command: write run.json of each window, say what is missing, remove the scratch folder if it is empty.

    Gives the folders with traces, the ranks that have any, and what is worth a warning.
    """
    out, scratch = Path(options.out), Path(options.scratch)
    warnings: list[str] = []
    late = demand.forget(out) and options.on_demand is not None
    scratch.mkdir(exist_ok=True)  # the last rank that sealed may have removed it
    processes = seen.taken(scratch)
    for process in processes if late else ():
        process["late"] = True
    left, alive = [], []
    for path in sorted(path for path in scratch.iterdir() if path.is_dir() and any(path.iterdir())):
        if leftovers.records(path):
            alive.append(
                str(leftovers.process_of(path))
            )  # the command did not wait for it: its folder is its own
        elif (path / ends.STARTED).exists():
            left.append(path)
        else:  # prepared, and its process ended before
            shutil.rmtree(path, ignore_errors=True)
    kept = [facts for path in left if (facts := leftovers.keep_killed(path, out)) is not None]
    if said := ends.told(kept):
        warnings.append(f"{out}: {said}; {ends.what_is_left(kept)}")
    left = [path for path in left if path.exists()]
    warnings += [
        f"{path}: left by process {leftovers.process_of(path)}, which died in its window" for path in left
    ]
    windows = [folder for folder in [out, *files.windows_in(out)] if files.sealed_ranks(folder)]
    recorded: set[int] = set()
    for folder in windows:
        recorded.update(_finish_run(options, folder, returncode, scratch, processes, warnings))
    if late and windows:
        warnings.append(f"{out}: asked for another window too late: no step ended after that")
    if alive:
        warnings.append(
            f"{out}: process {', '.join(alive)} still runs, and may record; etloom salvage {out} keeps what it leaves"
        )
    if not (windows or left or kept or alive):
        # On a full disk the processes could leave no word.
        full = not processes and not os.statvfs(out).f_bavail
        why = "the disk is full" if full else reasons.why_nothing(options, processes, returncode)
        warnings.append(f"{out}: nothing recorded: {why}")
    if not (left or alive):
        shutil.rmtree(scratch, ignore_errors=True)
    return windows, sorted(recorded), warnings


def _finish_run(
    options: Options,
    folder: Path,
    returncode: int,
    scratch: Path,
    processes: list[dict[str, Any]],
    warnings: list[str],
) -> list[int]:
    """Write run.json of a folder, with the command's exit status; the ranks in it."""
    ranks = files.sealed_ranks(folder)
    try:
        leftovers.note(folder, launch_of(options), returncode, processes, scratch)
        facts = {"command": options.command, "host": socket.gethostname(), "returncode": returncode}
        ranks = files.write_run(folder, facts, scratch)
    except OSError as error:
        warnings.append(f"{folder / 'run.json'}: cannot be written: {error.strerror}")
    world = max(rank["world_size"] for rank in ranks)
    asked = set(range(world) if options.ranks is None else options.ranks)
    missing = sorted(asked - {rank["rank"] for rank in ranks})
    here = {(rank["host"], rank.get("local_world_size")) for rank in ranks}
    if missing and here == {(socket.gethostname(), len(ranks))}:
        warnings.append(
            f"{folder}: {counted(len(ranks), 'rank')} of {world}, those of this host; etloom gather joins the "
            "folders of hosts"
        )
    elif missing:
        why = {
            facts["rank"]: f"; rank {facts['rank']}: {reasons.why_not(options, facts)}"
            for facts in processes
            if facts.get("rank") in missing and facts.get("began") and not facts.get("sealed")
        }
        told = "".join(list(why.values())[:4])
        warnings.append(f"{folder}: no traces of rank {runs(missing)} of {world}{told}")
    if options.nsys and (line := nsys.without_report(folder, [rank["rank"] for rank in ranks])):
        warnings.append(f"{folder}: {line}")
    if ring := reasons.of_ring(ranks):
        warnings.append(f"{folder}: {ring}")
    return [rank["rank"] for rank in ranks]
