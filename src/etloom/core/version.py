"""The version of etloom, as written to files and reports, and the digest of the code that computes answers."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

__version__ = "0.2.0"
_WITHOUT_ANSWERS = ("cli", "collector", "compat", "replayer", "reports")


@functools.cache
def compute_code_digest() -> str:
    """Return a digest of etloom's version and the source of all modules that can affect analysis results.

    Results that are kept (the cache, the answers in a store) belong to the code that computed them: two builds from a
    repository have the same version and may compute different ones.
    """
    package = str(Path(__file__).resolve().parents[1])
    digest = hashlib.sha256(__version__.encode())
    for folder, folders, files in os.walk(package):
        if folder == package:
            folders[:] = [name for name in folders if name not in _WITHOUT_ANSWERS]
        folders.sort()
        for file in sorted(file for file in files if file.endswith(".py")):
            path = f"{folder}/{file}"
            digest.update(path[len(package) + 1 :].encode() + b"\0")
            with open(path, "rb", buffering=0) as module:  # noqa: PTH123
                digest.update(module.read())
    return digest.hexdigest()[:16]
