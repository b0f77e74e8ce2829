"""Run a command with the steps of its optimizer recorded, without an edit of its code."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .. import option_rules, run_folder
from ..option_parsing import expand_folder_name, option_error, parse_ranks, parse_step_by, parse_window
from ..options import VARIABLE, Options, loaded_version, new_scratch_name
from ..session import on_demand as demand
from . import finalization, nsys_command
from .child_process import run_command


@dataclass(frozen=True)
class Collected:
    """What became of a command.

    `returncode` is its exit status (128 + n for signal n), `ranks` those with traces, `windows` the folders of traces:
    `out` itself, or one for each window of several.
    """

    out: Path
    returncode: int
    ranks: tuple[int, ...]
    warnings: tuple[str, ...]
    windows: tuple[Path, ...] = ()


def launch(
    command: Sequence[str],
    out: str | os.PathLike[str],
    steps: str | None = None,
    *,
    shapes: bool | None = None,
    stack: bool = False,
    memory: bool = False,
    all_threads: bool = True,
    overwrite: bool | None = False,
    observer: str | None = "native",
    max_bytes: int | None = None,
    ring: bool = False,
    ranks: str | None = None,
    on_demand: int | None = None,
    step_name: str | None = None,
    step_by: str | None = None,
    every: int | None = None,
    length: int | None = None,
    max_windows: int | None = None,
    what: str | None = None,
    building: Callable[[], None] = lambda: None,
) -> Collected:
    """Run `command` and record windows of its training steps into the folder `out`, on every rank it starts.

    A step is one return of the first optimizer's `.step()`, counted from 0 in each process. `steps` "3:5" (the
    default; with `ring` it is "3:", to the end) records steps 3 and 4: the window opens when the third `.step()` has
    returned and closes when the fifth has. A window from step 0 opens when the first optimizer is made, so its step
    0 also holds what follows that (wrapping in DDP, the first batch). A step that a GradScaler skips does not
    count, so the next one spans both. The other options are those of `record`; `observer` "native" is our own, built
    here if it was not before, where it can be; `max_bytes` bounds its file, and with `ring` the oldest operators make
    way (and Kineto's trace, which has no bound, is left out).
    `ranks` "0,8-15" records on those ranks only.

    Other steps: with `step_name` one is one record_function of the job in whose name this regular expression is
    found, as in an inference server; with `step_by` "profiler" one of the job's own `ProfilerStep#N` (its own
    torch.profiler goes on, and we leave Kineto to it), with "500ms" so much time, from the first nn.Module of any
    rank on (the job does not wait as such a window opens: an operator at its edge may be in one trace only).

    Several windows: `every` 1000 with `length` 2 records two steps of every thousand, `on_demand` 2 two steps each
    time `demand.trigger(out)` is called or this process gets SIGUSR2; with `ring` also what came before, as far as
    `max_bytes` holds it (without Kineto's trace). Each window then has a folder of its own in `out`, step_<first>, of
    which the newest `max_windows` are kept, so that a job left alone does not fill its disk.

    `what` names all that is recorded: "kineto,et,memory,stacks,shapes,flight-recorder,nsys". With nsys the ranks'
    programs run under `nsys profile`, and a window is its capture range.

    `building` is called before our observer is built, where it must be.

    It reaches every Python the command starts through PYTHONPATH (so not `python -I`, `-E` or `-S`, nor a
    process started with an environment of its own). stdin, stdout and stderr are the command's.

    Raises CollectError, before the command runs: `steps` is no range, `out` holds earlier traces (unless
    `overwrite`) or cannot be written, the command cannot be started. What goes wrong later is in `warnings`.
    """
    from etloom.core.errors import CollectError

    options, unbuilt = prepare_options(
        command,
        out,
        steps,
        shapes=shapes,
        stack=stack,
        memory=memory,
        all_threads=all_threads,
        observer=observer or "native",
        max_bytes=max_bytes,
        ring=ring,
        ranks=ranks,
        on_demand=on_demand,
        step_name=step_name,
        step_by=step_by,
        every=every,
        length=length,
        max_windows=max_windows,
        what=what,
        building=building,
    )
    options = replace(options, supervised=True)
    words = wrapped_command(options)
    if options.nsys and shutil.which("nsys") is None:
        raise CollectError(
            "nsys is not installed here", where="with", remedy="--print-command shows what to run where it is"
        )
    folder, scratch = Path(options.out), Path(options.scratch)
    run_folder.claim_folder(options.out, bool(overwrite))
    try:
        scratch.mkdir()
        demand.clear_requests(folder)
        window_asked = partial(demand.request_window, folder) if options.on_demand is not None else None
        returncode = run_command(words, {**os.environ, **job_environment(options)}, window_asked)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CollectError(f"cannot run: {error.strerror}", where=str(error.filename or words[0])) from error
    try:
        windows, recorded, warnings = finalization.finalize_run(options, returncode)
    except OSError as error:
        windows, recorded = [], []
        warnings = [f"{error.filename or folder}: {error.strerror}; run.json is not written"]
    return Collected(folder, returncode, tuple(recorded), (*unbuilt, *warnings), tuple(windows))


def prepare_options(
    command: Sequence[str],
    out: str | os.PathLike[str],
    steps: str | None,
    *,
    observer: str,
    max_bytes: int | None,
    ring: bool,
    ranks: str | None,
    on_demand: int | None,
    step_name: str | None,
    step_by: str | None,
    every: int | None,
    length: int | None,
    max_windows: int | None,
    what: str | None,
    shapes: bool | None,
    stack: bool,
    memory: bool,
    all_threads: bool,
    building: Callable[[], None] = lambda: None,
) -> tuple[Options, list[str]]:
    """The options of a launch, and what is worth a warning. Raises CollectError as `launch` does."""
    from etloom.core.errors import CollectError

    option_rules.check_windows(locals())
    first, last = parse_window(steps, every, length, on_demand, ring)
    chosen = parse_ranks(ranks)
    if step_name is not None:
        try:
            re.compile(step_name)
        except re.error as error:
            raise option_error(
                f"{step_name!r} is no regular expression: {error}", "step_name", "mend it"
            ) from None
    by = parse_step_by(step_by)
    found = option_rules.resolve_sources(
        what, shapes=shapes, stack=stack, memory=memory, ring=ring, step_by=step_by
    )
    option_rules.check_observer(found, observer, ring=ring, max_bytes=max_bytes)
    if not command:
        raise CollectError("no command to run", remedy="write it after --, for example -- python train.py")
    if found["nsys"] and (every is not None or on_demand is not None):
        raise option_error("nsys records one window", "what", "leave out nsys, or take --steps")
    usable, unbuilt = choose_observer(found, observer, ring=ring, max_bytes=max_bytes, building=building)
    if ring and what is None:
        unbuilt.append(option_rules.RING_WITHOUT_KINETO)
    folder = os.path.abspath(expand_folder_name(os.fspath(out)))  # noqa: PTH100
    options = Options(
        folder,
        new_scratch_name(folder),
        first,
        last,
        observer=usable,
        max_bytes=max_bytes,
        ring=ring,
        ranks=chosen,
        on_demand=on_demand,
        every=every,
        max_windows=max_windows or Options.max_windows,
        all_threads=all_threads,
        etloom=loaded_version(),
        command=tuple(command),
        **{"step_name": step_name, **found, **by},
    )
    return options, unbuilt


def wrapped_command(options: Options) -> list[str]:
    """The command as it is run: as it was given, or with nsys around its program. Raises CollectError."""
    from etloom.core.errors import CollectError

    command = list(options.command or ())
    if not options.nsys:
        return command
    around = nsys_command.wrap_command(command, options.out)
    if around is None:
        raise CollectError(
            "cannot tell where the program of a rank begins",
            where=" ".join(command),
            remedy="write nsys into the command yourself (--print-command with python t.py shows how)",
        )
    return around


def job_environment(options: Options) -> dict[str, str]:
    """What the command's environment has beside ours."""
    bootstrap = str(Path(__file__).resolve().parent / "bootstrap")
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([bootstrap, before] if before else [bootstrap])
    more = {"PYTHONPATH": path, VARIABLE: options.to_environment()}
    if options.flight_recorder:
        more["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE", "2000")
    return more


def choose_observer(
    found: dict[str, bool],
    wanted: str,
    *,
    ring: bool,
    max_bytes: int | None,
    building: Callable[[], None] = lambda: None,
) -> tuple[str, list[str]]:
    """The observer of an execution trace, where one is recorded (`found`), and what is worth a warning.

    Raises CollectError where the file of a ring would have no bound.
    """
    from etloom.core.errors import CollectError

    usable, unbuilt = usable_observer(wanted, building) if found["et"] else (wanted, [])
    if ring and usable != "native":
        raise CollectError(f"no ring: {unbuilt[0]}", remedy="leave out --ring (ring=True)")
    if max_bytes is not None and usable != "native":
        unbuilt.append("--max-size does not bound its file")
    return usable, unbuilt


def usable_observer(wanted: str, building: Callable[[], None] = lambda: None) -> tuple[str, list[str]]:
    """The observer to use and, where it is not the one that is wanted, a line that says why.

    building: called before ours is built.
    """
    if wanted not in ("native", "stock"):
        raise option_error(f"{wanted!r} is no observer", "observer", "choose native or stock")
    if wanted == "stock":
        return wanted, []
    from ..observer import BuildError, build, built

    try:
        if built() is None:
            building()
        build()
    except ImportError:
        # Whether the job's Python has one built for its torch, its processes will see.
        return wanted, []
    except BuildError as error:
        return "stock", [f"torch's own observer is used, ours cannot be built: {error}"]
    return wanted, []
