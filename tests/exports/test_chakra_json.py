"""Chakra nodes as JSON, and options of exports on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small

import etloom
from etloom.cli import main
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file, write_messages


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(small.write_run(tmp_path_factory.mktemp("run")), use_cache=False)


def test_options_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(small.write_run(tmp_path / "run")), str(tmp_path / "a.et")
    assert main(["export", run, "--out", out, "-O", "delays"]) == 2
    assert main(["export", run, "--out", out, "-O", "delays=maybe"]) == 2
    assert main(["export", run, "--rank", "0", "--out", out, "-O", "delays=no"]) == 0
    assert "delay" not in [node.name for node in load_file(tmp_path / "a.et").nodes]
    capsys.readouterr()
    assert main(["export", run, "--out", out, "-O", "colour=red"]) == 2
    assert "colour" in capsys.readouterr().err


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
