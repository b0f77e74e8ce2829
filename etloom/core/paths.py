"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return the path with a leading ``~`` or ``~user`` replaced by that home folder, unchanged if there is none.

    A shell expands ``~`` only where a word begins with it: not in Python code, ``--out=~/run`` or quotes.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for an unknown user)
