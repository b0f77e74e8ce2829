"""Runs in the cache are returned as they were read, read again if they change, and never exceed the limit."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.core.errors import ReadError
from etloom.core.trace import Job, Trace
from etloom.formats.parquet import writer
from etloom.loading import cache, executor, plan, rank_stores
from etloom.loading.rank_stores import CachedRun, save_on_disk
from support import small_traces


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cached runs."""
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / cache.RUNS


@pytest.fixture
def without_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is cached, however quickly it is read."""
    monkeypatch.setattr(executor, "MIN_SECONDS_TO_CACHE", -1)
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 0)


def trace(rows: int = 3) -> Trace:
    return Trace({"events": pl.DataFrame({"id": range(rows), "ts": range(rows)})}, {"rank": 7})


def add(key: str) -> CachedRun:
    run = CachedRun(key)
    run.add(7, trace())
    return CachedRun(key)  # the other one keeps the run in use


def list_keys(runs: Path) -> list[str]:
    return sorted(run.name.removeprefix("run=") for run in runs.iterdir())


def assert_equal(job: Job, expected: Job) -> None:
    assert job.ranks == expected.ranks and job.meta == expected.meta
    assert_frame_equal(job.stats, expected.stats, categorical_as_str=True)
    for rank, wanted in expected.items():
        assert dict(job[rank].meta) == dict(wanted.meta)
        for name, table in wanted.tables.items():
            assert_frame_equal(job[rank].table(name), table, categorical_as_str=True)


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("part", ["", "kineto_trace_1.json"])
def test_a_run_from_the_cache_equals_the_run_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, part: str
) -> None:
    path = small_traces.write_run(tmp_path / "run", (0, 1, 2)) / part
    expected = etloom.open(path, use_cache=False)
    cold = etloom.open(path, max_table_bytes=limit)
    monkeypatch.setattr(executor.file_reading, "read_file", lambda *_: pytest.fail("a file was read again"))
    for job in (cold, etloom.open(path, max_table_bytes=limit), etloom.open(path)):
        assert_equal(job, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
def test_a_changed_file_is_read_again(tmp_path: Path, runs: Path) -> None:
    run = small_traces.write_run(tmp_path / "run", (0, 1))
    etloom.open(run)
    os.utime(run / "kineto_trace_1.json", ns=(1, 1))
    etloom.open(run)
    etloom.open(run, iterations="all")
    etloom.open(run)
    assert len(list_keys(runs)) == 3


def test_only_regular_files_have_a_key(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("x")
    assert cache.make_key([file]) is not None
    assert cache.make_key([tmp_path / "none"]) is None
    assert cache.make_key([tmp_path]) is None


@pytest.mark.parametrize("file", ["tables.arrow", "events.parquet"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_damaged_rank_is_removed(monkeypatch: pytest.MonkeyPatch, file: str, lazy: bool) -> None:
    if file == "events.parquet":  # as the entries of large traces
        monkeypatch.setattr(writer, "_MAX_PACKED_BYTES", -1)
    run = add("k")
    (run.locate(7) / file).write_bytes(b"PAR1 damaged")
    assert run.open(7, lazy=lazy) is None
    assert not run.locate(7).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
def test_a_damaged_rank_is_read_again(tmp_path: Path, runs: Path) -> None:
    run = small_traces.write_run(tmp_path / "run", (0, 1))
    expected = etloom.open(run)
    damaged = next(runs.glob("run=*/rank=1/tables.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_equal(etloom.open(run), expected)
    assert damaged.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
@pytest.mark.parametrize("moment", ["write_meta", "pack_tables"])
def test_what_a_killed_process_wrote_is_not_opened(tmp_path: Path, runs: Path, moment: str) -> None:
    run = small_traces.write_run(tmp_path / "run", (0, 1))
    code = f"""
import itertools, os, sys, etloom
from etloom.formats.parquet import writer
from etloom.loading import executor, plan
executor.MIN_SECONDS_TO_CACHE, plan.MIN_TEXT_BYTES_TO_CACHE = -1, 0
write, count = writer.{moment}, itertools.count()
writer.{moment} = lambda *rest, **options: os._exit(9) if next(count) else write(*rest, **options)
etloom.open(sys.argv[1], jobs=1)
"""
    assert subprocess.run([sys.executable, "-c", code, str(run)], check=False).returncode == 9
    assert [path.name for path in runs.glob("run=*/rank=*")] == ["rank=0"]
    assert_equal(etloom.open(run), etloom.open(run, use_cache=False))
    assert len(list(runs.glob("run=*/rank=*"))) == 2
    cache.clear_cache()
    assert list_keys(runs) == []  # also what was written in part


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
@pytest.mark.parametrize("limit", [None, 0])
def test_two_processes_open_a_run_at_once(tmp_path: Path, runs: Path, limit: int | None) -> None:
    run = small_traces.write_run(tmp_path / "run", tuple(range(8)))
    code = f"""
import sys, etloom
from etloom.loading import executor, plan
executor.MIN_SECONDS_TO_CACHE, plan.MIN_TEXT_BYTES_TO_CACHE = -1, 0
etloom.open
print(flush=True)
sys.stdin.readline()
job = etloom.open(sys.argv[1], max_table_bytes={limit})
print(*(trace.events.height for trace in job.values()), flush=True)
"""
    words = [sys.executable, "-c", code, str(run)]
    processes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0].split() for process in processes] == [["7"] * 8] * 2
    assert len(list_keys(runs)) == 1 and not list(runs.glob("run=*/.rank*"))
    assert_equal(etloom.open(run), etloom.open(run, use_cache=False))


def test_the_runs_used_longest_ago_go_first(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate("abc"):
        run = add(key)
        os.utime(run.folder, (number, number))
    CachedRun("a").open(7, lazy=False)
    size = sum(file.stat().st_size for file in run.locate(7).iterdir())
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", str(size * 3))
    add("d")
    assert list_keys(runs) == ["a", "c", "d"]
    assert cache.clear_cache() >= size * 3
    assert list_keys(runs) == []


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
@pytest.mark.parametrize("table_bytes", [None, 0])
def test_the_cache_stays_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_bytes: int | None
) -> None:
    sizes = []
    for number in range(6):
        run = small_traces.write_run(tmp_path / f"run{number}", (0, 1, 2, 3))
        etloom.open(run, max_table_bytes=table_bytes)
        gc.collect()
        sizes.append(sum(size for _, size, _ in cache.list_entries()))
        monkeypatch.setenv("ETLOOM_CACHE_BYTES", str(int(sizes[0] * 2.5)))
    assert all(size < sizes[0] * 3 for size in sizes) and sizes[1] > 1.5 * sizes[0]


def test_an_unwritable_folder_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", "/proc/no-such-place")
    assert not CachedRun("k").add(7, trace())
    assert CachedRun("k").open(7) is None


@pytest.mark.slow
@pytest.mark.usefixtures("without_thresholds")
def test_a_cache_that_became_read_only_is_still_read(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (small_traces.write_run(tmp_path / name, (0, 1)) for name in ("one", "other"))
    etloom.open(one)
    (before,) = list_keys(runs)

    def refuse(*_: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for module, name in ((os, "utime"), (tempfile, "mkstemp"), (writer, "write")):
        monkeypatch.setattr(module, name, refuse)
    assert_equal(etloom.open(other), etloom.open(other, use_cache=False))
    expected = etloom.open(one, use_cache=False)
    monkeypatch.setattr(executor.file_reading, "read_file", lambda *_: pytest.fail("a file was read again"))
    for limit in (None, 0):
        assert_equal(etloom.open(one, max_table_bytes=limit), expected)
    assert list_keys(runs) == [before]


def test_other_files_are_never_removed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = add("a")
    run.folder.rename(runs / "my run")
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "1")
    add("b")
    cache.clear_cache()
    assert [entry.name for entry in runs.iterdir()] == ["my run"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_rank_that_is_removed_while_it_is_read_is_none(
    runs: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(writer, "_MAX_PACKED_BYTES", -1)
    run, read = add("a"), rank_stores.parquet.read

    def read_late(folder: Path, **options: Any) -> Trace | Job:
        moved = folder.rename(runs / "moved")
        (moved / "events.parquet").unlink()
        if replaced:
            run.add(7, trace())
        return read(moved, **options)

    monkeypatch.setattr(rank_stores.parquet, "read", read_late)
    assert run.open(7, lazy=False) is None


def save(key: str) -> Trace:
    """A rank of the run with that key, with its tables on disk."""
    return CachedRun(key).open(7) or save_on_disk(7, trace(), CachedRun(key))


@pytest.mark.slow
def test_open_runs_are_not_removed(runs: Path) -> None:
    add("b")
    add("c")
    job = save("a")
    opening = "from etloom.loading.rank_stores import CachedRun; run = CachedRun('b').open(7)"
    code = f"{opening}; print(run, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert "on disk" in other.stdout.readline()
        cache.clear_cache()
        assert list_keys(runs) == ["a", "b"]
        assert job.events.height == 3
        other.kill()
    del job
    gc.collect()
    cache.clear_cache()
    assert list_keys(runs) == []


@pytest.mark.slow
def test_threads_open_runs_while_others_are_removed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "20000")

    def use(number: int) -> int:
        return sum(save(f"{number}-{turn}").events.height for turn in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use, range(1, 9))) == [60] * 8
    gc.collect()
    cache.clear_cache()
    assert cache.measure_use() == 0
    assert list_keys(runs) == []


@pytest.mark.slow
def test_a_full_disk_is_not_an_error_and_two_full_disks_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer.write

    def fill(content: Trace, folder: Path, **options: Any) -> None:
        if tmp_path in folder.parents:
            raise pl.exceptions.ComputeError("No space left on device (os error 28)")
        write(content, folder, **options)

    monkeypatch.setattr(writer, "write", fill)
    (tmp_path / "temporary").mkdir()
    assert save("a").events.height == 3
    assert not CachedRun("b").add(7, trace())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(ReadError, match="cannot write the tables of a trace: No space left"):
        save("a")
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_names_that_look_like_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "[lr=1]*?"))
    again = add("a").open(7)
    assert again is not None and again.events.equals(trace().events)
    assert save("b").events.height == 3
    assert cache.clear_cache() > 0


@pytest.mark.slow
def test_ranks_of_a_large_run_are_cached_though_each_is_quick_to_read(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes a tenth of a second: two of them are read again, eight are not."""
    clock = itertools.count()
    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: next(clock) / 10))
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    for count in (2, 8):
        etloom.open(small_traces.write_run(tmp_path / f"x{count}", tuple(range(count))), jobs=1)
    assert len(list(runs.glob("run=*/rank=*"))) == 8


def test_entries_belong_to_the_code_that_computed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("{}")
    key = cache.make_key([file])
    assert key == cache.make_key([file])
    monkeypatch.setattr(cache, "compute_code_digest", lambda: "other code")
    assert cache.make_key([file]) != key


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "ETLOOM_CACHE"])
def test_only_the_user_reads_the_cache_unless_its_place_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    monkeypatch.delenv("ETLOOM_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    trace = etloom.open(run, use_cache=False)[0]
    assert CachedRun("0").add(0, trace)
    folder = cache.cache_folder()
    assert (folder.stat().st_mode & 0o077 == 0) == (variable == "XDG_CACHE_HOME")


def test_a_small_run_is_read_again_instead_of_cached(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MIN_SECONDS_TO_CACHE", -1)
    run = small_traces.write_run(tmp_path / "run")
    etloom.open(run)
    assert not list(runs.glob("run=*/rank=0/meta.json"))
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 1)
    etloom.open(run)
    assert list(runs.glob("run=*/rank=0/meta.json"))


def test_small_files_that_python_reads_are_cached(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, own: Path
) -> None:
    monkeypatch.setattr(executor, "MIN_SECONDS_TO_CACHE", -1)
    dump = next(iter(sorted((own / "flight_recorder").glob("nccl*"))))
    file = tmp_path / "dump_0.json"
    file.write_bytes(dump.read_bytes())
    etloom.open(file)
    assert list(runs.glob("run=*/rank=0/meta.json"))


def test_a_lease_waits_for_a_removal_and_holds_the_new_folder(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = add("a").folder
    gc.collect()
    remove, begun = cache.remove, threading.Event()

    def remove_late(folder: Path) -> None:
        begun.set()
        time.sleep(0.2)
        remove(folder)

    monkeypatch.setattr(cache, "remove", remove_late)
    with ThreadPoolExecutor(1) as threads:
        removal = threads.submit(cache.remove_unused, run)
        assert begun.wait(10)
        held = CachedRun("a")
        held.hold()
        assert removal.result()
    assert run.is_dir() and not cache.remove_unused(run)


def test_what_cannot_be_locked_is_in_use(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = add("a").folder
    gc.collect()
    monkeypatch.setattr(Path, "open", raise_error(errno.EMFILE))
    assert not cache.remove_unused(run) and run.is_dir()


def raise_error(number: int) -> Any:
    def raise_it(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return raise_it


def test_remains_of_removals_and_of_earlier_versions_are_cleared(runs: Path) -> None:
    for folder in (runs / ".removed-x" / "run=a", runs.parent / ("0a" * 16), runs / "run=empty"):
        folder.mkdir(parents=True)
        if folder.name != "run=empty":
            (folder / "tables.arrow").write_bytes(b"12345")
    assert cache.clear_cache() == 10
    assert not list(runs.iterdir()) and not cache.list_entries()


def test_a_relative_and_an_absolute_folder_have_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "rank_0.json"
    file.write_bytes(b"{}")
    monkeypatch.chdir(tmp_path)
    assert cache.make_key([file], file.parent) == cache.make_key([Path("run/rank_0.json")], Path("run"))
