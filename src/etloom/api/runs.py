"""Public functions that open, link, select from and describe runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import polars as pl

from etloom import formats, linker
from etloom.api.arguments import Run, StrPath, as_collection, as_job, as_paths, as_run, verb
from etloom.core.errors import EtloomError
from etloom.core.text import parse_time_range
from etloom.core.trace import Job, Trace
from etloom.linker import selection

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from etloom.loading import LoadOptions
    from etloom.loading.file_reading import Progress

_RunType = TypeVar("_RunType", bound=Run)


class LinkingOptions(TypedDict, total=False):
    """Linking options that both `link` and `open` accept; values that differ from the defaults are in the cache key."""

    inter_thread_threshold_us: float
    iterations: str
    step_name: str | None


_LINKING_DEFAULTS: LinkingOptions = {
    "inter_thread_threshold_us": 1000,
    "iterations": "best",
    "step_name": None,
}


@verb
def read(path: StrPath, format: str | None = None, **options: Any) -> Trace | Job:
    """Read a trace file without linking it; a Parquet file that `export` wrote is read back unchanged.

    Args:
        path: the file.
        format: name of a reader; default: detected from the first bytes.
        options: options of the reader, as in ``read("samples.csv", "metrics", time_column="when", unit="ms")``.

    Returns:
        The Trace of one rank, or a Job if the file holds several.

    Raises:
        ReadError: the file cannot be read.
        LimitError: it exceeds a limit.
        EtloomError: unknown format or option.

    Example:
        >>> trace = etloom.read("run/kineto_trace_0.json")
        >>> names = trace.events["name"]
    """
    return formats.read(path, format, **options)


@verb
def open(
    path: StrPath | Mapping[int, StrPath | Sequence[StrPath]],
    *,
    rank_pattern: str | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
    engine: str = "local",
    use_cache: bool = True,
    lazy: bool = False,
    max_table_bytes: int | None = None,
    for_report: bool = False,
    **linking: Unpack[LinkingOptions],
) -> Job:
    """Open a run (a folder or files), and link the traces of every rank.

    Args:
        path: a folder, a file, or a mapping ``{rank: file or files}``. The ranks of a folder are inferred from file
            names, or from the contents.
        rank_pattern: regular expression for the file names with one group, the rank.
        progress: called as ``progress(file, bytes)``: with 0 bytes for every file first, then with those of each read.
        jobs: number of ranks read in parallel; default: number of CPUs, fewer if memory is short.
        use_cache: keep files that are slow to read as tables in the user's cache folder, and read them from there
            while they are unchanged; of a run of more than 256 ranks also the answers that a store keeps, see
            ``for_report`` as well.
        lazy: leave tables of Parquet files on disk until they are accessed. A Kineto file of more than
            `etloom.loading.file_reading.SPILL_BYTES` is converted to Parquet in bounded memory, left on disk, and not
            linked.
        max_table_bytes: memory for tables; default: half of the available memory. If the ranks' tables would exceed it,
            they are kept on disk and loaded on access.
        engine: "local", or "ray": ranks that are not in the cache are read on a Ray cluster, whose hosts need the same
            paths and cache folder.
        for_report: of a run of at least 64 ranks, compute what `report` and the analysis findings need of each rank at
            the same time, in a process per CPU, and keep it in the cache.
        linking: options of `link`: inter_thread_threshold_us, iterations, step_name.

    Returns:
        The Job; its ``stats`` list everything that was lost, repaired or is doubtful.

    Raises:
        ReadError, LimitError: the files cannot be read.
        LinkError: files are not from one run.

    Example:
        >>> job = etloom.open("run/")
        >>> breakdown = etloom.analyze(job, "temporal-breakdown")
    """
    from etloom import loading

    if engine != "local":
        from etloom.loading.engines import check_engine

        check_engine(engine)
    changed = {name: value for name, value in linking.items() if value != _LINKING_DEFAULTS.get(name)}
    options = loading.LoadOptions(progress, jobs, use_cache, lazy, max_table_bytes, changed, engine=engine)
    if isinstance(path, Mapping):
        return loading.load_ranks({rank: as_paths(files) for rank, files in path.items()}, options)
    return _open_path(Path(path), options, rank_pattern, for_report)


def _open_path(path: Path, options: LoadOptions, rank_pattern: str | None, for_report: bool) -> Job:
    """Open a run; one of many ranks from the cache with its answers, to which they may be added."""
    from etloom import loading

    files = loading.list_ranked_files(path, rank_pattern)
    if len(files) >= loading.MIN_REPORTED_RANKS and options.use_cache and not options.linking:
        from etloom.exports.store import AddOptions, open_cached_run

        jobs, engine = options.jobs, options.engine
        keeps_all = len(files) >= loading.MIN_CACHED_RANKS
        has_processes = (jobs or os.cpu_count() or 1) > 1 or engine != "local"
        adding = AddOptions(None, jobs, rank_pattern, options.progress, engine, for_report=not keeps_all)
        is_added = keeps_all or (for_report and has_processes)
        if (cached := loading.find_cached_run(path, rank_pattern)) is not None:
            job = open_cached_run(path, files, cached, options, adding if is_added else None)
            if job is not None:
                return job
            options = replace(options, rank_folder=cached)
    return loading.load_path(path, options, rank_pattern)


@verb
def link(
    *traces: Trace | StrPath,
    inter_thread_threshold_us: float = 1000,
    iterations: str = "best",
    step_name: str | None = None,
    captures: Sequence[Trace | StrPath] = (),
    rank: int | None = None,
) -> Trace:
    """Link the operators, launches and GPU activity of one rank.

    Args:
        traces: an execution trace and a profiler trace of one rank, in any order, or one of them alone; as a Trace or
            the path of a file.
        inter_thread_threshold_us: pause of a thread in microseconds after which it is assumed to depend on another.
        iterations: the iteration of the profile to which the execution trace is linked if ids are missing: "best",
            "all", or a number from "0".
        step_name: regular expression over the names of the host events that are the steps; its first group is the
            number. Default: ProfilerStep#N, else the iterations of an inference engine.
        captures: traces of the captures of device graphs that the trace replays.
        rank: the rank to read from files that hold several, or whose rank is not stated; Traces are taken as they are.

    Returns:
        The linked Trace; ``stats`` has a row if the traces seem to be of different ranks or processes.

    Raises:
        LinkError: the traces are not of one program.

    Example:
        >>> trace = etloom.link("run/torch_et_0.json", "run/kineto_trace_0.json")
        >>> trace.meta["linked"]
        True
    """
    from etloom.loading import consistency
    from etloom.loading.profiler_joining import join_profilers

    parts = [part if isinstance(part, Trace) else _read_trace(part, rank) for part in traces]
    trace = linker.link(
        *join_profilers(parts, strict=True),
        inter_thread_threshold_us=inter_thread_threshold_us,
        iterations=iterations,
        step_name=step_name,
        captures=[item if isinstance(item, Trace) else _read_trace(item) for item in captures],
    )
    rank_conflicts = consistency.check_file_ranks(parts)
    if rank_conflicts:  # files of two ranks are of two processes, which needs no row of its own
        trace = trace.replace(stats=trace.stats.filter(pl.col("name") != "link.processes_differ"))
    return trace.with_stats(rank_conflicts)


@verb
def select(
    run: _RunType,
    *,
    rank: int | Collection[int] | None = None,
    step: int | None = None,
    time: str | tuple[int | None, int | None] | None = None,
    name: str | Collection[str] | None = None,
    category: str | Collection[str] | None = None,
) -> _RunType:
    """Return the part of a run that matches all filters (rank, step, time, name, category), as a new Trace or Job.

    Args:
        run: a Trace, a Job, or a path.
        rank: one rank or several.
        step: the number of a step.
        time: "START:END" after the first recorded event, as "10ms:1.5s", or (start, end) in ns.
        name: one glob or several; events that match, and what they enclose and launch.
        category: of events (cpu_op, kernel) or kernel types (communication, ...).

    Returns:
        A Trace for a Trace, else a Job; linked.

    Raises:
        AnalysisError: The rank or category does not exist, or nothing is left.

    Example:
        >>> part = etloom.select("run/", rank=0, step=2)
    """
    opened = as_run(run)
    part = selection.select_part(
        linker.linked_ranks(as_job(opened)),
        ranks=as_collection(rank),
        step=step,
        time=parse_time_range(time) if isinstance(time, str) else time,
        names=as_collection(name),
        categories=as_collection(category),
    )
    return cast("_RunType", part if isinstance(opened, Job) else part[opened.rank or 0])


@verb
def query(run: Run, sql: str) -> pl.DataFrame:
    """Run an SQL SELECT over the tables of a run.

    Args:
        run: a Trace, a Job, or a path.
        sql: a SELECT in the dialect of polars over the tables of `etloom.core.schema`; times are in ns. The tables of a
            Job have a ``rank`` column first.

    Raises:
        UnknownName: The table or column does not exist.
        EtloomError: the statement is invalid or would read a file.

    Example:
        >>> etloom.query("run/", "select count(*) as n from events where cat = 'kernel'").columns
        ['n']
    """
    return as_run(run).query(sql)


@verb
def info(run: Run) -> dict[str, Any]:
    """Describe a run: formats, ranks, devices, steps, rows of its tables, data loss.

    Args:
        run: a Trace, a Job, or a path.

    Returns:
        The facts that ``etloom info --format json`` prints, by stable keys; times in ns, unknown facts are None.
        ``by_rank`` has one dict per rank.

    Example:
        >>> etloom.info("run/")["ranks"]
        [0, 1]
    """
    from etloom.analyses.run_info import describe_run, find_stored_facts

    job = open(run, lazy=True) if isinstance(run, (str, os.PathLike)) else as_job(run)
    return find_stored_facts(job) or describe_run(job)


def _read_trace(path: StrPath, rank: int | None = None) -> Trace:
    from etloom.linker.merging import select_rank

    if not isinstance(path, (str, os.PathLike)):
        raise EtloomError(
            f"cannot link a {type(path).__name__}: expected a Trace, or the path of a file",
            remedy="the ranks of a Job that etloom.open returns are linked: job[0]",
        )
    return select_rank(formats.read(path), rank, path)
