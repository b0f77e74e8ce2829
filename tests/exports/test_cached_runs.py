"""Runs of many ranks are kept in the cache with their answers: read once, read again when they change, removed."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import loading
from etloom.core.errors import LimitError
from etloom.core.paths import cache_folder
from etloom.core.trace import Job
from etloom.exports.store import adding, batches, cached_runs, summaries
from etloom.exports.store.summaries import JOB_QUESTIONS
from etloom.formats.parquet import writer
from etloom.loading import cache, executor, plan
from support.fleets import write_fleet


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks are many; a cache of the test; only the questions that it needs."""
    monkeypatch.setattr(loading, "MIN_CACHED_RANKS", 2)
    monkeypatch.setattr(loading, "MIN_REPORTED_RANKS", 2)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(summaries, "RANK_QUESTIONS", ())
    monkeypatch.setattr(summaries, "JOB_QUESTIONS", [q for q in JOB_QUESTIONS if q.file == "stragglers"])
    monkeypatch.setattr(summaries, "GRAPH_QUESTIONS", ())
    monkeypatch.setattr(summaries, "RUN_TABLES", ())
    monkeypatch.setattr(batches, "MIN_RANKS", 64)  # without processes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_fleet(tmp_path / "monday", 2)


def list_runs() -> list[Path]:
    return sorted((cache_folder() / cache.RUNS).glob("run=*"))


@pytest.mark.slow
def test_a_run_of_many_ranks_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = etloom.open(run, use_cache=False)
    assert plain.stored is None and not list_runs()
    first = etloom.open(run)
    monkeypatch.setattr(adding, "load_folder", lambda *_: pytest.fail("the traces were read again"))
    again = etloom.open(run)
    for job in (first, again):
        assert job.stored is not None and dict(job.meta) == dict(plain.meta)
        assert etloom.analyze(job, "stragglers").equals(etloom.analyze(plain, "stragglers"))
        assert job[1].events.equals(plain[1].events)


@pytest.mark.slow
def test_changed_files_and_other_patterns_are_read_again(run: Path, tmp_path: Path) -> None:
    etloom.open(run)
    etloom.open(run, rank_pattern=r"(\d+)")
    assert len(list_runs()) == 2
    write_fleet(tmp_path / "other", 3)
    max((tmp_path / "other").iterdir()).rename(run / "rank_2.json")
    assert etloom.open(run).ranks == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("question", ["report", "findings"])
def test_a_report_caches_runs_of_fewer_ranks(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(loading, "MIN_REPORTED_RANKS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    etloom.open(run)
    assert not list_runs()

    def ask(source: Path | Job) -> Any:
        if question == "report":
            return etloom.report(source, tmp_path / "report.html").read_text()
        return etloom.analyze(source, question).write_json()

    expected = ask(etloom.open(run, use_cache=False))
    assert ask(run) == expected
    (cached,) = list_runs()
    names = {file.stem for file in (cached / "summaries").glob("*.parquet")}
    assert {"findings", "critical-path-by-edge"} <= names
    assert (cached / "rank=0" / "tables.arrow").exists()
    assert not {"slowdown", "result-operators", "compared-kernel"} & names
    opened = etloom.open(run)  # from the cache
    assert opened.stored is not None
    assert etloom.analyze(opened, "slowdown").equals(
        etloom.analyze(etloom.open(run, use_cache=False), "slowdown")
    )
    counts = "select rank, name, count(*) as n from events group by rank, name order by rank, name"
    assert etloom.query(opened, counts).equals(etloom.query(etloom.open(run, use_cache=False), counts))
    assert etloom.info(opened)["stats"] == etloom.info(etloom.open(run, use_cache=False))["stats"]


@pytest.mark.slow
def test_with_one_processor_a_report_keeps_no_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_CACHED_RANKS", 3)
    assert etloom.open(run, for_report=True, jobs=1).stored is None
    assert etloom.open(run, for_report=True, jobs=2).stored is not None


@pytest.mark.slow
def test_answers_are_added_to_ranks_that_were_read_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_CACHED_RANKS", 3)
    monkeypatch.setattr(executor, "MIN_SECONDS_TO_CACHE", -1)
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    plain = etloom.open(run)
    assert plain.stored is None and len(list_runs()) == 1
    monkeypatch.setattr(
        executor.file_reading, "read_file", lambda *_: pytest.fail("the traces were read again")
    )
    job = etloom.open(run, for_report=True, jobs=2)
    assert job.stored is not None and len(list_runs()) == 1
    assert etloom.analyze(job, "stragglers").equals(etloom.analyze(plain, "stragglers"))


@pytest.mark.slow
def test_damaged_answers_are_removed_and_added_again(run: Path) -> None:
    expected = etloom.analyze(etloom.open(run), "stragglers")
    gc.collect()
    (list_runs()[0] / "summaries" / "ranks.parquet").write_bytes(b"PAR1 damaged")
    for is_stored in (False, True):
        job = etloom.open(run)
        assert (job.stored is not None) == is_stored
        assert etloom.analyze(job, "stragglers").equals(expected)


@pytest.mark.slow
def test_an_interrupted_addition_continues_where_it_stopped(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adding, "describe_run", raise_interrupt)
        etloom.open(run)
    assert not (list_runs()[0] / "meta.json").exists()
    monkeypatch.setattr(
        executor.file_reading, "read_file", lambda *_: pytest.fail("the traces were read again")
    )
    assert etloom.open(run).stored is not None


def raise_interrupt(_: Job) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_progress_reaches_the_size_of_all_files(run: Path) -> None:
    size = sum(file.stat().st_size for file in run.iterdir())
    reported: list[int] = []
    etloom.open(run, progress=lambda _, count: reported.append(count))
    etloom.open(run, progress=lambda _, count: reported.append(count))
    assert sum(reported) == 2 * size


def fail_to_write(*_: object, **options: object) -> None:
    raise pl.exceptions.ComputeError("parquet: underlying IO error: No space left on device (os error 28)")


def test_a_store_on_a_full_disk_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "write", fail_to_write)
    with pytest.raises(
        etloom.EtloomError, match="store: cannot be written: No space left on device; free space"
    ):
        etloom.store_add(run, to=tmp_path / "store", jobs=1)


@pytest.mark.parametrize("reason", ["linking", "size", "space", "full disk", "unwritable", "unreadable run"])
def test_without_a_usable_cache_the_run_is_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    options: dict[str, Any] = {}
    if reason == "linking":
        options = {"inter_thread_threshold_us": 10.0}
    elif reason == "size":
        monkeypatch.setenv("ETLOOM_CACHE_BYTES", "10")
    elif reason == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    elif reason == "full disk":
        monkeypatch.setattr(writer, "write", fail_to_write)
    elif reason == "unwritable":
        (tmp_path / "file").touch()
        monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "file"))
    else:

        def refuse(*_: object) -> None:
            raise etloom.EtloomError("cannot be added")

        monkeypatch.setattr(cached_runs, "prepare_run", refuse)
    job = etloom.open(run, **options)
    assert job.stored is None and job.ranks == [0, 1]


@pytest.mark.slow
def test_a_failed_addition_leaves_no_tables(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written are the tables of both ranks, but not their answers."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(summaries, "write_job_answers", fail)
    assert etloom.open(run).stored is None
    assert not list_runs()


@pytest.mark.slow
def test_a_second_reader_waits_for_the_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    count = threading.Semaphore(0)
    prepare = cached_runs.prepare_run

    def prepare_slowly(*arguments: object) -> None:
        count.release()
        second.start()
        prepare(*arguments)  # type: ignore[arg-type]

    second = threading.Thread(target=lambda: jobs.append(etloom.open(run)))
    monkeypatch.setattr(cached_runs, "prepare_run", prepare_slowly)
    jobs.append(etloom.open(run))
    second.join(60)
    assert [job.stored is not None for job in jobs] == [True, True]
    assert count.acquire(blocking=False) and not count.acquire(blocking=False)  # it was prepared once


@pytest.mark.slow
def test_runs_in_the_cache_are_removed_as_other_entries(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = etloom.open(run)
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "10")
    cache._prune(10)
    assert list_runs(), "an open run stays"
    assert job[0].events.height
    del job
    gc.collect()
    cache._prune(10)
    assert not list_runs()
    monkeypatch.delenv("ETLOOM_CACHE_BYTES")
    etloom.open(run)
    assert cache.clear_cache() > 10_000 and not list_runs()


def test_a_failure_of_polars_is_raised_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path] = []

    def fail(path: Path, *_: object) -> None:
        paths.append(path)
        raise pl.exceptions.ComputeError("a failure")

    monkeypatch.setattr(loading, "load_path", fail)
    with pytest.raises(pl.exceptions.ComputeError, match="a failure"):
        etloom.open(run, use_cache=False)
    assert len(paths) == 1


@pytest.mark.slow
def test_a_file_within_another_limit_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = executor.file_reading.read_file

    def refuse_rank_1(path: Path, *options: Any) -> Any:
        if "1" in path.name:
            raise LimitError("is too large", where=path, remedy="set a limit")
        return read(path, *options)

    with monkeypatch.context() as patch:
        patch.setattr(executor.file_reading, "read_file", refuse_rank_1)
        patch.setenv("ETLOOM_MAX_RATIO", "2")
        assert etloom.open(run).ranks == [0]
    assert etloom.open(run).ranks == [0, 1]
