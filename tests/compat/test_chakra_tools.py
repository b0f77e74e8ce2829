"""chakra_converter, _jsonizer, _visualizer, _timeline_visualizer, _generator under their own flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import etloom
from etloom.compat import (
    chakra_converter,
    chakra_generator,
    chakra_jsonizer,
    chakra_timeline_visualizer,
    chakra_visualizer,
)
from etloom.exports.chakra_lint import lint
from etloom.exports.chakra_lint.list_schedule import schedule_nodes
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file, write_messages
from support import small_traces
from support.paths import ROOT


@pytest.fixture(scope="module")
def plus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ET+ of a small run."""
    folder = tmp_path_factory.mktemp("plus")
    etloom.export(
        etloom.open(small_traces.write_run(folder / "run"), use_cache=False)[0], folder / "x.etplus.json"
    )
    return folder / "x.etplus.json"


@pytest.mark.slow
def test_an_et_plus_becomes_nodes(plus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.et"
    assert chakra_converter.main(["PyTorch", "--input", str(plus), "--output", str(out), "--simulate"]) == 0
    assert capsys.readouterr().out == "9 nodes take 1.000 ms\n"
    nodes = {node.name: node for node in load_file(out).nodes if not node.attributes.get("part")}
    assert set(nodes) == {
        "ProfilerStep#3",
        "aten::linear",
        "aten::mm",
        "gemm",
        "ncclDevKernel_AllReduce_Sum",
    }
    assert nodes["gemm"].message.duration_micros == 600
    assert nodes["gemm"].message.ctrl_deps == [nodes["aten::mm"].id], (
        "launched by the operator around the call"
    )
    assert [one.code for one in lint(out).findings] == ["nothing-simulated"]


def test_a_wait_of_an_et_plus_is_a_dependency(plus: Path, tmp_path: Path) -> None:
    document = json.loads(plus.read_text())
    nodes = {node["name"]: node for node in document["nodes"]}
    # The operator that took until 600 is said to wait for a kernel that ends at 580.
    nodes["gemm"]["inclusive_dur"] = nodes["gemm"]["exclusive_dur"] = 180
    nodes["aten::linear"]["sync_dep"] = [nodes["gemm"]["id"]]
    (tmp_path / "y.json").write_text(json.dumps(document))
    chakra_converter.convert(tmp_path / "y.json", tmp_path / "y.et")
    found = load_file(tmp_path / "y.et").nodes
    (gemm,) = (node for node in found if node.name == "gemm")
    (waits,) = (node for node in found if node.runs_on_host and gemm.id in node.message.data_deps)
    assert (waits.name, waits.message.duration_micros) == ("aten::linear", 20)


def test_any_trace_is_converted_and_other_files_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    kineto = str(run / "kineto_trace_0.json")
    assert chakra_converter.main(["PyTorch", "--input", kineto, "--output", str(tmp_path / "k.et")]) == 0
    assert len(load_file(tmp_path / "k.et").nodes) == 11
    et = str(run / "torch_et_0.json")
    assert chakra_converter.main(["PyTorch", "--input", et, "--output", str(tmp_path / "e.et")]) == 1
    assert "no timed events" in capsys.readouterr().err
    assert chakra_converter.main(["PyTorch", "--input", str(tmp_path / "none"), "--output", "x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_an_et_plus_of_a_recording_takes_the_recorded_time(data: Path, tmp_path: Path) -> None:
    job = etloom.open(data / "nccl_ddp")
    etloom.export(job, tmp_path / "n.etplus.json")
    chakra_converter.convert(tmp_path / "n.etplus.json", tmp_path / "n.et")
    nodes = load_file(tmp_path / "n.et").nodes
    # The peer's --simulate comes to 919 ms for a recording of 665 ms.
    assert schedule_nodes(nodes).makespan_ns == pytest.approx(667_445_000, rel=0.01)
    # Delays of the stream of communications are replayed on its resource too.
    assert sum(node.type == 7 and node.name != "delay" for node in nodes) == 21


# Text

LAYERS = """
conv -1 100 ALLGATHER 8 120 REDUCESCATTER 16 80 ALLREDUCE 64 10
mid  -1  30 ALLGATHER 8  20 REDUCESCATTER 16 10 ALLREDUCE 64 10
fc   -1  50 NONE 0       60 NONE 0           40 ALLREDUCE 32 10
"""


def text(kind: str, tmp_path: Path, passes: int = 1, layers: str = LAYERS) -> list[tuple[str, list[str]]]:
    """Name of each node and of what it depends on."""
    (tmp_path / "in.txt").write_text(f"{kind}\n{len(layers.strip().splitlines())}{layers}")
    asked = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out")]
    assert chakra_converter.main(["Text", *asked, "--num-npus", "2", "--num-passes", str(passes)]) == 0
    assert (tmp_path / "out.0.et").read_bytes() == (tmp_path / "out.1.et").read_bytes()
    assert lint(tmp_path / "out.1.et").findings == []
    nodes = load_file(tmp_path / "out.0.et").nodes
    assert not schedule_nodes(nodes).stuck
    names = {node.id: node.name for node in nodes}
    return [(node.name, [names[on] for on in node.message.data_deps]) for node in nodes]


def test_text_micro(tmp_path: Path) -> None:
    once = [("conv_WG_COMM_ALLREDUCE", []), ("mid_WG_COMM_ALLREDUCE", []), ("fc_WG_COMM_ALLREDUCE", [])]
    assert text("MICRO", tmp_path, passes=2) == once * 2


def test_text_data(tmp_path: Path) -> None:
    assert text("DATA", tmp_path, passes=2)[:11] == [
        ("conv_FWD", []),
        ("mid_FWD", ["conv_FWD"]),
        ("fc_FWD", ["mid_FWD"]),
        ("fc_WG", ["fc_FWD"]),
        ("fc_WG_COMM_ALLREDUCE", ["fc_WG"]),
        ("fc_IG", ["fc_WG"]),
        ("mid_WG", ["fc_IG"]),
        ("mid_WG_COMM_ALLREDUCE", ["mid_WG"]),
        ("mid_IG", ["mid_WG"]),
        ("conv_WG", ["mid_IG"]),
        ("conv_WG_COMM_ALLREDUCE", ["conv_WG"]),
    ]
    again = text("DATA", tmp_path, passes=2)[11:13]
    assert again == [
        ("conv_FWD", ["conv_WG", "conv_WG_COMM_ALLREDUCE"]),
        ("mid_FWD", ["mid_WG_COMM_ALLREDUCE", "conv_FWD"]),
    ]


def test_text_model(tmp_path: Path) -> None:
    found = dict(text("MODEL", tmp_path))
    assert not any("WG_COMM" in name for name in found)
    assert found["mid_FWD"] == ["conv_FWD_COMM_ALLGATHER"]
    assert found["fc_IG"] == ["fc_FWD"], "NONE is no node"
    assert found["mid_IG"] == ["fc_IG", "fc_WG"]
    assert found["conv_IG"] == ["mid_IG_COMM_REDUCESCATTER", "mid_WG"]
    assert found["conv_WG"] == ["conv_IG"]
    assert "conv_IG_COMM_REDUCESCATTER" not in found


@pytest.mark.parametrize("kind", ["HYBRID_DATA_MODEL", "HYBRID_MODEL_DATA"])
def test_text_hybrid(kind: str, tmp_path: Path) -> None:
    found = dict(text(kind, tmp_path))
    assert found["mid_FWD"] == ["conv_FWD_COMM_ALLGATHER"]
    assert found["mid_WG_COMM_ALLREDUCE"] == ["mid_WG"]
    assert found["conv_IG"] == ["mid_IG_COMM_REDUCESCATTER", "mid_WG"]
    assert found["conv_WG"] == ["conv_IG"]


@pytest.mark.parametrize("kind", ["HYBRID_DLRM 2", "HYBRID_DLRM_ENHANCED 2"])
def test_text_dlrm(kind: str, tmp_path: Path) -> None:
    layers = LAYERS.replace(
        "conv -1 100 ALLGATHER 8 120 REDUCESCATTER 16", "emb -1 100 ALLTOALL 8 120 ALLTOALL 16"
    )
    found = dict(text(kind, tmp_path, layers=layers))
    assert found["mid_FWD"] == ["emb_FWD"], "the bottom layers go on beside the embeddings"
    assert found["fc_FWD"] == ["emb_FWD_COMM_ALLTOALL", "mid_FWD_COMM_ALLGATHER"]
    assert found["emb_IG_COMM_ALLTOALL"] == ["fc_IG"]
    assert found["emb_WG"] == ["emb_IG_COMM_ALLTOALL"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "not a text description of layers"),
        ("DATA\n2\nconv -1 1 NONE 0 1 NONE 0 1 NONE 0 1\n", "states 2 layers, but the file contains 1"),
        ("NEW\n1\nconv -1 1 NONE 0 1 NONE 0 1 NONE 0 1\n", "unknown parallelism"),
        ("DATA\n1\nconv -1 1 NONE 0\n", "5 columns"),
        ("DATA\n1\nconv -1 1 SUM 0 1 NONE 0 1 NONE 0 1\n", "unknown collective 'SUM'"),
        (
            "DATA\n1\nconv -1 -1 NONE 0 1 NONE 0 1 NONE 0 1\n",
            "time -1 us or size 0 B is out of range",
        ),
        (f"DATA\n1\nconv -1 1 NONE 0 1 NONE 0 1 ALLREDUCE {1 << 63} 1\n", "is out of range"),
        (
            "HYBRID_DLRM 4\n1\nconv -1 1 NONE 0 1 NONE 0 1 NONE 0 1\n",
            "names layer 4, which the file does not contain",
        ),
    ],
)
def test_texts_that_cannot_be_read(
    content: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text(content)
    asked = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out")]
    assert chakra_converter.main(["Text", *asked, "--num-npus", "1", "--num-passes", "1"]) == 1
    error = capsys.readouterr().err
    assert what in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out*")), "no part of an answer"


# The others


def test_jsonizer(plus: Path, tmp_path: Path) -> None:
    chakra_converter.convert(plus, tmp_path / "x.et")
    asked = ["--input_filename", str(tmp_path / "x.et"), "--output_filename", str(tmp_path / "x.json")]
    assert chakra_jsonizer.main(asked) == 0
    decoder, objects, text = json.JSONDecoder(), [], (tmp_path / "x.json").read_text()
    while text:
        content, end = decoder.raw_decode(text)
        objects.append(content)
        text = text[end:]
    assert objects[0]["attr"][0].keys() == {"name", "stringVal"}
    assert [node["id"] for node in objects[1:]] == [str(number) for number in range(1, 10)]
    kernel = next(node for node in objects if node.get("type") == "COMP_NODE" and "durationMicros" in node)
    assert isinstance(kernel["durationMicros"], str)
    assert chakra_jsonizer.main(["--input_filename", str(plus), "--output_filename", "x"]) == 1


def test_visualizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [pb.Node(id=1, name='a"<\x01'), pb.Node(id=2, name="b", data_deps=[1], ctrl_deps=[1])]
    write_messages(tmp_path / "x.et", pb.GlobalMetadata(version="1"), nodes)

    def draw(name: str) -> int:
        asked = ["--input_filename", str(tmp_path / "x.et"), "--output_filename", str(tmp_path / name)]
        return chakra_visualizer.main(asked)

    assert draw("x.dot") == 0
    assert (tmp_path / "x.dot").read_text().splitlines()[1:] == [
        '  1 [label="a\\"<\x01"];',
        '  2 [label="b"];',
        "  1 -> 2 [arrowhead=normal];",
        "  1 -> 2 [arrowhead=tee];",
        "}",
    ]
    assert draw("x.graphml") == 0
    tree = ElementTree.parse(tmp_path / "x.graphml")
    texts = [data.text for data in tree.iter("{http://graphml.graphdrawing.org/xmlns}data")]
    assert texts == ['a"<\ufffd', "b", "data", "control"]
    (tmp_path / "dot").write_text("#!/bin/sh\necho 'Error: <stdin>: syntax error' >&2\nexit 1\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert draw("x.pdf") == 1
    assert "Graphviz failed: Error: <stdin>: syntax error; write a .dot file" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert draw("x.pdf") == 1
    assert "Graphviz" in capsys.readouterr().err
    assert draw("x.png") == 1


def test_timeline_visualizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text(
        "info,npu=0,cycle=1\n"
        "issue,npu=0,cycle=3000,node_id=5,name=aten::mm, and more\n"
        "issue,npu=1,cycle=1000,node_id=5,name=COMM_COLL_NODE_x\n"
        "callback,npu=0,cycle=7500,node_id=5,name=aten::mm, and more\n"
        "callback,npu=1,cycle=2000,node_id=5,name=COMM_COLL_NODE_x\n"
        "callback,npu=0,cycle=9000,node_id=6,name=never issued\n"
    )
    asked = ["--input_filename", str(log), "--output_filename", str(tmp_path / "t.json"), "--npu_frequency"]
    assert chakra_timeline_visualizer.main([*asked, "1500", "--num_npus", "2"]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = ("pid", "tid", "name", "ts", "dur")
    assert [tuple(event[name] for name in names) for event in events if event["ph"] == "X"] == [
        (0, 3, "aten::mm, and more", 2.0, 3.0),
        (1, 4, "COMM_COLL_NODE_x", pytest.approx(2 / 3), pytest.approx(2 / 3)),
    ]
    assert etloom.read(tmp_path / "t.json").events["dur"].to_list() == [667, 3000]
    assert chakra_timeline_visualizer.main([*asked, "0", "--num_npus", "2"]) == 1
    log.write_text(f"issue,npu=0,cycle={'9' * 5000},node_id=5,name=a")
    assert chakra_timeline_visualizer.main([*asked, "1", "--num_npus", "2"]) == 1
    assert "no node with both lines, issue and callback" in capsys.readouterr().err


def test_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--num_npus", "3", "--default_runtime", "7", "--default_comm_size", "128"]
    assert chakra_generator.main(asked) == 0
    names = {path.name.removesuffix(f".{path.name.split('.')[1]}.et") for path in tmp_path.iterdir()}
    assert chakra_generator.main(["--default_runtime", "-1"]) == 1
    assert chakra_generator.main(["--default_comm_size", str(1 << 63)]) == 1
    assert len(names) == 14
    assert len(list(tmp_path.iterdir())) == 42
    first, second = load_file(tmp_path / "two_comp_nodes_dependent.2.et").nodes
    assert (second.message.duration_micros, list(second.message.data_deps)) == (7, [first.id])
    (send,) = load_file(tmp_path / "one_comm_send_node.2.et").nodes
    wanted = {"comm_src": 2, "comm_dst": 0, "comm_tag": 0, "comm_size": 128, "is_cpu_op": False}
    assert send.attributes == wanted
    (every,) = load_file(tmp_path / "one_metadata_node_all_types.0.et").nodes
    assert len(every.attributes) == 30
    assert every.attributes["sint64_list"] == [-5, -5]
    for name in sorted(names):
        if name not in ("BARRIER", "one_metadata_node_all_types"):
            assert not lint(tmp_path / f"{name}.1.et").has_errors, name


def test_each_command_is_installed() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    scripts: dict[str, Any] = dict(re.findall(r'^(chakra_\w+) = "(\S+)"$', project, re.MULTILINE))
    for name in ("converter", "jsonizer", "visualizer", "timeline_visualizer", "generator"):
        assert scripts[f"chakra_{name}"] == f"etloom.compat.chakra_{name}:main"


@pytest.mark.parametrize(
    ("text", "megahertz"), [("1500", 1500), ("1.5GHz", 1500), ("800 mhz", 800), ("2e3", None)]
)
def test_a_frequency_may_have_a_unit(text: str, megahertz: float | None) -> None:
    if megahertz is None:
        with pytest.raises(ValueError, match="expected a frequency"):
            chakra_timeline_visualizer.parse_megahertz(text)
    else:
        assert chakra_timeline_visualizer.parse_megahertz(text) == megahertz


def test_an_et_plus_whose_times_begin_late_is_converted(data: Path, tmp_path: Path) -> None:
    source = data / "cases/turn3/etplus_late_times.json.gz"
    assert chakra_converter.main(["PyTorch", "--input", str(source), "--output", str(tmp_path / "x.et")]) == 0
    nodes = load_file(tmp_path / "x.et").nodes
    assert {node.name for node in nodes} >= {"ProfilerStep#5", "aten::mm"}
    assert sum(node.message.duration_micros for node in nodes) == pytest.approx(15_407, rel=0.01)
