"""Columns read from the pages of a file are what SQLite's rows say, whatever else a table holds."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from etloom.core.errors import EtloomError
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
def test_rows_are_those_of_sqlite(tmp_path: Path, seed: int, odd: tuple[Any, ...]) -> None:
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


def test_row_numbers_out_of_order_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "file.db"
    write_table(path, [(10 + number, 20, 30) for number in range(6)])
    cell = b"\x07%c\x04\x01\x01\x01\x0c"  # size, row number, and the head of the record of the third row
    content = path.read_bytes()
    assert content.count(cell % 3) == 1
    path.write_bytes(content.replace(cell % 3, cell % 1))
    with SqliteFile.open(path) as source:
        assert sorted(source.read_table("t", COLUMNS)["a"]) == [10, 11, 12, 13, 14, 15]


MIXED = {"id": pl.Int64, "text": pl.String, "value": pl.Float64, "data": pl.Binary, "added": pl.Int64}
MIXED_DEFINITION = "(id INTEGER PRIMARY KEY, text, value REAL, data TEXT)"
FORMS: dict[str, tuple[str, str, bool]] = {
    "usual": (MIXED_DEFINITION, "ALTER TABLE t ADD added", True),
    "small pages": (MIXED_DEFINITION, "ALTER TABLE t ADD added", True),
    "UTF-16": (MIXED_DEFINITION, "ALTER TABLE t ADD added", False),
    "a default value": (MIXED_DEFINITION, "ALTER TABLE t ADD added DEFAULT 7", False),
    "a computed column": (f"{MIXED_DEFINITION[:-1]}, more AS (id + 1))", "ALTER TABLE t ADD added", False),
    "a descending key": (MIXED_DEFINITION.replace("KEY", "KEY DESC"), "ALTER TABLE t ADD added", False),
    "no row numbers": (f"{MIXED_DEFINITION} WITHOUT ROWID", "ALTER TABLE t ADD added", False),
}
"""Form of a file -> its table, how a column is added to it, and whether its pages are read."""


def write_mixed(path: Path, form: str, seed: int = 0) -> None:
    definition, addition, _ = FORMS[form]
    rng = random.Random(seed)
    texts = ("aten::mm", "é" * 700, "x" * 5000, "a\0b", "", None, 5, b"b", r"\u0041")
    values = (1.5, -2, 3.0, 1e300, None, "text")
    blobs = (None, b"\0\xff", "text", b"z" * 3000)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA page_size = {512 if form == 'small pages' else 4096}")
        db.execute(f"PRAGMA encoding = '{'UTF-16' if form == 'UTF-16' else 'UTF-8'}'")
        db.execute(f"CREATE TABLE t {definition}")
        numbers = sorted(rng.sample(range(-100, 1 << 40), 400))
        for number in numbers[:300]:
            row = (number, *(rng.choice(choices) for choices in (texts, values, blobs)))
            db.execute("INSERT INTO t (id, text, value, data) VALUES (?, ?, ?, ?)", row)
        db.execute(addition)
        db.executemany(
            "INSERT INTO t (id, added) VALUES (?, ?)", [(number, -number) for number in numbers[300:]]
        )
        db.commit()


def read_both(path: Path) -> tuple[pl.DataFrame | None, pl.DataFrame, list[tuple[str, int]]]:
    """Return what the pages hold and what SQLite says, with the numbers of values of a wrong type."""
    with SqliteFile.open(path) as source:
        if not MIXED.keys() <= source.tables.get("t", frozenset()):
            return None, pl.DataFrame(), []
        pages = source._read_pages("t", MIXED)
        counts = [(stat.name, stat.count) for stat in source.stats]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "_layouts", {})
            rows = source.read_table("t", MIXED)
    return pages, rows, counts


@pytest.mark.parametrize("form", FORMS)
def test_pages_hold_what_sqlite_says(tmp_path: Path, form: str) -> None:
    write_mixed(tmp_path / "file.db", form)
    pages, rows, counts = read_both(tmp_path / "file.db")
    assert rows.height == 400
    assert (pages is not None) == FORMS[form][2]
    if pages is not None:
        assert pages.equals(rows)
        assert [name for name, _ in counts] == ["read.wrong_type"]


@pytest.mark.slow
def test_damaged_pages_hold_what_sqlite_says_or_are_left_to_it(tmp_path: Path) -> None:
    path, rng, read = tmp_path / "file.db", random.Random(5), 0
    write_mixed(path, "small pages")
    content = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(content[: rng.choice((len(content), rng.randrange(len(content))))])
        for _ in range(rng.randrange(1, 8)):
            damaged[rng.randrange(100, max(101, len(damaged)))] = (
                rng.randrange(256) if len(damaged) > 101 else 0
            )
        path.write_bytes(damaged)
        with suppress(EtloomError):
            pages, rows, _ = read_both(path)
            read += pages is not None
            assert pages is None or pages.equals(rows)
    assert read > 30


def test_rows_that_overlap_in_a_page_are_left_to_sqlite(tmp_path: Path) -> None:
    """Otherwise each of thousands of rows could claim the same page as its text."""
    path = tmp_path / "file.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA page_size = 4096")
        db.execute("CREATE TABLE t(a TEXT)")
        db.executemany("INSERT INTO t VALUES (?)", [("x" * 900,), ("y" * 900,)])
        db.commit()
    content = bytearray(path.read_bytes())
    page = content[4096:8192]
    first = int.from_bytes(page[8:10], "big")
    rows = [(number, first - 6 * number) for number in range(1, 6)]
    for number, at in rows:  # each claims 2,000 bytes from where it begins
        page[at - 2000 : at - 1994] = bytes([0x8F, 0x50, number, 3, 0x9F, 0x1D])
        page[8 + 2 * number - 2 : 8 + 2 * number] = (at - 2000).to_bytes(2, "big")
    page[3:5] = len(rows).to_bytes(2, "big")
    content[4096:8192] = page
    path.write_bytes(content)
    with SqliteFile.open(path) as source:
        assert source._read_pages("t", {"a": pl.String}) is None


def test_a_path_may_be_any_bytes(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"\xff.db"))
    with closing(sqlite3.connect(os.fsencode(path))) as db:
        db.execute("CREATE TABLE t(a INTEGER)")
        db.execute("INSERT INTO t VALUES (7)")
        db.commit()
    with SqliteFile.open(path) as source:
        assert source.read_table("t", {"a": pl.Int64})["a"].to_list() == [7]


def test_only_bytes_are_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "file.db")) as db:
        db.execute("CREATE TABLE t(a TEXT, b BLOB)")
        db.executemany("INSERT INTO t VALUES (?, ?)", [(b"\xff", None), (None, None)])
        db.commit()
    with SqliteFile.open(tmp_path / "file.db") as source:
        table = source.read_table("t", {"a": pl.Binary, "b": pl.Binary})
    assert table.rows() == [(b"\xff", None), (None, None)]


def test_an_odd_list_of_tables_is_read_without_what_is_odd(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "file.db")) as db:
        db.execute("CREATE TABLE t(a INTEGER)")
        db.execute("CREATE TABLE u(a INTEGER)")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET rootpage = CAST('2' AS BLOB) WHERE name = 't'")
        db.commit()
    with SqliteFile.open(tmp_path / "file.db") as source:
        assert set(source.tables) == {"u"}


@pytest.mark.parametrize("dtype", [pl.Int64, pl.Float64])
def test_whole_numbers_in_a_column_of_reals(tmp_path: Path, dtype: type[pl.DataType]) -> None:
    with closing(sqlite3.connect(tmp_path / "file.db")) as db:
        db.execute("CREATE TABLE t(a DOUBLE)")
        db.execute("INSERT INTO t VALUES (5)")
        db.commit()
    with SqliteFile.open(tmp_path / "file.db") as source:
        read = source.read_table("t", {"a": dtype})["a"].to_list()
        assert read == pl.concat(source.query("t", 'SELECT "a" FROM t', {"a": dtype}))["a"].to_list()
