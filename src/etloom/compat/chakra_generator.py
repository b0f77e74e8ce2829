"""The interface of mlcommons/chakra's ``chakra_generator``, which writes small synthetic traces.

Writes fourteen traces for every NPU as NAME.NPU.et into the current folder. Unlike the peer's, ids begin at 1 on
every NPU, every node states is_cpu_op, and messages have both ends, a tag and a comm_size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etloom.compat._command import run_command
from etloom.core.errors import EtloomError
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import rank_path, write_messages

_NUMBERS = {name: number for number, name in pb.COLLECTIVES.items()}
_SCALARS: dict[str, Any] = {
    **dict.fromkeys(("double", "float"), 1.5),
    **dict.fromkeys(("int32", "int64", "sint32", "sint64", "sfixed32", "sfixed64"), -5),
    **dict.fromkeys(("uint32", "uint64", "fixed32", "fixed64"), 5),
    "bool": True,
    "string": "text",
    "bytes": b"bytes",
}

Attributes = dict[str, tuple[str, Any]]
"""Name -> type and value."""


def generate(
    folder: Path,
    npus: int = 64,
    runtime: int = 5,
    tensor_size: int = 1024,
    comm_size: int = 65536,
) -> None:
    """Write fourteen small Chakra traces per NPU to a folder. Raises EtloomError for values out of range.

    Args:
        runtime: the duration of each computation, us.
        tensor_size: bytes of each tensor.
        comm_size: bytes of each message.
    """
    if npus < 1 or not all(0 <= number < 1 << 63 for number in (runtime, tensor_size, comm_size)):
        raise EtloomError("expected at least one NPU, and a runtime and sizes of 0 or more")
    metadata = pb.GlobalMetadata(version="0.0.4")
    for npu in range(npus):
        for name, nodes in _traces(npu, npus, runtime, tensor_size, comm_size).items():
            write_messages(rank_path(folder / f"{name}.et", npu), metadata, nodes)


def _traces(npu: int, npus: int, runtime: int, tensor_size: int, comm_size: int) -> dict[str, list[Any]]:
    def comp(number: int, on: Sequence[int] = ()) -> Any:
        return _node(number, "COMP", {}, on, runtime)

    memory: Attributes = {"tensor_size": ("uint64", tensor_size)}
    traces = {
        "one_metadata_node_all_types": [_all_types()],
        "one_remote_mem_load_node": [_node(1, "MEM_LOAD", memory)],
        "one_remote_mem_store_node": [_node(1, "MEM_STORE", memory)],
        "one_comp_node": [comp(1)],
        "two_comp_nodes_independent": [comp(1), comp(2)],
        "two_comp_nodes_dependent": [comp(1), comp(2, [1])],
    }
    for name in ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "barrier"):
        size = 0 if name == "barrier" else comm_size
        attributes: Attributes = {"comm_type": ("int64", _NUMBERS[name]), "comm_size": ("int64", size)}
        traces[name.upper()] = [_node(1, "COMM_COLL", attributes)]
    for kind, source, target in (("send", npu, (npu + 1) % npus), ("recv", (npu - 1) % npus, npu)):
        ends: Attributes = {
            "comm_src": ("int32", source),
            "comm_dst": ("int32", target),
            "comm_tag": ("int32", 0),
        }
        traces[f"one_comm_{kind}_node"] = [
            _node(1, f"COMM_{kind.upper()}", {"comm_size": ("int64", comm_size), **ends})
        ]
    return traces


def _node(number: int, kind: str, attributes: Attributes, on: Sequence[int] = (), duration: int = 0) -> Any:
    node = pb.Node(
        id=number, name=f"{kind}_NODE_{number}", type=pb.TYPE_NUMBERS[f"{kind}_NODE"], data_deps=on
    )
    node.duration_micros = duration
    for name, (scalar, value) in {"is_cpu_op": ("bool", False), **attributes}.items():
        setattr(node.attr.add(name=name), f"{scalar}_val", value)
    return node


def _all_types() -> Any:
    node = pb.Node(id=1, name="METADATA_NODE_1", type=pb.TYPE_NUMBERS["METADATA_NODE"])
    for scalar, value in _SCALARS.items():
        setattr(node.attr.add(name=scalar), f"{scalar}_val", value)
        getattr(node.attr.add(name=f"{scalar}_list"), f"{scalar}_list").values.extend([value, value])
    return node


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_generator``: exit status 0, 1 for an error reported in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="chakra_generator", description="Write small Chakra traces.")
    parser.add_argument("--num_npus", type=int, default=64)
    parser.add_argument("--default_runtime", type=int, default=5, help="of computations, us")
    parser.add_argument("--default_tensor_size", type=int, default=1024, help="bytes")
    parser.add_argument("--default_comm_size", type=int, default=65536, help="bytes")
    args = parser.parse_args(arguments)
    sizes = (args.default_runtime, args.default_tensor_size, args.default_comm_size)
    return run_command("chakra_generator", lambda: generate(Path(), args.num_npus, *sizes))
