"""Requirements and the values reached, one line each, which `run.py` collects into a table; where the data is."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(os.environ.get("ETLOOM_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
"""Folder of the measurements."""

PREFIX = "requirement"


def state(name: str, asked: str, value: str, holds: bool | None = None) -> None:
    """Print a requirement, and the value that was reached; holds: None if nothing was asked or it was not measured."""
    print(PREFIX, name, asked, value, {True: "yes", False: "no", None: ""}[holds], sep=" | ")
