"""Requirements and the values reached: one line each, which `run.py` collects into its last table."""

from __future__ import annotations

PREFIX = "requirement"


def state(name: str, asked: str, value: str, holds: bool | None = None) -> None:
    """Print a requirement, and the value that was reached; holds: None if nothing was asked or it was not measured."""
    print(PREFIX, name, asked, value, {True: "yes", False: "no", None: ""}[holds], sep=" | ")
