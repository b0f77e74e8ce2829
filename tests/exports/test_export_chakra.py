"""Chakra .et: the activities of the graph, byte by byte, back through the reader, and run as a simulator would."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.exports import chakra
from etloom.exports.chakra import node_table
from etloom.exports.chakra.activities import ActivityKind
from etloom.exports.chakra.communication_nodes import _describe_communication, _exclude_outputs
from etloom.exports.chakra.group_numbering import GroupNumbers, number_groups
from etloom.exports.chakra_lint.list_schedule import schedule_nodes
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra import writing
from etloom.formats.chakra.et_files import ChakraNode, load_file, rank_path
from support import simulated_jobs, small_traces
from support.examples import examples
from support.paths import ROOT
from support.random_traces import LinkedTraceGenerator
from support.real_runs import open_run

BASE_US = small_traces.BASE_NS // 1000
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(small_traces.write_run(tmp_path_factory.mktemp("run")), use_cache=False)


@pytest.mark.slow
def test_a_small_run_node_by_node(run: Job, tmp_path: Path) -> None:
    etloom.export(run[0], tmp_path / "x.et")
    found = [
        (
            *(node.id, node.name, list(node.message.ctrl_deps), list(node.message.data_deps)),
            *(node.message.start_time_micros - BASE_US, node.message.duration_micros, node.runs_on_host),
        )
        for node in load_file(tmp_path / "x.0.et").nodes
    ]
    assert found == [
        (1, "ProfilerStep#3", [], [], 100, 100, True),
        (2, "aten::linear", [1], [1], 200, 50, True),
        (3, "aten::mm", [2], [2], 250, 70, True),  # with the call in it, up to the launch
        (4, "aten::mm", [3], [3], 320, 180, True),
        (5, "delay", [3], [3], 320, 80, False),
        (6, "gemm", [3], [5], 400, 600, False),
        (7, "aten::linear", [2], [4], 500, 100, True),
        (8, "ProfilerStep#3", [1], [7], 600, 70, True),
        (9, "ProfilerStep#3", [1], [8], 670, 430, True),
        (10, "delay", [8], [8], 670, 130, False),
        (11, "ncclDevKernel_AllReduce_Sum", [8], [10], 800, 250, False),
    ]
    mm, gemm = load_file(tmp_path / "x.0.et").nodes[2], load_file(tmp_path / "x.0.et").nodes[5]
    assert mm.attributes == {
        "is_cpu_op": True, "rf_id": 3, "scope": 0, "tid": 11, "et_id": 4, "cat": "cpu_op",
        "start_ns": small_traces.BASE_NS + 250_000, "duration_ns": 70_000, "inclusive_ns": 250_000,
    }  # fmt: skip
    assert gemm.attributes == {
        "is_cpu_op": False, "cat": "kernel", "stream": 7, "device": 0,
        "start_ns": small_traces.BASE_NS + 400_000, "duration_ns": 600_000,
    }  # fmt: skip


def test_without_delays_work_starts_at_once(run: Job, tmp_path: Path) -> None:
    chakra.write(run[0], tmp_path / "x.et", delays=False)
    nodes = load_file(tmp_path / "x.0.et").nodes
    assert "delay" not in [node.name for node in nodes]
    (gemm,) = (node for node in nodes if node.name == "gemm")
    assert [nodes[on - 1].name for on in gemm.message.data_deps] == ["aten::mm"]
    assert schedule_nodes(nodes).end[gemm.id] == (320 - 100 + 600) * 1000


@pytest.mark.slow
def test_ranks_have_a_file_each_and_may_be_compressed(run: Job, tmp_path: Path) -> None:
    etloom.export(run, tmp_path / "job.et.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.0.et.gz", "job.1.et.gz"]
    etloom.export(run, tmp_path / "plain.et")
    assert gzip.decompress((tmp_path / "job.1.et.gz").read_bytes()) == (tmp_path / "plain.1.et").read_bytes()
    read = etloom.read(tmp_path / "job.1.et.gz")
    assert (read.rank, read.meta["world_size"], read.meta["clock"]) == (1, 2, "epoch")


def test_an_inexpressible_trace_is_refused_with_a_reason(run: Job, tmp_path: Path) -> None:
    with pytest.raises(EtloomError, match="no timed events"):
        chakra.write(Trace({"nodes": run[0].nodes}, {"rank": 0}), tmp_path / "x.et")
    python = Trace({"events": run[0].events.head(1).with_columns(cat=pl.lit("python_function"))}, {"rank": 0})
    with pytest.raises(EtloomError, match="no timed operators"):
        chakra.write(python, tmp_path / "x.et")
    etloom.export(run[0], tmp_path / "x.et")
    with pytest.raises(EtloomError, match="already"):
        chakra.write(etloom.read(tmp_path / "x.0.et"), tmp_path / "y.et")
    assert [path.name for path in tmp_path.iterdir()] == ["x.0.et"]


# The wire


@given(st.lists(INT64, max_size=30))
def test_varints_are_those_of_protobuf(values: list[int]) -> None:
    content, widths = writing.encode_varints(np.array(values, np.int64))
    expected = [pb.encode_varint(value % 2**64) for value in values]
    assert content.tobytes() == b"".join(expected)
    assert widths.tolist() == list(map(len, expected))
    (packed,) = _rows(writing.encode_packed(5, np.array([0, len(values)]), np.array(values, np.int64)), 1)
    assert packed == pb.Node(data_deps=[value % 2**64 for value in values]).SerializeToString()


@given(st.lists(st.none() | INT64, min_size=1), st.lists(st.none() | st.text(), min_size=1))
def test_attributes_are_those_of_protobuf(numbers: list[int | None], texts: list[str | None]) -> None:
    made = writing.encode_integer_attribute(10, "seq", 9, pl.Series(numbers, dtype=pl.Int64)) or [None]
    named = writing.encode_text_attribute(10, "pg", 29, pl.Series(texts, dtype=pl.String)) or [None]
    assert _node_bytes("seq", "int64_val", numbers) == _rows(made, len(numbers))
    assert _node_bytes("pg", "string_val", texts) == _rows(named, len(texts))


def _rows(parts: list[Any], count: int) -> list[bytes]:
    if parts == [None]:
        return [b""] * count
    _, offsets, content = writing.join_fields(parts)
    assert len(offsets) == count + 1
    return [content[start:end].tobytes() for start, end in itertools.pairwise(offsets)]


def _node_bytes(name: str, kind: str, values: list[Any]) -> list[bytes]:
    made = []
    for value in values:
        node = pb.Node()
        if value is not None:
            setattr(node.attr.add(name=name), kind, value)
        made.append(node.SerializeToString())
    return made


@pytest.mark.slow
def test_every_message_is_as_protobuf_would_write_it(own: Path, tmp_path: Path) -> None:
    for trace in _own_traces(own):
        etloom.export(trace, tmp_path / "x.et")
        messages, lost = pb.split_messages(rank_path(tmp_path / "x.et", trace.rank or 0).read_bytes())
        assert not lost
        for message in messages[1:]:
            assert pb.Node.FromString(bytes(message)).SerializeToString() == message


def _own_traces(own: Path) -> list[Trace]:
    return list(etloom.open(own / "ddp_2", use_cache=False).values())


# Laws


def nodes_of(trace: Trace, *, serialize: bool = False) -> list[ChakraNode]:
    nodes = chakra.build_nodes(trace, number_groups([trace]), delays=True, serialize=serialize)
    messages, _ = pb.split_messages(chakra.encode_nodes(trace, nodes))
    return [ChakraNode(pb.parse_node(message)) for message in messages[1:]]


def starts_us(nodes: list[ChakraNode]) -> list[tuple[float, int]]:
    """Of each node when it would start by what it depends on, and when it did."""
    found = schedule_nodes(nodes, limited=False)
    assert not found.stuck
    first = min(node.message.start_time_micros for node in nodes)
    return [(found.start[node.id] / 1000, node.message.start_time_micros - first) for node in nodes]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_a_simulated_job_runs_as_it_was_recorded(seed: int) -> None:
    for trace in simulated_jobs.job_of(simulated_jobs.simulate(simulated_jobs.programs(seed))).values():
        for would, did in starts_us(nodes_of(trace)):
            assert did <= would < did + 1


@pytest.mark.slow
@settings(max_examples=examples(10))
@given(st.integers(0, 10**6))
def test_nodes_of_any_trace_follow_their_dependencies_and_start_no_earlier_than_them(seed: int) -> None:
    nodes = nodes_of(etloom.link(LinkedTraceGenerator(random.Random(seed)).linked.host()))
    assert [node.id for node in nodes] == list(range(1, len(nodes) + 1))
    assert all(0 < on < node.id for node in nodes for on in node.dependencies)
    assert all(would < did + 1 for would, did in starts_us(nodes))


@pytest.mark.slow
@settings(max_examples=examples(3))
@given(st.integers(0, 10**6))
def test_nodes_depend_neither_on_the_order_of_the_file_nor_on_the_clock(seed: int) -> None:
    made = LinkedTraceGenerator(random.Random(seed)).linked

    def facts(trace: Trace, shift_us: int = 0) -> list[tuple[Any, ...]]:
        return [
            (
                node.id,
                node.name,
                node.dependencies,
                node.message.duration_micros,
                node.message.start_time_micros - shift_us,
            )
            for node in nodes_of(etloom.link(trace))
        ]

    plain = facts(made.host())
    assert facts(made.host(random.Random(seed + 1))) == plain
    assert facts(made.host(shift=7_000_000_000), 7_000_000) == plain


@settings(max_examples=examples(8))
@given(st.integers(0, 10**6))
def test_exact_times_agree_with_rounded_ones_and_begin_after_their_dependencies(seed: int) -> None:
    trace = etloom.link(LinkedTraceGenerator(random.Random(seed)).linked.host())
    activities = node_table._build_activities(trace, delays=True)
    assert (activities.start == activities.start_ns // 1000).all()
    exact = activities.end_ns - activities.start_ns
    assert (exact >= 0).all() and (abs(exact - 1000 * activities.duration) < 1000).all()
    for at in np.flatnonzero(activities.kind == ActivityKind.WAIT):
        before = activities.dependencies[activities.first[at] : activities.first[at + 1]]
        # A wait that ended before its cause did (clocks differ) takes no time.
        ends = np.minimum(activities.end_ns[before], activities.end_ns[at])
        assert activities.start_ns[at] >= ends.max(initial=0)


def test_the_time_of_a_thread_is_all_there(run: Job) -> None:
    nodes = nodes_of(run[0])
    assert sum(node.message.duration_micros for node in nodes if node.runs_on_host) == 1000


# Communication


@pytest.mark.parametrize("number", pb.COLLECTIVES)
def test_each_collective_has_its_type(number: int) -> None:
    fact = {"collective": pb.COLLECTIVES[number], "bytes": 64, "pg_name": "3", "ranks": "[0, 1]"}
    said = _describe_communication("gloo:x", fact, 0, GroupNumbers({("3", "[0, 1]"): 3}, {3: [0, 1]}), {})
    if pb.COLLECTIVES[number] in ("reduce", "gather", "scatter", "barrier"):
        assert (said["type"], said["comm_type"], said["pg_name"], said["replayed"]) == (7, 5, None, True)
        assert said["collective"] == pb.COLLECTIVES[number]
    else:
        assert (said["type"], said["comm_type"], said["comm_size"], said["pg_name"]) == (7, number, 64, "3")


def test_messages_have_ends_and_a_number_for_each_pair() -> None:
    turns: dict[tuple[Any, ...], int] = {}
    none = GroupNumbers({}, {})

    def said(collective: str, peer: int | None, **more: Any) -> tuple[Any, ...]:
        fact = {"collective": collective, "peer": peer, "bytes": 8, "dtype": "float", **more}
        row = _describe_communication("nccl:x", fact, 2, none, turns)
        return tuple(row.get(name) for name in ("type", "comm_src", "comm_dst", "comm_tag", "comm_size"))

    assert said("send", 5) == (5, 2, 5, 0, 8)
    assert said("send", 5) == (5, 2, 5, 1, 8)
    assert said("recv", 5) == (6, 5, 2, 0, 8)
    assert said("recv", 5, bytes=0, out_nelems=6) == (6, 5, 2, 1, 24)
    assert said("send", None) == (7, None, None, None, 0), "an end that is not known: replayed"
    for name in ("ncclDevKernel_SendRecv", "ncclDevKernel_AllReduce"):
        row = _describe_communication(name, {}, 2, none, turns)
        assert (row["type"], row["comm_type"], row["comm_size"], row["replayed"]) == (7, 5, 0, True), name


@pytest.mark.parametrize(
    ("collective", "into", "out", "own"),
    [
        *(("all_gather", 40, 32, 8), ("reduce_scatter", 40, 8, 32), ("all_to_all", 32, 0, 16)),
        *(("all_reduce", 32, 32, 32), ("broadcast", 8, 8, 8)),
    ],
)
def test_outputs_among_the_arguments_are_not_put_in(collective: str, into: int, out: int, own: int) -> None:
    fact = {"collective": collective, "in_nelems": into, "out_nelems": out, "bytes": 4 * into}
    found = _exclude_outputs(fact)
    assert (found["in_nelems"], found["bytes"]) == (own, 4 * own)


def groups(*rows: tuple[str, str | None, str | None]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["pg_name", "pg_desc", "ranks"], orient="row")


def test_groups_are_numbered_as_simulators_ask(run: Job, tmp_path: Path) -> None:
    first = run[0].replace(
        groups=groups(
            ("0", "default_pg", "[0, 1]"),
            ("tp", "mesh", "[1]"),
            ("7", "x", "[0]"),
            ("94594108284448", "address", "[0]"),
            ("unknown", "x", None),
        )
    )
    second = run[1].replace(groups=groups(("tp", "mesh", "[1]")))
    found = number_groups([first, second])
    assert found.number == {
        ("0", "[0, 1]"): 0,
        ("7", "[0]"): 7,
        ("94594108284448", "[0]"): 8,
        ("tp", "[1]"): 9,
    }
    etloom.export(Job({0: first, 1: second}), tmp_path / "job.et")
    assert json.loads((tmp_path / "job.comm_groups.json").read_text()) == {
        "7": [0], "8": [0], "9": [1], "10": [0, 1],
    }  # fmt: skip
    # ASTRA-sim aborts at a metadata node.
    assert {node.type for node in load_file(tmp_path / "job.0.et").nodes} <= {4, 7}


def test_groups_with_ranks_that_are_not_numbers_are_unknown(run: Job) -> None:
    odd = groups(("1", "x", '[0, "a"]'), ("2", "x", "[[0]]"), ("3", "x", "{}"), ("4", "x", "[0, 1]"))
    assert number_groups([run[0].replace({**run[0].meta, "world_size": 10**12}, groups=odd)]).number == {
        ("4", "[0, 1]"): 4
    }


# Real traces


def read_back(trace: Trace, path: Path) -> None:
    """What the reader finds is what was written."""
    table = chakra.build_nodes(trace, number_groups([trace]), delays=True)
    etloom.export(trace, path)
    read = etloom.read(rank_path(path, trace.rank or 0))
    assert set(read.stats["name"]) <= {"read.absent_value"}  # ranges have no thread
    assert read.nodes["et_id"].to_list() == table.table["id"].to_list()
    assert read.nodes["name"].cast(pl.String).to_list() == table.table["name"].to_list()
    edges = read.dependencies.filter(pl.col("kind").cast(pl.String) == "data").sort("node", "on")
    assert (edges["on"].to_numpy() + 1).tolist() == table.dependencies.tolist()
    assert (np.bincount(edges["node"].to_numpy(), minlength=read.nodes.height) == np.diff(table.first)).all()
    columns = ["rf_id", "seq_id", "fw_tid", "fw_parent", "op_schema", "tid"]
    as_text = [pl.col(pl.Categorical).cast(pl.String)]
    assert (
        read.nodes.select(columns)
        .with_columns(as_text)
        .equals(
            table.table.select(pl.col(name).cast(read.nodes[name].dtype) for name in columns).with_columns(
                as_text
            )
        )
    )
    # The parts of an operator are one event.
    timed = table.table.drop_nulls("start_ns").filter(pl.col("part").is_null())
    took = timed.select(pl.coalesce("inclusive_ns", "duration_ns").sum()).item()
    assert read.events.select(pl.col("ts").sum(), pl.col("dur").sum()).row(0) == (
        timed["start_ns"].sum(),
        took,
    )
    # Of what is linked, the tensors are those of the execution trace.
    rows = read.nodes.select(
        "id", pl.col("attrs").cast(pl.String).str.json_path_match("$.et_id").cast(pl.Int64)
    )
    linked = rows.drop_nulls().join(trace.nodes.select(attrs="et_id", own="id"), on="attrs")
    names = [
        "io",
        "index",
        "item",
        "tensor_id",
        "storage_id",
        "numel",
        "itemsize",
        "device",
        "dtype",
        "shape",
    ]
    ours = read.tensors.join(linked, left_on="node", right_on="id").sort("own", "io", maintain_order=True)
    theirs = trace.tensors.filter(pl.col("node").is_in(linked["own"].implode())).sort(
        "node", "io", maintain_order=True
    )
    assert ours.height == theirs.height
    for name in names:
        # The recorder writes a size of 0 for a type, and no name for a device, that it does not know.
        told, meant = (side[name].cast(pl.String).replace(["0", ""], None) for side in (ours, theirs))
        assert told.equals(meant, null_equal=True), name


@pytest.mark.slow
def test_our_recording_reads_back_equal(own: Path, tmp_path: Path) -> None:
    for trace in _own_traces(own):
        read_back(trace, tmp_path / "x.et")


@pytest.mark.slow
def test_steps_and_launches_survive(data: Path, tmp_path: Path) -> None:
    """Operators are written in parts, between the operators they call; read, they are whole, with their launches."""
    trace = open_run(data / "dlrm")[0]
    etloom.export(trace, tmp_path / "x.et")
    read = etloom.open(tmp_path / "x.0.et", use_cache=False)[0]
    columns = ["step", "dur_ns", "operators"]
    assert etloom.analyze(read, "steps")[columns].rows() == etloom.analyze(trace, "steps")[columns].rows()

    def count_launches(trace: Trace) -> dict[str, int]:
        names = trace.events.select(operator="id", name=pl.col("name").cast(pl.String))
        launched = trace.launches.drop_nulls("operator").join(names, on="operator")
        return dict(launched.group_by("name").len().rows())

    wanted = count_launches(trace)
    wanted.pop("record_param_comms", None)  # its kernels are nodes of communication
    assert count_launches(read) == wanted


@pytest.mark.slow
def test_nccl_ddp_reads_back_equal_and_takes_the_recorded_time(data: Path, tmp_path: Path) -> None:
    trace = etloom.open(data / "nccl_ddp", use_cache=False)[0]
    read_back(trace, tmp_path / "x.et")
    nodes = load_file(tmp_path / "x.0.et").nodes
    timed = [node.attributes for node in nodes if "start_ns" in node.attributes]
    took = max(one["start_ns"] + one["duration_ns"] for one in timed) - min(one["start_ns"] for one in timed)
    assert abs(schedule_nodes(nodes).makespan_ns - took) < 0.0001 * took
    kernels = trace.launches.height
    assert sum("stream" in node.attributes and node.name != "delay" for node in nodes) == kernels
    assert all(node.message.data_deps for node in nodes if not node.runs_on_host)
    # Unlike the peer's, device work has successors.
    leads = {on for node in nodes for on in node.message.data_deps}
    assert sum(node.id in leads for node in nodes if not node.runs_on_host) > 0.99 * kernels


ACCURACY = {
    "dlrm": (0.0001, 0.001),
    "critical_path/alexnet.json.gz": (0.0001, 0.0001),
    "cpu/coll_4": (0.0001, 0.1),  # its collectives overlap, of which a simulator does one at a time
    "cpu/pp_4": (0.0001, 0.0001),
    "tracelens/h100_qwen.json.gz": (0.002, 0.002),
    "tracelens/mi300_vllm_graph_execution.json.gz": (0.0001, 0.0001),
}
"""How far the makespan of dependencies alone, and that on a simulator's resources, is from the recorded one."""


@pytest.mark.slow
def test_delays_of_a_stream_do_not_delay_another_one(tmp_path: Path) -> None:
    """Stream 8 waits for something that was not recorded while stream 7 works; the host waits for stream 7."""
    rank = small_traces.RankBuilder().op("aten::mm", 0, 250)
    rank.kernel(10, 300, 20, stream=8)
    for number in range(4):
        rank.kernel(20 + 10 * number, 80 + 40 * number, 38, stream=7)
    rank.op("cudaDeviceSynchronize", 70, 170, "cuda_runtime").op("aten::add", 250, 50).op(
        "aten::add", 300, 50
    )
    nodes = nodes_of(etloom.link(rank.trace(tmp_path)), serialize=True)
    ends = schedule_nodes(nodes).end
    begin = min(node.attributes["start_ns"] for node in nodes)
    assert sum(node.attributes["cat"] == "kernel" for node in nodes) == 5
    for node in nodes:
        recorded = node.attributes["start_ns"] + node.attributes["duration_ns"] - begin
        assert abs(ends[node.id] - recorded) <= 1000, node.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCURACY)
def test_recordings_take_the_recorded_time(name: str, data: Path) -> None:
    for trace in open_run(data / name).values():
        for limited, bound in zip((False, True), ACCURACY[name], strict=True):
            nodes = nodes_of(trace, serialize=limited)
            timed = [node.attributes for node in nodes if "start_ns" in node.attributes]
            took = max(one["start_ns"] + one["duration_ns"] for one in timed) - min(
                one["start_ns"] for one in timed
            )
            assert abs(schedule_nodes(nodes, limited=limited).makespan_ns / took - 1) < bound


SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
PROTO = """
syntax = "proto3";
package ChakraProtoMsg;
message GlobalMetadata { string version = 1; repeated AttributeProto attr = 2; }
enum NodeType { INVALID_NODE = 0; METADATA_NODE = 1; MEM_LOAD_NODE = 2; MEM_STORE_NODE = 3; COMP_NODE = 4;
  COMM_SEND_NODE = 5; COMM_RECV_NODE = 6; COMM_COLL_NODE = 7; }
message IOInfo { string values = 1; string shapes = 2; string types = 3; }
message Node { uint64 id = 1; string name = 2; NodeType type = 3; repeated uint64 ctrl_deps = 4;
  repeated uint64 data_deps = 5; uint64 start_time_micros = 6; uint64 duration_micros = 7; IOInfo inputs = 8;
  IOInfo outputs = 9; repeated AttributeProto attr = 10; }
""" + "".join(f"message {scalar}List {{ repeated {scalar} values = 1; }}\n" for scalar in SCALARS)
PROTO += "message AttributeProto { string name = 1; string doc_string = 2; oneof value {\n"
PROTO += "".join(
    f"{scalar} {scalar}_val = {3 + 2 * at}; {scalar}List {scalar}_list = {4 + 2 * at};\n"
    for at, scalar in enumerate(SCALARS)
)
PROTO += "} }\n"


def test_protoc_decodes_it(run: Job, tmp_path: Path) -> None:
    command = (
        [shutil.which("protoc")] if shutil.which("protoc") else [sys.executable, "-m", "grpc_tools.protoc"]
    )
    if command[0] == sys.executable and find_spec("grpc_tools") is None:
        pytest.skip("neither protoc (Debian: protobuf-compiler) nor grpcio-tools is there")
    (tmp_path / "et.proto").write_text(PROTO)
    etloom.export(run[0], tmp_path / "x.et")
    messages, _ = pb.split_messages((tmp_path / "x.0.et").read_bytes())
    decoded = []
    for kind, message in zip(("GlobalMetadata", "Node"), (messages[0], messages[6]), strict=True):
        done = subprocess.run(
            [*map(str, command), f"--decode=ChakraProtoMsg.{kind}", f"-I{tmp_path}", "et.proto"],
            input=bytes(message), capture_output=True, check=True,
        )  # fmt: skip
        decoded.append(done.stdout.decode())
    assert decoded[0].startswith(
        'version: "0.0.4"\nattr {\n  name: "schema"\n  string_val: "1.1.1-chakra.0.0.4"\n}'
    )
    assert decoded[1].startswith(
        'id: 6\nname: "gemm"\ntype: COMP_NODE\nctrl_deps: 3\ndata_deps: 5\n'
        f"start_time_micros: {BASE_US + 400}\nduration_micros: 600\n"
        'attr {\n  name: "is_cpu_op"\n  bool_val: false\n}'
    )


@pytest.mark.slow
def test_writing_imports_neither_pyarrow_nor_pandas(tmp_path: Path) -> None:
    # They take 0.1 and 0.2 s to import.
    code = (
        "import sys, etloom; from pathlib import Path; from support import small_traces; folder = Path(sys.argv[1]);"
        "etloom.export(etloom.open(small_traces.write_run(folder), use_cache=False)[0], folder / 'x.et');"
        "sys.exit(bool({'pandas.core', 'pyarrow'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT / "tests")


@pytest.mark.slow
def test_unrecorded_groups_are_those_matched(data: Path, tmp_path: Path) -> None:
    etloom.export(open_run(data / "cpu" / "coll_4"), tmp_path / "x.et")
    assert json.loads((tmp_path / "x.comm_groups.json").read_text()) == {"1": [0, 1], "2": [0, 1, 2, 3]}
    for rank in range(4):
        together = [
            node.attributes
            for node in load_file(tmp_path / f"x.{rank}.et").nodes
            if "comm_type" in node.attributes
        ]
        inner = [one["collective"] for one in together if one.get("pg_name") == "1"]
        assert inner == (["all_reduce"] if rank < 2 else [])
        assert {one.get("pg_name") for one in together} <= {"2", "1", None}
