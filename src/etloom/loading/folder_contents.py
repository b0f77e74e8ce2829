"""Inspect a folder of traces: its files, salvaged and converted copies, and the workload card."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats import detect_format, kineto
from etloom.formats.io.json_text import load_json
from etloom.loading.file_names import CAPTURE_FOLDER, TRACE_NAME, find_rank_in_name

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


# Read run.json, which `etloom collect` writes next to the traces, and detect unfinished recordings.
#
# How the processes and the command ended becomes rows of stats; everything else in run.json is passed on unchanged.

_MAX_BYTES = 1 << 26
_HIDDEN = re.compile(r"\.etloom-.+-\d+-[0-9a-f]+", re.ASCII)  # host, process, random number


def read_run_json(folder: Path, stats: list[Stat]) -> tuple[dict[str, Any] | None, dict[int, Stat]]:
    """Read the run.json of `etloom collect` in a folder, and report in stats how the job and its ranks ended.

    Args:
        folder: the folder of a run.
        stats: receives rows of stats about the run, for example how the command ended.

    Returns:
        The contents of run.json, None if there is no valid one; and for each rank with data loss a row of stats.
    """
    if (remedy := find_unfinished_recording(folder)) is not None:
        stats.append(Stat("job.unfinished_recording", "data_loss", 1, remedy))
    path = folder / "run.json"
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None, {}
    try:
        run = load_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        stats.append(Stat("job.run_json", "info", 1, f"{path.name} cannot be read"))
        return None, {}
    if not (isinstance(run, dict) and str(run.get("schema", "")).startswith("etloom-run")):
        return None, {}
    ended = run.get("ended")
    if isinstance(ended, str) and ended:
        stats.append(Stat("job.ended_early", "info", 1, ended[:500]))
    cut_short = {
        rank["rank"]: row
        for rank in _list_ranks(run)
        if type(rank.get("rank")) is int and (row := _describe_loss(rank)) is not None
    }
    if not cut_short and (row := _describe_loss(run)):
        stats.append(row)
    if run.get("returncode") is None and _is_launched(run):
        unknown_end = "etloom collect was killed before the job ended, or the job still runs"
        stats.append(Stat("job.end_unknown", "info", 1, unknown_end))
    elif run.get("returncode"):
        stats.append(Stat("job.failed", "info", 1, f"the command ended with status {run['returncode']}"))
    return run, cut_short


def find_unfinished_recording(folder: Path) -> str | None:
    """Return advice to the user if a recording in a folder has not finished; None if all have finished."""
    hidden_folders = (
        path for path in folder.glob(".etloom-*") if _HIDDEN.fullmatch(path.name) and path.is_dir()
    )
    if any(_has_started(place) for hidden in hidden_folders for place in _list_inside(hidden)):
        return f"a job is still recording here; if it was killed, recover its traces with etloom salvage {folder}"
    return None


def _has_started(place: Path) -> bool:
    return place.is_dir() and bool(_list_inside(place))


def _list_inside(folder: Path) -> list[Path]:
    """Return the entries of a folder; empty if it cannot be read or no longer exists."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_launched(run: dict[str, Any]) -> bool:
    """Return whether `etloom collect` launched the command of the run (not etloom.record within the job)."""
    jobs = [rank.get("job") for rank in _list_ranks(run)]
    return any(isinstance(job, dict) and job.get("supervised") for job in jobs)


def _list_ranks(run: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = run.get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _describe_loss(facts: dict[str, Any]) -> Stat | None:
    lost = facts.get("lost")
    return (
        Stat("job.truncated_recording", "data_loss", 1, lost[:500])
        if isinstance(lost, str) and lost
        else None
    )


# Find the traces that recorded the capture of device graphs (CUDA graphs), in a folder next to a trace.


def find_captures(path: Path) -> list[Path]:
    """Return the traces of CUDA graph captures in ``capture_traces``, a subfolder of a folder or next to a trace file.

    Next to a single trace, those whose names have the number of another rank are left out.
    """
    folder = (path if path.is_dir() else path.parent) / CAPTURE_FOLDER
    if path.parent.name == CAPTURE_FOLDER or not folder.is_dir() or not path.exists():
        return []
    files = [
        file for file in list_files(folder) if ".json" in file.name and file.is_file() and _is_kineto(file)
    ]
    numbers = {file: find_rank_in_name(file) for file in files}
    if path.is_dir() or len({number for number in numbers.values() if number is not None}) < 2:
        return files
    rank = find_rank_in_name(path)
    if rank is None and _is_kineto(path):
        rank = kineto.find_rank(path)
    return [file for file, number in numbers.items() if rank is None or number in (None, rank)]


def _is_kineto(path: Path) -> bool:
    try:
        return detect_format(path) == "kineto"
    except EtloomError:
        return False
