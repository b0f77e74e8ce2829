"""Chakra nodes as JSON, and options of exports on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import etloom
from etloom.cli import main
from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Job
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file, write_messages
from etloom.formats.io.compression import read_content
from support import small_traces


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(small_traces.write_run(tmp_path_factory.mktemp("run")), use_cache=False)


@pytest.mark.slow
def test_options_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(small_traces.write_run(tmp_path / "run")), str(tmp_path / "a.et")
    assert main(["export", run, "--out", out, "-O", "delays"]) == 2
    assert main(["export", run, "--out", out, "-O", "delays=maybe"]) == 2
    assert main(["export", run, "--rank", "0", "--out", out, "-O", "delays=no"]) == 0
    assert "delay" not in [node.name for node in load_file(tmp_path / "a.0.et").nodes]
    capsys.readouterr()
    assert main(["export", run, "--out", out, "-O", "colour=red"]) == 2
    assert "colour" in capsys.readouterr().err


@pytest.mark.slow
def test_a_linked_trace_as_chakra_json(run: Job, tmp_path: Path) -> None:
    etloom.export(run[0], tmp_path / "x.chakra.json")
    etloom.export(run[0], tmp_path / "x.et")
    found = json.loads((tmp_path / "x.chakra.json").read_text())
    assert [node["name"] for node in found["nodes"]] == [
        node.name for node in load_file(tmp_path / "x.0.et").nodes
    ]
    assert (found["metadata"]["version"], found["metadata"]["attr"]["rank"]) == ("0.0.4", 0)
    with pytest.raises(EtloomError, match="one rank, not 2"):
        etloom.export(run, tmp_path / "y.chakra.json")


@pytest.mark.slow
def test_a_chakra_file_becomes_chakra_json_unless_another_format_is_named(run: Job, tmp_path: Path) -> None:
    source = tmp_path / "x.0.et"
    etloom.export(run[0], tmp_path / "x.et")
    etloom.convert(source, tmp_path / "nodes.json")
    assert main(["convert", str(source), str(tmp_path / "again.json.gz")]) == 0
    assert len(json.loads((tmp_path / "nodes.json").read_text())["nodes"]) == len(load_file(source).nodes)
    assert read_content(tmp_path / "again.json.gz", 1 << 20)[0] == (tmp_path / "nodes.json").read_bytes()
    etloom.convert(source, tmp_path / "chrome.json", "chrome")
    assert "traceEvents" in json.loads((tmp_path / "chrome.json").read_text())


WORKLOAD = {
    "workload_graph": [
        {"Id": 0, "Name": "mm", "NodeType": 4, "is_cpu_op": False, "runtime": 5, "data_deps": []},
        {
            "Id": 1, "Name": "reduce", "NodeType": "COMM_COLL_NODE", "is_cpu_op": False, "data_deps": [0],
            "comm_type": 0, "comm_size": 64, "comm_priority": 0, "tensor_size": 9,
        },
    ]
}  # fmt: skip


def test_the_json_of_the_feeder_is_read(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD, indent=1))
    trace = etloom.read(path)
    assert trace.nodes["name"].to_list() == ["mm", "reduce"]
    assert trace.comms.select("collective", "bytes").rows() == [("all_reduce", 64)]
    assert trace.dependencies.select("node", "on").rows() == [(1, 0)]
    assert [node.message.duration_micros for node in load_file(path).nodes] == [5, 0]
    assert etloom.lint(path).verdict == "finish"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"Id": -1}, "node 0"),
        ({"Id": "a"}, "node 0"),
        ({"NodeType": "NEW"}, "node 0: 'NEW'"),
        ({"data_deps": 3}, "node 0"),
        ({"comm_size": [1]}, "node 0: comm_size: expected a number or text, got list"),
        ({"comm_src": 1 << 40}, "node 0"),
    ],
)
def test_values_that_the_feeder_could_not_read(
    change: dict[str, object], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"workload_graph": [{**WORKLOAD["workload_graph"][0], **change}]}))
    with pytest.raises(ReadError, match=problem):
        etloom.read(path)
    path.write_text('{"workload_graph": 7}')
    with pytest.raises(ReadError, match="expected a list, got int"):
        etloom.read(path)
    path.write_text('{"workload_graph": [')
    with pytest.raises(ReadError, match="is not JSON"):
        etloom.read(path)


def test_a_file_as_json_is_one_object_with_numbers_and_lists(tmp_path: Path) -> None:
    node = pb.Node(id=2**64 - 1, name='größe "x"', type=4, data_deps=[1, 2], duration_micros=7)
    node.attr.add(name="rf_id").int64_val = -5
    node.attr.add(name="odd").double_val = float("nan")
    node.inputs.values, node.inputs.shapes, node.inputs.types = (
        "[[1, 2, 0, 4, 4, 'cpu'], None]",
        "[[4], []]",
        "oops",
    )
    write_messages(tmp_path / "x.et", pb.GlobalMetadata(version="1"), [node, pb.Node(id=0, type=99)])
    assert main(["convert", str(tmp_path / "x.et"), str(tmp_path / "x.chakra.json")]) == 0
    nothing = {"ctrl_deps": [], "data_deps": [], "start_time_micros": 0, "duration_micros": 0, "attr": {}}
    assert json.loads((tmp_path / "x.chakra.json").read_text()) == {
        "metadata": {"version": "1", "attr": {}},
        "nodes": [
            {
                "id": 2**64 - 1, "name": 'größe "x"', "type": "COMP_NODE", "ctrl_deps": [], "data_deps": [1, 2],
                "start_time_micros": 0, "duration_micros": 7,
                "inputs": {"values": [[1, 2, 0, 4, 4, "cpu"], None], "shapes": [[4], []], "types": "oops"},
                "attr": {"rf_id": -5, "odd": "nan"},
            },
            {"id": 0, "name": "", "type": 99, **nothing},
        ],
    }  # fmt: skip
