"""Paths of the repository and of the shared real traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
HAS_DATA = DATA.is_dir() and any(DATA.iterdir())
NO_DATA = f"no shared traces at {DATA}; set ETLOOM_DATA to the folder that holds them"


def skip_without_data(parameters: Sequence[object]) -> Sequence[object]:
    """Return parameters that were taken from the shared traces, or one that skips its test where they are absent."""
    return parameters or [pytest.param(None, id="no data", marks=pytest.mark.skip(reason=NO_DATA))]
