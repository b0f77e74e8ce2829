"""What a stranger's file can hold: it costs what is damaged, is counted, and neither time nor the process."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Trace
from fuzzing.seeds import execution_trace, gpu_document

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
    assert (found["read.no_counter"], found["read.empty_metadata"]) == (2, 1)


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
    assert counts(trace) == {"read.no_time": 1, "read.invalid_duration": 1, "read.events": 2}


@pytest.mark.parametrize("base", ["9223372036854775807", "99999999999999999999999", '"x"', "1e400"])
def test_an_invalid_base_time_is_counted(tmp_path: Path, base: str) -> None:
    trace = read(tmp_path, f'{{"baseTimeNanoseconds":{base},"traceEvents":[{EVENT}]}}')
    assert trace.events["ts"].to_list() == [10_000]
    assert counts(trace)["read.invalid_base"] == 1


def test_args_that_are_not_json_do_not_break_an_export(tmp_path: Path) -> None:
    event = '{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"pid":1,"tid":1,"beside":inf,"args":{"x":%s}}'
    trace = read(tmp_path, f"[{event % 'NaN'},{event % '[bar]'}]")
    texts = trace.events["args"].to_list()
    assert json.loads(texts[0]) == {".beside": "inf", "x": "NaN"}
    assert texts[1] is None
    assert counts(trace)["read.invalid_json"] == 1
    etloom.export(trace, tmp_path / "out.json", "chrome")
    assert len(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) >= 2


def test_deep_and_huge_metadata(tmp_path: Path) -> None:
    deep = f'{{"ph":"M","name":"process_name","pid":1,"args":{{"name":{"[" * 20000}{"]" * 20000}}}}}'
    huge = f'{{"ph":"M","name":"process_sort_index","pid":1,"args":{{"sort_index":{10**20}}}}}'
    trace = read(tmp_path, f"[{EVENT},{deep},{huge}]")
    assert counts(trace)["read.invalid_json"] == 1
    assert trace.table("threads")["sort_index"].to_list() == [None]


def test_attributes_written_otherwise_than_in_the_node_before(tmp_path: Path) -> None:
    nodes = [NODE % (1, "1"), NODE % (2, " 2"), NODE % (3, '3,"more":1'), NODE % (4, "4")]
    trace = read(
        tmp_path, f'{{"schema":"1.1.1-chakra.0.0.4","pid":1,"nodes":[{",".join(nodes)}]}}', "execution_trace"
    )
    assert trace.nodes["rf_id"].to_list() == [1, 2, 3, 4]
    assert "read.invalid_event" not in counts(trace)


@pytest.mark.parametrize("depth", [90, 200, 900, 1100])
@pytest.mark.parametrize("member", ["%s", '{"a": %s, "b": "\\ud800"}'])
def test_a_header_nested_deeply_costs_itself(depth: int, member: str, tmp_path: Path) -> None:
    value = member % ("[" * depth + '"\\udfff"' + "]" * depth)
    for text in (
        f'{{"time": {value}, "traceEvents": [{EVENT}]}}',
        f'{{"schema": "1.1.1", "time": {value}, "nodes": [{{"id": 1, "name": "a", "ctrl_deps": 0}}]}}',
    ):
        path = tmp_path / "trace.json"
        path.write_text(text)
        trace = etloom.read(path)
        assert isinstance(trace, Trace)
        assert "read.header" in trace.stats["name"].to_list() or depth < 100


def test_a_type_nested_too_deep_ends_no_process(tmp_path: Path) -> None:
    deep = "GenericList[" * 100_000 + "Tensor(float)" + "]" * 100_000
    node = (NODE % (1, "1")).replace(
        '"inputs":{"values":[],"shapes":[],"types":[]}',
        f'"inputs":{{"values":[7],"shapes":[[]],"types":["{deep}"]}}',
    )
    trace = read(tmp_path, f'{{"schema":"1.1.1-chakra.0.0.4","pid":1,"nodes":[{node}]}}', "execution_trace")
    assert trace.nodes["inputs"].to_list() == ["[7]"]


@pytest.mark.slow
@pytest.mark.parametrize("piece", ['{"ph":{},', "0,"])
def test_damage_does_not_take_quadratic_time(tmp_path: Path, piece: str) -> None:
    pieces = 100_000
    start = time.process_time()
    trace = read(tmp_path, f'{{"traceEvents":[{EVENT},{piece * pieces}')
    assert counts(trace)["read.invalid_event"] == pieces
    assert trace.events.height == 1
    assert time.process_time() - start < 10


@pytest.mark.parametrize("stray", ["}", "}}}", ":", "}1", '}"', "}\x01"])
def test_a_stray_brace_costs_no_event_and_ends(tmp_path: Path, stray: str) -> None:
    trace = read(tmp_path, f'{{"traceEvents":[{EVENT}{stray},{EVENT},{EVENT}{stray}]}}')
    assert trace.events.height == 3
    assert counts(trace)["read.invalid_event"] >= 2


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
    assert counts(trace).get("read.invalid_json", 0) == (read_as is None)
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


def node_with(**members: str) -> str:
    """A node whose members stand as given; the others are those of `NODE`."""
    node = {"id": "1", "name": '"a"', "ctrl_deps": "1", "inputs": "{}", "outputs": "{}", "attrs": "[]"}
    return "{" + ",".join(f'"{key}":{text}' for key, text in {**node, **members}.items()) + "}"


def read_nodes(folder: Path, *nodes: str) -> Trace:
    return read(folder, f'{{"schema":"1.1.1-chakra.0.0.4","nodes":[{",".join(nodes)}]}}', "execution_trace")


def test_metadata_without_a_track_is_kept(tmp_path: Path) -> None:
    rows = [
        '{"ph":"M","name":"process_name","pid":1,"args":{"name":"python"}}',
        '{"ph":"M","name":"process_uptime","pid":1,"args":{"seconds":7}}',
        '{"ph":"M","name":"thread_name","pid":1,"tid":2,"args":{"name":"main","more":1}}',
        '{"ph":"M","name":"thread_sort_index","pid":1,"tid":3,"args":{"sort_index":"x"}}',
        '{"ph":"M","args":{"name":"of whom?"}}',
    ]
    trace = read(tmp_path, f"[{EVENT},{','.join(rows)}]")
    assert trace.table("threads").select("pid", "tid", "name").rows() == [
        (1, None, "python"),
        (1, 2, "main"),
        (1, 3, None),
    ]
    kept = trace.meta["metadata_events"]
    assert [event["name"] for event in kept] == ["process_uptime", "thread_name", "thread_sort_index", None]
    assert kept[0] == {"name": "process_uptime", "pid": 1, "tid": None, "args": {"seconds": 7}}
    assert counts(trace)["read.other_metadata"] == 4


def test_a_track_id_may_be_text_or_a_number(tmp_path: Path) -> None:
    lanes = ["7", '"7"', '"stream 7"', '"stream\\u0020\\u0037"', "7.5", str(2**70), "null"]
    rows = ",".join(
        f'{{"ph":"i","name":"a","ts":{at},"pid":1,"tid":{lane}}}' for at, lane in enumerate(lanes)
    )
    trace = read(tmp_path, f"[{rows}]")
    tids = trace.events["tid"].to_list()
    assert tids[:2] == [7, 7]
    assert tids[2] == tids[3] < -(1 << 39)
    assert len(set(tids)) == 5
    assert tids[6] == -1
    assert counts(trace)["read.unexpected_type"] == 2  # a fraction and 71 bits, kept by name
    assert trace.table("threads")["name"].to_list() == ["stream 7", "7.5", str(2**70)]


def test_a_missing_name_is_null(tmp_path: Path) -> None:
    rows = '{"ph":"C","ts":1,"args":{"a":1}},{"ph":"X","ts":1,"dur":1},{"ph":"M","pid":1,"args":{"x":1}}'
    trace = read(tmp_path, f"[{rows}]")
    assert trace.table("counters")["name"].to_list() == [None]
    assert trace.events["name"].to_list() == [None]
    assert trace.meta["metadata_events"][0]["name"] is None
    nodes = read_nodes(tmp_path, NODE % (1, 1), node_with(id="2", name="null"), '{"id":3}')
    assert nodes.nodes["name"].to_list() == ["a", None, None]
    linked = etloom.link(nodes, read(tmp_path, LAUNCHED))
    etloom.export(linked, tmp_path / "out.json", "etplus")


@pytest.mark.parametrize(
    ("inputs", "lost"),
    [
        (
            '"values":[[7,8,0,64,4,"cpu"] [1,2,0,4,4,"cpu"]],"types":["Tensor(float)","Tensor(float)"]',
            "invalid_event",
        ),
        ('"values":[[7,8 0,64,4,"cpu"]],"types":["Tensor(float)"]', "invalid_tensor"),
        ('"values":[[7,8,0,64,4 "cpu"]],"types":["Tensor(float)"]', "invalid_event"),
        ('"values":[[7,8,0,64,4,"cpu"]],"shapes":[[1] [2]],"types":["Tensor(float)"]', "invalid_event"),
        ('"values":[1 2],"types":["Int","Int"]', "invalid_json"),
        ('"values":[1],"types":["Int" "Int"]', "invalid_json"),
    ],
)
def test_a_missing_comma_in_a_list_is_counted(tmp_path: Path, inputs: str, lost: str) -> None:
    trace = read_nodes(tmp_path, NODE % (1, 1), node_with(id="2", inputs=f"{{{inputs}}}"), NODE % (3, 3))
    assert [node for node in trace.nodes["et_id"] if node != 2] == [1, 3]
    assert (2 in trace.nodes["et_id"]) == (lost != "invalid_event")
    assert counts(trace)[f"read.{lost}"] == 1


@pytest.mark.parametrize("attrs", ["null", "5", '{"rf_id":1}', "[null]", '[{"name":"rf_id"}]'])
def test_attributes_of_another_kind_cost_no_node(tmp_path: Path, attrs: str) -> None:
    trace = read_nodes(tmp_path, node_with(id="1", attrs=attrs), NODE % (2, 2))
    assert trace.nodes["et_id"].to_list() == [1, 2]
    assert "read.invalid_event" not in counts(trace)
    assert counts(trace).get("read.unexpected_type", 0) == (attrs != "null")
    assert (trace.nodes["attrs"][0] is None) == (attrs == "null")


def test_flows_are_joined_by_text_too(tmp_path: Path) -> None:
    ids = ["5", '"5"', '"0xa"', '"0xa"', '"b"', str(2**64 - 1), "null"]
    rows = ",".join(f'{{"ph":"s","name":"a","ts":{at},"id":{name}}}' for at, name in enumerate(ids))
    trace = read(tmp_path, f"[{rows}]")
    flows = trace.table("flows")["flow"].to_list()
    assert flows[:2] == [5, 5]
    assert flows[2] == flows[3]
    assert len(set(flows)) == 5
    assert flows[6] is None
    assert (counts(trace)["read.text_flow_id"], counts(trace)["read.no_flow_id"]) == (4, 1)


def test_fields_of_instants_and_arrows_without_a_column_are_kept_or_counted(tmp_path: Path) -> None:
    rows = [
        EVENT,
        '{"ph":"i","name":"[memory]","ts":1,"args":{"Bytes":5}}',
        '{"ph":"i","name":"[memory]","ts":1,"args":{"Bytes":5,"Owner":"x"}}',
        '{"ph":"i","name":"[memory]","ts":1,"id":3,"dur":0,"args":{"Bytes":5,"stream":7,"finished":true}}',
        '{"ph":"s","name":"a","ts":1,"id":1,"args":{"x":1}}',
        '{"ph":"s","name":"a","ts":1,"id":1,"bp":"e"}',
        '{"ph":"C","name":"a","ts":1,"id":1,"args":{"x":1}}',
    ]
    trace = read(tmp_path, f"[{','.join(rows)}]")
    assert counts(trace)["read.unstored_args"] == 1
    assert trace.flows["args"].to_list() == ['{"x": 1}', None]
    memory = trace.table("memory")
    assert memory["bytes"].to_list() == [5, 5, 5]
    kept = [json.loads(args) if args else None for args in memory["args"]]
    assert kept == [None, {"Owner": "x"}, {"finished": True, "stream": 7, ".id": 3, ".dur": 0}]
    written = etloom.export(trace, tmp_path / "again.json")
    assert etloom.read(written).table("memory")["args"].to_list() == memory["args"].to_list()


def test_numbers_and_escapes_that_are_not_json_are_counted(tmp_path: Path) -> None:
    event = '{"ph":"X","name":"%s","ts":1,"dur":1,"args":{%s}}'
    rows = [
        event % ("a", '"x":NaN'),
        event % ("b", '"x":-Infinity,"y":inf'),
        event % ("c", '"Input Dims":[[inf]]'),
        event % ("d", r'"x":"\q"'),
        event % (r"e\q", ""),
        event % ("f", r'"Collective name":"\u12"'),
        event % (r"g\\q", r'"x":"\\q\n"'),
    ]
    trace = read(tmp_path, f"[{','.join(rows)}]")
    found = counts(trace)
    assert (found["read.nonfinite"], found["read.invalid_json"], found["read.invalid_escape"]) == (4, 1, 2)
    assert trace.events["name"].to_list() == ["a", "b", "c", "d", r"e\q", "f", r"g\q"]
    assert trace.table("arguments")["dims"].to_list() == [None] and found["read.wrong_type"] == 1


def test_a_counter_event_of_which_a_sample_is_read_is_read(tmp_path: Path) -> None:
    rows = [
        '{"ph":"C","name":"c","ts":1,"args":{"a":1,"b":"x","c":3}}',
        '{"ph":"C","name":"c","ts":1,"args":{"b":"x"}}',
        '{"ph":"C","name":"c","ts":"soon","args":{"b":1}}',
    ]
    trace = read(tmp_path, f"[{','.join(rows)}]")
    found = counts(trace)
    assert (found["read.counter_events"], found["read.no_counter"], found["read.invalid_counter"]) == (
        1,
        2,
        3,
    )
    assert trace.table("counters")["value"].to_list() == [1, 3]


DAMAGED_EVENTS = {
    "NaN": ('"ts":NaN', "no_time", 1),
    "inf": ('"ts":1,"dur":inf', "invalid_duration", 0),
    "NaN in args": ('"ts":1,"dur":1,"args":{"a":NaN}', "nonfinite", 0),
    "bad escape": (r'"ts":1,"dur":1,"cat":"\x"', "invalid_escape", 0),
    "raw control character": ('"ts":1,"dur":1,"cat":"\x01"', "invalid_event", 1),
    "bad UTF-8": ('"ts":1,"dur":1,"cat":"\udcff"', "invalid_event", 1),
    "missing comma": ('"ts":1 "dur":1', "invalid_event", 1),
    "wrong type": ('"ts":"now"', "no_time", 1),
    "wrong type of a text": ('"ts":1,"dur":1,"cat":[1]', "unexpected_type", 0),
    "wrong type of args": ('"ts":1,"dur":1,"args":[1]', "unexpected_type", 0),
    "70-bit integer": (f'"ts":{2**70}', "no_time", 1),
    "70-bit integer in args": (f'"ts":1,"dur":1,"args":{{"correlation":{2**70}}}', "unexpected_type", 0),
    "negative duration": ('"ts":1,"dur":-1', "negative_duration", 0),
    "10 MB text": (f'"ts":1,"dur":1,"cat":"{"x" * 10_000_000}"', "long_text", 0),
    "10 MB text without an end": (f'"ts":1,"dur":1,"cat":"{"x" * 10_000_000}', "invalid_event", 1),
}
DAMAGED_NODES = {
    "NaN": ({"id": "NaN"}, "no_id", 1),
    "inf": ({"inputs": '{"values":[inf]}'}, "nonfinite", 0),
    "bad escape": ({"name": r'"\x"'}, "invalid_escape", 0),
    "raw control character": ({"name": '"\x01"'}, "invalid_event", 1),
    "bad UTF-8": ({"name": '"\udcff"'}, "invalid_event", 1),
    "missing comma": ({"name": '"a" "b":1'}, "invalid_event", 1),
    "wrong type": ({"id": '"one"'}, "no_id", 1),
    "wrong type of a list": ({"inputs": "5"}, "unexpected_type", 0),
    "wrong type of a text": ({"name": "5"}, "unexpected_type", 0),
    "70-bit integer": ({"id": str(2**70)}, "no_id", 1),
    "70-bit integer in attrs": ({"attrs": f'[{{"name":"rf_id","value":{2**70}}}]'}, "unexpected_type", 0),
    "10 MB text": ({"name": f'"{"x" * 10_000_000}"'}, "long_text", 0),
    "10 MB text without an end": ({"name": f'"{"x" * 10_000_000}'}, "invalid_event", 1),
}


def assert_costs_itself(trace: Trace, table: str, others: int, trouble: str, lost: int) -> None:
    assert trace.table(table).height == others + 1 - lost
    usual = {"read.events", "read.nodes", "read.repaired_parent", "read.missing_parent", "read.absent_value"}
    assert {name: count for name, count in counts(trace).items() if name not in usual} == {
        f"read.{trouble}": 1
    }


@pytest.mark.parametrize("sort", DAMAGED_EVENTS)
def test_one_damaged_event_costs_itself_and_a_row_of_stats(tmp_path: Path, sort: str) -> None:
    text, trouble, lost = DAMAGED_EVENTS[sort]
    rows = [EVENT.replace('"ts":10', f'"ts":{at}') for at in range(20_000)]
    rows.insert(10_000, f'{{"ph":"X","name":"d",{text}}}')
    path = tmp_path / "trace.json"
    path.write_bytes(f'{{"traceEvents":[{",".join(rows)}]}}'.encode("utf-8", "surrogateescape"))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    assert_costs_itself(trace, "events", 20_000, trouble, lost)
    assert trace.events.filter(name="a")["ts"].to_list() == [at * 1000 for at in range(20_000)]


@pytest.mark.parametrize("sort", DAMAGED_NODES)
def test_one_damaged_node_costs_itself_and_a_row_of_stats(tmp_path: Path, sort: str) -> None:
    members, trouble, lost = DAMAGED_NODES[sort]
    rows = [NODE % (at, at + 1) for at in range(10_000)]
    rows.insert(5_000, node_with(**{"id": "99999", **members}))
    document = f'{{"schema":"1.1.1-chakra.0.0.4","nodes":[{",".join(rows)}]}}'
    path = tmp_path / "trace.json"
    path.write_bytes(document.encode("utf-8", "surrogateescape"))
    trace = etloom.read(path, "execution_trace")
    assert isinstance(trace, Trace)
    assert_costs_itself(trace, "nodes", 10_000, trouble, lost)
    assert trace.nodes["rf_id"].to_list()[:10_000] == list(range(1, 10_001))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory that holds")
def test_bytes_are_released_when_memory_is_exhausted() -> None:
    code = """
import resource
from etloom import _native
data = bytearray(1 << 28)
parser = _native.kineto_parser()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), -1))
try:
    parser.feed(data)
except MemoryError:
    data.clear()  # BufferError while somebody holds it
    print("given back")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "given back\n", done.stderr


@pytest.mark.parametrize("key", ["device", "registers per thread", "grid"])
def test_numbers_too_wide_for_a_column_stay_text(tmp_path: Path, key: str) -> None:
    value = f"[{2**40}, 1, 1]" if key == "grid" else str(2**40)
    trace = read(tmp_path, f'[{{"ph":"X","name":"a","ts":1,"dur":1,"args":{{"{key}":{value}}}}}]')
    assert trace.events["args"].to_list() == [f'{{"{key}": {value}}}']
    assert counts(trace)["read.unexpected_type"] == 1


def test_sizes_and_scopes_of_a_node_that_are_too_wide(tmp_path: Path) -> None:
    tensor = f'{{"values":[[1,2,3,4,{2**40},"cpu"]],"types":["Tensor(float)"]}}'
    scope = f'[{{"name":"scope","value":{2**40}}}]'
    trace = read_nodes(tmp_path, node_with(inputs=tensor), node_with(id="2", attrs=scope))
    assert trace.nodes["inputs"].to_list() == [f'[[1, 2, 3, 4, {2**40}, "cpu"]]', None]
    assert trace.nodes["attrs"].to_list() == [None, f'{{"scope": {2**40}}}']
    assert (counts(trace)["read.invalid_tensor"], counts(trace)["read.unexpected_type"]) == (1, 1)


def test_halves_of_characters_are_replaced_everywhere(tmp_path: Path) -> None:
    half = r"\ud800"
    group = f'{{"pg_name":"{half}","ranks":[0]}}'
    lane = f'{{"ph":"M","name":"process_name","pid":1,"args":{{"name":"{half}"}}}}'
    call = f'{{"ph":"X","name":"{half}","ts":1,"dur":1,"args":{{"Collective name":"{half}","x":"{half}"}}}}'
    trace = read(
        tmp_path, f'{{"distributedInfo":{{"rank":0,"pg_config":[{group}]}},"traceEvents":[{lane},{call}]}}'
    )
    texts = [trace.table("groups")["pg_name"][0], trace.table("threads")["name"][0]]
    texts += [trace.events["name"][0], trace.comms["collective"][0], json.loads(trace.events["args"][0])["x"]]
    assert texts == ["\ufffd"] * 5


def test_numbers_and_halves_in_a_record_of_communication(tmp_path: Path) -> None:
    half, huge = r"\ud800", 2**70
    values = f'[[],{huge},["{half}","{half}"],0,"{half}",[],[],0,1,{huge}]'
    record = node_with(name='"record_param_comms"', inputs=f'{{"values":{values},"types":["a"]}}')
    config = json.dumps(f'[{{"pg_name":"{half}","pg_size":{huge}}}]')
    groups = node_with(id="2", name='"## process_group:init ##"', inputs=f'{{"values":[{config}]}}')
    trace = read_nodes(tmp_path, record, groups)
    assert trace.comms.select("pg_name", "seq", "group_size").rows() == [("\ufffd", None, None)]
    assert trace.table("groups").select("pg_name", "size").rows() == [("\ufffd", None)]


def escape_keys(text: str, seed: int) -> str:
    """Write some characters of each key of a JSON text as escapes."""
    generator = random.Random(seed)

    def escape(match: re.Match[str]) -> str:
        letters = [
            f"\\u{ord(letter):04x}" if generator.random() < 0.3 else letter.replace("/", "\\/")
            for letter in match[1]
        ]
        return f'"{"".join(letters)}":'

    return re.sub(r'"([^"\\]*)"\s*:', escape, text)


@pytest.mark.parametrize("seed", range(5))
def test_escapes_in_keys_change_no_value(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "trace_0.json"
    for document in (gpu_document(0), execution_trace(0)):
        text = json.dumps(document)
        escaped = escape_keys(text, seed)
        assert json.loads(escaped) == document and escaped != text
        traces = []
        for content in (text, escaped):
            path.write_text(content)
            traces.append(etloom.read(path))
        plain, other = traces
        assert isinstance(plain, Trace) and isinstance(other, Trace)
        assert other.meta == plain.meta and other.table_names == plain.table_names
        for name in plain.table_names:
            assert other.table(name).equals(plain.table(name)), name


HEAD = (
    '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "G [x]"}], "distributedInfo": {"rank": 3}, '
)


@pytest.mark.slow
@pytest.mark.parametrize("byte", ['"', "", "}", "[", ",", "#", "\\", ":"])
def test_a_damaged_byte_of_the_head_does_not_cost_the_events(byte: str, tmp_path: Path) -> None:
    for place in range(1, len(HEAD)):
        text = HEAD[:place] + byte + HEAD[place + 1 :] + f'"traceEvents": [{EVENT}, {EVENT}]}}'
        try:
            json.loads(text)
        except ValueError:
            trace = read(tmp_path, text)
            assert trace.events.height == 2, text
            is_lost = trace.meta.get("rank") != 3 or "device_properties" not in trace.meta
            assert trace.stats.filter(pl.col("severity") == "data_loss").height or not is_lost, text


@pytest.mark.parametrize("value", ["5", '"ns": 5, "other": {"a": [1]', '[{"a": 1', '{"a": {"b": 1}'])
@pytest.mark.parametrize("comma", ["", ", "])
@pytest.mark.parametrize("rest", ["}", ', "traceName": "a.json"}', ', "traceName": "a.json"'])
def test_a_member_of_the_head_without_end_does_not_cost_the_events(
    value: str, comma: str, rest: str, tmp_path: Path
) -> None:
    trace = read(tmp_path, f'{{"baseTimeNanoseconds": {value}{comma}"traceEvents": [{EVENT}, {EVENT}]{rest}')
    assert trace.events.height == 2
    assert value == "5" or trace.stats.filter(pl.col("severity") == "data_loss").height


@pytest.mark.slow
def test_no_line_about_leaked_objects(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"schemaVersion":1,}')
    command = [sys.executable, "-m", "etloom", "info", str(tmp_path / "trace.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1, run.stderr


@pytest.mark.parametrize("depth", [150, 5_000])
def test_deeply_nested_metadata_is_skipped(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    rows = [EVENT, *['{"ph":"M","name":"process_name","pid":1,"args":{"name":' + nested + "}}"] * 2]
    trace = read(tmp_path, f'{{"traceEvents":[{",".join(rows)}]}}')
    assert (trace.events.height, counts(trace)["read.invalid_json"]) == (1, 2)
