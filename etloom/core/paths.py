"""Paths as users write them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return the path with a leading ``~`` or ``~user`` replaced by that home folder, unchanged if there is none.

    A shell expands ``~`` only where a word begins with it: not in Python code, ``--out=~/run`` or quotes.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def cache_folder() -> Path:
    """Return etloom's folder in the user's cache folder, or $ETLOOM_CACHE; it need not exist yet."""
    if folder := os.environ.get("ETLOOM_CACHE"):
        return Path(folder)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "etloom"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etloom"
