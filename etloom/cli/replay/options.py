"""Options that several replay commands share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

import click

from etloom.cli.command import FiniteFloat, OptionGroup
from etloom.cli.output import Format


class Device(str, enum.Enum):
    """Devices whose memory the replayed communication can use."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class ProcessOptions:
    """Backend, device, timeout and rendezvous address of the processes of a replay."""

    backend: str
    device: Device | None
    timeout: float
    master_addr: str | None
    master_port: int | None


PROCESS_OPTIONS = OptionGroup(
    "processes",
    ProcessOptions,
    [
        click.Option(
            ["--backend"],
            default="gloo",
            help="nccl, gloo, mpi, ucc, or another backend registered with torch.",
        ),
        click.Option(["--device"], type=click.Choice(Device), help="Default: the device of the backend."),
        click.Option(
            ["--timeout"],
            type=FiniteFloat(min=1),
            default=60.0,
            help="Seconds after which a call counts as hung.",
        ),
        click.Option(["--master-addr"], help="Host of rank 0; default: set by the launcher."),
        click.Option(
            ["--master-port"],
            type=click.IntRange(0, 65_535),
            help="A free port on that host; default: derived from the launcher's settings.",
        ),
    ],
)


@dataclass(frozen=True)
class OutputOptions:
    """Options of a replay command: the output file and the table format of its results."""

    out: Path | None
    format: Format | None


def repeat_options(repeats: int) -> list[click.Parameter]:
    """Return the click options for the number of timed passes (default ``repeats``) and of warmup passes."""
    return [
        click.Option(
            ["--repeats"], type=click.IntRange(min=1), default=repeats, help="Number of timed passes."
        ),
        click.Option(
            ["--warmup"],
            type=click.IntRange(min=0),
            default=1,
            help="Number of passes before the timed ones.",
        ),
    ]


FORMAT = click.Option(
    ["--format"], type=click.Choice(Format), help="Format of the printed table; default: table."
)
ALLOW_NAMESPACE = click.Option(
    ["--allow-namespace"],
    multiple=True,
    help="Also run the operators of this namespace, such as torchvision; may be repeated.",
)
