"""Columns of integers read as lines are what SQLite's rows say, whatever else a table holds."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from etloom.formats.io import sqlite_file
from etloom.formats.io.sqlite_file import SqliteFile, int_columns

COLUMNS = int_columns("a b c")
ODD: tuple[Any, ...] = ("x", "1,2", "1\n2,3,4", ",,\n", '"', "", 1.5, b"\xff\x00", "9" * 40, "\n")


def write_table(path: Path, rows: list[tuple[Any, ...]], definition: str = "(a, b, c)") -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE TABLE t {definition}")
        db.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(rows[0]))})", rows)
        db.commit()


@pytest.mark.parametrize("odd", [(), ODD], ids=["integers", "odd values"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_sqlite(
    tmp_path: Path, seed: int, odd: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "_ROWS", 7)
    rng = random.Random(seed)
    values = (0, 1, -5, (1 << 63) - 1, -(1 << 63), None, *(odd if seed else ()))
    rows = [tuple(rng.choice(values) for _ in range(3)) for _ in range(50)]
    write_table(tmp_path / "file.db", rows)
    with SqliteFile.open(tmp_path / "file.db") as source:
        frame = source.read_table("t", COLUMNS)
        wrong = sum(stat.count for stat in source.stats if stat.name == "read.wrong_type")
    assert frame.rows() == [tuple(v if isinstance(v, int) else None for v in row) for row in rows]
    assert wrong == sum(not isinstance(v, int) and v is not None for row in rows for v in row)


@pytest.mark.parametrize(
    "definition", ["(a INTEGER PRIMARY KEY, b, c) WITHOUT ROWID", "(a, b, c, rowid, oid)", "(a, b, c)"]
)
def test_tables_without_usable_row_numbers_are_read_too(tmp_path: Path, definition: str) -> None:
    rows = [(number, 2 * number, None) for number in range(500)]
    more = 2 if "oid" in definition and "WITHOUT" not in definition else 0
    write_table(tmp_path / "file.db", [row + (1,) * more for row in rows], definition)
    with SqliteFile.open(tmp_path / "file.db") as source:
        assert source.read_table("t", COLUMNS).rows() == rows


def test_row_numbers_out_of_order_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading on from the last row misses rows, or finds earlier ones again."""
    monkeypatch.setattr(sqlite_file, "_ROWS", 1)
    path = tmp_path / "file.db"
    write_table(path, [(10 + number, 20, 30) for number in range(6)])
    cell = b"\x07%c\x04\x01\x01\x01\x0c"  # size, row number, and the head of the record of the third row
    content = path.read_bytes()
    assert content.count(cell % 3) == 1
    path.write_bytes(content.replace(cell % 3, cell % 1))
    with SqliteFile.open(path) as source:
        assert sorted(source.read_table("t", COLUMNS)["a"]) == [10, 11, 12, 13, 14, 15]
