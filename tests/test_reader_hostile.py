"""What a stranger's file can hold: it costs what is damaged, is counted, and neither time nor the process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.trace import Trace

EVENT = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":2,"ts":10,"dur":5}'
LAUNCHED = EVENT.replace('"dur":5', '"dur":5,"args":{"Record function id":1}').join("[]")
NODE = (
    '{"id":%d,"name":"a","ctrl_deps":1,"inputs":{"values":[],"shapes":[],"types":[]},'
    '"outputs":{"values":[],"shapes":[],"types":[]},"attrs":[{"name":"rf_id","type":"uint64","value":%s}]}'
)


def read(folder: Path, text: str, format: str = "kineto") -> Trace:
    path = folder / "trace.json"
    path.write_text(text)
    trace = etloom.read(path, format)
    assert isinstance(trace, Trace)
    return trace


def counts(trace: Trace) -> dict[str, int]:
    return dict(trace.stats.select("name", "count").iter_rows())


@pytest.mark.parametrize("behind", [" garbage", '{"traceEvents":[]}'])
def test_bytes_behind_a_short_document_are_counted(tmp_path: Path, behind: str) -> None:
    trace = read(tmp_path, f'{{"traceEvents":[{EVENT}]}}{behind}\n')
    assert trace.events.height == 1
    assert counts(trace)["read.trailing_bytes"] == len(behind.lstrip()) + 1


def test_counters_and_metadata_without_args_are_counted(tmp_path: Path) -> None:
    rows = [
        EVENT,
        '{"ph":"C","name":"c","ts":1}',
        '{"ph":"C","name":"c","ts":1,"args":{}}',
        '{"ph":"M","name":"m"}',
    ]
    found = counts(read(tmp_path, f'{{"traceEvents":[{",".join(rows)}]}}'))
    assert (found["read.odd_counter"], found["read.no_metadata"]) == (2, 1)


def test_times_with_an_exponent_are_exact(tmp_path: Path) -> None:
    rows = (
        '{"ph":"X","name":"a","ts":1.7000000000001234e+15,"dur":1.2345e-05},'
        '{"ph":"X","name":"b","ts":2e15,"dur":12345e-4}'
    )
    assert read(tmp_path, f"[{rows}]").events.select("ts", "dur").rows() == [
        (1_700_000_000_000_123_400, 0),
        (2_000_000_000_000_000_000, 1235),
    ]


def test_times_that_cannot_be_added_are_counted(tmp_path: Path) -> None:
    rows = '{"ph":"X","name":"a","ts":9e15,"dur":1}, {"ph":"X","name":"b","ts":1,"dur":9e15}'
    trace = read(tmp_path, f"[{rows}]")
    assert trace.events.select("ts", "dur").rows() == [(1000, None)]
    assert counts(trace) == {"read.no_time": 1, "read.odd_duration": 1, "read.events": 2}


@pytest.mark.parametrize("base", ["9223372036854775807", "99999999999999999999999", '"x"', "1e400"])
def test_a_base_that_is_no_time_is_counted(tmp_path: Path, base: str) -> None:
    trace = read(tmp_path, f'{{"baseTimeNanoseconds":{base},"traceEvents":[{EVENT}]}}')
    assert trace.events["ts"].to_list() == [10_000]
    assert counts(trace)["read.odd_base"] == 1


def test_args_that_are_no_json_do_not_spoil_an_export(tmp_path: Path) -> None:
    event = '{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"pid":1,"tid":1,"beside":inf,"args":{"x":%s}}'
    trace = read(tmp_path, f"[{event % 'NaN'},{event % '[bar]'}]")
    texts = trace.events["args"].to_list()
    assert json.loads(texts[0]) == {".beside": "inf", "x": "NaN"}
    assert texts[1] is None
    assert counts(trace)["read.odd_json"] == 1
    etloom.export(trace, tmp_path / "out.json", "chrome")
    assert len(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) >= 2


def test_deep_and_huge_metadata(tmp_path: Path) -> None:
    deep = f'{{"ph":"M","name":"process_name","pid":1,"args":{{"name":{"[" * 20000}{"]" * 20000}}}}}'
    huge = f'{{"ph":"M","name":"process_sort_index","pid":1,"args":{{"sort_index":{10**20}}}}}'
    trace = read(tmp_path, f"[{EVENT},{deep},{huge}]")
    assert counts(trace)["read.odd_json"] == 1
    assert trace.table("threads")["sort_index"].to_list() == [None]


def test_attributes_written_otherwise_than_in_the_node_before(tmp_path: Path) -> None:
    nodes = [NODE % (1, "1"), NODE % (2, " 2"), NODE % (3, '3,"more":1'), NODE % (4, "4")]
    trace = read(
        tmp_path, f'{{"schema":"1.1.1-chakra.0.0.4","pid":1,"nodes":[{",".join(nodes)}]}}', "execution_trace"
    )
    assert trace.nodes["rf_id"].to_list() == [1, 2, 3, 4]
    assert "read.damaged" not in counts(trace)


def test_a_type_nested_too_deep_ends_no_process(tmp_path: Path) -> None:
    deep = "GenericList[" * 100_000 + "Tensor(float)" + "]" * 100_000
    node = (NODE % (1, "1")).replace(
        '"inputs":{"values":[],"shapes":[],"types":[]}',
        f'"inputs":{{"values":[7],"shapes":[[]],"types":["{deep}"]}}',
    )
    trace = read(tmp_path, f'{{"schema":"1.1.1-chakra.0.0.4","pid":1,"nodes":[{node}]}}', "execution_trace")
    assert trace.nodes["inputs"].to_list() == ["[7]"]


@pytest.mark.parametrize("piece", ['{"ph":{},', "0,"])
def test_damage_alone_takes_no_quadratic_time(tmp_path: Path, piece: str) -> None:
    pieces = 100_000
    start = time.monotonic()
    trace = read(tmp_path, f'{{"traceEvents":[{EVENT},{piece * pieces}')
    assert counts(trace)["read.damaged"] == pieces
    assert trace.events.height == 1
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("stray", ["}", "}}}", ":", "}1", '}"', "}\x01"])
def test_a_stray_brace_costs_no_event_and_ends(tmp_path: Path, stray: str) -> None:
    trace = read(tmp_path, f'{{"traceEvents":[{EVENT}{stray},{EVENT},{EVENT}{stray}]}}')
    assert trace.events.height == 3
    assert counts(trace)["read.damaged"] >= 2


@pytest.mark.parametrize(
    ("value", "read_as"),
    [
        ("-inf", ["-inf"]),
        ("[nan, 1.5, true]", [["nan", 1.5, True]]),
        ("bare", None),
        (r'"\q"', None),
        ("[" * 3000 + "]" * 3000, None),
    ],
)
def test_values_of_operators_are_json(tmp_path: Path, value: str, read_as: Any) -> None:
    """PyTorch writes -inf as it is, as in masked_fill of every attention layer."""
    node = (NODE % (1, "1")).replace(
        '"inputs":{"values":[],"shapes":[],"types":[]}',
        f'"inputs":{{"values":[{value}],"shapes":[[]],"types":["Double"]}}',
    )
    trace = read(tmp_path, f'{{"schema":"1.1.1-chakra.0.0.4","pid":1,"nodes":[{node}]}}', "execution_trace")
    text = trace.nodes["inputs"][0]
    assert (None if text is None else json.loads(text)) == read_as
    assert counts(trace).get("read.odd_json", 0) == (read_as is None)
    etloom.export(etloom.link(trace, read(tmp_path, LAUNCHED)), tmp_path / "out.json", "etplus")


@pytest.mark.parametrize("list_of", ["values", "types", "shapes"])
def test_a_list_with_a_stray_bracket_ends(tmp_path: Path, list_of: str) -> None:
    lists = {"values": "[[1,1,0,4,4,0]]", "types": '["Tensor(float)"]', "shapes": "[[2]]"}
    lists[list_of] = lists[list_of][:-1] + ',x"]}"]'
    inputs = ",".join(f'"{name}":{text}' for name, text in lists.items())
    node = (NODE % (1, "1")).replace('"values":[],"shapes":[],"types":[]', inputs, 1)
    trace = read(
        tmp_path, f'{{"schema":"1.1.1-chakra.0.0.4","nodes":[{node},{NODE % (2, 2)}]}}', "execution_trace"
    )
    assert 2 in trace.nodes["et_id"].to_list()
