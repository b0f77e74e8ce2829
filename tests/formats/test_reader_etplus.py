"""ET+: times, device nodes and dependencies of a linked execution trace; cut-off files."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from etloom import formats
from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Trace
from etloom.formats import etplus
from etloom.formats.execution_trace.communication import describe_record


def attrs(**values: Any) -> list[dict[str, Any]]:
    return [{"name": name, "type": "", "value": value} for name, value in values.items()]


def document() -> dict[str, Any]:
    tensor = [12, 13, 0, 64, 4, "cuda:0"]
    mul = {
        "id": 2,
        "name": "aten::mul",
        "ctrl_deps": 1,
        "inputs": {
            "values": [tensor, 2],
            "shapes": [[8, 8], []],
            "types": ["Tensor(float)", "Int"],
            "strides": [[8, 1], []],
        },
        "outputs": {"values": [tensor], "shapes": [[8, 8]], "types": ["Tensor(float)"], "strides": [[8, 1]]},
        "attrs": attrs(rf_id=9, seq_id=-1, scope=0, tid=1, fw_tid=0, op_schema="aten::mul(...)"),
        "inclusive_dur": 20.125,
        "exclusive_dur": 15,
        "ts": 1695835572943613.123,
        "inter_thread_dep": None,
    }
    kernel = {
        **mul,
        "id": 3,
        "ctrl_deps": 2,
        "cat": "kernel",
        "name": "void mul_kernel()",
        "ph": "X",
        "inclusive_dur": 5.5,
        "exclusive_dur": 5.5,
        "ts": 1695835572943620.001,
        "stream": 7,
    }
    return {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": 77,
        "time": "2024-08-07 23:45:10",
        "nodes": [
            {"id": 0, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 0, "attrs": attrs(rf_id=0)},
            {"id": 1, "name": "## forward ##", "ctrl_deps": 0, "attrs": attrs(rf_id=8, scope=7, tid=1),
             "ts": 1695835572943600, "inclusive_dur": 100, "exclusive_dur": 80.0, "sync_dep": [3]},
            mul,
            kernel,
            {"id": 4, "name": "record_param_comms", "ctrl_deps": 0, "inter_thread_dep": 2,
             "attrs": attrs(rf_id=10, tid=2, collective_name="allreduce", pg_name="1", pg_desc="tp", pg_size=2,
                            dtype="Float", in_msg_nelems=64, out_msg_nelems=64, in_split_size="[]")},
            {**kernel, "id": 5, "ctrl_deps": 4, "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
             "ts": 1695835572943700.5, "pg_name": "1", "stream": 20},
        ],
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "unknown"
    # json.dumps would round the times to doubles: their digits are put in as text.
    text = json.dumps(document(), indent=4)
    for digits in ("1695835572943613.123", "1695835572943620.001"):
        text = text.replace(str(float(digits)), digits)
    found.write_text(text)
    return found


def texts(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


def test_it_is_distinguished_from_an_execution_trace_without_times(path: Path) -> None:
    assert etplus.sniff(path.read_bytes())
    plain = document()
    for node in plain["nodes"]:
        for key in ("inclusive_dur", "exclusive_dur"):
            node.pop(key, None)
    assert not etplus.sniff(json.dumps(plain).encode())


def test_nodes_with_a_time_are_events_to_the_nanosecond(path: Path) -> None:
    trace = etplus.read(path)
    assert trace.meta["clock"] == "epoch"
    assert trace.meta["schema_version"] == "1.1.1-chakra.0.0.4"
    columns = ("cat", "name", "ts", "dur", "pid", "tid", "stream", "rf_id")
    assert texts(trace.events).select(columns).rows() == [
        ("user_annotation", "## forward ##", 1695835572943600000, 100_000, 77, 1, None, 8),
        ("cpu_op", "aten::mul", 1695835572943613123, 20_125, 77, 1, None, 9),
        ("kernel", "void mul_kernel()", 1695835572943620001, 5_500, None, 7, 7, None),
        (
            "kernel",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
            1695835572943700500,
            5_500,
            None,
            20,
            20,
            None,
        ),
    ]
    assert trace.events["seq_id"].null_count() == 4
    assert texts(trace.links).rows() == [
        (1, 0, "file", 1.0),
        (2, 1, "file", 1.0),
        (3, 2, "file", 1.0),
        (5, 3, "file", 1.0),
    ]


def test_gpu_activity_is_attached_to_its_operator(path: Path) -> None:
    # record_param_comms has no time of its own: its kernel's operator is not an event.
    assert etplus.read(path).launches.drop("captured").rows() == [(None, 2, 1), (None, 3, None)]


def test_nodes_tensors_and_attributes(path: Path) -> None:
    trace = etplus.read(path)
    nodes = {row["et_id"]: row for row in texts(trace.nodes).to_dicts()}
    assert (nodes[2]["rf_id"], nodes[2]["seq_id"], nodes[2]["tid"], nodes[2]["fw_tid"]) == (9, None, 1, None)
    assert (nodes[2]["inputs"], nodes[2]["input_types"]) == ("[null, 2]", '["Tensor(float)", "Int"]')
    assert json.loads(nodes[2]["attrs"]) == {"exclusive_dur_ns": 15_000}
    # A device node is a copy of its operator's: what was copied is not its own.
    assert (nodes[3]["rf_id"], nodes[3]["inputs"], nodes[3]["op_schema"]) == (None, None, None)
    assert json.loads(nodes[3]["attrs"]) == {
        "is_cpu_op": False, "cat": "kernel", "stream": 7, "exclusive_dur_ns": 5_500,
    }  # fmt: skip
    columns = ("node", "io", "index", "tensor_id", "numel", "shape", "stride", "dtype")
    assert texts(trace.tensors).select(columns).rows() == [
        (2, 0, 0, 12, 64, "[8, 8]", "[8, 1]", "float"),
        (2, 1, 0, 12, 64, "[8, 8]", "[8, 1]", "float"),
    ]


def test_dependencies_of_all_kinds(path: Path) -> None:
    assert texts(etplus.read(path).dependencies).rows() == [
        (1, 0, "ctrl"),
        (1, 3, "sync"),
        (2, 1, "ctrl"),
        (3, 2, "ctrl"),
        (4, 0, "ctrl"),
        (4, 2, "thread"),
        (5, 4, "ctrl"),
    ]


def test_communication_of_the_call_and_of_the_kernel(path: Path) -> None:
    columns = ("node", "collective", "pg_name", "pg_desc", "group_size", "dtype", "in_nelems", "in_split")
    assert texts(etplus.read(path).comms).select(columns).rows() == [
        (4, "all_reduce", "1", "tp", 2, "Float", 64, "[]"),
        (5, "all_reduce", "1", None, None, None, None, None),
    ]


def test_gzip_and_a_file_without_times(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert etplus.read(packed).events.equals(etplus.read(path).events)
    packed.write_text('{"schema": "1.1.1", "nodes": []}')
    assert etplus.read(packed).tables == {}


@pytest.mark.slow
def test_all_complete_nodes_of_a_truncated_file_are_read(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    starts = [text.index(f'"id": {et_id},') for et_id in range(6)]
    ends = [text.rindex("}", 0, start) for start in starts[1:]] + [text.rindex("}", 0, len(text) - 2)]
    first = text.index("[", text.index('"nodes"'))
    cut = tmp_path / "cut.json"
    rng = random.Random(3)
    for length in sorted(rng.sample(range(first + 1, len(text) - 1), 150)):
        cut.write_text(text[:length])
        trace = etplus.read(cut)
        assert trace.nodes.height == sum(end < length for end in ends), length
        lost = trace.stats.filter(pl.col("name") == "read.truncated")
        assert lost["severity"].to_list() == ["data_loss"]


def test_one_bad_node_costs_itself(path: Path) -> None:
    path.write_text(path.read_text().replace('"## forward ##"', '"## forw\nard ##'))
    trace = etplus.read(path)
    assert trace.nodes["et_id"].to_list() == [0, 2, 3, 4, 5]
    assert trace.stats["name"].to_list()[0] == "read.truncated"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"nodes": 3}', "[" * 100_000, '{"schema": "x", "traceEvents": []}', "\0\xff"],
    ids=range(7),
)
def test_a_file_that_is_not_et_plus_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ReadError) as error:
        etplus.read(tmp_path / "x")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "text", 2**70, -1, [], {}, True, "NaN", 1e400])
def test_any_field_may_be_anything(value: Any, tmp_path: Path) -> None:
    times = ("ts", "inclusive_dur", "exclusive_dur")
    for key in ("id", "name", "ctrl_deps", "inputs", "outputs", "attrs", "cat", "stream", *times, "sync_dep"):
        broken = document()
        for node in broken["nodes"][1:4]:
            node[key] = value
        (tmp_path / "x").write_text(json.dumps(broken))
        try:
            trace = etplus.read(tmp_path / "x")
        except EtloomError:
            continue
        assert trace.nodes.height >= 3


@pytest.mark.parametrize("depth", [65, 400, 900])
def test_deep_nesting_is_read_or_refused(depth: int, tmp_path: Path) -> None:
    deep: Any = document()
    deep["nodes"][1]["inputs"] = {"values": "@", "shapes": [], "types": []}
    text = json.dumps(deep).replace('"@"', "[" * depth + "]" * depth)
    (tmp_path / "x").write_text(text)
    try:
        assert etplus.read(tmp_path / "x").nodes.height == 6
    except ReadError as error:
        assert "nested too deeply" in str(error)


@pytest.fixture(scope="module")
def linked(data: Path, golden: Path) -> tuple[dict[str, Any], int, int]:
    """nccl_ddp as chakra_trace_link writes it, put together from its own figures."""
    trace = json.loads(gzip.decompress((data / "nccl_ddp" / "torch_et_0.json.gz").read_bytes()))
    host = pl.read_csv(gzip.decompress((golden / "chakra_link_host.csv.gz").read_bytes()))
    work = pl.read_csv(gzip.decompress((golden / "chakra_link_gpu.csv.gz").read_bytes()))
    times = {row["rf_id"]: row for row in host.to_dicts()}
    launched: dict[int, list[dict[str, Any]]] = {}
    for row in work.to_dicts():
        launched.setdefault(row["parent_rf_id"], []).append(row)
    nodes: list[dict[str, Any]] = []
    new_ids: dict[int, int] = {}
    for node in sorted(trace["nodes"], key=lambda node: node["id"]):
        rf_id = next(attr["value"] for attr in node["attrs"] if attr["name"] == "rf_id")
        made = {**node, "id": len(nodes), "ctrl_deps": new_ids.get(node["ctrl_deps"], 0)}
        new_ids[node["id"]] = made["id"]
        if time := times.get(rf_id):
            made |= {"ts": time["ts_us"], "inclusive_dur": time["inclusive_dur_us"]}
        nodes.append(made)
        for row in launched.get(rf_id, []):
            own = {"id": len(nodes), "ctrl_deps": made["id"], "cat": "kernel", "name": row["name"], "ph": "X"}
            nodes.append(
                {**node, **own, "ts": row["ts_us"], "inclusive_dur": row["dur_us"], "stream": row["stream"]}
            )
    return {**trace, "nodes": nodes}, host.height, work.height


@pytest.mark.slow
def test_a_real_run_as_chakra_links_it(linked: tuple[dict[str, Any], int, int], tmp_path: Path) -> None:
    whole, operators, kernels = linked
    (tmp_path / "x.json").write_text(json.dumps(whole))
    trace: Trace = etplus.read(tmp_path / "x.json")
    assert trace.stats.is_empty()
    assert trace.nodes.height == len(whole["nodes"])
    assert trace.events.height == operators + kernels == 14_385 + 3_660
    assert trace.launches.height == kernels
    assert trace.launches["operator"].null_count() == 0
    # Each call and its kernel, as in the recording itself.
    counts = dict(texts(trace.comms)["collective"].value_counts().rows())
    assert counts == {"all_reduce": 30, "broadcast": 12, "wait": 6}


def test_a_lone_surrogate_becomes_a_replacement_character(path: Path, tmp_path: Path) -> None:
    text = path.read_text().replace('"name": "', '"name": "\\ud800', 1)
    (tmp_path / "odd.json").write_text(text)
    names = etplus.read(tmp_path / "odd.json").nodes["name"].cast(pl.String)
    assert any(name.startswith("\ufffd") for name in names)


@pytest.mark.parametrize(("numel", "expected"), [(4, 4), (2**62, 2**62), (2**70, None), ("4", None)])
def test_a_record_of_a_tensor_without_type(numel: object, expected: int | None) -> None:
    values = [[[1, 2, 0, numel, 4, "cuda:0"]], 7, ["0", "default"], 0, "allreduce", [], [], 0, 1, 2]
    inputs = {"values": values, "types": ["GenericList[Tensor(]", *["Int"] * 9]}
    row = describe_record(inputs)
    assert row["collective"] == "allreduce" and row.get("dtype") is None
    assert row.get("in_nelems") == expected


@pytest.mark.parametrize("untimed", [5, 300, 3000])
@pytest.mark.parametrize("indent", [None, 2])
def test_times_are_found_wherever_they_begin(tmp_path: Path, untimed: int, indent: int | None) -> None:
    """Operators before the profiler's window have no times, and may fill more than the head of the file."""
    content = document()
    timed = content["nodes"][1]
    plain = {
        key: value for key, value in timed.items() if key not in ("ts", "inclusive_dur", "exclusive_dur")
    }
    content["nodes"][1:1] = [{**plain, "id": 10 + i} for i in range(untimed)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(content, indent=indent))
    assert formats.detect_format(path) == "etplus"
    content["nodes"] = [node for node in content["nodes"] if "ts" not in node]
    content["nodes"][-1]["name"] = '"inclusive_dur": 5'
    path.write_text(json.dumps(content, indent=indent))
    assert formats.detect_format(path) == "execution-trace"


def test_a_member_across_two_blocks_is_found(tmp_path: Path) -> None:
    text = json.dumps(document())
    start = text.index('"inclusive_dur"')
    for offset in (1, 8, 15, 16, 17):
        padding = " " * ((1 << 20) - start - offset)
        path = tmp_path / f"{offset}.json"
        path.write_text("{" + padding + text[1:start] + text[start:].replace("exclusive", "other"))
        assert etplus.is_in(path)


def test_a_warm_up_before_the_window_is_no_loss(data: Path) -> None:
    trace = formats.read(data / "cases/turn3/etplus_late_times.json.gz")
    assert isinstance(trace, Trace)
    assert (trace.meta["formats"], trace.nodes.height, trace.links.height) == (["etplus"], 324, 46)
