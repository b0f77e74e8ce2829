"""etloom collect: run a command with a window of its training steps recorded."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from etloom.cli.collect_output import (
    MAX_BYTES_FOR_STEPS,
    convert_observer_files,
    record_sequence_length,
    record_whole_steps,
    report_failures,
    summarize_recording,
)
from etloom.cli.error_handling import handle_errors, print_message
from etloom.core.errors import CollectError


def _number_of_steps(text: str) -> int:
    """Of --on-demand, which is easily taken for a flag."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"takes a number of steps, as in --on-demand 2, and {text!r} is none"
        ) from None


@handle_errors(max_bytes="max_size")
def collect(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The command to run, after --.", show_default=False, metavar="-- COMMAND..."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the traces; {host}, {rank}, {time} are filled in."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Steps to record, as a slice: 3:5 (the default) is steps 3 and 4, 3: (with --ring) all from 3 on."
        ),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Record a window every so many steps, into OUT/step_N.")
    ] = None,
    length: Annotated[int | None, typer.Option("--for", help="Steps of a window of --every (2).")] = None,
    max_windows: Annotated[
        int | None,
        typer.Option(help="Of the windows of --every and --on-demand keep the newest so many (50)."),
    ] = None,
    step_by: Annotated[
        str | None,
        typer.Option(
            help="What makes a step: optimizer (the default), profiler (the job's ProfilerStep#N) or a time, 500ms."
        ),
    ] = None,
    step_name: Annotated[
        str | None,
        typer.Option(
            help="Count record_functions whose name has this regular expression as steps, not the optimizer's.",
        ),
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Record on these ranks only: 0,8-15.")] = None,
    what: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="All that is recorded: kineto,et,shapes (the default); also memory, stacks, flight-recorder, nsys.",
        ),
    ] = None,
    shapes: Annotated[
        bool | None,
        typer.Option(help="Without --with: shapes of operators' inputs (yes).", show_default=False),
    ] = None,
    stack: Annotated[bool, typer.Option("--stack", help="Without --with: Python stacks, too.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Without --with: allocations, too.")] = False,
    observer: Annotated[
        str, typer.Option(help="native (our own, with times, for a tenth of the cost) or stock (torch's).")
    ] = "native",
    max_size: Annotated[
        int | None, typer.Option(help="MiB that the native observer's file of a window may take (4096).")
    ] = None,
    ring: Annotated[
        bool,
        typer.Option(
            "--ring",
            help="At --max-size, overwrite the oldest (without Kineto's trace, which has no bound); from step 3 to the "
            "end where --steps does not say. --on-demand then keeps what came before, too.",
        ),
    ] = False,
    on_demand: Annotated[
        int | None,
        typer.Option(
            help="Record so many steps, say 2, whenever asked, by --trigger or by SIGUSR2 to this process.",
            metavar="STEPS",
            parser=_number_of_steps,
        ),
    ] = None,
    trigger: Annotated[
        Path | None, typer.Option(help="Ask the --on-demand job of this folder to record now.")
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Only build the native observer for this torch, ahead of time.")
    ] = False,
    print_command: Annotated[
        bool,
        typer.Option("--print-command", help="Print what would be run, for a cluster's script; run nothing."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the traces of an earlier run.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write and tell the report afterwards.")] = False,
) -> None:
    """Run a training command, unchanged, and record some of its steps on every rank.

    Each rank writes an execution trace and a Kineto trace of the same steps. The exit status is the command's.
    The native observer is compiled once for a torch, some 20 s; its file (observer_0.etob) is kept and also put
    into PyTorch's format (torch_et_0.json.gz) after the command, up to 64 MiB. A workload card, filled in as far as
    the run knows itself, lies beside the traces under the folder's name: run/run.yaml for --out run/.

    Examples:

    \b
      etloom collect --out run/ -- python train.py --epochs 1
      etloom collect --out run/ --steps 10:12 -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --with kineto,et,shapes,stacks,memory --report -- python train.py
      etloom collect --out run/ --every 1000 --for 2 --with et -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --on-demand 2 --ranks 0,8-15 -- torchrun --nproc-per-node 16 train.py
      etloom collect --trigger run/
      etloom collect --out run/ --step-name '^decode' -- python serve.py
      etloom collect --out run/ --step-by 500ms --steps 20:22 -- python serve.py
      etloom collect --out '/local/{host}-{time}' -- torchrun --nnodes 2 --nproc-per-node 8 train.py
      etloom collect --out run/ --with et,nsys --print-command -- torchrun --nproc-per-node 8 train.py
      etloom collect --build
    """
    _check_exclusive(
        {"--build": build, "--trigger": trigger is not None, "--print-command": print_command},
        {"a command": bool(command), "--out": out is not None, "--overwrite": overwrite, "--report": report},
    )
    if build:
        _build_observer()
        return
    if trigger is not None:
        from etloom.collector.session import on_demand as demand

        if demand.trigger(trigger):
            print_message(f"asked: {trigger} records as soon as its ranks have agreed on a step")
        else:
            print_message(
                f"asked, and nothing took note yet: {trigger} records at the end of its step, if a job runs there that "
                "was started with --on-demand"
            )
        return
    if out is None:
        raise typer.BadParameter("needed: the folder for the traces", param_hint="--out")
    if not command:
        raise typer.BadParameter("needed: the command to run, after --", param_hint="COMMAND")
    from etloom.collector import launch

    options: dict[str, Any] = {
        "shapes": shapes,
        "stack": stack,
        "memory": memory,
        "observer": observer,
        "max_bytes": None if max_size is None else max_size << 20,
        "ring": ring,
        "ranks": ranks,
        "on_demand": on_demand,
        "step_name": step_name,
        "step_by": step_by,
        "every": every,
        "length": length,
        "max_windows": max_windows,
        "what": what,
    }
    if print_command:
        typer.echo(_format_command_line(command, out, steps, options))
        return
    collected = launch(command, out, steps, overwrite=overwrite, building=_report_build, **options)
    folders = collected.windows or (collected.out,)
    with report_failures("PyTorch's format is not written"):
        convert_observer_files(folders, lambda folder: _user_path(folder, collected.out, out))
    for folder in folders:
        with report_failures(f"{folder}: nobody knows which steps are whole"):
            record_whole_steps(folder, MAX_BYTES_FOR_STEPS)
        with report_failures(f"{folder}: the card lacks the length of a sequence"):
            record_sequence_length(folder)
    for warning in collected.warnings:
        print_message(warning)
    if collected.ranks:
        where = _user_path(folders[-1], collected.out, out)
        print_message(summarize_recording(collected, where))
        if report:
            from etloom.cli.report import write_report

            with report_failures(f"{where}: no report"):
                write_report(where)
    raise typer.Exit(collected.returncode)


def _check_exclusive(alone: dict[str, bool], others: dict[str, bool]) -> None:
    """What only builds, asks or prints takes no note of the rest."""
    asked = [name for name, given in alone.items() if given]
    beside = [*asked[1:], *(name for name, given in others.items() if given)]
    if asked == ["--print-command"]:
        beside = [name for name in beside if name in ("--overwrite", "--report")]
    if asked and beside:
        raise typer.BadParameter(f"does nothing with {beside[0]}: leave out one", param_hint=asked[0])


def _user_path(folder: Path, whole: Path, out: Path) -> Path:
    """The folder of a window as the user called the run's, where that was a plain path."""
    return out / folder.relative_to(whole) if "{" not in str(out) else folder


def _format_command_line(command: list[str], out: Path, steps: str | None, options: dict[str, Any]) -> str:
    """What `launch` would run, for a shell."""
    from etloom.collector.launcher import collection

    prepared, unbuilt = collection.prepare_options(command, out, steps, all_threads=True, **options)
    for line in unbuilt:
        print_message(line)
    environment = [f"{name}={value}" for name, value in collection.job_environment(prepared).items()]
    words = ["env", *environment, *collection.wrapped_command(prepared)]
    return f"mkdir -p {shlex.quote(prepared.scratch)} && {shlex.join(words)}"


def _report_build() -> None:
    """Say what the first use of the native observer waits for."""
    print_message("building the native observer for this torch, once: half a minute, more on a busy machine")


def _build_observer() -> None:
    from etloom.collector.observer import BuildError
    from etloom.collector.observer import build as build_observer

    try:
        print_message(f"the native observer is built: {build_observer()}")
    except ImportError:
        raise CollectError(
            "this Python has no torch", remedy="install etloom beside the torch of the job"
        ) from None
    except BuildError as error:
        raise CollectError(f"the native observer cannot be built: {error}") from None
