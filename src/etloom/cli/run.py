"""etloom run: runs a command, records and watches it, and writes the report when it has ended."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click

from etloom.cli.collect import RECORDING_FLAGS, ActionOptions, collect_command
from etloom.cli.command import FieldFlags, Flag, Positional, command
from etloom.cli.error_handling import print_message
from etloom.collector.options import CollectOptions
from etloom.core.errors import EtloomError
from etloom.core.urls import clean_url

_FLAGS = FieldFlags(**{**RECORDING_FLAGS.flags, "watch": None, "on_demand": None, "fake_world": None})


@command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    *,
    words: Annotated[tuple[str, ...], "The command to run, after --.", Positional("-- COMMAND...")] = (),
    out: Annotated[
        Path | None, "Folder or URL for the traces and the report; default: etloom-runs/TIME.", Flag("-o")
    ] = None,
    overwrite: Annotated[bool, "Replace the traces of an earlier run."] = False,
    recording: Annotated[CollectOptions, _FLAGS],
) -> None:
    """Run a training command, record some of its steps, watch it, and report at the end.

    The same as etloom collect --watch --report, with etloom watch while the command runs: its lines, on stderr, state
    the progress, and the cause if the job stalls or crashes. The exit status is the command's.

    Examples:

    \b
      etloom run -- torchrun --nproc-per-node 2 train.py
      etloom run --out run/ --steps 10:12 -- python train.py --epochs 1
    """
    if not words:
        example = "etloom run -- torchrun --nproc-per-node 2 train.py"
        hint = "; the report of the folder run: etloom report run" if Path("run").is_dir() else ""
        raise click.UsageError(f"missing the command to run, after --, as in: {example}{hint}")
    folder = out or Path("etloom-runs", time.strftime("%Y%m%d-%H%M%S"))
    has_ended = threading.Event()
    is_watched = clean_url(folder) is None and "{" not in str(folder)
    watching = threading.Thread(target=_watch, args=(folder, has_ended), daemon=True)
    if is_watched:
        recording = replace(recording, watch=True)
    actions = ActionOptions(overwrite=overwrite, report=True)
    try:  # the watcher starts late, as it would take the state of an earlier run for that of this one
        collect_command(words, folder, recording, actions, watching.start if is_watched else None)
    finally:
        has_ended.set()


def _watch(folder: Path, has_ended: threading.Event) -> None:
    """Print the progress of the job that records into a folder."""
    from etloom.api.watching import JobWatcher
    from etloom.cli.watch import follow_job

    try:
        follow_job(JobWatcher(folder), print_message, has_ended=has_ended)
    except (EtloomError, OSError) as error:
        if not has_ended.is_set():
            print_message(f"the job is not watched any more: {error}")
