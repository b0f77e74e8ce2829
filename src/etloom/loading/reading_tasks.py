"""Read ranks by tasks, which save their linked tables in a folder: in processes of this host, or on a Ray cluster.

The caller then opens them from there, as it does when a run is opened again. So a rank that no task could read (a path
that another host does not see, a host without etloom) is read by the caller, with the same result.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etloom import formats
from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.machine import available_memory
from etloom.core.names import add_names, list_user_paths
from etloom.core.trace import Trace
from etloom.core.version import compute_code_digest
from etloom.loading import cache, engines
from etloom.loading.executor import execute_plan
from etloom.loading.file_reading import Progress, estimate_text_bytes
from etloom.loading.plan import PARSED_NATIVELY, LoadOptions, LoadPlan, RankPlan, Source, Storage
from etloom.loading.rank_stores import CachedRun, RankFolder

MAX_FILE_TEXT_BYTES = 32_000_000
"""Larger files are read by threads: they spend most of their time outside of the interpreter's lock."""
_TASK_RANKS = 8
"""Ranks between two reports of progress."""
_MIN_PENDING_RANKS = 2 * _TASK_RANKS
_PROCESS_BYTES = 200_000_000
"""Memory of a process without its ranks (measured: 110 MB), twice."""


def read_by_tasks(plan: LoadPlan) -> LoadPlan:
    """Read and link the ranks of a plan that are not in the cache, by tasks if that is faster or if the engine is Ray.

    Returns:
        The plan for the rest of the work.

    Raises:
        UnknownName: the engine does not exist.
        InvalidValue: the engine is Ray, and the cache is not used.
        EtloomError: see `etloom.loading.engines.run_on_ray`.
    """
    options = plan.options
    is_remote = engines.is_remote(options.engine)
    if is_remote and not options.use_cache:
        raise InvalidValue(
            "the engine ray returns tables through the cache, which is turned off",
            remedy="use the cache (without --no-cache), in a folder that all hosts share: $ETLOOM_CACHE",
            option="engine",
        )
    folder = plan.folder
    if not isinstance(folder, CachedRun):  # of a run that is added to a store, batches are read
        return plan
    pending = [
        rank
        for rank, part in plan.ranks.items()
        if rank is not None and part.source is Source.FILES and not folder.has(rank)
    ]

    def describe(ranks: Iterable[int]) -> str:
        parts = {rank: plan.ranks[rank] for rank in ranks}
        if is_remote:  # else the current folder is the same
            parts = {rank: part.to_absolute() for rank, part in parts.items()}
        return describe_ranks(parts, key=folder.key, linking=dict(options.linking))

    if is_remote:
        if pending:
            folder.hold()
            engines.run_on_ray(read_into_cache, [describe([rank]) for rank in pending])
        return plan
    if not _is_faster_in_processes(plan, pending):
        return plan
    groups = [pending[start : start + _TASK_RANKS] for start in range(0, len(pending), _TASK_RANKS)]
    texts = [describe(group) for group in groups]
    progress = TaskProgress(
        options.progress, [file for part in plan.ranks.values() for file in part.all_files]
    )

    def report(index: int) -> None:
        progress.complete(file for rank in groups[index] for file in plan.ranks[rank].all_files)

    folder.hold()
    processes = max(1, min(plan.parallel, available_memory() // _PROCESS_BYTES))
    engines.run_in_processes(read_into_cache, texts, processes, report)
    ranks = dict(plan.ranks)
    for rank in pending:
        ranks[rank] = replace(ranks[rank], storage=Storage.EVICTABLE)
    return replace(plan, ranks=ranks, options=replace(options, progress=progress))


class TaskProgress:
    """Reports the files that tasks have read, and of the others what the caller reads; see `Progress`."""

    def __init__(self, report: Progress | None, files: Iterable[Path]) -> None:
        self._report = report or (lambda file, count: None)
        self._complete: set[Path] = set()
        for file in files:
            self._report(file, 0)

    def __call__(self, file: Path, count: int) -> None:
        if file not in self._complete:
            self._report(file, count)

    def complete(self, files: Iterable[Path]) -> None:
        """Report files as read."""
        for file in files:
            self._complete.add(file)
            with contextlib.suppress(OSError):  # it was removed
                self._report(file, file.stat().st_size)


def _is_faster_in_processes(plan: LoadPlan, ranks: Sequence[int]) -> bool:
    if plan.parallel < 2 or len(ranks) < _MIN_PENDING_RANKS:
        return False
    files = [file for rank in ranks for file in plan.ranks[rank].all_files]
    try:
        text_bytes = [estimate_text_bytes(file) for file in files]
        # Files of several ranks are not cached.
        has_one_rank = all(formats.detect_format(file, "kineto") in PARSED_NATIVELY for file in files)
    except (OSError, EtloomError):
        return False
    is_small = max(text_bytes) <= MAX_FILE_TEXT_BYTES
    return has_one_rank and is_small and cache.has_room(sum(text_bytes) // 10)


def describe_ranks(ranks: Mapping[int, RankPlan], **facts: Any) -> str:
    """Return the task to read ranks as JSON text, with further ``facts``; files are named as in the plan."""
    files = {
        int(rank): [[str(path) for path in paths] for paths in (part.files, part.captures)]
        for rank, part in ranks.items()
    }
    names = [str(path.resolve()) for path in list_user_paths()]
    content = {"ranks": files, "names": names, "code": compute_code_digest(), **facts}
    return json.dumps(content, default=lambda number: number.item())


def read_ranks(
    task: Mapping[str, Any], folder: RankFolder, linking: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[int, Trace]]:
    """Read and link the ranks of a task (see `describe_ranks`) that are not in a folder, and save them there.

    Yields each rank of the folder, with tables in memory of one rank at a time. Ranks with a file that cannot be read
    or that holds several ranks are left to the caller, and so are all of them on a host with another version of etloom.
    """
    if task["code"] != compute_code_digest():
        return
    add_names(*map(Path, task["names"]))
    options = LoadOptions(jobs=1, linking=linking)
    for rank, paths in ((int(rank), paths) for rank, paths in task["ranks"].items()):
        files, captures = (tuple(map(Path, each)) for each in paths)
        part = RankPlan(files, Source.FILES, Storage.EVICTABLE, captures)
        with contextlib.suppress(EtloomError):
            job = execute_plan(LoadPlan({rank: part}, options, max_table_bytes=0, folder=folder))
            if folder.has(rank):
                yield rank, job[rank]


def read_into_cache(text: str) -> None:
    """Read the ranks of a task (JSON text) into the cache."""
    task = json.loads(text)
    for _ in read_ranks(task, CachedRun(task["key"]), task["linking"]):
        pass
