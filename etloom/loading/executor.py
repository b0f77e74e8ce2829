"""The execution of a `LoadPlan`: read, link, cache and keep the tables of each rank as the plan says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from etloom import linker
from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats import parquet
from etloom.formats.parquet import writer
from etloom.linker.source_checks import flag_missing_gpu_events
from etloom.loading import cache, consistency, file_reading, large_files
from etloom.loading.parallel import run_in_parallel
from etloom.loading.plan import LoadPlan, RankPlan, Source, Storage
from etloom.loading.resident_tables import ResidentTables

MIN_SECONDS_TO_CACHE = 0.5
"""Files that took less time to read and link are not cached."""


def execute_plan(plan: LoadPlan, *, skip_unreadable: bool = False) -> Job:
    """Load a run as planned.

    Args:
        plan: the decision of `etloom.loading.plan`.
        skip_unreadable: report files that cannot be read as rows of stats; a rank without any readable file is missing.

    Raises:
        ReadError, LimitError: a file (with ``skip_unreadable``: every file) cannot be read.
        LinkError: files of a rank are not of one program.
    """
    execution = _Execution(plan, skip_unreadable)
    for path in itertools.chain(*(rank.files for rank in plan.ranks.values())):
        file_reading.report_progress(plan.options.progress, path, 0)
    if None in plan.ranks:
        job = execution.load_single_file(plan.ranks[None])
    else:
        job = execution.load_ranks()
    return job.with_stats(large_files.count_unlinked(job))


def add_rank_stats(job: Job, stats_by_rank: Mapping[int, Sequence[Stat]]) -> Job:
    """Return the job with more stats of its ranks; those of ranks that it lacks become stats of the run."""
    traces = {rank: trace.with_stats(stats_by_rank.get(rank, ())) for rank, trace in job.items()}
    remaining = [row for rank, rows in stats_by_rank.items() if rank not in job for row in rows]
    return Job(traces, job.meta, job.run_stats).with_stats(remaining)


class _Execution:
    """The execution of one plan."""

    def __init__(self, plan: LoadPlan, skip_unreadable: bool) -> None:
        self.plan = plan
        self.options = plan.options
        self.skip_unreadable = skip_unreadable
        self.resident = ResidentTables(plan.max_table_bytes)
        self.unreadable: dict[Path, EtloomError] = {}

    def load_single_file(self, rank_plan: RankPlan) -> Job:
        """Load a file that may hold several ranks; a single rank without a number becomes rank 0."""
        (path,) = rank_plan.files
        loaded = self._load(rank_plan)
        if isinstance(loaded, Job):
            return loaded
        assert loaded is not None
        return Job({loaded.rank or 0: loaded}, {"path": str(path)})

    def load_ranks(self) -> Job:
        """Load all ranks in parallel."""
        plans = {rank: plan for rank, plan in self.plan.ranks.items() if rank is not None}
        loaded = run_in_parallel(
            lambda rank: self._load_rank(rank, plans[rank]), list(plans), self.plan.parallel
        )
        traces = {rank: trace for rank, trace in loaded.items() if trace is not None}
        errors = {
            rank: [self.unreadable[path] for path in plan.files if path in self.unreadable]
            for rank, plan in plans.items()
        }
        if self.unreadable and not traces:
            first, *others = itertools.chain(*errors.values())
            more = f"; {len(others)} more cannot be read either" if others else ""
            raise ReadError(f"{first.what}{more}", where=first.where, remedy=first.remedy)
        job = Job({rank: trace.replace(meta={"rank": rank}) for rank, trace in traces.items()})
        rows = {
            rank: [Stat("job.unreadable_file", "error", 1, str(error)) for error in rank_errors]
            for rank, rank_errors in errors.items()
        }
        return add_rank_stats(job, rows).with_stats(consistency.check_ranks(traces))

    def _load_rank(self, rank: int, rank_plan: RankPlan) -> Trace | None:
        trace = self._load(rank_plan, rank)
        assert not isinstance(trace, Job)
        return trace

    def _load(self, rank_plan: RankPlan, rank: int | None = None) -> Trace | Job | None:
        """Load what a RankPlan describes; None if none of its files can be read."""
        if rank_plan.source is Source.PARQUET:
            return self._open_parquet(rank_plan)
        if rank_plan.source is Source.LARGE_KINETO:
            return self._convert_large_file(rank_plan.files[0])
        key = self._make_key(rank_plan.files, rank)
        is_evictable = rank_plan.storage is Storage.EVICTABLE
        if (cached := cache.open_entry(key) if is_evictable else cache.load_entry(key)) is not None:
            for path in rank_plan.files:
                file_reading.report_progress(self.options.progress, path, path.stat().st_size)
            return self._add_to_resident(cached) if is_evictable else cached
        start = time.monotonic()
        if rank is None:
            content = file_reading.read_file(rank_plan.files[0], self.options.progress)
            if isinstance(content, Job):
                with file_reading.convert_panics(rank_plan.files[0]):
                    return content.map(self._link)
            parts = [content]
        else:
            parts = self._read_parts(rank_plan.files)
        if not parts:
            return None
        with file_reading.convert_panics(rank_plan.files[0]):
            trace = self._link(*parts)
        is_complete = len(parts) == len(rank_plan.files)
        if is_evictable:
            write = partial(writer.write, trace)
            return self._add_to_resident(cache.open_or_create([key if is_complete else None], write))
        if is_complete and time.monotonic() - start > MIN_SECONDS_TO_CACHE:
            cache.store_entry(key, trace)
        return trace

    def _read_parts(self, files: Sequence[Path]) -> list[Trace]:
        """Read the files of one rank; with ``skip_unreadable`` those that can be read."""
        parts = []
        for path in files:
            try:
                parts.append(file_reading.read_single_rank(path, self.options.progress))
            except EtloomError as error:
                if not self.skip_unreadable:
                    raise
                self.unreadable[path] = error
        return parts

    def _link(self, *parts: Trace) -> Trace:
        """Link the traces of one rank; one that was saved linked stays as it is, unless there are linking options."""
        if len(parts) == 1 and not self.options.linking:
            return linker.linked(parts[0])
        return linker.link(*parts, **self.options.linking)

    def _open_parquet(self, rank_plan: RankPlan) -> Job:
        """Open saved traces without loading their tables; those that are not linked are linked if memory allows."""
        (path,) = rank_plan.files
        saved = parquet.read(path, lazy=True)
        job = saved if isinstance(saved, Job) else Job({saved.rank or 0: saved}, {"path": str(path)})
        if rank_plan.storage is Storage.EVICTABLE:
            return job.map(
                lambda trace: self._add_to_resident(trace) if linker.is_linked(trace) else self._link(trace)
            )
        return job.map(lambda trace: trace if large_files.has_too_many_events(trace) else self._link(trace))

    def _convert_large_file(self, path: Path) -> Trace:
        options = self.options
        trace = large_files.open_on_disk(path, options.progress, options.use_cache, options.linking)
        return flag_missing_gpu_events(trace)

    def _add_to_resident(self, trace: Trace) -> Trace:
        """Keep the tables on disk, except for stats, which every verb reads of each rank."""
        return self.resident.add(trace).replace(stats=trace.table("stats")) if trace.loaders else trace

    def _make_key(self, files: Sequence[Path], rank: int | None) -> str | None:
        if not self.options.use_cache:
            return None
        facts = {} if rank is None else {"rank": rank}
        return cache.entry_key(files, **facts, **self.options.linking)
