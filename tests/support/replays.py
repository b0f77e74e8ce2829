"""Small execution traces for replays, node by node, and their replay in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import etloom


def empty_values() -> dict[str, Any]:
    return {"values": [], "shapes": [], "types": []}


def recorded_calls(calls: list[dict[str, Any]], world: int) -> dict[str, Any]:
    """An execution trace (1.1.1) of record_param_comms nodes; what has an id is a node already."""
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world}
    nodes = [
        call
        if "id" in call
        else {
            "id": at + 2,
            "name": "record_param_comms",
            "ctrl_deps": 1,
            "inputs": empty_values(),
            "outputs": empty_values(),
            "attrs": [
                {"name": name, "type": "uint64" if isinstance(value, int) else "string", "value": value}
                for name, value in {"rf_id": at, **group, **call}.items()
            ],
        }
        for at, call in enumerate(calls)
    ]
    root = {
        "id": 1,
        "name": "[pytorch|profiler|execution_trace|process]",
        "ctrl_deps": 1,
        "inputs": empty_values(),
        "outputs": empty_values(),
        "attrs": [],
    }
    return {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [root, *nodes]}


def write_calls(folder: Path, calls: Mapping[int, list[dict[str, Any]]]) -> Path:
    """A run of these calls of each rank."""
    for rank, own in calls.items():
        (folder / f"torch_et_{rank}.json").write_text(json.dumps(recorded_calls(own, len(calls))))
    return folder


def all_reduce_call(elements: int) -> dict[str, Any]:
    """An all-reduce of all ranks."""
    sizes = {"in_msg_nelems": elements, "out_msg_nelems": elements}
    everyone = {"global_rank_start": 0, "global_rank_stride": 1}
    return {"collective_name": "allreduce", "dtype": "Float", **sizes, **everyone}


def replay_trace(recording: Any, device: str = "cpu", **options: Any) -> Any:
    """Replay the operators of a trace; hooks, ``skip`` and ``resources`` are passed like options."""
    from etloom.replayer.compute.operator_replay import replay_operators

    return _replay(replay_operators, recording, device, options)


def prepare_trace(recording: Any, device: str = "cpu", **options: Any) -> Any:
    """Prepare an executor of a trace, with the arguments of `replay_trace`."""
    from etloom.replayer.compute.operator_replay import prepare_executor

    return _replay(prepare_executor, recording, device, options)


def _replay(function: Any, trace: Any, device: str, options: dict[str, Any]) -> Any:
    from etloom.replayer.compute.compute_options import ComputeHooks, ComputeOptions

    hooks = {name: options.pop(name) for name in ("on_step", "on_all_tried", "notify") if name in options}
    others = {name: options.pop(name) for name in ("skip", "resources") if name in options}
    return function(trace, ComputeOptions(device, **options), ComputeHooks(**hooks), **others)


def operator_node(
    at: int, schema: str, inputs: list[Any], types: list[str], shapes: list[Any], **more: Any
) -> dict[str, Any]:
    """A node as schema 1.1.0 has it. outputs: [tensor]; their types and shapes follow those of Tensor(float)."""
    outputs = more.pop("outputs", [])
    attrs = [
        {"name": key, "type": kind, "value": given}
        for key, kind, given in (
            ("rf_id", "uint64", at), ("fw_parent", "uint64", 0), ("seq_id", "int64", -1), ("scope", "uint64", 0),
            ("tid", "uint64", 1), ("fw_tid", "uint64", 0), ("op_schema", "string", schema),
            ("kernel_backend", "string", ""), ("kernel_file", "string", ""),
            *((key, "string", given) for key, given in more.items()),
        )
    ]  # fmt: skip
    return {
        "id": at, "name": schema.partition("(")[0].partition(".")[0], "ctrl_deps": 1, "attrs": attrs,
        "inputs": {"values": inputs, "shapes": shapes, "types": types},
        "outputs": {
            "values": outputs, "shapes": [[one[3]] for one in outputs], "types": ["Tensor(float)"] * len(outputs)
        },
    }  # fmt: skip


def read_nodes(folder: Path, *nodes: dict[str, Any]) -> etloom.Trace:
    file = folder / "torch_et_0.json"
    file.write_text(
        json.dumps({"schema": "1.1.0-chakra.0.0.4", "pid": 1, "time": "", "start_ts": 0, "nodes": nodes})
    )
    read = etloom.read(file)
    assert isinstance(read, etloom.Trace)
    return read


RELU = "aten::relu(Tensor self) -> Tensor"


def et_tensor(at: int, storage: int, elements: int = 4) -> list[Any]:
    return [at, storage, 0, elements, 4, "cpu"]


def relu_node(at: int, taken: list[Any], given: list[Any], schema: str = RELU) -> dict[str, Any]:
    return operator_node(at, schema, [taken], ["Tensor(float)"], [[taken[3]]], outputs=[given])


FLOATS = "Tensor(float)"


def comms_tensor(number: int, elements: int) -> list[Any]:
    return [number, number, 0, elements, 4, "cpu"]


TENSOR_LIST = f"GenericList[{FLOATS}]"


def comms_node(
    number: int, name: str, values: list[Any], types: list[str], schema: str = ""
) -> dict[str, Any]:
    nothing: list[Any] = [[] for _ in values]
    inputs = {"values": values, "shapes": nothing, "types": types, "strides": nothing}
    outputs: dict[str, Any] = {"values": [], "shapes": [], "types": [], "strides": []}
    attrs = [
        {"name": "op_schema", "type": "string", "value": schema},
        {"name": "tid", "type": "uint64", "value": 1},
    ]
    return {
        "id": number,
        "name": name,
        "ctrl_deps": 1,
        "inputs": inputs,
        "outputs": outputs,
        "attrs": attrs,
    }
