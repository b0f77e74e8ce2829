"""The verbs: each a few lines that compose the rooms below. `etloom` forwards to them by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from etloom import formats, linker
from etloom.api import arguments
from etloom.core import registry
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job, Trace
from etloom.linker import selection

if TYPE_CHECKING:
    from etloom import graphs, loading
    from etloom.comparison import Difference
    from etloom.simulator import Simulated
    from etloom.simulator.changes import AnyChange

StrPath = str | os.PathLike[str]
_Run = TypeVar("_Run", Trace, Job)
_One = TypeVar("_One", int, str)


def read(path: StrPath, format: str | None = None, **options: Any) -> Trace | Job:
    """What one file holds: the Trace of a rank, or a Job where a file holds several ranks.

    The format is told from the first bytes unless ``format`` names a reader, ``options`` are those of the reader:
    ``read("samples.csv", "metrics", time_column="when", unit="ms")``. What `export` saved as Parquet
    is read back as it was. Nothing is linked. Raises ReadError, LimitError, UnknownName, EtloomError.
    """
    return formats.read(path, format, **options)


def open(
    path: StrPath | Mapping[int, StrPath | Sequence[StrPath]],
    *,
    rank_pattern: str | None = None,
    progress: loading.Progress | None = None,
    jobs: int | None = None,
    use_cache: bool = True,
    lazy: bool = False,
    room: int | None = None,
    **linking: Any,
) -> Job:
    """The Job that a folder, a file or a mapping ``{rank: file or files}`` holds, every rank linked.

    The ranks of a folder are told from the names of its files, or from what is inside, unless
    ``rank_pattern`` (a regular expression with one group, the rank) says how. A single file is a Job of one
    rank. ``progress(file, bytes)`` is called with 0 for every file before any is read, then with the
    number of bytes of the file as they are read. ``jobs`` ranks are read at a time (default: one a CPU), and fewer
    where memory would not hold them. What takes long to read is kept as Parquet in the user's cache folder
    and taken from there while the files stay as they are, unless ``use_cache`` is off. ``lazy`` leaves tables that
    are Parquet already on disk until they are asked for, and a Kineto file of more than `opening.large.SPILL_BYTES` as
    well, in bounded memory: as Parquet in the cache or a temporary folder, and not linked. The tables of a run of
    ranks that may take more than ``room`` bytes (default: half of the memory that is left) lie there too, and are read
    when they are asked for. ``linking`` are the options of `link`.

    Raises ReadError and LimitError for what cannot be read, LinkError for files that are not of one run.
    """
    from etloom import loading

    how = loading.LoadOptions(progress, jobs, use_cache, lazy, room, linking)
    if isinstance(path, Mapping):
        return how.ranks({rank: _as_paths(given) for rank, given in path.items()})
    path = Path(path)
    if path.is_dir() and formats.detect_format(path) is None:
        return how.folder(path, rank_pattern)
    return how.file(path)


def link(*traces: Trace, inter_thread_threshold_us: float = 1000, iterations: str = "best") -> Trace:
    """The Trace of one rank in which operators, launches and device work are joined.

    ``traces`` are an execution trace and a profiler trace of one rank, in either order, or one of them alone.
    Where they are of different ranks, by what they say or the names of their files, ``stats`` has a row of it.
    Raises LinkError where they are not of one program.
    """
    from etloom.loading import consistency

    trace = linker.link(*traces, inter_thread_threshold_us=inter_thread_threshold_us, iterations=iterations)
    return consistency.flag_missing_gpu_events(trace).with_stats(consistency.check_files(traces))


def analyze(trace: Trace | Job, name: str, **options: Any) -> pl.DataFrame:
    """The table of an analysis; for a Job the tables of all ranks under each other, ``rank`` first.

    What is not linked yet is linked first. A rank whose trace cannot answer (memory was recorded of another one only)
    has no rows. Raises UnknownName for an analysis that is not there, EtloomError for an option it does not have,
    AnalysisError for a question that no rank's trace can answer.
    """
    arguments.check_run(trace)
    analysis = registry.get("analyses", name)
    arguments.check_options("analyses", name, options)

    def asked(of: Trace | Job) -> pl.DataFrame:
        with registry.name_plugin_in_errors("analyses", name):
            answer: pl.DataFrame = analysis.analyze(of, **options)
        registry.check_answer(name, answer)
        return answer

    if analysis.SCOPE == "job":
        return asked(arguments.as_job(trace).map(_ensure_linked))
    if isinstance(trace, Job):
        return _analyze_ranks(trace, lambda one: asked(_ensure_linked(one)))
    return asked(_ensure_linked(trace))


def select(
    trace: _Run,
    *,
    rank: int | Collection[int] | None = None,
    step: int | None = None,
    time: str | tuple[int | None, int | None] | None = None,
    name: str | Collection[str] | None = None,
    category: str | Collection[str] | None = None,
) -> _Run:
    """The part of a run that all these filters keep, as a run of its own that any other verb takes.

    time: what begins in "START:END" after the first work recorded, as "10ms:1.5s", or (start, end) in ns. name: globs;
    kept with what such an event encloses and launches. category: of events (cpu_op, kernel) or kinds of device work
    (communication, ...). `etloom.linker.selection` says what goes with what. What is not linked yet is linked first.
    Raises AnalysisError where a rank or category is not there, and where nothing is left.
    """
    job = arguments.as_job(trace).map(_ensure_linked)
    part = selection.select_part(
        job,
        ranks=_as_collection(rank),
        step=step,
        time=selection.parse_time_range(time) if isinstance(time, str) else time,
        names=_as_collection(name),
        categories=_as_collection(category),
    )
    return part if isinstance(trace, Job) else part[trace.rank or 0]


def graph(trace: Trace | Job) -> graphs.DependencyGraph:
    """The dependency graph of a rank, or of all ranks of a job at once: what waits for what, and for how long.

    ``.graph`` is an `etloom.graphs.algorithms.Graph`: its schedule, longest path, slack and reach are functions of that module;
    a what-if is its schedule with other lags. What is not linked yet is linked first.
    """
    from etloom.graphs import build_graph

    arguments.check_run(trace)
    return build_graph(trace.map(_ensure_linked) if isinstance(trace, Job) else _ensure_linked(trace))


def simulate(trace: Trace | Job, *changes: str | AnyChange) -> Simulated:
    """What a rank or a job would have taken with other times, by its dependency graph.

    changes: lines such as "kernel:*gemm* x0.5", "comm x0" (`etloom.simulator.changes` holds the language), or
    RemoveSync, Network, NoStraggler of `etloom.simulator`. The answer's ``table`` has a row for the job, each rank and
    each step, its ``reasons`` say what that rests on; `etloom.simulator.retime_job` makes a run of it. Raises EtloomError
    for a change that cannot be read or is about nothing.
    """
    from etloom import simulator

    job = arguments.as_job(trace)
    parsed = [simulator.parse_change(change) if isinstance(change, str) else change for change in changes]
    return simulator.simulate(job.map(_ensure_linked), parsed)


def diff(before: Trace | Job, after: Trace | Job) -> Difference:
    """From one run to another: ``.verdict`` says whether it is slower beyond noise, ``.table(by)`` what changed.

    by: category, operator, kernel, collective or step. What is not linked yet is linked first.
    """
    from etloom.comparison import Difference

    return Difference(*(arguments.as_job(run).map(_ensure_linked) for run in (before, after)))


def query(trace: Trace | Job, sql: str) -> pl.DataFrame:
    """The answer to an SQL SELECT over the tables of `etloom.core.schema`; for a Job each has a ``rank`` column.

    Raises UnknownName for a table or column that is not there, EtloomError for SQL that polars refuses.
    """
    arguments.check_run(trace)
    return trace.query(sql)


def export(trace: Trace | Job, path: StrPath, format: str | None = None, **options: Any) -> Path:
    """Write a trace in another format, told by the end of ``path`` unless ``format`` names an export.

    ``options`` are those of the format. Returns the path. Raises UnknownName and EtloomError for a format or option
    that is not there, and EtloomError where it cannot be written.
    """
    arguments.check_run(trace)
    target = Path(path)
    name = format or registry.find_by_suffix("exports", target)
    plugin = registry.get("exports", name)
    arguments.check_options("exports", name, options)
    with _prepare_target(target), registry.name_plugin_in_errors("exports", name):
        plugin.write(trace, target, **options)
    return target


def convert(
    path: StrPath,
    out: StrPath,
    format: str | None = None,
    *,
    progress: loading.Progress | None = None,
    reader: str | None = None,
    **options: Any,
) -> Path:
    """Write one trace file as another format without linking it; returns ``out``.

    ``reader`` (the format of what is read) and its ``options`` are as for `read`. A Kineto file that would take more
    than `opening.large.SPILL_BYTES` in memory goes to Parquet part by part, in bounded memory.

    Raises ReadError, LimitError, UnknownName, EtloomError.
    """
    from etloom.loading import large_files

    source, target = Path(path), Path(out)
    name = format or registry.find_by_suffix("exports", target)
    exporter = registry.get("exports", name)
    if name == "chakra-json" and formats.detect_format(source) == "chakra":
        with _prepare_target(target):
            exporter.convert(source, target)
    elif name == "parquet" and not reader and large_files.is_large(source):
        with _prepare_target(target):
            large_files.spill_to_parquet(source, target, progress)
    else:
        told = partial(progress, source) if progress else None
        read = formats.read(source, reader, progress=told, **options)
        with _prepare_target(target):
            exporter.write(read, target)
    return target


def report(job: Trace | Job | Difference, path: StrPath) -> Path:
    """Write the self-contained HTML report of a run, or of the difference between two (see `diff`).

    Returns the path. Raises EtloomError if it cannot.
    """
    from etloom.comparison import Difference
    from etloom.reports import difference_page, html_report

    target = Path(path)
    with _prepare_target(target):
        if isinstance(job, Difference):
            difference_page.write_page(job, target)
            return target
        html_report.write_page(arguments.as_job(job).map(_ensure_linked), target)
    return target


def _analyze_ranks(job: Job, question: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    """The answers of the ranks that have one, ``rank`` first. Raises the first AnalysisError where none has."""
    answers, refusals = [], []
    for rank, trace in job.items():
        try:
            answer = question(trace)
            of_rank = pl.Series("rank", [rank], pl.Int64).new_from_index(0, answer.height)
            answers.append(pl.DataFrame([of_rank, *answer]))
        except AnalysisError as error:
            refusals.append(error)
    if refusals and not answers:
        raise refusals[0]
    return pl.concat(answers) if answers else pl.DataFrame()


@contextmanager
def _prepare_target(target: Path) -> Iterator[None]:
    """Make the folder of the target; what the system refuses is said of the target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=target, remedy="name another path"
        ) from error


def _as_collection(given: _One | Collection[_One] | None) -> Collection[_One]:
    """What one or several were asked for, as several."""
    if given is None:
        return ()
    return (given,) if isinstance(given, (str, int)) else given


def _ensure_linked(trace: Trace) -> Trace:
    return trace if trace.meta.get("linked") else linker.link(trace)


def _as_paths(given: StrPath | Sequence[StrPath]) -> list[Path]:
    return [Path(given)] if isinstance(given, (str, os.PathLike)) else [Path(file) for file in given]
