"""Small files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, scratch: Path) -> None:
    """Write `path` anew: in `scratch`, on the same disk, under a name that nobody has, then renamed.

    Whatever `path` or anything in `scratch` links to stays as it is: a folder may be a stranger's. Raises OSError.
    """
    unfinished = scratch / f".{path.name}.{os.urandom(6).hex()}"
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(file, "w", encoding="utf-8") as text_file:  # noqa: PTH123
            text_file.write(text)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
