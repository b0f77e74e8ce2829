"""ET+ as mlcommons' own linker writes it: device nodes are copies of their record, with inputs by position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etloom.compat import chakra_converter
from etloom.formats.chakra.et_files import load_file

NAMED = [
    ("collective_name", "string", "allreduce"), ("dtype", "string", "Float"), ("in_msg_nelems", "int64", 1000),
    ("out_msg_nelems", "int64", 1000), ("pg_name", "string", "0"), ("pg_size", "int64", 2),
]  # fmt: skip
TENSOR = [5, 6, 0, 1000, 4, "cuda:0"]
INPUTS = {
    "values": [[TENSOR], [3, False], ["0", "default_pg"], 0, "allreduce", [], [], 0, 1, 2],
    "shapes": [[[1000]], [[], []], [[], []], [], [], [], [], [], [], []],
    "types": [
        "GenericList[Tensor(float)]", "Tuple[Int,Bool]", "Tuple[String,String]", "Int", "String",
        "GenericList[]", "GenericList[]", "Int", "Int", "Int",
    ],
}  # fmt: skip


def node(number: int, name: str, parent: int, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    attrs = [
        ("rf_id", "uint64", number),
        ("tid", "uint64", 1),
        ("scope", "uint64", 0),
        *more.pop("attrs", []),
    ]
    made = {
        "id": number, "name": name, "ctrl_deps": parent,
        "inputs": {"values": [], "shapes": [], "types": []}, "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": key, "type": kind, "value": value} for key, kind, value in attrs],
        "inclusive_dur": dur, "exclusive_dur": dur, "ts": ts,
    }  # fmt: skip
    return {**made, **more}


@pytest.mark.parametrize("attrs", [[], NAMED], ids=["positional", "named"])
def test_collectives_of_the_peers_linker_are_kept(attrs: list[Any], tmp_path: Path) -> None:
    record: dict[str, Any] = {"inputs": INPUTS, "attrs": attrs}
    nodes = [
        node(1, "[pytorch|profiler|execution_trace|process]", 0, 0.0, 0.0),
        node(2, "[pytorch|profiler|execution_trace|thread]", 1, 0.0, 0.0),
        node(3, "record_param_comms", 2, 100.0, 50.0, **record),
        node(
            4, "ncclDevKernel_AllReduce_Sum_f32", 3, 120.0, 200.0, **record,
            cat="kernel", ph="X", stream=20, pg_name="0",
        ),
    ]  # fmt: skip
    document = {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": 7,
        "time": "",
        "start_ts": 0,
        "finish_ts": 1,
        "nodes": nodes,
    }
    (tmp_path / "plus.json").write_text(json.dumps(document))
    out = tmp_path / "x.et"
    assert (
        chakra_converter.main(["PyTorch", "--input", str(tmp_path / "plus.json"), "--output", str(out)]) == 0
    )
    (found,) = (one for one in load_file(out).nodes if one.type == 7 and one.name != "delay")
    attributes = found.attributes
    assert (attributes["comm_type"], attributes["comm_size"], attributes["pg_name"]) == (0, 4000, "0")
    assert "replayed" not in attributes
