"""Checks that the compiled part of etloom exists, which a clone of the repository lacks until it is built."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_native_part() -> None:
    """Check that the compiled module of etloom (``etloom._native``) is installed.

    It does not if Python is started in the folder of a clone: the source folder hides the installed package there.

    Raises:
        ImportError: It does not exist.
    """
    if find_spec("etloom._native") is None:
        folder = Path(__file__).resolve().parents[1]
        raise ImportError(
            f"{folder} is the source folder of etloom, without the compiled part; start Python in another folder to "
            "use the installed package, or run `make setup` in the clone"
        ) from None
