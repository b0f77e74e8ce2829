"""etloom collect: run a command with a window of its training steps recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etloom.cli._guard import guarded, say
from etloom.errors import CollectError, EtloomError


@guarded()
def collect(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The command to run, after --.", show_default=False, metavar="-- COMMAND..."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the traces.", show_default=False)
    ] = None,
    steps: Annotated[str, typer.Option(help="Steps to record, as a slice: 3:5 is steps 3 and 4.")] = "3:5",
    shapes: Annotated[bool, typer.Option(help="Record the shapes of operators' inputs.")] = True,
    stack: Annotated[bool, typer.Option("--stack", help="Record Python stacks.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Record allocations.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the traces of an earlier run.")
    ] = False,
    observer: Annotated[
        str, typer.Option(help="native (our own, with times, for a tenth of the cost) or stock (torch's).")
    ] = "native",
    max_size: Annotated[
        int | None, typer.Option(help="MiB that the native observer's file may take.", show_default=False)
    ] = None,
    ring: Annotated[
        bool, typer.Option("--ring", help="At --max-size, overwrite the oldest operators, do not stop.")
    ] = False,
    ranks: Annotated[
        str | None, typer.Option(help="Record on these ranks only: 0,8-15.", show_default=False)
    ] = None,
    step_name: Annotated[
        str | None,
        typer.Option(
            help="Count record_functions whose name has this regular expression as steps, not the optimizer's.",
            show_default=False,
        ),
    ] = None,
    on_demand: Annotated[
        int | None,
        typer.Option(help="Record so many steps when asked by --trigger, not --steps.", show_default=False),
    ] = None,
    trigger: Annotated[
        Path | None,
        typer.Option(help="Ask the --on-demand job of this folder to record now.", show_default=False),
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Only build the native observer for this torch, ahead of time.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write and tell the report afterwards.")] = False,
) -> None:
    """Run a training command, unchanged, and record some of its steps on every rank.

    Each rank writes an execution trace and a Kineto trace of the same steps. The exit status is the command's.
    The native observer is compiled once for a torch, some 20 s; its file (observer_0.etob) is kept and also put
    into PyTorch's format (torch_et_0.json.gz) after the command.

    Examples:

    \b
      etloom collect --out run/ -- python train.py --epochs 1
      etloom collect --out run/ --steps 10:12 -- torchrun --nproc-per-node 8 train.py
      etloom collect --out run/ --stack --memory --report -- python train.py
      etloom collect --out run/ --on-demand 2 --ranks 0,8-15 -- torchrun --nproc-per-node 16 train.py
      etloom collect --trigger run/
      etloom collect --out run/ --step-name '^decode' -- python serve.py
      etloom collect --build
    """
    if build:
        _build()
        return
    if trigger is not None:
        from etloom.collector import demand

        demand.trigger(trigger)
        say(f"asked: {trigger} records as soon as its ranks have agreed on a step")
        return
    if out is None:
        raise typer.BadParameter("needed: the folder for the traces", param_hint="--out")
    if not command:
        raise typer.BadParameter("needed: the command to run, after --", param_hint="COMMAND")
    from etloom.collector import launch

    collected = launch(
        command or [],
        out,
        steps,
        shapes=shapes,
        stack=stack,
        memory=memory,
        overwrite=overwrite,
        observer=observer,
        max_bytes=None if max_size is None else max_size << 20,
        ring=ring,
        ranks=ranks,
        on_demand=on_demand,
        step_name=step_name,
    )
    for recorded in sorted(out.glob("observer_*.etob")):
        rank = recorded.stem.removeprefix("observer_")
        _convert(recorded, out / f"torch_et_{rank}.json.gz")
    for warning in collected.warnings:
        say(warning)
    if collected.ranks:
        say(f"recorded {_ranks(collected.ranks)} in {out}; next: etloom report {out}")
    if report and collected.ranks:
        from etloom.cli.report import write_report

        write_report(out)
    raise typer.Exit(collected.returncode)


def _build() -> None:
    from etloom.collector.observer import BuildError
    from etloom.collector.observer import build as build_observer

    try:
        say(f"the native observer is built: {build_observer()}")
    except ImportError:
        raise CollectError(
            "this Python has no torch", remedy="install etloom beside the torch of the job"
        ) from None
    except BuildError as error:
        raise CollectError(f"the native observer cannot be built: {error}") from None


def _convert(path: Path, target: Path) -> None:
    """Put an observer's file into PyTorch's format beside it, for other tools."""
    from etloom import convert

    try:
        convert(path, target, "execution-trace")
    except (EtloomError, OSError) as error:
        say(f"{target} is not written: {error}")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
