"""The cache gives back what was kept, forgets what changed, and never grows past its limit."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

from etloom import cache
from etloom.trace import Job, Trace


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trace(rows: int = 3) -> Trace:
    return Trace({"events": pl.DataFrame({"id": range(rows), "ts": range(rows)})}, {"rank": 7})


def test_gives_back_what_was_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("x")
    key = cache.key_of([file], iterations="best")
    assert cache.load(key) is None
    cache.keep(key, trace())
    again = cache.load(key)
    assert again is not None
    assert again.rank == 7
    assert again.events.equals(trace().events)


def test_a_changed_file_another_option_or_a_missing_file_is_another_key(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("x")
    first = cache.key_of([file], iterations="best")
    assert cache.key_of([file], iterations="all") != first
    os.utime(file, ns=(1, 1))
    assert cache.key_of([file], iterations="best") != first
    assert cache.key_of([tmp_path / "none"]) is None
    assert cache.key_of([tmp_path]) is None


def test_a_damaged_entry_is_none_and_removed(tmp_path: Path, own_folder: Path) -> None:
    cache.keep("k", trace())
    (own_folder / "k" / "events.parquet").write_bytes(b"PAR1 damaged")
    assert cache.load("k") is None
    assert not (own_folder / "k").exists()


def test_the_entries_used_longest_ago_go_first(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate(("a" * 32, "b" * 32, "c" * 32)):
        cache.keep(key, trace())
        os.utime(own_folder / key / "meta.json", (number, number))
    cache.load("a" * 32)
    size = sum(file.stat().st_size for file in (own_folder / ("a" * 32)).iterdir())
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", str(size * 3))
    cache.keep("d" * 32, trace())
    assert sorted(entry.name for entry in own_folder.iterdir()) == ["a" * 32, "c" * 32, "d" * 32]
    assert cache.clear() >= size * 3
    assert list(own_folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", "/proc/no-such-place")
    cache.keep("k", trace())
    assert cache.load("k") is None


def test_what_is_no_entry_is_never_removed(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.keep("a" * 32, trace())
    (own_folder / ("a" * 32)).rename(own_folder / "my run")
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "0")
    cache.keep("b" * 32, trace())
    assert cache.clear() == 0
    assert [entry.name for entry in own_folder.iterdir()] == ["my run"]


@pytest.mark.parametrize("replaced", [False, True])
def test_an_entry_that_goes_while_it_is_read_is_none(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    key = "a" * 32
    cache.keep(key, trace())
    read = cache.reader.read

    def slow(entry: Path) -> Trace | Job:
        moved = entry.rename(own_folder / "moved")
        (moved / "events.parquet").unlink()
        found = read(moved)
        if replaced:
            cache.keep(key, trace())
        return found

    monkeypatch.setattr(cache.reader, "read", slow)
    assert cache.load(key) is None
