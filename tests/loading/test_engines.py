"""Engines: tasks on ranks in processes; those for Ray are run one after another in this process.

tests/exports/test_ray.py has a cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom import loading
from etloom.core.errors import EtloomError, InvalidValue, UnknownName
from etloom.exports.store import adding, batches
from etloom.loading import cache, engines, file_reading, plan, reading_tasks
from support import worker_tasks
from support.fleets import write_fleet

Tasks = list[str]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tasks:
    """The texts of the tasks, which run in this process instead of a cluster."""
    texts: Tasks = []

    def run(
        function: Callable[[str], None], each: Sequence[str], on_done: Callable[[int], None] | None = None
    ) -> None:
        texts.extend(each)
        for index, text in enumerate(each):
            function(text)
            if on_done is not None:
                on_done(index)

    for module in (engines, adding):
        monkeypatch.setattr(module, "run_on_ray", run)
    monkeypatch.setattr(engines, "connect", lambda: pytest.fail("a cluster was started"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(adding, "count_cpus", lambda _: 2)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return texts


@pytest.mark.slow
def test_ranks_are_read_into_the_cache_by_tasks(tasks: Tasks, tmp_path: Path) -> None:
    run = write_fleet(tmp_path / "run", 3)
    job = etloom.open(run, engine="ray", iterations="all")
    assert len(tasks) == 3
    expected = etloom.open(run, use_cache=False, iterations="all")
    for rank, trace in expected.items():
        assert_frame_equal(job[rank].events, trace.events, categorical_as_str=True)
        assert_frame_equal(job[rank].stats, trace.stats)
    assert job.meta == expected.meta
    etloom.open(run, engine="ray", iterations="all")
    assert len(tasks) == 3  # the cache has them
    etloom.open(run, engine="ray")
    assert len(tasks) == 6


def test_a_rank_that_a_task_cannot_read_is_reported_as_without_an_engine(
    tasks: Tasks, tmp_path: Path
) -> None:
    run = write_fleet(tmp_path / "run", 3)
    file = next(run.glob("*_1.json*"))
    file.write_bytes(b"{]")
    stats = [etloom.open(run, engine=engine).stats for engine in ("ray", "local")]
    assert_frame_equal(*stats)
    assert "job.unreadable_file" in stats[0]["name"]


@pytest.mark.slow
def test_a_store_is_filled_by_tasks(tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MIN_RANKS", 1)
    run = write_fleet(tmp_path / "run", 4)
    seen: list[int] = []
    (added,) = etloom.store_add(
        run, to=tmp_path / "store", engine="ray", progress=lambda _, count: seen.append(count)
    )
    assert len(tasks) == 2 and added.ranks == (0, 1, 2, 3) and sum(seen) > 0
    (local,) = etloom.store_add(run, to=tmp_path / "local", jobs=1)
    assert_frame_equal(
        etloom.analyze(added.path, "stragglers"), etloom.analyze(local.path, "stragglers"), check_exact=True
    )


def test_a_missing_engine_package_is_one_line(tasks: Tasks, tmp_path: Path) -> None:
    run = write_fleet(tmp_path / "run", 2)
    with pytest.raises(UnknownName, match="unknown engine 'spark'; expected one of local, ray"):
        etloom.open(run, engine="spark")
    with pytest.raises(InvalidValue, match="returns tables through the cache"):
        etloom.open(run, engine="ray", use_cache=False)
    with pytest.raises(InvalidValue, match="s3://bucket/store is copied to this host"):
        etloom.store_add(run, to="s3://bucket/store", engine="ray")
    assert not tasks


def test_without_ray_the_remedy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EtloomError, match=r"needs Ray; pip install 'etloom\[ray\]'"):
        engines.run_on_ray(reading_tasks.read_into_cache, ["{}"])


@pytest.mark.slow
def test_without_ray_a_cached_run_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a single trace, which the engine does not concern."""
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    run, store = write_fleet(tmp_path / "run", 2), tmp_path / "store"
    etloom.open(run)
    etloom.store_add(run, to=store, jobs=1)
    monkeypatch.setitem(sys.modules, "ray", None)
    for path in (run, run / "kineto_trace_0.json", store / "run=run"):
        with pytest.raises(EtloomError, match="needs Ray"):
            etloom.open(path, engine="ray")
    with pytest.raises(EtloomError, match="needs Ray"):
        etloom.store_add(run, to=store, engine="ray")


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **_: object) -> None:
        raise ConnectionError(f"ray client at {address} timed out\nlong hint")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=refuse))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        EtloomError,
        match=r"^127.0.0.1:1: the Ray cluster cannot be used: [^\n]* timed out; check RAY_ADDRESS",
    ):
        engines.connect()


@pytest.fixture
def names_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets worker processes import the modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.mark.slow
@pytest.mark.usefixtures("names_of_tests")
def test_a_process_handles_one_task_after_another(tmp_path: Path) -> None:
    files = [tmp_path / str(index) for index in range(6)]
    ended: Tasks = []
    engines.run_in_processes(
        worker_tasks.note_process, list(map(str, files)), 2, lambda index: ended.append(str(files[index]))
    )
    assert sorted(ended) == list(map(str, files))
    assert 1 <= len({file.read_text() for file in files}) <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("names_of_tests")
def test_after_a_failed_task_another_process_goes_on(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("0", "bad", "1", "killed", "2")]
    ended: list[int] = []
    engines.run_in_processes(worker_tasks.fail_on_bad, list(map(str, files)), 1, ended.append)
    assert ended == [0, 1, 2, 3, 4]
    assert [file.exists() for file in files] == [True, False, True, False, True]
    assert len({file.read_text() for file in files if file.exists()}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("names_of_tests")
def test_workers_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy", "json", "gc"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    engines.run_in_processes(worker_tasks.note_process, [str(tmp_path / "ended")], 1)
    assert (tmp_path / "ended").exists()


def raise_interrupt(_: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("names_of_tests")
def test_no_process_outlives_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        processes.append(start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(engines.subprocess, "Popen", note)
    stop = engines._Worker.stop

    def stop_late(worker: engines._Worker) -> None:
        time.sleep(0.2)  # a busy host: the other process could end many tasks meanwhile
        stop(worker)

    monkeypatch.setattr(engines._Worker, "stop", stop_late)
    files = [tmp_path / str(index) for index in range(20)]
    with pytest.raises(KeyboardInterrupt):
        engines.run_in_processes(worker_tasks.note_process, list(map(str, files)), 2, raise_interrupt)
    assert processes and all(process.returncode is not None for process in processes)
    assert sum(file.exists() for file in files) <= 4  # two at a time, and one of each that ends meanwhile


@pytest.mark.parametrize("executable", ["", "/nonexistent", "/bin/false"])
def test_where_no_process_works_the_tasks_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    ended: list[int] = []
    engines.run_in_processes(worker_tasks.note_process, [str(tmp_path / "file")] * 9, 2, ended.append)
    assert len(ended) <= 2 and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("names_of_tests")
def test_what_the_start_of_python_prints_is_not_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello\\n')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    exists: list[bool] = []
    file = tmp_path / "ended"
    engines.run_in_processes(
        worker_tasks.note_process, [str(file)], 1, lambda _: exists.append(file.exists())
    )
    assert exists == [True]


def test_without_tasks_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.subprocess, "Popen", lambda *_, **__: pytest.fail("a process started"))
    engines.run_in_processes(worker_tasks.note_process, [], 2)


@pytest.fixture
def small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run of four ranks, which are read in two processes as if they were many."""
    monkeypatch.setattr(loading, "MIN_TASK_RANKS", 3)
    monkeypatch.setattr(reading_tasks, "_MIN_PENDING_RANKS", 3)
    monkeypatch.setattr(reading_tasks, "_TASK_RANKS", 2)
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return write_fleet(tmp_path / "run", 4)


@pytest.mark.slow
def test_many_small_ranks_are_read_in_processes(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: dict[str, int] = {}

    def count(file: Path, read: int) -> None:
        progress[file.name] = progress.get(file.name, 0) + read

    monkeypatch.setattr(file_reading, "read_file", lambda *_: pytest.fail("read by this process"))
    job = etloom.open(small_run, progress=count)
    cache.clear_cache()  # not what the job has open
    assert progress == {file.name: file.stat().st_size for file in small_run.iterdir()}
    again = etloom.open(small_run)  # from the cache
    monkeypatch.undo()
    expected = etloom.open(small_run, use_cache=False)
    for loaded in (job, again):
        assert loaded.meta == expected.meta
        assert_frame_equal(loaded.stats, expected.stats)
        for rank, trace in expected.items():
            assert dict(loaded[rank].meta) == dict(trace.meta)
            for name, table in trace.tables.items():
                assert_frame_equal(loaded[rank].table(name), table, categorical_as_str=True)


@pytest.mark.slow
def test_a_rank_that_a_process_cannot_read_is_reported_by_this_one(small_run: Path) -> None:
    next(small_run.glob("*_1.json*")).write_bytes(b"{]")
    stats = [etloom.open(small_run, use_cache=use_cache).stats for use_cache in (True, False)]
    assert_frame_equal(*stats)
    assert "job.unreadable_file" in stats[0]["name"]


@pytest.mark.parametrize(
    "reason", ["one job", "no cache", "few ranks", "large ranks", "files of several ranks", "full cache"]
)
def test_other_ranks_are_read_by_this_process(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(engines, "run_in_processes", lambda *_: pytest.fail("processes started"))
    if reason == "few ranks":
        monkeypatch.setattr(loading, "MIN_TASK_RANKS", 5)
    elif reason == "large ranks":
        monkeypatch.setattr(reading_tasks, "MAX_FILE_TEXT_BYTES", 10)
    elif reason == "files of several ranks":
        monkeypatch.setattr(reading_tasks, "PARSED_NATIVELY", ())
    elif reason == "full cache":
        monkeypatch.setattr(cache, "has_room", lambda *_: False)
    jobs = 1 if reason == "one job" else None
    assert etloom.open(small_run, jobs=jobs, use_cache=reason != "no cache").ranks == [0, 1, 2, 3]
