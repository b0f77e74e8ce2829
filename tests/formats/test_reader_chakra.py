"""Chakra .et: both forms of metadata, every attribute type, dependencies, communication, damage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import LimitError, ReadError
from etloom.formats import chakra
from etloom.formats.chakra import protobuf as pb
from etloom.formats.io import safe_values
from support.examples import examples


def framed(*messages: Any) -> bytes:
    return b"".join(map(pb.delimit_message, messages))


def node(et_id: int, name: str = "op", attrs: dict[str, tuple[str, Any]] | None = None, **fields: Any) -> Any:
    made = pb.Node(id=et_id, name=name, **fields)
    for key, (kind, value) in (attrs or {}).items():
        attribute = made.attr.add(name=key)
        if kind.endswith("_list"):
            getattr(attribute, kind).values.extend(value)
            getattr(attribute, kind).SetInParent()
        else:
            setattr(attribute, kind, value)
    return made


def texts(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


VERSION = pb.GlobalMetadata(version="0.0.4")
ATTRIBUTES = pb.GlobalMetadata()
ATTRIBUTES.attr.add(name="schema").string_val = "1.1.1-chakra.0.0.4"
ATTRIBUTES.attr.add(name="pid").uint64_val = 77


@pytest.mark.parametrize(
    ("metadata", "version", "header"),
    [
        (VERSION, "0.0.4", {"version": "0.0.4"}),
        (ATTRIBUTES, "1.1.1-chakra.0.0.4", {"version": "", "schema": "1.1.1-chakra.0.0.4", "pid": 77}),
    ],
)
def test_both_forms_of_metadata(metadata: Any, version: str, header: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "unknown"
    path.write_bytes(framed(metadata, node(5)))
    assert chakra.sniff(path.read_bytes())
    trace = chakra.read(path)
    assert trace.meta["schema_version"] == version
    assert trace.meta["header"] == header
    assert trace.nodes["et_id"].to_list() == [5]


def test_a_file_without_metadata_and_one_with_empty_metadata(tmp_path: Path) -> None:
    for content in (framed(node(5)), framed(pb.GlobalMetadata(), node(5))):
        (tmp_path / "x").write_bytes(content)
        assert chakra.read(tmp_path / "x").nodes["et_id"].to_list() == [5]


EVERY_TYPE: dict[str, tuple[Any, list[Any]]] = {
    "double": (0.1, [0.1, -1e300]),
    "float": (0.5, [0.5, 2.0]),
    "int32": (-(2**31), [-1, 2**31 - 1]),
    "int64": (-(2**63), [-1, 2**63 - 1]),
    "uint32": (2**32 - 1, [0, 1]),
    "uint64": (2**64 - 1, [0, 2**64 - 1]),
    "sint32": (-5, [-5, 5]),
    "sint64": (-(2**62), [-5, 5]),
    "fixed32": (7, [7, 8]),
    "fixed64": (2**63, [7, 8]),
    "sfixed32": (-7, [-7, 8]),
    "sfixed64": (-(2**63), [-7, 8]),
    "bool": (True, [True, False]),
    "string": ("größe", ["a", ""]),
}


def test_every_type_of_attribute(tmp_path: Path) -> None:
    attrs: dict[str, tuple[str, Any]] = {"raw": ("bytes_val", b"\0\xff"), "raws": ("bytes_list", [b"a", b""])}
    expected: dict[str, Any] = {"raw": "AP8=", "raws": ["YQ==", ""]}
    for kind, (one, many) in EVERY_TYPE.items():
        attrs |= {f"{kind}_1": (f"{kind}_val", one), f"{kind}_n": (f"{kind}_list", many)}
        expected |= {f"{kind}_1": one, f"{kind}_n": many}
    attrs |= {"empty": ("int64_list", []), "odd": ("double_val", float("inf"))}
    expected |= {"empty": [], "odd": "inf"}
    (tmp_path / "x.et").write_bytes(framed(VERSION, node(1, attrs=attrs, type=4, duration_micros=3)))
    (text,) = chakra.read(tmp_path / "x.et").nodes["attrs"].cast(pl.String)
    assert json.loads(text) == {"node_type": "COMP_NODE", "duration_micros": 3, **expected}


def test_attributes_with_a_column_and_placeholders_of_the_recorder(tmp_path: Path) -> None:
    attrs: dict[str, tuple[str, Any]] = {
        "rf_id": ("int64_val", 659),
        "fw_parent": ("int64_val", 0),
        "seq_id": ("int64_val", -1),
        "scope": ("int64_val", 7),
        "tid": ("int64_val", 2),
        "fw_tid": ("int64_val", 1),
        "op_schema": ("string_val", ""),
    }
    (tmp_path / "x.et").write_bytes(framed(VERSION, node(1, attrs=attrs)))
    (row,) = texts(chakra.read(tmp_path / "x.et").nodes).to_dicts()
    found = {key: row[key] for key in ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")}
    assert found == {
        "rf_id": 659,
        "fw_parent": None,
        "seq_id": None,
        "scope": 7,
        "tid": 2,
        "fw_tid": 1,
        "op_schema": None,
    }


def test_nodes_are_sorted_and_dependencies_point_to_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(
        framed(
            VERSION,
            node(9, "late", ctrl_deps=[4], data_deps=[4, 7, 99]),
            node(4, "root"),
            node(7, "middle", ctrl_deps=[4], data_deps=[4]),
            node(8, "orphan", ctrl_deps=[100]),
        )
    )
    trace = chakra.read(path)
    assert trace.nodes["et_id"].to_list() == [4, 7, 8, 9]
    assert trace.nodes["file_order"].to_list() == [1, 2, 3, 0]
    assert trace.nodes["parent"].to_list() == [None, 0, None, 0]
    assert trace.nodes["recorded_parent"].to_list() == [None, 4, 100, 4]
    assert texts(trace.dependencies).rows() == [
        (1, 0, "ctrl"),
        (1, 0, "data"),
        (3, 0, "ctrl"),
        (3, 0, "data"),
        (3, 1, "data"),
    ]
    assert {row[0]: row[1:3] for row in trace.stats.rows()} == {
        "read.dangling_dependency": ("data_loss", 2),
        "read.missing_parent": ("info", 1),
    }


def test_ids_that_occur_twice_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.et").write_bytes(framed(VERSION, node(1, "a"), node(1, "b"), node(2, data_deps=[1])))
    trace = chakra.read(tmp_path / "x.et")
    assert texts(trace.dependencies).rows() == [(2, 0, "data")]
    assert trace.stats.row(0)[:3] == ("read.duplicate_node_id", "error", 2)


def test_communication(tmp_path: Path) -> None:
    size: tuple[str, Any] = ("int64_val", 1024)
    path = tmp_path / "x.et"
    path.write_bytes(
        framed(
            VERSION,
            node(
                1,
                "c",
                {"comm_type": ("int64_val", 7), "comm_size": size, "pg_name": ("string_val", "2")},
                type=7,
            ),
            node(2, "s", {"comm_dst": ("int32_val", 3), "comm_size": size}, type=5),
            node(3, "r", {"comm_src": ("int32_val", 1), "tensor_size": ("uint64_val", 64)}, type=6),
            node(4, "ncclDevKernel_AllGather_RING_LL", {}, type=7),
            node(5, "unnamed", {}, type=7),
            node(6, "aten::mm", {}, type=4),
        )
    )
    columns = ("node", "collective", "bytes", "pg_name", "peer", "is_p2p")
    assert texts(chakra.read(path).comms).select(columns).rows() == [
        (0, "reduce_scatter", 1024, "2", None, False),
        (1, "send", 1024, None, 3, True),
        (2, "recv", 64, None, 1, True),
        (3, "all_gather", None, None, None, False),
        (4, None, None, None, None, False),  # an unset comm_type is not all-reduce
    ]


def test_inputs_become_values_and_tensors(tmp_path: Path) -> None:
    made = node(1)
    halves = "[[7, 5, 6, 2, 2, 'cpu'], [8, 5, 0, 1, 2, 'cpu']]"
    made.inputs.values = f"[[4, 5, 0, 6, 4, 'cuda:0'], {halves}, True, None, 'it\\'s', 0.5]"
    made.inputs.shapes = "[[2, 3], [[2], []], [], [], [], []]"
    both = "GenericList[Tensor(c10::Half),Tensor(short int)]"
    unset = "Tensor(nullptr (uninitialized))"
    made.inputs.types = f"['Tensor(float)', '{both}', 'Bool', 'None', 'String', 'Double']"
    made.outputs.values, made.outputs.shapes = "[[0, 0, 0, 0, 0, '']]", "[[]]"
    made.outputs.types = f"['{unset}']"
    (tmp_path / "x.et").write_bytes(framed(VERSION, made))
    trace = chakra.read(tmp_path / "x.et")
    assert texts(trace.nodes)["inputs"].to_list() == ['[null, [null, null], true, null, "it\'s", 0.5]']
    names = (
        "io",
        "index",
        "item",
        "tensor_id",
        "storage_id",
        "offset",
        "numel",
        "itemsize",
        "device",
        "dtype",
        "shape",
    )
    assert texts(trace.tensors).select(names).rows() == [
        (0, 0, None, 4, 5, 0, 6, 4, "cuda:0", "float", "[2, 3]"),
        (0, 1, 0, 7, 5, 6, 2, 2, "cpu", "c10::Half", "[2]"),
        (0, 1, 1, 8, 5, 0, 1, 2, "cpu", "short int", "[]"),
        (1, 0, None, 0, 0, 0, 0, None, "", "nullptr (uninitialized)", "[]"),
    ]


def test_process_groups(tmp_path: Path) -> None:
    made = node(1, "## process_group:init ##", type=1)
    listed = [
        {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "group_size": 8}
    ]
    listed.append(
        {"pg_name": "1", "pg_desc": "tp", "backend_config": "cuda:nccl", "ranks": [0, 1], "group_size": 2}
    )
    made.inputs.values = str([json.dumps(listed)])
    (tmp_path / "x.et").write_bytes(framed(ATTRIBUTES, made))
    groups = texts(chakra.read(tmp_path / "x.et").groups).drop("axis", "axis_from")
    assert groups.rows() == [
        ("0", "default_pg", "cuda:nccl", None, 8),
        ("1", "tp", "cuda:nccl", "[0, 1]", 2),
    ]


def test_hostile_process_groups_cost_themselves(tmp_path: Path) -> None:
    made = node(1, "## process_group:init ##", type=1)
    odd = [
        {"pg_name": 3, "pg_desc": [1], "group_size": "x", "ranks": {"a": 1}},
        7,
        {"pg_name": "1", "group_size": 2**70},
    ]
    made.inputs.values = str([json.dumps(odd), "[", "[" * 5000, 4])
    (tmp_path / "x.et").write_bytes(framed(ATTRIBUTES, made))
    trace = chakra.read(tmp_path / "x.et")
    assert texts(trace.groups).select("pg_name", "pg_desc", "size").rows() == [
        ("3", None, None),
        ("1", None, None),
    ]
    assert {row[0]: row[2] for row in trace.stats.rows()} == {
        "read.unreadable_values": 2,
        "read.wrong_type": 2,
    }


def test_exports_of_etloom_are_read_to_the_nanosecond(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    metadata = pb.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="clock").string_val = "epoch"
    metadata.attr.add(name="rank").int64_val = 3
    attrs: dict[str, tuple[str, Any]] = {
        "start_ns": ("int64_val", 1_700_000_000_000_000_123),
        "duration_ns": ("int64_val", 456),
        "cat": ("string_val", "gpu_memcpy"),
        "device": ("int64_val", 1),
        "stream": ("int64_val", 7),
        "is_cpu_op": ("bool_val", False),
    }
    seq: dict[str, tuple[str, Any]] = {"comm_seq": ("int64_val", 5), "in_msg_nelems": ("int64_val", 6)}
    path.write_bytes(framed(metadata, node(1, "copy", attrs), node(2, "nccl", seq, type=7)))
    trace = chakra.read(path)
    assert (trace.rank, trace.meta["clock"]) == (3, "epoch")
    assert texts(trace.events).select("ts", "dur", "cat", "device", "stream").rows() == [
        (1_700_000_000_000_000_123, 456, "gpu_memcpy", 1, 7)
    ]
    assert trace.comms.select("seq", "in_nelems").rows() == [(5, 6)]


def test_nodes_with_a_start_are_events_too(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    on_device = {"is_cpu_op": ("bool_val", False), "stream": ("int64_val", 7)}
    path.write_bytes(
        framed(
            VERSION,
            node(1, "k", on_device, start_time_micros=20, duration_micros=5),
            node(2, "op", {"is_cpu_op": ("bool_val", True)}, start_time_micros=10, duration_micros=3),
        )
    )
    trace = chakra.read(path)
    assert texts(trace.events).select("name", "cat", "ts", "dur", "stream").rows() == [
        ("op", "cpu_op", 10_000, 3_000, None),
        ("k", "kernel", 20_000, 5_000, 7),
    ]
    assert texts(trace.links).rows() == [(0, 1, "file", 1.0), (1, 0, "file", 1.0)]


@pytest.mark.parametrize("start", [(1 << 64) - 1, 1 << 62])
def test_an_invalid_start_time_loses_only_that_value(start: int, tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    odd = {"start_ns": ("string_val", "soon"), "is_cpu_op": ("bool_val", True)}
    own = {"is_cpu_op": ("bool_val", True)}
    path.write_bytes(
        framed(
            VERSION,
            node(1, "far", own, start_time_micros=start),
            node(2, "odd", odd),
            node(3, "op", own, start_time_micros=10, duration_micros=3),
        )
    )
    trace = etloom.open(path, use_cache=False)[0]
    assert texts(trace.events).select("name", "ts").rows() == [("op", 10_000)]
    assert trace.nodes.height == 3
    said = trace.stats.filter(pl.col("name") == "read.no_time")
    assert said.select("severity", "count").rows() == [("data_loss", 2)]


def test_attributes_of_an_unexpected_type_cost_themselves(tmp_path: Path) -> None:
    attrs: dict[str, tuple[str, Any]] = {
        "rf_id": ("string_val", "seven"),
        "comm_type": ("int64_list", [1]),
        "comm_size": ("uint64_val", 2**64 - 1),
    }
    (tmp_path / "x.et").write_bytes(framed(VERSION, node(1, attrs=attrs, type=7)))
    trace = chakra.read(tmp_path / "x.et")
    assert trace.nodes["rf_id"].to_list() == [None]
    assert trace.comms.select("collective", "bytes").rows() == [(None, None)]
    assert {row[3] for row in trace.stats.rows()} == {
        "nodes.rf_id has values of a wrong type: now null",
        "comms.bytes has values of a wrong type: now null",
    }


WHOLE = [VERSION, *(node(i, f"op {i}", {"rf_id": ("int64_val", i)}) for i in range(1, 12))]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_all_complete_nodes_of_a_truncated_file_are_read(packed: bool, tmp_path: Path) -> None:
    path, whole = tmp_path / "x.et", framed(*WHOLE)
    ends = [len(framed(*WHOLE[: count + 1])) for count in range(len(WHOLE))]
    for length in range(ends[0], len(whole) + 1):
        path.write_bytes(gzip.compress(whole[:length]) if packed else whole[:length])
        trace = chakra.read(path)
        assert trace.nodes.height == sum(end <= length for end in ends[1:])
        lost = trace.stats.filter(pl.col("name") == "read.truncated")
        assert lost["severity"].to_list() == ([] if length in ends else ["data_loss"])


def test_gzip_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.et.gz"
    packed = gzip.compress(framed(*WHOLE) * 1)
    path.write_bytes(packed[:-4])
    assert chakra.read(path).stats["name"].to_list() == ["read.truncated"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x05ab", b"not a trace at all"], ids=range(4))
def test_a_file_that_is_not_chakra_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.et").write_bytes(content)
    assert not chakra.sniff(content)
    with pytest.raises(ReadError) as error:
        chakra.read(tmp_path / "x.et")
    assert "\n" not in str(error.value)


def test_a_damaged_node_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(framed(VERSION, node(1)) + b"\x03\x12\xff\x01" + framed(node(2)))
    trace = chakra.read(path)
    assert trace.nodes["et_id"].to_list() == [1, 2]
    assert trace.stats.row(0)[:3] == ("read.damaged_node", "data_loss", 1)


def test_exceeding_the_limit_is_a_separate_error(tmp_path: Path) -> None:
    (tmp_path / "x.et").write_bytes(framed(*WHOLE))
    with pytest.raises(LimitError, match="contains more than 20 bytes"):
        chakra.read(tmp_path / "x.et", limit=20)


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.et"
    path.write_bytes(framed(VERSION) + content)
    chakra.sniff(content)
    chakra.read(path)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.lists(PLAIN, max_size=4))
def test_a_repr_parses_to_its_value(value: list[Any]) -> None:
    assert safe_values.parse_literal(repr(value)) == value


@pytest.mark.parametrize("text", ["__import__('os')", "[1, 2", "{1}", "[1 2]", "[" * 100_000])
def test_values_other_than_plain_ones_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        safe_values.parse_literal(text)


@pytest.mark.slow
def test_the_converted_trace(data: Path) -> None:
    trace = chakra.read(data / "chakra" / "chakra.0.et.gz")
    assert trace.meta["schema_version"] == "1.0.1"
    assert trace.meta["header"]["pid"] == 114598
    assert trace.nodes.height == 3664
    assert trace.nodes["rf_id"].drop_nulls().len() == 2448
    sizes = texts(trace.comms).filter(pl.col("bytes").is_not_null())
    assert sizes.height == 7
    assert sizes.row(0, named=True)["collective"] == "broadcast"
    assert sizes.row(0, named=True)["bytes"] == 212480
    types = trace.nodes.select(pl.col("attrs").cast(pl.String).str.json_path_match("$.node_type")).to_series()
    assert dict(types.value_counts().rows()) == {"COMP_NODE": 3643, "COMM_COLL_NODE": 21}
    # The converter removes nodes that others still name: astra-sim issue 338.
    assert {row[0]: row[2] for row in trace.stats.rows()} == {
        "read.dangling_dependency": 1277,
        "read.missing_parent": 1277,
    }


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter"])
def test_astra_sims_microbenchmarks(data: Path, name: str) -> None:
    for rank in range(4):
        trace = chakra.read(data / "chakra" / "astra" / name / f"{name}.{rank}.et")
        assert trace.meta["schema_version"] == "0.0.4"
        (row,) = texts(trace.nodes).to_dicts()
        assert row["name"] == f"{name}_4npus_1MB"
        assert json.loads(row["attrs"]) == {
            "node_type": "COMM_COLL_NODE",
            "duration_micros": 0,
            "is_cpu_op": False,
        }
        assert texts(trace.comms).select("collective", "bytes").rows() == [(name, 1048576)]
        assert trace.stats.is_empty()


def test_a_cycle_of_dependencies_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "x.0.et"
    path.write_bytes(framed(VERSION, node(1, ctrl_deps=[2]), node(2, ctrl_deps=[1]), node(3, ctrl_deps=[2])))
    stats = {row["name"]: row for row in chakra.read(path).stats.iter_rows(named=True)}
    if "read.parent_cycle" not in stats:
        stats = {row["name"]: row for row in etloom.open(path, use_cache=False).stats.iter_rows(named=True)}
    assert stats["read.parent_cycle"]["count"] == 3
    assert "read.wrong_type" not in stats
