"""After the command of `launch`: the facts of the run, and what is missing of it."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

from .. import diagnosis, process_endings, run_folder
from ..job_identity import launch_id
from ..options import Options
from ..recovery import killed_windows
from ..session import on_demand, process_status
from ..session.messages import count_noun, format_ranges
from . import nsys_command


def finalize_run(options: Options, returncode: int) -> tuple[list[Path], list[int], list[str]]:
    """After the command: write run.json of each window, say what is missing, remove the scratch folder if it is empty.

    Gives the folders with traces, the ranks that have any, and what is worth a warning.
    """
    out, scratch = Path(options.out), Path(options.scratch)
    warnings: list[str] = []
    late = on_demand.clear_requests(out) and options.on_demand is not None
    scratch.mkdir(exist_ok=True)  # the last rank that sealed may have removed it
    processes = process_status.read_statuses(scratch)
    for process in processes if late else ():
        process["late"] = True
    left, alive = [], []
    for path in sorted(path for path in scratch.iterdir() if path.is_dir() and any(path.iterdir())):
        if killed_windows.is_still_recording(path):
            alive.append(
                str(killed_windows.pid_of_window(path))
            )  # the command did not wait for it: its folder is its own
        elif (path / process_endings.STARTED_FILE).exists():
            left.append(path)
        else:  # prepared, and its process ended before
            shutil.rmtree(path, ignore_errors=True)
    kept = [facts for path in left if (facts := killed_windows.seal_killed_window(path, out)) is not None]
    if said := process_endings.describe_endings(kept):
        warnings.append(f"{out}: {said}; {process_endings.describe_kept(kept)}")
    left = [path for path in left if path.exists()]
    warnings += [
        f"{path}: left by process {killed_windows.pid_of_window(path)}, which died in its window"
        for path in left
    ]
    windows = [folder for folder in [out, *run_folder.list_windows(out)] if run_folder.sealed_ranks(folder)]
    recorded: set[int] = set()
    for folder in windows:
        recorded.update(_finalize_window(options, folder, returncode, scratch, processes, warnings))
    if late and windows:
        warnings.append(f"{out}: asked for another window too late: no step ended after that")
    if alive:
        warnings.append(
            f"{out}: process {', '.join(alive)} still runs, and may record; etloom salvage {out} keeps what it leaves"
        )
    if not (windows or left or kept or alive):
        # On a full disk the processes could leave no word.
        full = not processes and not os.statvfs(out).f_bavail
        why = "the disk is full" if full else diagnosis.explain_empty_run(options, processes, returncode)
        warnings.append(f"{out}: nothing recorded: {why}")
    if not (left or alive):
        shutil.rmtree(scratch, ignore_errors=True)
    return windows, sorted(recorded), warnings


def _finalize_window(
    options: Options,
    folder: Path,
    returncode: int,
    scratch: Path,
    processes: list[dict[str, Any]],
    warnings: list[str],
) -> list[int]:
    """Write run.json of a folder, with the command's exit status; the ranks in it."""
    ranks = run_folder.sealed_ranks(folder)
    try:
        killed_windows.record_endings(folder, launch_id(options), returncode, processes, scratch)
        facts = {"command": options.command, "host": socket.gethostname(), "returncode": returncode}
        ranks = run_folder.write_run(folder, facts, scratch)
    except OSError as error:
        warnings.append(f"{folder / 'run.json'}: cannot be written: {error.strerror}")
    world = max(rank["world_size"] for rank in ranks)
    asked = set(range(world) if options.ranks is None else options.ranks)
    missing = sorted(asked - {rank["rank"] for rank in ranks})
    here = {(rank["host"], rank.get("local_world_size")) for rank in ranks}
    if missing and here == {(socket.gethostname(), len(ranks))}:
        warnings.append(
            f"{folder}: {count_noun(len(ranks), 'rank')} of {world}, those of this host; etloom gather joins the "
            "folders of hosts"
        )
    elif missing:
        why = {
            facts["rank"]: f"; rank {facts['rank']}: {diagnosis.explain_unrecorded_process(options, facts)}"
            for facts in processes
            if facts.get("rank") in missing and facts.get("began") and not facts.get("sealed")
        }
        told = "".join(list(why.values())[:4])
        warnings.append(f"{folder}: no traces of rank {format_ranges(missing)} of {world}{told}")
    if options.nsys and (line := nsys_command.missing_reports(folder, [rank["rank"] for rank in ranks])):
        warnings.append(f"{folder}: {line}")
    if ring := diagnosis.describe_ring(ranks):
        warnings.append(f"{folder}: {ring}")
    return [rank["rank"] for rank in ranks]
