"""Defines the folder layout of a store of runs and its versions: store.json, and a folder per run.

    STORE/store.json                              {"etloom": version, "store": 1}
    STORE/run=NAME/meta.json                      a saved Job, with its source, its answers and the checksums
                                                  of its summaries; written last
    STORE/run=NAME/rank=N/events.parquet, ...     the tables of a rank, as in any folder of Parquet
    STORE/run=NAME/summaries/ranks.parquet        one row per rank: host, events, meta, rows of its tables
    STORE/run=NAME/summaries/stats.parquet        the stats of all ranks
    STORE/run=NAME/summaries/ANSWER.parquet       answers to analyses; of analyses of ranks with a column ``rank``
    STORE/.adding/                                runs that are being added

A run is renamed from ``.adding`` to its name when it is complete, so readers see whole runs only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError, InvalidValue, ReadError
from etloom.core.text import count_noun
from etloom.core.version import __version__
from etloom.formats.io.atomic_file import write_atomically
from etloom.formats.io.json_text import load_json

STORE_VERSION = 1
"""Version of the layout. A reader refuses a newer one; ``etloom store refresh`` writes runs of older ones again."""
MANIFEST = "store.json"
SUMMARIES = "summaries"
ADDING = ".adding"
RUN_PREFIX = "run="
_NAME = re.compile(r"[\w.+-]{1,200}", re.ASCII)


def is_store(path: Path) -> bool:
    """Return whether a folder is a store of runs (has a store.json)."""
    return (path / MANIFEST).is_file()


def is_stored_run(path: Path) -> bool:
    """Return whether a folder is a run in a store (has a meta.json and summaries/ranks.parquet)."""
    return (path / SUMMARIES / "ranks.parquet").is_file() and (path / "meta.json").is_file()


def check_name(name: str) -> str:
    """Return the name if it can name a stored run (letters, digits, '.', '_', '+', '-'). Raises InvalidValue."""
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise InvalidValue(
            f"{name!r} cannot name a run",
            remedy="use letters, digits, '.', '_', '+' and '-'; the first must not be '.'",
            option="name",
        )
    return name


def run_folder(store: Path, name: str) -> Path:
    """Return the path of a run's folder in a store; the folder need not exist."""
    return store / f"{RUN_PREFIX}{name}"


def open_store(store: Path, *, create: bool = False) -> None:
    """Check that a folder is a store that this version of etloom can read, or create the store.

    Args:
        store: the folder.
        create: create the store if the folder does not exist or is empty.

    Raises:
        ReadError: it is not a store, or its layout is newer than this version of etloom.
        EtloomError: it cannot be created.
    """
    manifest = store / MANIFEST
    if not manifest.is_file():
        if not create:
            raise ReadError(
                "is not a store", where=store, remedy="etloom store add RUN --to STORE creates one"
            )
        if store.exists() and (not store.is_dir() or any(store.iterdir())):
            raise EtloomError(
                "exists and is not a store", where=store, remedy="choose a new or an empty folder"
            )
        try:
            store.mkdir(parents=True, exist_ok=True)
            write_json(manifest, {"etloom": __version__, "store": STORE_VERSION})
        except OSError as error:
            raise EtloomError(
                f"cannot be written: {error.strerror or error}", where=store, remedy="choose another path"
            ) from None
    check_version(read_json(manifest), manifest)


def check_version(content: dict[str, Any], file: Path) -> None:
    """Raise ReadError if a manifest has no layout version, or a version that this etloom cannot read."""
    version = content.get("store")
    if type(version) is not int or version < 1:
        raise ReadError(
            "states no version of the store, so it cannot be read",
            where=file,
            remedy="add the run to a new store",
        )
    if version > STORE_VERSION:
        raise ReadError(
            f"has layout {version} of stores, this etloom reads up to {STORE_VERSION}",
            where=file,
            remedy="update etloom",
        )


def list_runs(store: Path) -> list[str]:
    """Return the names of the complete runs of a store, in the order in which they were added."""
    open_store(store)
    folders = [
        folder for folder in store.iterdir() if folder.name.startswith(RUN_PREFIX) and is_stored_run(folder)
    ]
    added = {folder: str(read_json(folder / "meta.json").get("added", "")) for folder in folders}
    return [
        folder.name.removeprefix(RUN_PREFIX) for folder in sorted(folders, key=lambda at: (added[at], at))
    ]


def select_run(store: Path) -> Path:
    """Return the folder of the only run of a store. Raises ReadError if it has none or several."""
    names = list_runs(store)
    if len(names) == 1:
        return run_folder(store, names[0])
    if not names:
        raise ReadError("is a store without runs", where=store, remedy=f"etloom store add RUN --to {store}")
    listed = ", ".join(names[-5:]) + (", ..." if len(names) > 5 else "")
    raise ReadError(
        f"is a store of {count_noun(len(names), 'run')} ({listed})",
        where=store,
        remedy=f"specify one: {run_folder(store, names[-1])}",
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a manifest of a store (store.json, a run's meta.json). Raises ReadError."""
    try:
        content = load_json(file.read_bytes())
    except OSError as error:
        raise ReadError(
            f"cannot be read: {error.strerror}",
            where=file,
            remedy="check that it exists and that you may read it",
        ) from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ReadError("is not a manifest of a store", where=file, remedy="add the run again")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a manifest (a JSON object); the file appears under its name only when it is complete."""
    write_atomically(file, json.dumps(content, indent=1))
