"""After the command of `launch`: the facts of the run, and what is missing of it."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from . import demand, files
from .options import Options


def gather(options: Options, returncode: int) -> tuple[list[Path], list[int], list[str]]:
    """After the command: write run.json of each window, say what is missing, remove the scratch folder if it is empty.

    Gives the folders with traces, the ranks that have any, and what is worth a warning.
    """
    out, scratch = Path(options.out), Path(options.scratch)
    warnings: list[str] = []
    demand.forget(out)
    scratch.mkdir(exist_ok=True)  # the last rank that sealed may have removed it
    with_torch = [path for path in scratch.iterdir() if path.name.startswith("torch-")]
    for path in with_torch:
        path.unlink()
    left = sorted(path for path in scratch.iterdir() if path.is_dir() and any(path.iterdir()))
    kept = [rank for path in left if (rank := _keep_killed(path, out)) is not None]
    if kept:
        names = ", ".join(map(str, sorted(kept)))
        warnings.append(f"{out}: rank {names} was killed in its window; its operators up to then are kept")
    left = [path for path in left if path.exists()]
    warnings += [f"{path}: left by process {path.name}, which died in its window" for path in left]
    windows = [folder for folder in [out, *files.windows_in(out)] if files.sealed_ranks(folder)]
    recorded: set[int] = set()
    for folder in windows:
        recorded.update(_finish_run(options, folder, returncode, scratch, warnings))
    if not windows and not with_torch:
        warnings.append(
            f"{out}: nothing recorded, no Python of the command imported torch.optim; was PYTHONPATH lost "
            "on the way (python -I, -E, -S, env -i, a container)?"
        )
    elif not windows and not left and not kept:
        warnings.append(f"{out}: nothing recorded, {_why_nothing(options)}")
    if not left:
        shutil.rmtree(scratch, ignore_errors=True)
    return windows, sorted(recorded), warnings


def _finish_run(
    options: Options, folder: Path, returncode: int, scratch: Path, warnings: list[str]
) -> list[int]:
    """Write run.json of a folder, with the command's exit status; the ranks in it."""
    ranks = files.sealed_ranks(folder)
    try:
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
            f"{folder}: the {len(ranks)} ranks of this host, of {world}; etloom gather joins the folders of hosts"
        )
    elif missing:
        warnings.append(f"{folder}: no traces of rank {', '.join(map(str, missing))} of {world}")
    return [rank["rank"] for rank in ranks]


def _keep_killed(scratch: Path, out: Path) -> int | None:
    """The rank of a process that was killed in its window, after its observer's file was given its final name."""
    facts = files.read_json(scratch / "killed.json")
    if facts is None or not (scratch / "et.etob").is_file() or not isinstance(facts.get("rank"), int):
        return None
    folder = Path(facts["out"])
    folder.mkdir(exist_ok=True)
    target = folder / f"observer_{facts['rank']}.etob"
    if target.exists():
        return None
    (scratch / "et.etob").replace(target)
    shutil.rmtree(scratch, ignore_errors=True)
    return int(facts["rank"])


def _why_nothing(options: Options) -> str:
    if options.on_demand is not None:
        return "nobody asked for the window or the job ended before it"
    steps = options.steps if options.every is None else f"{options.steps}, every {options.every},"
    if options.step_ns is not None:
        return (
            f"no process with an nn.Module was there in the steps {steps} of {options.step_ns / 1e9:g} s each"
        )
    return (
        f"{_stepper(options)} made the steps {steps} in a window that was kept; "
        "see the messages above, or record from the job's code with etloom.record"
    )


def _stepper(options: Options) -> str:
    return "no optimizer" if options.step_name is None else f"no record_function named {options.step_name!r}"
