"""Parts of the dependency graph as DOT and GraphML, and Chakra nodes as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest
import small

import etloom
from etloom.cli import main
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job
from etloom.exports._part import part
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file, write_messages

XML = "{http://graphml.graphdrawing.org/xmlns}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(small.write_run(tmp_path_factory.mktemp("run")), use_cache=False)


def test_a_node_is_an_event_and_an_edge_says_why(run: Job) -> None:
    found = part(run[0], None, None, None, 2, 100)
    names = dict(found.nodes.select("number", "name").iter_rows())
    edges = {
        (names[a], names[b], why) for a, b, why in found.edges.select("source", "target", "why").iter_rows()
    }
    assert edges == {
        ("ProfilerStep#3", "aten::linear", "segment"),
        ("aten::linear", "aten::mm", "segment"),
        ("aten::mm", "cudaLaunchKernel", "segment"),
        ("cudaLaunchKernel", "aten::mm", "segment"),
        ("aten::mm", "aten::linear", "segment"),
        ("aten::linear", "cudaLaunchKernel", "segment"),
        ("cudaLaunchKernel", "ProfilerStep#3", "segment"),
        ("cudaLaunchKernel", "gemm", "launch"),
        ("cudaLaunchKernel", "ncclDevKernel_AllReduce_Sum", "launch"),
    }


def test_collectives_join_ranks(run: Job) -> None:
    found = part(run, None, None, "ncclDevKernel_AllReduce_Sum", 0, 100)
    assert found.nodes["rank"].to_list() == [0, 1]
    assert set(found.edges["why"]) == {"transfer"}
    assert found.edges.height == 2, "each waits for the other"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"around": "gemm", "depth": 0}, {"gemm"}),
        ({"around": "gemm", "depth": 1}, {"gemm", "cudaLaunchKernel"}),
        ({"around": "gemm", "depth": 2}, {"gemm", "cudaLaunchKernel", "aten::mm"}),
        ({"step": 3, "around": "gemm", "depth": 1}, {"gemm", "cudaLaunchKernel"}),
    ],
)
def test_parts(run: Job, tmp_path: Path, options: dict[str, object], names: set[str]) -> None:
    etloom.export(run, tmp_path / "x.graphml", **options, rank=1)
    tree = ElementTree.parse(tmp_path / "x.graphml")
    assert {data.text for data in tree.iter(f"{XML}data") if data.get("key") == "name"} == names
    assert {data.text for data in tree.iter(f"{XML}data") if data.get("key") == "rank"} == {"1"}


def test_graphml_holds_times_and_names_that_need_escapes(run: Job, tmp_path: Path) -> None:
    events = run[0].events.with_columns(
        name=pl.when(pl.col("name").cast(pl.String) == "gemm").then(pl.lit("a<b>&\x01\"'")).otherwise("name")
    )
    etloom.export(run[0].replace(events=events), tmp_path / "x.graphml")
    tree = ElementTree.parse(tmp_path / "x.graphml")
    nodes = [{data.get("key"): data.text for data in node} for node in tree.iter(f"{XML}node")]
    (gemm,) = (node for node in nodes if node["name"] == "a<b>&\ufffd\"'")
    assert (gemm["duration_ns"], gemm["category"], gemm["stream"]) == ("600000", "kernel", "7")
    kinds = {key.get("id"): key.get("attr.type") for key in tree.iter(f"{XML}key")}
    assert (kinds["name"], kinds["start_ns"], kinds["why"], kinds["floor_ns"]) == (
        "string",
        "long",
        "string",
        "long",
    )
    known = {node.get("id") for node in tree.iter(f"{XML}node")}
    assert all({edge.get("source"), edge.get("target")} <= known for edge in tree.iter(f"{XML}edge"))


def test_dot(run: Job, tmp_path: Path) -> None:
    etloom.export(run[0], tmp_path / "x.dot", around="gemm", depth=1)
    assert (tmp_path / "x.dot").read_text().splitlines() == [
        "digraph etloom {",
        "  rankdir=LR;",
        "  node [shape=ellipse];",
        '  n3 [label="cudaLaunchKernel\\n20.000 us"];',
        '  n4 [label="gemm\\n600.000 us", shape=box];',
        '  n3 -> n4 [label="launch"];',
        "}",
    ]


def test_quotes_in_dot(run: Job, tmp_path: Path) -> None:
    events = run[0].events.with_columns(name=pl.lit('"; evil [label="\\'))
    etloom.export(run[0].replace(events=events), tmp_path / "x.dot")
    assert 'label="\\"; evil [label=\\"\\\\\\n' in (tmp_path / "x.dot").read_text()


def test_too_much_and_nothing_are_said(run: Job, tmp_path: Path) -> None:
    with pytest.raises(EtloomError, match="the part has 7 nodes, more than can be drawn"):
        etloom.export(run[0], tmp_path / "x.dot", limit=6)
    with pytest.raises(AnalysisError, match="no event of that part"):
        etloom.export(run[0], tmp_path / "x.dot", step=9)
    with pytest.raises(AnalysisError, match="no rank 5"):
        etloom.export(run, tmp_path / "x.dot", rank=5)
    with pytest.raises(EtloomError, match="no option 'colour'"):
        etloom.export(run, tmp_path / "x.dot", colour=5)
    assert not list(tmp_path.iterdir())


def test_options_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small.write_run(tmp_path / "run")
    out = str(tmp_path / "x.dot")
    assert main(["export", str(run), "--out", out, "-O", "around=gemm", "-O", "depth=0", "-O", "rank=0"]) == 0
    assert (tmp_path / "x.dot").read_text().count("label") == 1
    assert main(["export", str(run), "--out", out, "-O", "depth=deep"]) == 2
    assert main(["export", str(run), "--out", out, "-O", "depth"]) == 2
    assert main(["export", str(run), "--out", str(tmp_path / "a.et"), "-O", "delays=maybe"]) == 2
    assert main(["export", str(run), "--rank", "0", "--out", str(tmp_path / "a.et"), "-O", "delays=no"]) == 0
    assert "delay" not in [node.name for node in load_file(tmp_path / "a.et").nodes]
    assert main(["export", str(run), "--out", out, "-O", "colour=red"]) == 2
    assert "no option 'colour'" in capsys.readouterr().err


def test_a_linked_trace_as_chakra_json(run: Job, tmp_path: Path) -> None:
    etloom.export(run[0], tmp_path / "x.chakra.json")
    etloom.export(run[0], tmp_path / "x.et")
    found = json.loads((tmp_path / "x.chakra.json").read_text())
    assert [node["name"] for node in found["nodes"]] == [
        node.name for node in load_file(tmp_path / "x.et").nodes
    ]
    assert (found["metadata"]["version"], found["metadata"]["attr"]["rank"]) == ("0.0.4", 0)
    with pytest.raises(EtloomError, match="one rank, not 2"):
        etloom.export(run, tmp_path / "y.chakra.json")


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
