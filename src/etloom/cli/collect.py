"""etloom collect: run a command and record some of its training steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from etloom.cli.command import LOCAL_PATH_TYPE, FieldFlags, Flag, Positional, command
from etloom.cli.error_handling import print_message
from etloom.collector.options import CollectOptions
from etloom.core.errors import CollectError
from etloom.core.urls import clean_url

if TYPE_CHECKING:
    from etloom.collector import CollectResult


class StepCount(click.ParamType[int]):
    """The click type of --on-demand: a number of steps. Its error shows the syntax, as users often omit the number."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(value)
        except ValueError:
            self.fail(f"expected a number of steps, as in --on-demand 2, got {value!r}", param, ctx)


class MebiBytes(click.ParamType[int]):
    """The click type of a size in MiB, which it converts to bytes."""

    name = "MiB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(value) << 20
        except ValueError:
            self.fail(f"expected a size in MiB, got {value!r}", param, ctx)


@dataclass(frozen=True)
class ActionOptions:
    """Values of the options of `etloom collect` other than recording options, such as --trigger and --report."""

    trigger: Annotated[
        Path | None,
        "Trigger the job that runs with --on-demand and --out OUT.",
        Flag(type=LOCAL_PATH_TYPE, metavar="OUT"),
    ] = None
    build: Annotated[bool, "Build the native observer for the installed torch, and run nothing."] = False
    print_command: Annotated[
        bool, "Print the command line that would run, to use it in a batch script; run nothing."
    ] = False
    overwrite: Annotated[bool, "Replace the traces of an earlier run."] = False
    report: Annotated[bool, "Afterwards, print the summary and write the HTML report."] = False


RECORDING_FLAGS = FieldFlags(
    every=Flag(metavar="N"),
    length=Flag("--for", metavar="STEPS"),
    max_windows=Flag(metavar="N"),
    step_by=Flag(metavar="UNIT"),
    step_name=Flag(metavar="REGEX"),
    ranks=Flag(metavar="RANKS"),
    sources=Flag("--with", metavar="LIST"),
    max_bytes=Flag("--max-size", type=MebiBytes()),
    on_demand=Flag(type=StepCount(), metavar="STEPS"),
    fake_world=Flag(metavar="SIZE"),
)


@command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def collect(
    *,
    words: Annotated[tuple[str, ...], "The command to run, after --.", Positional("-- COMMAND...")] = (),
    out: Annotated[
        Path | None,
        "Folder for the traces, or URL to upload them to; {host}, {rank} and {time} are replaced.  "
        "[required to record]",
        Flag("-o"),
    ] = None,
    recording: Annotated[CollectOptions, RECORDING_FLAGS],
    actions: ActionOptions,
) -> None:
    """Run a training command, unchanged, and record some of its steps on every rank.

    Each rank writes an execution trace and a Kineto trace of the same steps. The exit status is the command's.
    The native observer writes observer_RANK.etob; after the command, files of up to 64 MiB are also converted to
    PyTorch's format, torch_et_RANK.json.gz. It is compiled once per torch version, which takes about 20 s. A workload
    card with what is known about the job is written next to the traces: run/run.yaml for --out run/.

    Examples:

    \b
      etloom collect --out run/ -- python train.py --epochs 1
      etloom collect --out run/ --steps 10:12 -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --with kineto,et,shapes,stacks,memory --report -- python train.py
      etloom collect --out run/ --every 1000 --for 2 --with et -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --on-demand 2 --ranks 0,8-15 -- torchrun --nproc-per-node 16 train.py
      etloom collect --trigger run/
      etloom collect --out 's3://bucket/run/{host}' --every 1000 -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --step-name '^decode' -- python serve.py
      etloom collect --out run/ --step-by 500ms --steps 20:22 -- python serve.py
      etloom collect --out '/local/{host}-{time}' -- torchrun --nnodes 2 --nproc-per-node 8 train.py
      etloom collect --out run/ --with et,nsys --print-command -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --fake-world 512 --ranks 0,256 -- python train.py
      etloom collect --build
    """
    _check_exclusive(words, out, actions)
    if actions.build:
        _build_observer()
    elif actions.trigger is not None:
        _trigger(actions.trigger)
    elif out is None:
        raise click.UsageError("missing --out: the folder for the traces")
    elif not words:
        raise click.UsageError("missing the command to run, after --")
    elif actions.print_command:
        if clean_url(out) is not None:
            raise click.BadParameter(
                "expected a local path: nothing would upload the traces", param_hint="--out"
            )
        click.echo(_format_command_line(words, out, recording))
    else:
        collect_command(words, out, recording, actions)


def collect_command(
    words: Sequence[str],
    out: Path,
    recording: CollectOptions,
    actions: ActionOptions,
    on_claim: Callable[[], None] | None = None,
) -> None:
    """Run the command, print what was recorded, and exit with the command's status.

    ``on_claim`` is called as by `etloom.collector.collect`, for a local folder.
    """
    result = _record(words, out, recording, actions.overwrite, on_claim)
    for warning in result.warnings:
        print_message(warning)
    if result.ranks:
        from etloom.api.recording import collect_failures, describe_recording, get_user_path

        last = (result.windows or (result.out,))[-1]
        is_uploaded = clean_url(out) is None or clean_url(result.out) is not None
        where = get_user_path(last, result.out, out) if is_uploaded else last
        print_message(describe_recording(result, where))
        if actions.report:
            from etloom.cli.report import write_report

            failures: list[str] = []
            with collect_failures(failures, f"{where}: no report"):
                write_report(where)
            for failure in failures:
                print_message(failure)
    raise click.exceptions.Exit(result.exit_status)


def _record(
    words: Sequence[str],
    out: Path,
    recording: CollectOptions,
    overwrite: bool,
    on_claim: Callable[[], None] | None,
) -> CollectResult:
    """Run the command as `etloom.collect` does, whose libraries are loaded when something has been recorded."""
    if clean_url(out) is not None:
        import etloom

        return etloom.collect(words, out, overwrite=overwrite, on_build=_report_build, **asdict(recording))
    from etloom import collector

    result = collector.collect(
        words, out, recording, overwrite=overwrite, on_build=_report_build, on_claim=on_claim
    )
    if not (result.windows or result.ranks or any(result.out.glob("*.etob"))):
        return result
    from etloom.api.recording import finish_recording

    return replace(result, warnings=(*finish_recording(result, out), *result.warnings))


def _check_exclusive(words: Sequence[str], out: Path | None, actions: ActionOptions) -> None:
    """Raise a usage error for options that --build, --trigger or --print-command would ignore."""
    chosen = [
        flag
        for flag, is_set in {
            "--build": actions.build,
            "--trigger": actions.trigger is not None,
            "--print-command": actions.print_command,
        }.items()
        if is_set
    ]
    others = {
        "a command": bool(words),
        "--out": out is not None,
        "--overwrite": actions.overwrite,
        "--report": actions.report,
    }
    if chosen == ["--print-command"]:
        others = {flag: others[flag] for flag in ("--overwrite", "--report")}
    ignored = [*chosen[1:], *(flag for flag, is_set in others.items() if is_set)]
    if chosen and ignored:
        raise click.BadParameter(f"cannot be combined with {ignored[0]}", param_hint=chosen[0])


def _trigger(folder: Path) -> None:
    from etloom.collector import request_recording

    if request_recording(folder):
        print_message(f"triggered: {folder} records as soon as its ranks have agreed on a step")
    else:
        print_message(
            f"trigger written; no job has picked it up yet. A job started with --on-demand records into {folder} at "
            "the end of its current step"
        )


def _format_command_line(words: Sequence[str], out: Path, recording: CollectOptions) -> str:
    """Return the shell command line that `etloom collect` would run."""
    from etloom.collector.launcher.collection import prepare_command

    job = prepare_command(words, out, recording)
    for line in job.warnings:
        print_message(line)
    environment = [f"{name}={value}" for name, value in job.environment.items()]
    return f"mkdir -p {shlex.quote(job.options.scratch)} && {shlex.join(['env', *environment, *job.words])}"


def _report_build() -> None:
    """Print that the native observer is being built, and how long that takes."""
    print_message("building the native observer for this torch, once: half a minute, more on a busy machine")


def _build_observer() -> None:
    from etloom.collector.observer import BuildError, build_library

    try:
        print_message(f"the native observer is built: {build_library(retry=True)}")
    except ImportError:
        raise CollectError(
            "torch is not installed in this Python", remedy="install etloom in the environment of the job"
        ) from None
    except BuildError as error:
        raise CollectError(f"the native observer cannot be built: {error}") from None
