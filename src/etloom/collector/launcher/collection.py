"""Runs a command and records windows of its training steps, without changes to its code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..observer.native_build import choose_observer
from ..options import (
    RING_WITHOUT_KINETO,
    VARIABLE,
    CollectOptions,
    RecordingOptions,
    check_observer,
    check_windows,
    loaded_version,
    local_folder,
    new_scratch_name,
    option_error,
    parse_ranks,
    parse_step_by,
    parse_window,
    resolve_sources,
)
from ..run_folder import claim_folder
from ..session import on_demand
from ..session.live_state import WATCH_FOLDER
from .child_process import run_command, wrap_command
from .fake_world_run import record_fake_ranks
from .finalization import finalize_run

_FLIGHT_RECORDER_ENTRIES = "2000"
_WATCHED_ENTRIES = "128"
"""Collectives of the ring that --watch writes up to twice a second: few, to cost the job less than 0.5 % of a core."""


@dataclass(frozen=True)
class CollectResult:
    """The result of `collect`: the command's exit status, the recorded ranks, the folders with traces, and warnings.

    Attributes:
        out: The folder of the run.
        exit_status: Exit status of the command; 128 + n if signal n ended it.
        ranks: Ranks that recorded traces, ascending.
        windows: Folders with traces: `out` itself, or one per window with `every` or `on_demand`.
        warnings: Messages about what could not be recorded, and why.
    """

    out: Path
    exit_status: int
    ranks: tuple[int, ...] = ()
    windows: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobCommand:
    """A job's command prepared for recording: options, argument list, added environment variables, and warnings."""

    options: RecordingOptions
    words: tuple[str, ...]
    environment: dict[str, str]
    warnings: tuple[str, ...]


def collect(
    command: Sequence[str],
    out: str | os.PathLike[str],
    options: CollectOptions | None = None,
    *,
    overwrite: bool = False,
    on_build: Callable[[], None] | None = None,
    on_claim: Callable[[], None] | None = None,
) -> CollectResult:
    """Run a command and record windows of its training steps, on every rank that it starts.

    A step is one return of the first optimizer's `.step()`, counted from 0 in each process. `steps` "3:5" records
    steps 3 and 4: the window opens when the third `.step()` has returned and closes when the fifth has. A window from
    step 0 opens when the first optimizer is created, so step 0 also contains what follows (wrapping in DDP, the first
    batch). A step that a GradScaler skips does not count, so the next step spans both.

    The recording reaches every Python that the command starts, through PYTHONPATH; not `python -I`, `-E` or `-S`, nor
    processes with an environment of their own. With the source nsys the ranks' programs run under `nsys profile`.
    stdin, stdout and stderr are the command's.

    Args:
        command: The command and its arguments.
        out: Folder for the traces; {host}, {rank} and {time} are replaced.
        options: Which steps to record, and what (default: steps 3 and 4, a Kineto trace and an execution trace).
        overwrite: Replace the traces of an earlier run.
        on_build: Called before the native observer is compiled, which takes some 20 s, once per torch version.
        on_claim: Called before the command runs, when nothing of an earlier run is left in the folder.

    Returns:
        The exit status of the command, the folders with traces, the ranks and all warnings.

    Raises:
        CollectError: Before the command runs: an option is invalid, `out` holds earlier traces or cannot be written,
            or the command cannot be started.

    Example:
        >>> from etloom.collector import CollectOptions, collect
        >>> result = collect(["python", "train.py"], "run/", CollectOptions(steps="3:5"))  # doctest: +SKIP
        >>> result.exit_status, result.ranks  # doctest: +SKIP
        (0, (0,))
    """
    from etloom.core.errors import CollectError

    if options is not None and options.fake_world is not None:
        return CollectResult(*record_fake_ranks(command, out, options, job_environment, overwrite))
    job = prepare_command(command, out, options or CollectOptions(), on_build=on_build)
    recording = replace(job.options, supervised=True)
    if recording.nsys and shutil.which("nsys") is None:
        raise CollectError(
            "nsys is not on the PATH", where="with", remedy="use --print-command for a machine that has it"
        )
    folder = Path(recording.out)
    claim_folder(recording.out, overwrite)
    status = _run_job(job.words, recording, on_claim)
    try:
        outcome = finalize_run(recording, status)
    except OSError as error:
        warning = f"{error.filename or folder}: {error.strerror}; run.json is not written"
        return CollectResult(folder, status, warnings=(*job.warnings, warning))
    return CollectResult(folder, status, outcome.ranks, outcome.windows, (*job.warnings, *outcome.warnings))


def _run_job(
    words: Sequence[str], options: RecordingOptions, on_claim: Callable[[], None] | None = None
) -> int:
    """Run the prepared command and return its exit status."""
    from etloom.core.errors import CollectError

    folder, scratch = Path(options.out), Path(options.scratch)
    try:
        scratch.mkdir()
        on_demand.clear_requests(folder)
        shutil.rmtree(folder / WATCH_FOLDER, ignore_errors=True)  # the state of an earlier run
        if on_claim is not None:
            on_claim()
        request = partial(on_demand.request_window, folder) if options.on_demand is not None else None
        return run_command(words, {**os.environ, **job_environment(options)}, request)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CollectError(f"cannot run: {error.strerror}", where=str(error.filename or words[0])) from error


def prepare_command(
    command: Sequence[str],
    out: str | os.PathLike[str],
    options: CollectOptions,
    *,
    on_build: Callable[[], None] | None = None,
) -> JobCommand:
    """Check the options, build the native observer if it is needed, and return what `collect` would run.

    Raises:
        CollectError: An option is invalid, or a rank's program cannot be wrapped with nsys.
    """
    from etloom.core.errors import CollectError

    check_windows(options)
    first, last = parse_window(options.steps, options.every, options.length, options.on_demand, options.ring)
    ranks = parse_ranks(options.ranks)
    step_fields = parse_step_by(options.step_by)
    sources = resolve_sources(options)
    check_observer(options, records_et=sources["et"])
    if not command:
        raise CollectError("no command to run", remedy="write it after --, for example -- python train.py")
    if sources["nsys"] and (options.every is not None or options.on_demand is not None):
        raise option_error(
            "nsys records one window: --every and --on-demand are not possible", "sources", "use --steps"
        )
    observer, warnings = choose_observer(
        options,
        records_et=sources["et"],
        needs_gate=sources["kineto"] and "step_ns" in step_fields,
        on_build=on_build,
    )
    if options.ring and options.sources is None:
        warnings.append(RING_WITHOUT_KINETO)
    folder = local_folder(os.fspath(out))
    recording = RecordingOptions(
        folder,
        new_scratch_name(folder),
        first,
        last,
        observer=observer,
        max_bytes=options.max_bytes,
        ring=options.ring,
        watch=options.watch,
        ranks=ranks,
        on_demand=options.on_demand,
        every=options.every,
        max_windows=options.max_windows or RecordingOptions.max_windows,
        all_threads=options.all_threads,
        etloom_version=loaded_version(),
        command=tuple(command),
        **{"step_name": options.step_name, **sources, **step_fields},
    )
    return JobCommand(recording, _job_words(recording), job_environment(recording), tuple(warnings))


def _job_words(options: RecordingOptions) -> tuple[str, ...]:
    """Return the job's command as a list of arguments; to record with nsys, each rank runs under `nsys profile`."""
    from etloom.core.errors import CollectError

    command = options.command or ()
    if not options.nsys:
        return command
    words = wrap_command(command, options.out)
    if words is None:
        raise CollectError(
            "cannot find the program of a rank in the command",
            where=" ".join(command),
            remedy="add nsys to the command yourself (--print-command -- python t.py shows how)",
        )
    return tuple(words)


def job_environment(options: RecordingOptions) -> dict[str, str]:
    """Return the environment variables that start the recorder in every Python process of the command."""
    bootstrap = str(Path(__file__).resolve().parent / "bootstrap")
    previous = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([bootstrap, previous] if previous else [bootstrap])
    variables = {"PYTHONPATH": path, VARIABLE: options.to_environment()}
    if options.watch:
        variables["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE", _WATCHED_ENTRIES)
    if options.flight_recorder:
        variables["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE", _FLIGHT_RECORDER_ENTRIES)
    return variables
