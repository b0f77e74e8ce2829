"""The declared columns are the columns: of the tables, of every Trace, of what the documentation says."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.schema import SEVERITIES, TABLES, parse_distinct
from etloom.core.trace import Trace


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_declared_completely(name: str) -> None:
    table = TABLES[name]
    assert table.name == name
    assert table.meaning.strip().endswith(".")
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    for column in table.columns:
        assert column.meaning.strip(), column
        assert pl.Series([], dtype=column.dtype).dtype == column.dtype
        assert table[column.name] is column
        if column.refers:
            assert column.dtype == pl.UInt32, f"{name}.{column.name}: a foreign key has the type of an id"
            assert "id" in TABLES[column.refers].schema, f"{name}.{column.name} refers to a table without id"
    assert dict(table.empty().schema) == table.schema
    assert table.empty().height == 0


def test_times_are_whole_nanoseconds() -> None:
    times = [
        (name, column) for name, table in TABLES.items() for column in table.columns if column.unit == "ns"
    ]
    assert {("events", "ts"), ("events", "dur"), ("memory", "ts"), ("counters", "ts"), ("flows", "ts")} <= {
        (name, column.name) for name, column in times
    }
    assert all(column.dtype == pl.Int64 for _, column in times)


def test_conform_puts_columns_in_order_and_fills_absent_ones_with_null() -> None:
    frame = pl.DataFrame({"operator": [3], "launch": [1]})
    conformed = TABLES["launches"].conform(frame)
    assert dict(conformed.schema) == TABLES["launches"].schema
    assert conformed.rows() == [(1, None, 3, None)]
    assert TABLES["launches"].conform(conformed) is conformed


def test_conform_refuses_a_column_that_is_not_declared() -> None:
    with pytest.raises(ValueError, match=r"launches has no column \['speed'\]"):
        TABLES["launches"].conform(pl.DataFrame({"speed": [1]}))


def test_conform_refuses_a_cast_that_loses() -> None:
    with pytest.raises(pl.exceptions.PolarsError):
        TABLES["launches"].conform(pl.DataFrame({"launch": [-1]}))


def test_severities() -> None:
    assert SEVERITIES == ("info", "data_loss", "error")


def test_parse_distinct_works_out_each_text_once() -> None:
    seen: list[object] = []

    def product(shape: list[int]) -> int:
        seen.append(shape)
        return shape[0] * shape[1]

    texts = ["[2, 3]", None, "[2, 3]", "no json", "[4]", "[5, 6]", "7"]
    frame = pl.DataFrame({"dims": texts}, schema={"dims": pl.Categorical}).with_row_index("id")
    with pytest.raises(IndexError):
        parse_distinct(frame, "dims", product, pl.Int64)
    frame = frame.filter(pl.col("id") != 4)
    seen.clear()
    parsed = parse_distinct(frame, "dims", product, pl.Int64, alias="numel")
    assert parsed["numel"].to_list() == [6, None, 6, None, 30, None]
    assert parsed["id"].to_list() == frame["id"].to_list()
    assert parsed["dims"].cast(pl.String).to_list() == frame["dims"].cast(pl.String).to_list()
    assert sorted(map(str, seen)) == ["7", "[2, 3]", "[5, 6]"]


def test_parse_distinct_gives_nested_values_in_place_of_the_text() -> None:
    frame = pl.DataFrame({"x": [1, 2], "shape": ["[1, 2]", "[]"]})
    parsed = parse_distinct(frame, "shape", lambda value: value, pl.List(pl.Int64))
    assert parsed.rows() == [(1, [1, 2]), (2, [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "cpu/ddp_2/kineto_trace_0.json.gz", "cpu/ddp_2/torch_et_0.json.gz", "nccl_ddp/kineto_trace_0.json.gz",
        "critical_path/event_sync.json.gz", "et_schemas/1.0.2-chakra.0.0.4.json.gz", "chakra/chakra.0.et.gz",
    ],
)  # fmt: skip
def test_tables_that_are_read_match_their_schema(data: Path, file: str) -> None:
    trace = etloom.read(data / file)
    assert isinstance(trace, Trace)
    assert trace.tables
    for name, frame in trace.tables.items():
        assert list(frame.schema.items()) == list(TABLES[name].schema.items()), name
        if "id" in frame.columns:
            assert frame["id"].equals(pl.int_range(frame.height, dtype=pl.UInt32, eager=True).alias("id")), (
                name
            )
        for column in TABLES[name].columns:
            if column.refers and frame.height:
                there = trace.table(column.refers)["id"].implode()
                assert frame[column.name].drop_nulls().is_in(there).all(), f"{name}.{column.name}"
    assert set(trace.stats["severity"]) <= set(SEVERITIES)
