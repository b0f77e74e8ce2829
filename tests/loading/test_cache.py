"""The cache gives back what was kept, forgets what changed, and never grows past its limit."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import tempfile
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
from etloom.loading import cache, executor, plan, rank_stores
from support import small_traces


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trace(rows: int = 3) -> Trace:
    return Trace({"events": pl.DataFrame({"id": range(rows), "ts": range(rows)})}, {"rank": 7})


def test_cached_tables_are_returned(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("x")
    key = cache.entry_key([file], iterations="best")
    assert cache.load_entry(key) is None
    cache.store_entry(key, trace())
    again = cache.load_entry(key)
    assert again is not None
    assert again.rank == 7
    assert again.events.equals(trace().events)


def test_a_changed_file_another_option_or_a_missing_file_is_another_key(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("x")
    first = cache.entry_key([file], iterations="best")
    assert cache.entry_key([file], iterations="all") != first
    os.utime(file, ns=(1, 1))
    assert cache.entry_key([file], iterations="best") != first
    assert cache.entry_key([tmp_path / "none"]) is None
    assert cache.entry_key([tmp_path]) is None


@pytest.mark.parametrize("file", ["tables.arrow", "events.parquet"])
def test_a_damaged_entry_is_none_and_removed(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    if file == "events.parquet":  # as the entries of large traces
        monkeypatch.setattr(cache.writer, "_MAX_PACKED_BYTES", -1)
    cache.store_entry("k", trace())
    (own_folder / "k" / file).write_bytes(b"PAR1 damaged")
    assert cache.load_entry("k") is None
    assert not (own_folder / "k").exists()


def test_the_entries_used_longest_ago_go_first(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate(("a" * 32, "b" * 32, "c" * 32)):
        cache.store_entry(key, trace())
        os.utime(own_folder / key / "meta.json", (number, number))
    cache.load_entry("a" * 32)
    size = sum(file.stat().st_size for file in (own_folder / ("a" * 32)).iterdir())
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", str(size * 3))
    cache.store_entry("d" * 32, trace())
    assert sorted(entry.name for entry in own_folder.iterdir()) == ["a" * 32, "c" * 32, "d" * 32]
    assert cache.clear_cache() >= size * 3
    assert list(own_folder.iterdir()) == []


def test_an_unwritable_folder_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", "/proc/no-such-place")
    cache.store_entry("k", trace())
    assert cache.load_entry("k") is None


def test_other_files_are_never_removed(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store_entry("a" * 32, trace())
    (own_folder / ("a" * 32)).rename(own_folder / "my run")
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "0")
    cache.store_entry("b" * 32, trace())
    assert cache.clear_cache() == 0
    assert [entry.name for entry in own_folder.iterdir()] == ["my run"]


def test_old_scratch_of_killed_processes_is_removed(own_folder: Path) -> None:
    for name, age in ((f".{'a' * 32}.12345678", 10**5), (f".{'b' * 32}.12345678", 0), (".other", 10**5)):
        (own_folder / name).mkdir(parents=True)
        os.utime(own_folder / name, (time.time() - age,) * 2)
    cache.clear_cache()
    assert {entry.name for entry in own_folder.iterdir()} == {f".{'b' * 32}.12345678", ".other"}


@pytest.mark.parametrize("replaced", [False, True])
def test_an_entry_removed_while_it_is_read_is_none(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(cache.writer, "_MAX_PACKED_BYTES", -1)
    key = "a" * 32
    cache.store_entry(key, trace())
    read = cache.reader.read

    def slow(entry: Path, **options: Any) -> Trace | Job:
        moved = entry.rename(own_folder / "moved")
        (moved / "events.parquet").unlink()
        content = read(moved, **options)
        if replaced:
            cache.store_entry(key, trace())
        return content

    monkeypatch.setattr(cache.reader, "read", slow)
    assert cache.load_entry(key) is None


def opened(key: str) -> Trace:
    """The entry of that key, made where it is not there, its tables left on disk."""
    return cache.open_or_create([key], lambda folder: cache.writer.write(trace(), folder))


@pytest.mark.slow
def test_open_entries_are_not_removed(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, done = ("a" * 32, "b" * 32, "c" * 32)
    cache.store_entry(there, trace())
    cache.store_entry(done, trace())
    ours = opened(here)
    code = f"from etloom.loading import cache; kept = cache.open_entry({there!r}); print(kept, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert "on disk" in other.stdout.readline()
        cache._prune(0)
        assert sorted(entry.name for entry in own_folder.glob("[!.]*")) == [here, there]
        assert ours.events.height == 3
        other.kill()
    del ours
    gc.collect()
    cache._prune(0)
    assert list(own_folder.glob("[!.]*")) == []
    assert len(list(own_folder.iterdir())) == 1  # what this process has open; that of the killed one went


@pytest.mark.slow
def test_threads_open_entries_while_others_are_removed(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "20000")

    def use(number: int) -> int:
        return sum(opened(f"{number}{turn}".rjust(32, "0")).events.height for turn in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use, range(1, 9))) == [60] * 8
    gc.collect()
    cache._prune(0)
    assert cache.get_usage(own_folder).in_use == 0
    assert list(own_folder.glob("[!.]*")) == []


@pytest.mark.slow
def test_a_full_disk_is_not_an_error_and_two_full_disks_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        if tmp_path in folder.parents:
            raise pl.exceptions.ComputeError("No space left on device (os error 28)")
        cache.writer.write(trace(), folder)

    (tmp_path / "temporary").mkdir()
    assert cache.open_or_create(["a" * 32], full).events.height == 3
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(ReadError, match="temporary: cannot write the tables of a trace: No space left"):
        cache.open_or_create(["a" * 32], full)
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setattr(cache.writer, "write", lambda _, folder, packs: full(folder))
    cache.store_entry("b" * 32, trace())
    assert cache.load_entry("b" * 32) is None


def test_names_that_look_like_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "[lr=1]*?"))
    cache.store_entry("a" * 32, trace())
    again = cache.load_entry("a" * 32)
    assert again is not None
    assert again.events.equals(trace().events)
    assert opened("b" * 32).events.height == 3


@pytest.mark.slow
def test_ranks_of_a_large_run_are_cached_though_each_is_quick_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes a tenth of a second: two of them are read again, eight are not."""
    clock = itertools.count()
    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: next(clock) / 10))
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    few, many = (small_traces.write_run(tmp_path / f"x{count}", tuple(range(count))) for count in (2, 8))
    before = {path: etloom.open(path, jobs=1) for path in (few, many)}
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 8
    monkeypatch.setattr(executor.file_reading, "read_file", lambda *_: pytest.fail("a file was read again"))
    again = etloom.open(many, jobs=1)
    for rank, trace in before[many].items():
        assert_frame_equal(again[rank].events, trace.events, categorical_as_str=True)


def test_entries_belong_to_the_code_that_computed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("{}")
    key = cache.entry_key([file])
    assert key == cache.entry_key([file])
    monkeypatch.setattr(cache, "compute_code_digest", lambda: "other code")
    assert cache.entry_key([file]) != key


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "ETLOOM_CACHE"])
def test_only_the_user_reads_the_cache_unless_its_place_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    monkeypatch.delenv("ETLOOM_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    trace = etloom.open(run, use_cache=False)[0]
    cache.store_entry("0" * 32, trace)
    folder = cache.cache_folder()
    assert cache.load_entry("0" * 32) is not None
    assert (folder.stat().st_mode & 0o077 == 0) == (variable == "XDG_CACHE_HOME")


def test_a_small_run_is_read_again_instead_of_cached(
    tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_stores, "MIN_SECONDS_TO_CACHE", -1)
    run = small_traces.write_run(tmp_path / "run")
    etloom.open(run)
    assert not list(own_folder.glob("*/meta.json"))
    monkeypatch.setattr(plan, "MIN_TEXT_BYTES_TO_CACHE", 1)
    etloom.open(run)
    assert list(own_folder.glob("*/meta.json"))


def test_small_files_that_python_reads_are_cached(
    tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch, own: Path
) -> None:
    monkeypatch.setattr(rank_stores, "MIN_SECONDS_TO_CACHE", -1)
    dump = next(iter(sorted((own / "flight_recorder").glob("nccl*"))))
    file = tmp_path / "dump_0.json"
    file.write_bytes(dump.read_bytes())
    etloom.open(file)
    assert list(own_folder.glob("*/meta.json"))
