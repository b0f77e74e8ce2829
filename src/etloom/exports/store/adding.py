"""Add a run to a store: read and link its ranks, and save their tables with the results of analyses.

The ranks are read and linked in batches, each in its own process; then the questions to all ranks are answered from the
saved tables, with those of a few ranks in memory at a time; then the run gets its name. Killed at any point, the next
addition goes on where this one stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - before polars, which otherwise converts arrays half as fast
import polars as pl

from etloom import formats
from etloom.analyses.run_info import describe_run
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.core.urls import describe_path
from etloom.core.version import __version__, compute_code_digest
from etloom.exports.store import batches, summaries
from etloom.exports.store.rank_results import attach_results, open_results
from etloom.formats.io.atomic_file import find_write_problem
from etloom.formats.parquet import checksums, sniff_folder, writer
from etloom.formats.parquet.store_layout import (
    ADDING,
    STORE_VERSION,
    SUMMARIES,
    check_name,
    is_store,
    is_stored_run,
    open_store,
    read_json,
    run_folder,
    select_run,
    write_json,
)
from etloom.formats.parquet.stored_runs import build_rank_table
from etloom.formats.parquet.summary_files import list_checksums
from etloom.loading import LoadOptions, Progress, cache, load_folder, load_path
from etloom.loading.engines import count_cpus, is_remote, run_in_processes, run_on_ray
from etloom.loading.rank_discovery import DiscoveredRun, discover_ranks
from etloom.loading.rank_stores import RankFolder
from etloom.loading.reading_tasks import TaskProgress

MAX_TABLE_BYTES = 256_000_000
"""Memory for the tables of ranks, of which the most recently used ones stay loaded."""
PARTS = "parts"
"""The folder with the analysis results of each batch of ranks, while a run is prepared."""


@dataclass(frozen=True)
class AddOptions:
    """Options of `add_run`: name, number of processes, engine, and behavior on conflicts and failures.

    Attributes:
        name: name of the run; default: that of its folder or file.
        jobs: processes; default: number of CPUs.
        rank_pattern: regular expression for the file names with one group, the rank.
        progress: see `etloom.loading.Progress`.
        engine: "local", or "ray" to read ranks on a cluster, whose hosts see the run and the store under these paths.
        for_report: compute only what a report needs; other questions are answered from the tables.
    """

    name: str | None = None
    jobs: int | None = None
    rank_pattern: str | None = None
    progress: Progress | None = None
    engine: str = "local"
    for_report: bool = False


@dataclass(frozen=True)
class AddedRun:
    """A run in a store, as returned by `add_run`.

    Attributes:
        name: its name.
        path: its folder, which every verb opens.
        ranks: its ranks.
        is_new: False if the store held it already, unchanged.
        has_replaced: True if the store held a run of this name, whose files have changed or which another version
            stored.
    """

    name: str
    path: Path
    ranks: tuple[int, ...]
    is_new: bool
    has_replaced: bool = False


def add_run(run: Path, store: Path, options: AddOptions) -> AddedRun:
    """Add a run (folder or file of traces) to a store, which is created if it does not exist.

    A run that the store holds already is not read again, unless its files changed.

    Raises:
        ReadError, LimitError, LinkError: the run cannot be read.
        EtloomError: the store cannot be written, or holds another run of this name.
    """
    if is_store(run):
        run = select_run(run)
    name = check_name(options.name or _default_name(run))
    source = describe_source(run, options.rank_pattern)
    open_store(store, create=True)
    stage = Staging(store, name, source.key)
    with stage.locked() as lock:
        published = stage.read_published()
        if published is not None:
            if published.get("key") == source.key:
                return AddedRun(name, stage.target, tuple(published.get("ranks", ())), False)
            _check_same_source(published, run, stage)
        try:
            if not is_stored_run(stage.folder):
                prepare_run(source, stage.folder, options, lock)
            ranks = tuple(read_json(stage.folder / "meta.json").get("ranks", ()))
            stage.publish()
        except (OSError, pl.exceptions.PolarsError) as error:
            if (problem := find_write_problem(error)) is None:
                raise
            raise EtloomError(
                f"cannot be written: {problem.strerror}",
                where=store,
                remedy="free space there and add the run again; it goes on where it stopped",
            ) from error
    return AddedRun(name, stage.target, ranks, True, has_replaced=published is not None)


def _default_name(run: Path) -> str:
    name = run.resolve().name
    return name.removeprefix("run=") if is_stored_run(run) else name


def _check_same_source(published: dict[str, Any], run: Path, stage: Staging) -> None:
    """Raise EtloomError if the store contains a run of the same name from a different source path."""
    path = published.get("source")
    if path != describe_path(run.resolve()) and run.resolve() != stage.target.resolve():
        raise EtloomError(
            f"already exists, added from {path}", where=stage.target, remedy="specify another --name"
        )


def prepare_run(source: Source, folder: Path, options: AddOptions, lock: int) -> None:
    """Write tables, analysis results and, last, the manifest of a run to a folder.

    Args:
        source: the run.
        folder: the folder; ranks and results of batches that are there are not computed again.
        options: as for `add_run`.
        lock: descriptor of a file that is locked as long as a process works.
    """
    jobs = options.jobs or count_cpus(options.engine)
    parts_folder = folder / PARTS
    parts_folder.mkdir(parents=True, exist_ok=True)
    progress = options.progress
    is_split = jobs > 1 or is_remote(options.engine)
    if source.discovered is not None and is_split and len(source.discovered.ranks) > batches.MIN_RANKS:
        pending = batches.list_batches(source.discovered, folder, parts_folder, jobs, options.for_report)
        task_progress = TaskProgress(progress, (file for batch in pending for file in batch.files))

        def report(index: int) -> None:
            task_progress.complete(pending[index].files)

        texts = [batch.to_json() for batch in pending]
        if is_remote(options.engine):
            run_on_ray(batches.prepare_batch, texts, report)
        else:  # the run stays locked as long as one of the processes works
            run_in_processes(batches.prepare_batch, texts, jobs, report, pass_fds=(lock,))
        progress = task_progress
    job = _open_prepared(source, folder, options, jobs, progress)
    parts = _complete_parts(job, parts_folder, options.for_report)
    answers = folder / SUMMARIES
    answers.mkdir(exist_ok=True)
    entries = summaries.write_rank_answers(parts, folder)
    job = attach_results(job, parts)
    job_entries, skipped = summaries.write_job_answers(job, folder, options.for_report)
    job = job.with_stats(skipped)
    write_json(answers / "facts.json", describe_run(job))
    writer.write_tables(
        {answers / "stats.parquet": job.stats, answers / "ranks.parquet": build_rank_table(job)}
    )
    shutil.rmtree(parts_folder, ignore_errors=True)
    content = {
        "etloom": __version__,
        "code": compute_code_digest(),
        "store": STORE_VERSION,
        "kind": "stored-run",
        "key": source.key,
        "source": _original_path(source.path),
        "added": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "ranks": job.ranks,
        "meta": dict(job.meta),
        "answers": [*entries, *job_entries],
    }
    content[checksums.KEY] = list_checksums(folder)
    write_json(folder / "meta.json", content)


def _original_path(run: Path) -> str:
    """Return the path or URL of a run's traces; for a run in a store, of the traces from which it was first read."""
    stored = read_json(run / "meta.json").get("source") if is_stored_run(run) else None
    return describe_path(run.resolve() if stored is None else stored)


def _open_prepared(
    source: Source, folder: Path, options: AddOptions, jobs: int, progress: Progress | None
) -> Job:
    """Open the run from its ranks' tables in a folder; ranks that are missing there are read and saved."""
    load = LoadOptions(
        progress,
        jobs,
        use_cache=False,
        max_table_bytes=MAX_TABLE_BYTES,
        rank_folder=RankFolder(
            folder, options.for_report, open_results(part for part, _ in _list_parts(folder / PARTS))
        ),
    )
    if source.discovered is None:
        job = load_path(source.path, load, options.rank_pattern)
    else:
        job = load_folder(source.path, load, options.rank_pattern, source.discovered)
    for rank, trace in job.items():  # of a file of several ranks, or a folder of Parquet
        if not sniff_folder(folder / f"rank={rank}"):
            writer.write(trace, folder / f"rank={rank}", packs=options.for_report)
    return Job(job, job.meta, job.run_stats)  # without the answers of a store, which are to be computed


def _complete_parts(job: Job, folder: Path, for_report: bool) -> list[Path]:
    """Return folders with analysis results that cover all ranks; ranks without results are analyzed here."""
    parts, ranks = [], set(job.ranks)
    for part, members in _list_parts(folder):
        if members and members <= ranks:
            parts.append(part)
            ranks -= members
    remaining = sorted(ranks)
    for start in range(0, len(remaining), batches.MAX_RANKS):
        members_left = remaining[start : start + batches.MAX_RANKS]
        part = folder / f"rest-{members_left[0]}-{members_left[-1]}"
        summaries.summarize_ranks(((rank, job[rank]) for rank in members_left), part, for_report)
        parts.append(part)
    return parts


def _list_parts(folder: Path) -> list[tuple[Path, set[int]]]:
    """Return (folder, ranks) of each completed part: a folder with the analysis results of a batch of ranks."""
    return [
        (part, set(read_json(part / "part.json")["ranks"]))
        for part in sorted(folder.iterdir())
        if (part / "part.json").is_file()
    ]


# The staging folder in which a run is prepared before it appears in a store: key, lock and publication.
#
# A run is prepared in ``STORE/.adding/NAME-KEY``. The key depends on the files of the run, so that a killed addition
# goes on where it stopped, and starts again if the files have changed.


@dataclass(frozen=True)
class Source:
    """A run to be added to a store: its path, its discovered traces, and a key that changes with its files.

    Attributes:
        path: the folder or file.
        key: changes with the files, the version of etloom, and the layout of stores.
        discovered: the traces of a folder; None for a file or a folder that is one trace.
    """

    path: Path
    key: str
    discovered: DiscoveredRun | None


def describe_source(path: Path, rank_pattern: str | None) -> Source:
    """Find the files of a run and compute its key. Raises ReadError."""
    discovered = None
    facts: dict[str, Any] = {"store": STORE_VERSION}
    if formats.detect_format(path) is not None:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    else:
        discovered = discover_ranks(path, rank_pattern)
        by_rank = (*discovered.ranks.values(), *discovered.captures.values())
        files = [file for rank_files in by_rank for file in rank_files]
        facts |= {"pattern": rank_pattern, "card": discovered.card, "run": discovered.run}
    key = cache.make_key(files, **facts)
    if key is None:
        raise EtloomError(
            "contains files that cannot be opened", where=path, remedy="add a folder of regular files"
        )
    return Source(path, key, discovered)


class Staging:
    """The folder in which a run is prepared until it is complete and moved to its name in the store.

    Args:
        store: the store.
        name: name of the run.
        key: key of its source.
    """

    def __init__(self, store: Path, name: str, key: str) -> None:
        self.target = run_folder(store, name)
        self.folder = store / ADDING / f"{name}-{key}"
        self._lock = store / ADDING / f"{name}.lock"
        self._name = name

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock on the run's name within the context, and yield the descriptor of the lock file.

        Raises:
            EtloomError: another process adds a run of this name.
        """
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            if not lock_file(file.fileno()):
                raise EtloomError(
                    f"run {self._name!r} is being added by another process",
                    where=self.target.parent,
                    remedy="wait for it, or choose another --name",
                )
            yield file.fileno()

    def read_published(self) -> dict[str, Any] | None:
        """Return the manifest (meta.json) of the run with the same name in the store; None if there is none."""
        return read_json(self.target / "meta.json") if is_stored_run(self.target) else None

    def publish(self) -> None:
        """Move the complete run to its name in the store, and remove the remains of earlier attempts."""
        for scratch in self.folder.glob(".*"):  # of processes that were killed
            shutil.rmtree(scratch, ignore_errors=True)
        old = self.folder.with_name(f"{self._name}-replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.folder.rename(self.target)
        for rest in self.folder.parent.glob(f"{self._name}-*"):
            if len(rest.name) == len(self.folder.name) or rest == old:
                shutil.rmtree(rest, ignore_errors=True)


def lock_file(descriptor: int, waits: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock and this is not to wait."""
    try:
        import fcntl
    except ImportError:  # a system without locks
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
