"""Atomic writes: a small file appears complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, scratch: Path) -> None:
    """Write `text` to a new file with a unique name in the folder `scratch`, then rename that file to `path`.

    `scratch` must be on the same disk. Links are not followed, neither at `path` nor in `scratch`: the folder may
    belong to somebody else.

    Raises:
        OSError: The file cannot be written; `path` is unchanged.
    """
    unfinished = scratch / f".{path.name}.{os.urandom(6).hex()}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
