"""Changes to the checksums of saved traces and stores, for tests that change their files."""

from __future__ import annotations

import json
from pathlib import Path

from etloom.formats.parquet import checksums


def remove_checksums(folder: Path) -> None:
    """Make a folder look as an older version saved it, so that changed files are not noticed as such."""
    for manifest in folder.rglob("meta.json"):
        content = json.loads(manifest.read_text())
        content.pop(checksums.KEY, None)
        manifest.write_text(json.dumps(content))


def update_checksum(file: Path) -> None:
    """Record a changed file's checksum in its meta.json, if that is intact and lists the file."""
    for manifest in (file.with_name("meta.json"), file.parents[1] / "meta.json"):
        try:
            content = json.loads(manifest.read_text())
            listed = content[checksums.KEY]
            if file.name in listed:
                listed |= checksums.compute_checksums([file])
                manifest.write_text(json.dumps(content))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
