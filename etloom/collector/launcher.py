"""Run a command with the steps of its optimizer recorded, without an edit of its code."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import demand, files
from .options import VARIABLE, Options, new_scratch, own_version, parse_ranks, parse_steps


@dataclass(frozen=True)
class Collected:
    """What became of a command.

    `returncode` is its exit status (128 + n for signal n), `ranks` those with traces in `out`.
    """

    out: Path
    returncode: int
    ranks: tuple[int, ...]
    warnings: tuple[str, ...]


def launch(
    command: Sequence[str],
    out: str | os.PathLike[str],
    steps: str = "3:5",
    *,
    shapes: bool = True,
    stack: bool = False,
    memory: bool = False,
    all_threads: bool = True,
    overwrite: bool = False,
    observer: str = "stock",
    max_bytes: int | None = None,
    ring: bool = False,
    ranks: str | None = None,
    on_demand: int | None = None,
    step_name: str | None = None,
) -> Collected:
    """Run `command` and record a window of its training steps into the folder `out`, on every rank it starts.

    A step is one return of the first optimizer's `.step()`, counted from 0 in each process. `steps` "3:5"
    records steps 3 and 4: the window opens when the third `.step()` has returned and closes when the fifth
    has. A window from step 0 opens when the first optimizer is made, so its step 0 also holds what follows
    that (wrapping in DDP, the first batch). A step that a GradScaler skips does not count, so the next one
    spans both. The other options are those of `record`; `observer` "native" is our own, built here if it was
    not before, where it can be; `max_bytes` bounds its file, and with `ring` the oldest operators make way.
    `ranks` "0,8-15" records on those ranks only. `on_demand` records so many steps when `demand.trigger(out)` is
    called, in place of `steps`; once a run. With `step_name` a step is one record_function of the job in whose
    name this regular expression is found, as in an inference server.

    It reaches every Python the command starts through PYTHONPATH (so not `python -I`, `-E` or `-S`, nor a
    process started with an environment of its own). stdin, stdout and stderr are the command's.

    Raises CollectError, before the command runs: `steps` is no range, `out` holds earlier traces (unless
    `overwrite`) or cannot be written, the command cannot be started. What goes wrong later is in `warnings`.
    """
    from etloom.errors import CollectError

    first, last = parse_steps(steps)
    chosen = parse_ranks(ranks)
    if on_demand is not None and on_demand < 1:
        raise CollectError(f"a window of {on_demand} steps", where="on_demand", remedy="ask for 1 or more")
    if step_name is not None:
        try:
            re.compile(step_name)
        except re.error as error:
            raise CollectError(f"no regular expression: {error}", where=step_name) from None
    if max_bytes is not None and max_bytes < 1 << 20:
        raise CollectError(f"{max_bytes} bytes are too few", where="max_bytes", remedy="allow 1 MiB or more")
    observer, unbuilt = _observer(observer)
    if not command:
        raise CollectError("no command to run", remedy="write it after --, for example -- python train.py")
    folder = Path(out).absolute()
    files.claim(str(folder), overwrite)
    scratch = Path(new_scratch(str(folder)))
    options = Options(
        str(folder),
        str(scratch),
        first,
        last,
        shapes,
        stack,
        memory,
        all_threads,
        observer,
        max_bytes,
        ring,
        chosen,
        step_name,
        on_demand,
        etloom=own_version(),
        command=tuple(command),
    )
    try:
        scratch.mkdir()
        demand.forget(folder)
        returncode = _run(command, _environment(options))
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CollectError(
            f"cannot run: {error.strerror}", where=str(error.filename or command[0])
        ) from error
    try:
        recorded, warnings = _gather(options, returncode)
    except OSError as error:
        recorded, warnings = [], [f"{error.filename or folder}: {error.strerror}; run.json is not written"]
    return Collected(folder, returncode, tuple(rank["rank"] for rank in recorded), (*unbuilt, *warnings))


def _observer(wanted: str) -> tuple[str, list[str]]:
    """The observer to use and, where it is not the one that is wanted, a line that says why."""
    from etloom.errors import CollectError

    if wanted not in ("native", "stock"):
        raise CollectError(f"{wanted!r} is no observer", where="observer", remedy="choose native or stock")
    if wanted == "stock":
        return wanted, []
    from .observer import BuildError, build

    try:
        build()
    except ImportError:
        # Whether the job's Python has one built for its torch, its processes will see.
        return wanted, []
    except BuildError as error:
        return "stock", [f"torch's own observer is used, ours cannot be built: {error}"]
    return wanted, []


def _environment(options: Options) -> dict[str, str]:
    bootstrap = str(Path(__file__).resolve().parent / "bootstrap")
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([bootstrap, before] if before else [bootstrap])
    return {**os.environ, "PYTHONPATH": path, VARIABLE: options.to_environment()}


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(list(command), env=environment)
    with _forward_signals(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """We outlive the command. A terminal's Ctrl-C reaches it directly, other signals through us."""

    def forward(number: int, _frame: Any) -> None:
        if not (number == signal.SIGINT and _in_foreground()):
            process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _gather(options: Options, returncode: int) -> tuple[list[dict[str, Any]], list[str]]:
    """After the command: write run.json, say what is missing, remove the scratch folder if it is empty."""
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
    ranks = files.sealed_ranks(out)
    if ranks:
        try:
            facts = {"command": options.command, "host": socket.gethostname(), "returncode": returncode}
            ranks = files.write_run(out, facts, scratch)
        except OSError as error:
            warnings.append(f"{out / 'run.json'}: cannot be written: {error.strerror}")
        world = max(rank["world_size"] for rank in ranks)
        asked = set(range(world) if options.ranks is None else options.ranks)
        missing = sorted(asked - {rank["rank"] for rank in ranks})
        if missing:
            warnings.append(f"{out}: no traces of rank {', '.join(map(str, missing))} of {world}")
    elif not with_torch:
        warnings.append(
            f"{out}: nothing recorded, no Python of the command imported torch.optim; was PYTHONPATH lost "
            "on the way (python -I, -E, -S, env -i, a container)?"
        )
    elif options.on_demand is not None and not left and not kept:
        warnings.append(f"{out}: nothing recorded, nobody asked for the window or the job ended before it")
    elif not left and not kept:
        warnings.append(
            f"{out}: nothing recorded, {_stepper(options)} made the steps {options.steps} in a window that was kept; "
            "see the messages above, or record from the job's code with etloom.record"
        )
    if not left:
        shutil.rmtree(scratch, ignore_errors=True)
    return ranks, warnings


def _keep_killed(scratch: Path, out: Path) -> int | None:
    """The rank of a process that was killed in its window, after its observer's file was given its final name."""
    facts = files.read_json(scratch / "killed.json")
    if facts is None or not (scratch / "et.etob").is_file() or not isinstance(facts.get("rank"), int):
        return None
    target = out / f"observer_{facts['rank']}.etob"
    if target.exists():
        return None
    (scratch / "et.etob").replace(target)
    shutil.rmtree(scratch, ignore_errors=True)
    return int(facts["rank"])


def _stepper(options: Options) -> str:
    return "no optimizer" if options.step_name is None else f"no record_function named {options.step_name!r}"
