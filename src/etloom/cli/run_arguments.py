"""Arguments that most commands share: the path of a run and the options to open it; and `open_job`."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from etloom.cli.command import LOCAL_PATH_TYPE, FieldFlags, Flag, Positional
from etloom.cli.error_handling import print_message
from etloom.cli.output import show_progress

if TYPE_CHECKING:
    from etloom.core.trace import Job

MAX_TABLE_BYTES = 256_000_000
"""Memory for the tables of a run: verbs process rank after rank."""


RunPath = Annotated[
    Path,
    "A folder of traces, or one trace file; also s3://, gs://, hdfs:// and other URLs.",
    Positional("PATH"),
]
RankPattern = Annotated[str | None, "Regular expression for the file names, with one group: the rank."]
Engine = Annotated[
    Literal["local", "ray"],
    "Where ranks are read: on this host, or on a Ray cluster (docs/fleet.md).",
    Flag(show_default=True),
]


@dataclass(frozen=True)
class RunOptions:
    """Options for opening a run, which most commands share."""

    rank_pattern: RankPattern = None
    strict: Annotated[bool, "Fail if anything in the files was lost."] = False
    jobs: Annotated[
        int | None,
        "Number of ranks (and threads) processed in parallel; default: number of CPUs.",
        Flag(type=click.IntRange(min=1)),
    ] = None
    engine: Engine = "local"
    cache: Annotated[
        bool, "Keep files that are slow to read in a cache, and read them from there next time."
    ] = True
    step_name: Annotated[
        str | None,
        "Host events whose names match are the steps; a first group is the number. Default: ProfilerStep#N, "
        "else the iterations of an inference engine.",
        Flag(metavar="REGEX"),
    ] = None
    names: Annotated[
        tuple[Path, ...],
        "More names of iterations, kernel families and communication (docs/serving.md); repeatable.",
        Flag(type=LOCAL_PATH_TYPE, metavar="FILE.yaml"),
    ] = ()


RunsOptions = Annotated[RunOptions, FieldFlags(rank_pattern=None)]
"""For verbs that open several runs."""


def open_job(
    path: Path,
    run: RunOptions,
    *,
    lazy: bool = False,
    warn: bool = True,
    for_report: bool = False,
    **linking: Any,
) -> Job:
    """Open the run at ``path`` with a progress bar and link it.

    Args:
        path: a folder or file.
        run: the shared options of verbs.
        lazy: as for `etloom.open`, for verbs that only need `Trace.scan`.
        for_report: as for `etloom.open`.
        warn: print on stderr if data was lost, for verbs that do not show it themselves.
        linking: options of `etloom.link`.

    Raises:
        DataLoss: with ``run.strict``, if anything was lost.
    """
    limit_threads(run)
    import etloom
    from etloom.core.names import add_names

    add_names(*run.names)
    if run.step_name is not None:
        linking["step_name"] = run.step_name
    with show_progress(f"reading {path}") as update:
        job = etloom.open(
            path,
            rank_pattern=run.rank_pattern,
            progress=update,
            jobs=run.jobs,
            engine=run.engine,
            use_cache=run.cache,
            lazy=lazy,
            max_table_bytes=MAX_TABLE_BYTES,
            for_report=for_report,
            **linking,
        )
    if run.strict:
        job.check_lossless()
    if warn:
        report_loss(job, path)
    for name in ("job.other_runs", "job.ranks_inferred"):
        for example in job.stats.filter(name=name)["example"]:
            print_message(f"{path}: {example}")
    return job


def limit_threads(run: RunOptions) -> None:
    """Limit the threads of polars to --jobs; polars reads the limit at its first query."""
    if run.jobs is not None:
        os.environ.setdefault("POLARS_MAX_THREADS", str(min(run.jobs, os.cpu_count() or 1)))


_DESCRIPTIONS = ("stats", "threads", "groups")
"""Tables that may have rows although nothing happened in the recording."""


def check_readable(job: Job, path: Path, *, may_be_empty: bool = False) -> None:
    """Raise ReadError if nothing could be read of the files; ``may_be_empty``: only if they hold something."""
    from etloom.core.errors import ReadError
    from etloom.core.losses import describe_loss
    from etloom.core.schema import TABLES

    if any(job.rank_facts[name].sum() for name in ("events", "nodes")):
        return  # and the ranks of a store need not be opened
    contents = [name for name in TABLES if name not in _DESCRIPTIONS]
    if any(trace.rows(name) for trace in job.values() for name in contents if name in trace.table_names):
        return
    loss = describe_loss(job.stats.filter(job.stats["name"].str.starts_with("read.")))
    if loss or not may_be_empty:
        problem = f"no event or operator could be read: {loss}" if loss else "contains no event or operator"
        raise ReadError(problem, where=path, remedy="record it again")


def report_loss(job: Job, path: Path | str) -> None:
    """Print a line on stderr that lists lost or doubtful data of a run by rank; nothing if there is none."""
    from etloom.core.losses import describe_loss

    if loss := describe_loss(job.stats):
        print_message(
            f"{path}: data lost or doubtful: {loss}; etloom info {shlex.quote(str(path))} shows details"
        )
