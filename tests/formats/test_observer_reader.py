"""The reader of an observer's file on files that no observer wrote: built by hand, cut, damaged, lying."""

from __future__ import annotations

import struct
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError, ReadError
from etloom.formats import observer
from etloom.formats.observer import arguments
from support.examples import examples
from support.observer_files import (
    CHUNK,
    DICTIONARY,
    EVENTS,
    FILE,
    HALF,
    TENSOR,
    begin,
    chunk,
    define,
    record,
    whole,
)


def read(tmp_path: Path, data: bytes) -> etloom.Trace:
    path = tmp_path / "observer_0.etob"
    path.write_bytes(data)
    return etloom.read(path)


def stat(trace: etloom.Trace, name: str) -> int:
    return int(trace.stats.filter(pl.col("name") == name)["count"].sum())


def test_content_of_the_file(tmp_path: Path) -> None:
    trace = read(tmp_path, FILE)
    assert trace.events.select("name", "ts", "dur", "tid", "rf_id").rows() == [
        ("aten::add", 1100, 100, 77, 10),
        ("aten::add", 1110, 40, 77, 11),
        ("aten::add", 1210, None, 77, 12),
    ]
    operators = trace.nodes.filter(pl.col("rf_id").is_not_null())
    assert operators.select("et_id", "recorded_parent", "op_schema", "inputs", "attrs").rows() == [
        (3, 2, "aten::add.Tensor(Tensor self) -> Tensor", "[null, 0.5, -3]", '{"raised": true}'),
        (4, 3, "aten::add.Tensor(Tensor self) -> Tensor", "[]", None),
        (5, 2, "aten::add.Tensor(Tensor self) -> Tensor", "[]", None),
    ]
    assert operators["input_types"][0] == '["Tensor(float)", "Double", "Int"]'
    wanted = ["io", "tensor_id", "storage_id", "version", "offset", "numel", "shape", "dtype"]
    assert trace.tensors.select(wanted).rows() == [
        (0, 1, 3, 4, 0, 6, "[2, 3]", "float"),
        (1, 2, 4, 0, 6, 6, "[2, 3]", "float"),  # of an operator that was given nothing: a new storage
    ]
    assert stat(trace, "read.open_operators") == 1
    assert trace.stats.filter(pl.col("severity") != "info").is_empty()


def test_operators_of_several_forms_in_any_order(tmp_path: Path) -> None:
    """Each operator gets its own values, and of records with the same handle the first one counts."""
    two_tensors = define(3, 3, b"T\1\0\0\0T\1\0\0\0")
    later = b"".join(
        (
            begin(14, 500, form=3, words=(0xE0, 0xF0, 1, 0xE8, 0xF8, 2)),
            begin(13, 400, form=1, words=(*TENSOR, 0, 7)),
            begin(11, 200, form=1, words=(*TENSOR, HALF, 7)),
            record(2, 0, 0, 900, 14),
            record(2, 0, 0, 950, 99),
        )
    )
    earlier = b"".join(
        (
            begin(12, 300, form=1, words=(*TENSOR, HALF, -3)),
            begin(10, 100, form=3, words=(0xA8, 0xB8, 1, 0xA0, 0xB0, 2)),
            begin(11, 999),
            record(2, 0, 0, 250, 11),
            record(2, 0, 0, 290, 11),
        )
    )
    trace = read(
        tmp_path, whole(chunk(2, 0, DICTIONARY + two_tensors), chunk(1, 2, earlier), chunk(1, 1, later))
    )
    operators = trace.nodes.filter(pl.col("rf_id").is_not_null())
    assert operators.select("rf_id", "inputs").rows() == [
        (10, "[null, null]"),
        (11, "[null, 0.5, 7]"),
        (12, "[null, 0.5, -3]"),
        (13, "[null, 0.0, 7]"),
        (14, "[null, null]"),
    ]
    assert trace.events.select("ts", "dur").rows() == [
        (1100, None),
        (1200, 50),
        (1300, None),
        (1400, None),
        (1500, 400),
    ]
    assert trace.tensors.select("node", "index", "version").rows() == [
        (2, 0, 1),
        (2, 1, 2),
        (3, 0, 4),
        (4, 0, 4),
        (5, 0, 4),
        (6, 0, 1),
        (6, 1, 2),
    ]
    assert stat(trace, "read.duplicate_node_id") == 1 and stat(trace, "read.end_without_begin") == 1


def test_a_closed_chunk_with_a_wrong_sum_is_left_out(tmp_path: Path) -> None:
    damaged = bytearray(FILE)
    damaged[4096 + CHUNK + 64 + 9] ^= 1
    trace = read(tmp_path, bytes(damaged))
    assert trace.events.is_empty() and stat(trace, "read.damaged_chunk") == 1


def test_an_open_chunk_is_read_up_to_the_first_invalid_record(tmp_path: Path) -> None:
    lying = EVENTS + struct.pack("<BBHI", 1, 0, 4000, 0) + bytes(40)
    trace = read(tmp_path, whole(chunk(2, 0, DICTIONARY), chunk(1, 1, lying, closed=False)))
    assert trace.events.height == 3 and stat(trace, "read.damaged_record") == 1


def test_a_lost_dictionary_loses_names_and_no_times(tmp_path: Path) -> None:
    trace = read(tmp_path, whole(chunk(1, 1, EVENTS)))
    assert trace.events["dur"].to_list() == [100, 40, None]
    assert set(trace.nodes.filter(pl.col("rf_id").is_not_null())["name"]) == {"unknown"}
    assert stat(trace, "read.unnamed_operator") == 3 and stat(trace, "read.damaged_arguments") == 2


def test_parents_never_go_in_circles(tmp_path: Path) -> None:
    events = begin(10, 100, parent=11) + begin(11, 110, parent=10) + begin(12, 120, parent=12)
    trace = read(tmp_path, whole(chunk(2, 0, DICTIONARY), chunk(1, 1, events)))
    assert stat(trace, "read.missing_parent") == 2
    assert trace.nodes["recorded_parent"].to_list() == [1, 1, 2, 3, 2]


@pytest.mark.parametrize("kept", [5, 100, 4095])
def test_other_files_are_refused(tmp_path: Path, kept: int) -> None:
    with pytest.raises(ReadError):
        observer.read(_written(tmp_path, FILE[:5] + b"x" * kept))


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="version 2"):
        observer.read(_written(tmp_path, FILE[:8] + b"\2\0\0\0" + FILE[12:]))


def _written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(data)
    return path


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_gives_a_trace_or_one_line(tmp_path: Path, data: st.DataObject) -> None:
    # Open chunks have no sums, so what is damaged in them reaches the reader's later steps.
    source = bytearray(whole(chunk(2, 0, DICTIONARY, closed=False), chunk(1, 1, EVENTS, closed=False)))
    for _ in range(data.draw(st.integers(1, 6))):
        begins = data.draw(st.sampled_from([0, 4096, 4096 + 64, 4096 + CHUNK, 4096 + CHUNK + 64]))
        place = begins + data.draw(st.integers(0, 250))
        source[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(source)), st.integers(0, len(source))))
    try:
        trace = observer.read(_written(tmp_path, bytes(source[:cut])))
    except EtloomError:
        return
    assert trace.nodes["et_id"].n_unique() == trace.nodes.height
    assert (trace.nodes["parent"].drop_nulls() < trace.nodes.height).all()


@pytest.mark.parametrize(
    "code",
    [b"L\xff\xff\xff\xff", b"L\1\0\0\0" * 40 + b"i", b"T\1\0", b"?", b"L\2\0\0\0i", b"I\xff\xff\xff\x7f"],
)
def test_forms_that_cannot_be(code: bytes) -> None:
    with pytest.raises(arguments.DamagedForm):
        arguments.parse_form(code, {}, {})
