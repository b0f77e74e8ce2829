"""HTA's ``hta.common.trace.Trace``, which has frames once `parse_traces` or `load_traces` ran, and ``ParserConfig``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from etloom import api
from etloom.compat.hta.frames import HtaTrace, drop_last_step
from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.paths import expand_home
from etloom.core.trace import Job
from etloom.core.trace import Trace as RankTrace
from etloom.formats.kineto import find_rank
from etloom.loading.file_names import find_rank_in_name

StrPath = str | PathLike[str]
TraceFiles = Mapping[int, StrPath] | Sequence[StrPath]


class Trace(HtaTrace):
    """The events of a run as a pandas frame per rank; `parse_traces` or `load_traces` reads them.

    Other arguments of these methods, which steer HTA's processes and memory, have no effect.
    """

    is_parsed = False
    _is_aligned = True

    def __init__(self, trace_files: TraceFiles | None = None, trace_dir: StrPath = ".") -> None:
        self._source = resolve_trace_files(trace_files, trace_dir)

    def parse_traces(self, max_ranks: int = -1, *_: Any, **__: Any) -> None:
        """Read the traces; times are those of the files. ``max_ranks``: read the first ranks only (-1: all)."""
        job = api.open(self._source)
        kept = job.ranks if max_ranks < 0 else job.ranks[:max_ranks]
        self._is_aligned = False
        super().__init__(Job({rank: job[rank] for rank in kept}, job.meta, job.run_stats))
        self.is_parsed = True

    def load_traces(self, include_last_profiler_step: bool | None = False, *_: Any, **__: Any) -> None:
        """Read the traces, without the last step unless ``include_last_profiler_step``; times begin at 0."""
        job = api.open(self._source)
        self._is_aligned = True
        super().__init__(job if include_last_profiler_step else job.map(drop_last_step))
        self.is_parsed = True

    def align_and_filter_trace(self, include_last_profiler_step: bool | None = False) -> None:
        """Shift times to begin at 0, and drop the last step unless ``include_last_profiler_step``."""
        if not self.is_parsed:
            raise EtloomError("the traces are not read yet", remedy="call parse_traces() before")
        self._is_aligned = True
        super().__init__(self.job if include_last_profiler_step else self.job.map(drop_last_step))

    def _zero_ns(self, trace: RankTrace) -> int:
        return self.zero if self._is_aligned else int(trace.meta.get("base_ns") or 0)


class ParserConfig:
    """Accepts HTA's choice of arguments to keep; the frames have all columns whatever is chosen."""

    ARGS_INPUT_SHAPE = ("input_dims", "input_type", "input_strides")
    _default: ParserConfig | None = None

    def __init__(self, args: Sequence[Any] | None = None, **_: Any) -> None:
        self.args = list(args or [])

    def add_args(self, args: Sequence[Any]) -> None:
        self.args += [arg for arg in args if arg not in self.args]

    def get_args(self) -> list[Any]:
        return self.args

    @classmethod
    def get_default_cfg(cls) -> ParserConfig:
        return cls._default or cls()

    @classmethod
    def set_default_cfg(cls, cfg: ParserConfig) -> None:
        cls._default = cfg


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
