"""Options of the replay commands that are still declared with typer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

PathArgument = Annotated[
    Path,
    typer.Argument(
        readable=False, help="A folder of traces, or one trace file.", show_default=False, metavar="PATH"
    ),
]
RankPatternOption = Annotated[
    str | None,
    typer.Option("--rank-pattern", help="Regular expression for the file names, with one group: the rank."),
]


def check_finite(value: float | None) -> float | None:
    """Refuse nan and infinities, which the parser accepts as numbers."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value
