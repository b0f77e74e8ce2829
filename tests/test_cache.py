"""The cache gives back what was kept, forgets what changed, and never grows past its limit."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

from etloom import cache
from etloom.trace import Trace


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
    for number, key in enumerate("abc"):
        cache.keep(key, trace())
        os.utime(own_folder / key / "meta.json", (number, number))
    cache.load("a")
    size = sum(file.stat().st_size for file in (own_folder / "a").iterdir())
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", str(size * 3))
    cache.keep("d", trace())
    assert sorted(entry.name for entry in own_folder.iterdir()) == ["a", "c", "d"]
    assert cache.clear() >= size * 3
    assert list(own_folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", "/proc/no-such-place")
    cache.keep("k", trace())
    assert cache.load("k") is None
