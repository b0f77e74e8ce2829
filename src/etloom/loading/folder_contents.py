"""Inspect a folder of traces: its files, salvaged and converted copies, and the workload card."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats import detect_format
from etloom.loading.file_names import CAPTURE_FOLDER, TRACE_NAME
from etloom.loading.run_json import find_unfinished_recording

_SALVAGED = ".salvaged"
_RESULT_FOLDER = "ASCEND_PROFILER_OUTPUT"
"""Folder with the trace of a rank, next to the raw data that it was made from."""
_MAX_DEPTH = 6
_MAX_FILES = 100_000
_MAX_ENDINGS = 6
"""Endings of files that a message names."""


def holds_traces(folder: Path) -> bool:
    """Return whether a folder contains files whose names match the naming schemes of traces (`TRACE_NAME`)."""
    try:
        return folder.is_dir() and any(TRACE_NAME.search(path.name) for path in folder.iterdir())
    except OSError:
        return False


def list_files(folder: Path) -> list[Path]:
    """Return the visible files and folders in a folder, sorted by name. Raises ReadError if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror}", where=folder) from None


def list_tree(folder: Path) -> list[Path]:
    """Return the files and trace folders below a folder, sorted; of a folder of torch_npu its result only.

    Raises:
        ReadError: there are too many files.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        if _RESULT_FOLDER in folders:
            folders[:], names = [_RESULT_FOLDER], []
        elif depth >= _MAX_DEPTH:
            folders.clear()
        visible = [
            Path(parent, name) for name in folders if not name.startswith(".") and name != CAPTURE_FOLDER
        ]
        traces = [path for path in visible if detect_format(path) is not None]
        folders[:] = [path.name for path in visible if path not in traces]
        files += traces + [Path(parent, name) for name in names if depth and not name.startswith(".")]
        if len(files) > _MAX_FILES:
            raise ReadError(
                f"contains more than {_MAX_FILES:,} files", where=folder, remedy="open one of its folders"
            )
    return sorted(files)


def prefer_salvaged(paths: Sequence[Path]) -> tuple[list[Path], dict[Path, Stat]]:
    """Drop damaged files that have a salvaged copy; return the remaining paths, and a row of stats for each copy."""
    stems = {path: f"{path.parent}/{path.name.partition('.json')[0]}" for path in paths}
    copies = {stem: path for path, stem in stems.items() if stem.endswith(_SALVAGED)}
    remaining = []
    stats: dict[Path, Stat] = {}
    for path in paths:
        copy = copies.get(stems[path] + _SALVAGED)
        if copy is None:
            remaining.append(path)
        else:
            example = f"{copy.name} is read instead of {path.name}, from which it was salvaged"
            stats[copy] = Stat("job.salvaged_file_used", "data_loss", 1, example)
    return remaining, stats


def find_converted_file(path: Path) -> str | None:
    """Return the name of the metrics file that `etloom convert` turned into a Parquet folder; None for other paths."""
    if not path.is_dir():
        return None
    try:
        meta = json.loads((path / "meta.json").read_bytes())["meta"]
        (format,), (file,) = meta["formats"], meta["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Path(file).name if format == "metrics" else None


def read_first_card(folder: Path, stats: list[Stat]) -> dict[str, Any] | None:
    """Return the first readable workload card (YAML file, sorted by name) in a folder; None if there is none."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        from etloom.formats.io.workload_card import is_card, read_card  # loads the YAML parser

        try:
            if is_card(path):
                return read_card(path)
        except EtloomError as error:
            stats.append(Stat("job.workload_card", "data_loss", 1, str(error)))
    return None


def suggest_remedy(folder: Path, ignored: Iterable[Path]) -> str:
    """Suggest which subfolder to try if a folder has no traces, or describe its contents."""
    folders = sorted(path.name for path in list_files(folder) if path.is_dir())
    if folders:
        return f"try one of its folders: {', '.join(folders[:5])}"
    if (unfinished := find_unfinished_recording(folder)) is not None:
        return unfinished
    endings = Counter(_file_ending(path) for path in ignored)
    most_common = endings.most_common(_MAX_ENDINGS)
    contents = ", ".join(f"{count:,} {ending}" for ending, count in most_common)
    if not contents:
        return "it is empty; name the folder of the traces, or record a job with `etloom collect`"
    more = ", ..." if len(endings) > _MAX_ENDINGS else ""
    supported = "PyTorch's traces, Nsight Systems exports, Chakra .et and others of README's table"
    return f"it contains {contents}{more}; supported are {supported}; `etloom info FILE` describes one file"


def _file_ending(path: Path) -> str:
    """Return the suffix of a file name, including that of a compression, such as ".json.gz"."""
    is_compressed = path.suffix in (".gz", ".zst")
    return "".join(path.suffixes[-2:] if is_compressed else path.suffixes[-1:]) or "without a suffix"
