"""The verbs: each a few lines that compose the rooms below. `etloom` forwards to them by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from etloom import given, linker, readers, registry, selection
from etloom.errors import AnalysisError, EtloomError
from etloom.trace import Job, Trace

if TYPE_CHECKING:
    from etloom import dependencies, opening
    from etloom.comparing import Difference
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
    return readers.read(path, format, **options)


def open(
    path: StrPath | Mapping[int, StrPath | Sequence[StrPath]],
    *,
    rank_pattern: str | None = None,
    progress: opening.Progress | None = None,
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
    from etloom import opening

    how = opening.Opening(progress, jobs, use_cache, lazy, room, linking)
    if isinstance(path, Mapping):
        return how.ranks({rank: _as_files(given) for rank, given in path.items()})
    path = Path(path)
    if path.is_dir() and readers.format_of(path) is None:
        return how.folder(path, rank_pattern)
    return how.file(path)


def link(*traces: Trace, inter_thread_threshold_us: float = 1000, iterations: str = "best") -> Trace:
    """The Trace of one rank in which operators, launches and device work are joined.

    ``traces`` are an execution trace and a profiler trace of one rank, in either order, or one of them alone.
    Where they are of different ranks, by what they say or the names of their files, ``stats`` has a row of it.
    Raises LinkError where they are not of one program.
    """
    from etloom.opening import doubts

    trace = linker.link(*traces, inter_thread_threshold_us=inter_thread_threshold_us, iterations=iterations)
    return doubts.with_cut_device(trace).with_stats(doubts.between_files(traces))


def analyze(trace: Trace | Job, name: str, **options: Any) -> pl.DataFrame:
    """The table of an analysis; for a Job the tables of all ranks under each other, ``rank`` first.

    What is not linked yet is linked first. A rank whose trace cannot answer (memory was recorded of another one only)
    has no rows. Raises UnknownName for an analysis that is not there, EtloomError for an option it does not have,
    AnalysisError for a question that no rank's trace can answer.
    """
    given.check_is_run(trace)
    analysis = registry.get("analyses", name)
    given.check_options("analyses", name, options)

    def asked(of: Trace | Job) -> pl.DataFrame:
        with registry.naming("analyses", name):
            answer: pl.DataFrame = analysis.analyze(of, **options)
        registry.check_answer(name, answer)
        return answer

    if analysis.SCOPE == "job":
        return asked(given.as_job(trace).map(_linked))
    if isinstance(trace, Job):
        return _of_ranks(trace, lambda one: asked(_linked(one)))
    return asked(_linked(trace))


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
    (communication, ...). `etloom.selection` says what goes with what. What is not linked yet is linked first.
    Raises AnalysisError where a rank or category is not there, and where nothing is left.
    """
    job = given.as_job(trace).map(_linked)
    part = selection.select(
        job,
        ranks=_several(rank),
        step=step,
        time=selection.stretch(time) if isinstance(time, str) else time,
        names=_several(name),
        categories=_several(category),
    )
    return part if isinstance(trace, Job) else part[trace.rank or 0]


def graph(trace: Trace | Job) -> dependencies.Dependencies:
    """The dependency graph of a rank, or of all ranks of a job at once: what waits for what, and for how long.

    ``.graph`` is an `etloom.graphs.Graph`: its schedule, longest path, slack and reach are functions of that module;
    a what-if is its schedule with other lags. What is not linked yet is linked first.
    """
    from etloom.dependencies import depend

    given.check_is_run(trace)
    return depend(trace.map(_linked) if isinstance(trace, Job) else _linked(trace))


def simulate(trace: Trace | Job, *changes: str | AnyChange) -> Simulated:
    """What a rank or a job would have taken with other times, by its dependency graph.

    changes: lines such as "kernel:*gemm* x0.5", "comm x0" (`etloom.simulator.changes` holds the language), or
    RemoveSync, Network, NoStraggler of `etloom.simulator`. The answer's ``table`` has a row for the job, each rank and
    each step, its ``reasons`` say what that rests on; `etloom.simulator.retimed` makes a run of it. Raises EtloomError
    for a change that cannot be read or is about nothing.
    """
    from etloom import simulator

    job = given.as_job(trace)
    parsed = [simulator.parse(change) if isinstance(change, str) else change for change in changes]
    return simulator.simulate(job.map(_linked), parsed)


def diff(before: Trace | Job, after: Trace | Job) -> Difference:
    """From one run to another: ``.verdict`` says whether it is slower beyond noise, ``.table(by)`` what changed.

    by: category, operator, kernel, collective or step. What is not linked yet is linked first.
    """
    from etloom.comparing import Difference

    return Difference(*(given.as_job(run).map(_linked) for run in (before, after)))


def query(trace: Trace | Job, sql: str) -> pl.DataFrame:
    """The answer to an SQL SELECT over the tables of `etloom.schema`; for a Job each has a ``rank`` column.

    Raises UnknownName for a table or column that is not there, EtloomError for SQL that polars refuses.
    """
    given.check_is_run(trace)
    return trace.query(sql)


def export(trace: Trace | Job, path: StrPath, format: str | None = None, **options: Any) -> Path:
    """Write a trace in another format, told by the end of ``path`` unless ``format`` names an export.

    ``options`` are those of the format. Returns the path. Raises UnknownName and EtloomError for a format or option
    that is not there, and EtloomError where it cannot be written.
    """
    given.check_is_run(trace)
    target = Path(path)
    name = format or registry.by_suffix("exports", target)
    plugin = registry.get("exports", name)
    given.check_options("exports", name, options)
    with _writing(target), registry.naming("exports", name):
        plugin.write(trace, target, **options)
    return target


def convert(
    path: StrPath,
    out: StrPath,
    format: str | None = None,
    *,
    progress: opening.Progress | None = None,
    reader: str | None = None,
    **options: Any,
) -> Path:
    """Write one trace file as another format without linking it; returns ``out``.

    ``reader`` (the format of what is read) and its ``options`` are as for `read`. A Kineto file that would take more
    than `opening.large.SPILL_BYTES` in memory goes to Parquet part by part, in bounded memory.

    Raises ReadError, LimitError, UnknownName, EtloomError.
    """
    from etloom.opening import large

    source, target = Path(path), Path(out)
    name = format or registry.by_suffix("exports", target)
    exporter = registry.get("exports", name)
    if name == "chakra-json" and readers.format_of(source) == "chakra":
        with _writing(target):
            exporter.convert(source, target)
    elif name == "parquet" and not reader and large.is_large(source):
        with _writing(target):
            large.spill(source, target, progress)
    else:
        told = partial(progress, source) if progress else None
        read = readers.read(source, reader, progress=told, **options)
        with _writing(target):
            exporter.write(read, target)
    return target


def report(job: Trace | Job | Difference, path: StrPath) -> Path:
    """Write the self-contained HTML report of a run, or of the difference between two (see `diff`).

    Returns the path. Raises EtloomError if it cannot.
    """
    from etloom.comparing import Difference
    from etloom.reports import difference, html

    target = Path(path)
    with _writing(target):
        if isinstance(job, Difference):
            difference.write(job, target)
            return target
        html.write(given.as_job(job).map(_linked), target)
    return target


def _of_ranks(job: Job, question: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
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
def _writing(target: Path) -> Iterator[None]:
    """Make the folder of the target; what the system refuses is said of the target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=target, remedy="name another path"
        ) from error


def _several(given: _One | Collection[_One] | None) -> Collection[_One]:
    """What one or several were asked for, as several."""
    if given is None:
        return ()
    return (given,) if isinstance(given, (str, int)) else given


def _linked(trace: Trace) -> Trace:
    return trace if trace.meta.get("linked") else linker.link(trace)


def _as_files(given: StrPath | Sequence[StrPath]) -> list[Path]:
    return [Path(given)] if isinstance(given, (str, os.PathLike)) else [Path(file) for file in given]
