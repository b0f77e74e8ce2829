"""etloom demo: shows the report, the findings and a what-if of a recording that the package contains."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import click

from etloom.cli.command import LOCAL_PATH_TYPE, Flag, command
from etloom.cli.error_handling import print_message
from etloom.core.errors import EtloomError

RECORDING = Path(__file__).parent / "recording"
"""Two ranks of examples/train_with_problems.py, as benchmarks/record_demo.py records them."""
_WRITTEN_LATER = {"report.html"}
_PROBLEMS = """\
The recording: steps 5-7 of a small network that two processes train on CPUs (examples/train_with_problems.py).
The script has three problems: rank 1 has three times the work, samples are prepared in the training process, and
each of 60 metrics is a collective of its own. The three commands below find them and predict the effect of a repair.
"""


@command()
def demo(
    *,
    out: Annotated[
        Path, "The folder to which the recording is copied.", Flag("-o", type=LOCAL_PATH_TYPE)
    ] = Path("etloom-demo"),
) -> None:
    """Show what etloom does with a recording that the package contains: report, findings and a what-if.

    Takes a few seconds and needs neither torch nor a GPU. The recording stays in the folder OUT, with its HTML report,
    for further commands.

    Examples:

    \b
      etloom demo
      etloom demo --out /tmp/demo
    """
    from etloom.cli import app

    _copy_recording(out)
    click.echo(_PROBLEMS)
    for words in (
        ["report", str(out)],
        ["findings", str(out), "--min-pct", "5"],
        ["simulate", str(out), "--like-peers", "1"],
    ):
        click.echo(f"\n$ {shlex.join(['etloom', *words])}\n")
        app(words, prog_name="etloom", standalone_mode=False)
    click.echo("")
    print_message(
        f"next: open {out / 'report.html'} in a browser; record a job of your own: "
        "etloom collect --out run --report -- python train.py"
    )


def _copy_recording(out: Path) -> None:
    """Copy the recording to a folder.

    Raises:
        EtloomError: the folder contains other files.
    """
    names = {file.name for file in RECORDING.iterdir()}
    others = {file.name for file in out.iterdir()} - names - _WRITTEN_LATER if out.is_dir() else set()
    if others:
        raise EtloomError(
            f"contains other files, such as {min(others)}",
            where=out,
            remedy="choose another folder with --out",
        )
    shutil.copytree(RECORDING, out, dirs_exist_ok=True)
