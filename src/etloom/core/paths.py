"""Expands ``~`` in paths that users write, and locates the folder of etloom's cache."""

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
    """Return etloom's folder in the user's cache folder, or $ETLOOM_CACHE; it need not exist yet.

    Of a user without a home folder it is a path at which no folder can be created, so that nothing is kept.
    """
    if folder := os.environ.get("ETLOOM_CACHE"):
        return Path(folder)
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "etloom"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etloom"
    except RuntimeError:
        return Path(os.devnull) / "etloom"


def create_cache_folder() -> Path:
    """Create etloom's cache folder if it does not exist, and return it. Raises OSError.

    In the user's cache folder only the user can read it: entries show what traces show, whose own folders may be
    private. $ETLOOM_CACHE may be shared.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o777 if os.environ.get("ETLOOM_CACHE") else 0o700, parents=True, exist_ok=True)
    return folder
