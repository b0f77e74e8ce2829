"""Execute a `LoadPlan`: read, link and cache the tables of each rank, ranks in parallel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from etloom import formats, linker
from etloom.core.errors import EtloomError, ReadError
from etloom.core.machine import run_in_parallel
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.core.urls import describe_path
from etloom.formats import parquet
from etloom.linker.merging import flag_missing_gpu_events
from etloom.loading import consistency, file_reading
from etloom.loading.part_joining import join_parts
from etloom.loading.plan import LoadPlan, RankPlan, Source, Storage
from etloom.loading.profiler_joining import join_profilers
from etloom.loading.rank_stores import ResidentTables, leave_on_disk, save_on_disk

MIN_SECONDS_TO_CACHE = 0.5
"""Runs that take less time to read and link are not cached. Of a run of many ranks, the limit is divided among the
ranks."""
_NOT_LINKED = (
    "too large to link while reading: parent, depth and step of events, launches, thread_dependencies and "
    "sync_dependencies are empty; etloom link PATH --out RUN.parquet links it, in memory"
)


def execute_plan(plan: LoadPlan, *, skip_unreadable: bool = False) -> Job:
    """Load a run as its `LoadPlan` specifies, and return the linked Job.

    Args:
        plan: the decision of `etloom.loading.plan`.
        skip_unreadable: report files that cannot be read as rows of stats; a rank without any readable file is missing.

    Raises:
        ReadError, LimitError: a file (with ``skip_unreadable``: every file) cannot be read.
        LinkError: files of a rank are not of one program.
    """
    execution = _Execution(plan, skip_unreadable)
    if (progress := plan.options.progress) is not None:
        for path in itertools.chain(*(rank.all_files for rank in plan.ranks.values())):
            progress(path, 0)
    job = execution.load_single_file() if None in plan.ranks else execution.load_ranks()
    if job.stored is not None:  # a store holds linked traces only, too many to look at
        return job
    unlinked = sum(not linker.is_linked(trace) for trace in job.values())
    return job.with_stats([Stat("job.not_linked", "info", unlinked, _NOT_LINKED)])


def add_rank_stats(job: Job, stats_by_rank: Mapping[int, Sequence[Stat]]) -> Job:
    """Add rows to the stats of a job's ranks; rows of ranks that the job lacks go to the stats of the run."""
    traces = {rank: trace.with_stats(stats_by_rank.get(rank, ())) for rank, trace in job.items()}
    remaining = [row for rank, rows in stats_by_rank.items() if rank not in job for row in rows]
    return Job(traces, job.meta, job.run_stats).with_stats(remaining)


def _join_files(contents: Sequence[Trace | Job]) -> Job:
    """Combine the ranks of all files into one Job; those that several files repeat are numbered in file order."""
    if len(contents) == 1 and isinstance(contents[0], Job):
        return contents[0]
    traces = [
        trace
        for content in contents
        for trace in (content.values() if isinstance(content, Job) else [content])
    ]
    ranks = [trace.rank for trace in traces if trace.rank is not None]
    if len(set(ranks)) == len(traces):
        return Job(dict(sorted(zip(ranks, traces, strict=True))))
    example = f"{len(traces)} devices of {len(contents)} files, in the order of their names"
    return Job({rank: trace.replace(meta={"rank": rank}) for rank, trace in enumerate(traces)}).with_stats(
        [Stat("job.ranks_numbered", "info", len(traces), example)]
    )


class _Execution:
    """Executes one `LoadPlan`, and collects the errors of files that cannot be read."""

    def __init__(self, plan: LoadPlan, skip_unreadable: bool) -> None:
        self.plan = plan
        self.options = plan.options
        self.skip_unreadable = skip_unreadable
        self.resident = ResidentTables(plan.max_table_bytes)
        self.unreadable: dict[Path, EtloomError] = {}

    def load_single_file(self) -> Job:
        """Load the only file of the plan, which may hold several ranks; a trace without a rank becomes rank 0."""
        loaded = self._load(None)
        assert loaded is not None
        if isinstance(loaded, Job):
            return loaded
        (path,) = self.plan.ranks[None].files
        return Job({loaded.rank or 0: loaded}, {"path": describe_path(path)})

    def load_ranks(self) -> Job:
        """Load all ranks of the plan in parallel and return them as a Job."""
        loaded = run_in_parallel(self._load, list(self.plan.ranks), self.plan.parallel)
        if any(isinstance(content, Job) for content in loaded.values()):
            return _join_files([content for content in loaded.values() if content is not None])
        traces = {
            rank: trace for rank, trace in loaded.items() if isinstance(trace, Trace) and rank is not None
        }
        errors = {
            rank: [self.unreadable[path] for path in plan.files if path in self.unreadable]
            for rank, plan in self.plan.ranks.items()
            if rank is not None
        }
        if self.unreadable and not traces:
            first, *others = itertools.chain(*errors.values())
            more = f"; {len(others)} more cannot be read either" if others else ""
            raise ReadError(f"{first.what}{more}", where=first.where, remedy=first.remedy)
        # A replaced trace would lose the results that `check_ranks` computes.
        job = Job(
            {
                rank: trace if trace.rank == rank else trace.replace(meta={"rank": rank})
                for rank, trace in traces.items()
            }
        )
        rows = {
            rank: [Stat("job.unreadable_file", "error", 1, str(error)) for error in rank_errors]
            for rank, rank_errors in errors.items()
        }
        return add_rank_stats(job, rows).with_stats(consistency.check_ranks(traces))

    def _load(self, rank: int | None) -> Trace | Job | None:
        """Load a rank, or the single file (None), from its planned source; None if none of its files can be read."""
        plan, options = self.plan.ranks[rank], self.options
        if plan.source is Source.PARQUET:
            return self._open_parquet(plan)
        folder, on_disk = self.plan.folder, plan.storage is not Storage.MEMORY
        saved = folder.open(rank, lazy=on_disk) if folder is not None else None
        if saved is not None and options.progress is not None:
            for path in plan.all_files:
                options.progress(path, path.stat().st_size)
        if plan.source is Source.LARGE_KINETO:
            trace = saved or file_reading.open_on_disk(plan.files[0], options.progress, options.use_cache)
            return flag_missing_gpu_events(trace)
        if saved is not None:
            return self._leave_on_disk(saved)
        start = time.monotonic()
        parts = self._read_files(plan.files, is_rank=rank is not None)
        if not parts:
            return None
        with formats.convert_panics(plan.files[0]):
            if isinstance(parts, Job):
                return parts.map(self._link)
            captures, capture_stats = self._read_captures(plan.captures)
            trace = self._link(*join_profilers(join_parts(parts)), captures=captures).with_stats(
                capture_stats
            )
        if len(parts) < len(plan.files):  # the next time, they may be readable
            folder = None
        if on_disk:
            saved = save_on_disk(rank, trace, folder)
        elif folder is not None and time.monotonic() - start > MIN_SECONDS_TO_CACHE / len(self.plan.ranks):
            folder.add(rank, trace)
        return self._leave_on_disk(saved, trace) if saved is not None else trace

    def _read_files(self, files: Sequence[Path], is_rank: bool) -> list[Trace] | Job:
        """Read the files of one rank; a file that holds several ranks is returned as a Job.

        With ``skip_unreadable``, files that cannot be read are skipped and recorded in ``unreadable``.
        """
        parts = []
        for path in files:
            try:
                content = file_reading.read_file(path, self.options.progress)
                if isinstance(content, Trace):
                    parts.append(content)
                elif is_rank and not self._may_hold_ranks(content):
                    raise ReadError("contains several ranks", where=path, remedy="open it separately")
                else:
                    return content
            except EtloomError as error:
                if not self.skip_unreadable:
                    raise
                self.unreadable[path] = error
        return parts

    def _may_hold_ranks(self, job: Job) -> bool:
        """Return whether a file read as ``job`` may hold several ranks: the plan's only file, or one per host."""
        is_only = len(self.plan.ranks) == 1 and all(len(plan.files) == 1 for plan in self.plan.ranks.values())
        return is_only or job.meta.get("formats") in (["xplane"], ["nccl-profiler"])

    def _read_captures(self, files: Sequence[Path]) -> tuple[list[Trace], list[Stat]]:
        """Read traces of CUDA graph captures; unreadable files are reported in stats and do not stop loading."""
        captures, stats = [], []
        for path in files:
            try:
                content = file_reading.read_file(path, self.options.progress)
            except EtloomError as error:
                stats.append(Stat("job.unreadable_capture", "data_loss", 1, str(error)))
            else:
                captures += [content] if isinstance(content, Trace) else []
        return captures, stats

    def _link(self, *parts: Trace, captures: Sequence[Trace] = ()) -> Trace:
        """Link a rank's traces; a single trace that is linked already is returned unchanged unless options are set."""
        if len(parts) == 1 and not self.options.linking and not captures and linker.is_linked(parts[0]):
            return parts[0]
        options = {**self.options.linking, "captures": captures} if captures else self.options.linking
        return linker.link(*parts, **options)

    def _open_parquet(self, rank_plan: RankPlan) -> Job:
        """Open saved traces with their tables on disk; traces that are not linked yet are linked if memory suffices."""
        (path,) = rank_plan.files
        saved = parquet.read(path, lazy=True)
        job = (
            saved if isinstance(saved, Job) else Job({saved.rank or 0: saved}, {"path": describe_path(path)})
        )
        if rank_plan.storage is Storage.EVICTABLE and job.stored is not None:
            return leave_on_disk(job, self.plan.max_table_bytes)
        if rank_plan.storage is Storage.EVICTABLE:
            return job.map(
                lambda trace: self._leave_on_disk(trace) if linker.is_linked(trace) else self._link(trace)
            )
        if job.stored is not None:  # a store holds linked traces only
            return job
        return job.map(lambda trace: trace if file_reading.has_too_many_events(trace) else self._link(trace))

    def _leave_on_disk(self, trace: Trace, read: Trace | None = None) -> Trace:
        """Let a trace's tables on disk be loaded on access and evicted; ``read``: the same trace in memory."""
        return self.resident.add(trace, {} if read is None else read.tables) if trace.loaders else trace
