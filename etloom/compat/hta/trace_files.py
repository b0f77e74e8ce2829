"""Resolves HTA's arguments ``trace_files`` and ``trace_dir`` to the trace files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from etloom.core.errors import InvalidValue
from etloom.core.paths import expand_home
from etloom.formats.kineto import find_rank
from etloom.loading.file_names import find_rank_in_name

StrPath = str | PathLike[str]
TraceFiles = Mapping[int, StrPath] | Sequence[StrPath]


def resolve_trace_files(trace_files: TraceFiles | None, trace_dir: StrPath) -> Path | dict[int, Path]:
    """Return the folder to open or, with ``trace_files``, the file of each rank.

    Args:
        trace_files: {rank: file}; or a list of files, whose ranks are read from their contents or names. None: the
            traces of ``trace_dir``. A relative name that does not exist is one of ``trace_dir``.
        trace_dir: a folder, or a file.

    Raises:
        InvalidValue: two files of a list are of one rank, or state none.
    """
    folder = expand_home(trace_dir)
    if trace_files is None:
        return folder
    if isinstance(trace_files, Mapping):
        return {rank: _locate(file, folder) for rank, file in trace_files.items()}
    if isinstance(trace_files, (str, PathLike)):
        return {_find_rank(path) or 0: path for path in [_locate(trace_files, folder)]}
    paths = [_locate(file, folder) for file in trace_files]
    by_rank: dict[int, Path] = {}
    for path in paths:
        rank = _find_rank(path)
        if rank is None and len(paths) > 1:
            raise InvalidValue(
                "the file does not state its rank", where=path, remedy="pass a dict: {rank: file}"
            )
        if (other := by_rank.setdefault(rank or 0, path)) is not path:
            raise InvalidValue(
                f"is a second file of rank {rank}; the first is {other.name}",
                where=path,
                remedy="pass a dict: {rank: file}",
            )
    return by_rank


def _locate(file: StrPath, folder: Path) -> Path:
    path = expand_home(file)
    return path if path.is_absolute() or path.exists() else folder / path


def _find_rank(path: Path) -> int | None:
    rank = find_rank(path)
    return find_rank_in_name(path) if rank is None else rank
