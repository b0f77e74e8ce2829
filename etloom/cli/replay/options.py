"""Options that several of the replays take."""

from __future__ import annotations

from typing import Annotated

import typer

from etloom.cli.replay.typer_options import check_finite

Backend = Annotated[str, typer.Option(help="nccl, gloo, mpi, ucc, or another that torch has registered.")]
AllowNamespace = Annotated[
    list[str] | None,
    typer.Option(help="Run the operators of this namespace too, such as torchvision.", show_default=False),
]
Timeout = Annotated[
    float, typer.Option(min=1, callback=check_finite, help="Seconds after which a call counts as hung.")
]
MasterAddr = Annotated[
    str | None, typer.Option(help="Host of rank 0; by default as the launcher tells.", show_default=False)
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65_535, help="A free port there; by default as the launcher tells.", show_default=False
    ),
]
