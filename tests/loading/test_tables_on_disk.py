"""A run that memory should not hold at once answers as one that it holds does, and holds no more than it may."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.loading import Progress, cache, file_reading
from etloom.loading.rank_stores import ResidentTable, ResidentTables
from support import small_traces

RANKS = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_traces.write_run(tmp_path / "run", RANKS)


def held(job: Job) -> list[int]:
    """The tables that each rank holds in memory."""
    loaders = [
        [one for one in trace.loaders.values() if isinstance(one, ResidentTable)] for trace in job.values()
    ]
    return [sum(one.is_loaded for one in tables) for tables in loaders if tables]


def evictable(job: Job) -> list[bool]:
    """Whether the tables of each rank may be evicted."""
    return [any(isinstance(one, ResidentTable) for one in trace.loaders.values()) for trace in job.values()]


def entries() -> list[Path]:
    return list(cache.cache_folder().glob("runs/run=*/rank=*/meta.json"))


@pytest.mark.slow
def test_answers_are_equal_with_tables_in_memory_and_on_disk(run: Path) -> None:
    whole, shelved = etloom.open(run, use_cache=False), etloom.open(run, max_table_bytes=0)
    assert evictable(whole) == [False] * 4
    assert evictable(shelved) == [True] * 4
    assert [dict(trace.meta) for trace in shelved.values()] == [dict(trace.meta) for trace in whole.values()]
    for name in TABLES:
        for rank in RANKS:
            assert shelved[rank].table(name).equals(whole[rank].table(name)), name
            assert shelved[rank].scan(name).collect().equals(whole[rank].table(name)), name
            assert shelved[rank].rows(name) == whole[rank].table(name).height
    for name in ("findings", "temporal-breakdown", "collectives", "critical-path"):
        assert etloom.analyze(shelved, name).equals(etloom.analyze(whole, name)), name
    assert (
        etloom.report(shelved, run / "a.html").read_text() == etloom.report(whole, run / "b.html").read_text()
    )


def test_without_memory_only_the_last_used_rank_keeps_its_tables(run: Path) -> None:
    job = etloom.open(run, max_table_bytes=0)
    assert sum(held(job)) <= 1
    for rank in RANKS:
        assert job[rank].events.height == 7
        assert job[rank].kernels.height
        assert held(job) == [2 * (rank == one) for one in RANKS]


@pytest.mark.slow
def test_cached_values_are_evicted_with_the_tables(run: Path) -> None:
    job, asked = etloom.open(run, max_table_bytes=0), []

    def question(trace: Trace) -> int:
        asked.append(trace.rank)
        return trace.events.height

    assert [job[rank].compute_once(question) for rank in (0, 0, 1, 0)] == [7, 7, 7, 7]
    assert asked == [0, 1, 0]


@pytest.mark.slow
def test_as_many_ranks_are_in_memory_as_fit(run: Path) -> None:
    size = int(etloom.open(run, use_cache=False)[0].events.estimated_size())
    job = etloom.open(run, max_table_bytes=2 * size + size // 2)
    for rank in (0, 1, 0, 2):
        assert job[rank].events.height == 7
    assert held(job) == [1, 0, 1, 0]  # rank 1 was used longest ago


@pytest.mark.slow
def test_keeping_tables_in_memory_depends_on_the_length_of_the_text(own: Path) -> None:
    """At 0.6 bytes a byte of it, which for this run lies between what its tables take and three times as much."""
    text = sum(file_reading.estimate_text_bytes(path) for path in (own / "ddp_2").glob("*_*_[01].json.gz"))
    whole = etloom.open(own / "ddp_2", use_cache=False)
    takes = sum(frame.estimated_size() for trace in whole.values() for frame in trace.tables.values())
    limit = 6 * text // 10
    assert takes < limit < 3 * takes
    for room, expected in (
        (takes, True),
        (limit - 1, True),
        (limit + 1, False),
        (3 * takes, False),
    ):
        job = etloom.open(own / "ddp_2", max_table_bytes=room)
        assert evictable(job) == [expected, expected], room


def test_memory_used_by_several_threads_is_counted_consistently() -> None:
    """One that could come in between would count a table out that another counts in."""
    shelf, inside, most = ResidentTables(10**9), [0], [0]

    class Slow(dict[Any, int]):
        """Gives way to the other threads where they would do harm."""

        def pop(self, *key: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            inside[0] -= 1
            return super().pop(*key)

    shelf._bytes_by_rank = Slow()
    traces = [object(), object()]
    threads = [
        threading.Thread(target=lambda: [shelf.use(trace, 5) for trace in traces])  # type: ignore[arg-type]
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert list(shelf._bytes_by_rank.values()) == [20, 20] and shelf._total == 40


def test_a_second_opening_reads_tables_of_the_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etloom.open(run, max_table_bytes=0)
    assert len(entries()) == 4
    monkeypatch.setattr("etloom.linker.link", None)
    assert etloom.open(run, max_table_bytes=0)[3].events.height == 7


@pytest.mark.slow
def test_without_a_cache_tables_are_in_temporary_folders_removed_with_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    job = etloom.open(run, max_table_bytes=0, use_cache=False)
    assert not cache.cache_folder().exists()
    assert job[2].events.height == 7
    assert len(list((tmp_path / "temporary").iterdir())) == 4
    del job
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_cache_stays_within_its_limit_and_the_rest_is_stored_elsewhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "1")
    job = etloom.open(run, max_table_bytes=0, jobs=1)
    assert len(entries()) == 1
    assert [trace.events.height for trace in job.values()] == [7, 7, 7, 7]


def test_a_replaced_table_is_kept_and_a_pickle_contains_all(run: Path) -> None:
    trace = etloom.open(run, max_table_bytes=0)[1]
    changed = trace.replace(events=trace.events.head(2), meta={"seen": True})
    assert any(isinstance(one, ResidentTable) for one in changed.loaders.values())
    assert (changed.events.height, changed.meta["seen"], trace.events.height) == (2, True, 7)
    assert changed.query("select count(*) as n from events").item() == 2
    again = pickle.loads(pickle.dumps(changed))
    assert not again.loaders
    assert again.kernels.equals(trace.kernels)


@pytest.mark.slow
def test_a_rank_of_which_a_file_cannot_be_read_is_not_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = file_reading.read_file

    def fails(path: Path, progress: Progress | None) -> Trace | Job:
        if path.name == "torch_et_1.json":
            raise ReadError("is damaged", where=path)
        return read(path, progress)

    monkeypatch.setattr(file_reading, "read_file", fails)
    job = etloom.open(run, max_table_bytes=0)
    assert job.stats.filter(pl.col("name") == "job.unreadable_file")["rank"].to_list() == [1]
    assert [trace.events.height for trace in job.values()] == [7, 7, 7, 7]
    assert len(entries()) == 3


@pytest.mark.slow
def test_a_saved_run_is_not_moved(run: Path, tmp_path: Path) -> None:
    whole = etloom.open(run, use_cache=False)
    saved = etloom.export(whole, tmp_path / "run.parquet")
    assert evictable(etloom.open(saved)) == [False] * 4
    shelved = etloom.open(saved, max_table_bytes=0)
    assert evictable(shelved) == [True] * 4
    assert etloom.analyze(shelved, "findings").equals(etloom.analyze(whole, "findings"))
    assert shelved.run_stats.equals(whole.run_stats)
    assert not cache.cache_folder().exists()
    # What is to be linked otherwise is linked, in memory.
    assert evictable(etloom.open(saved, max_table_bytes=0, iterations="all")) == [False] * 4


@pytest.mark.slow
def test_a_process_that_is_terminated_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    """As `timeout`, Slurm and containers end one. Slowly: what it is asked of the last rank waits for the signal."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = """
import os, signal, sys
from etloom import cli
from etloom.cli import run_arguments
run_arguments.MAX_TABLE_BYTES = 0
from etloom.analyses import steps
def ended(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
steps.analyze = ended
sys.argv = ["etloom", "analyze", "steps", sys.argv[1], "--no-cache"]
sys.exit(cli.main())
"""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code, str(run)], env=environment, timeout=400, check=False)
    assert done.returncode == 143
    assert list(temporary.iterdir()) == []
