"""TraceLinker: the two call forms of Chakra's, and its steps as methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etloom.compat.chakra import TraceLinker
from etloom.core.errors import EtloomError
from support import small_traces


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "host.json").write_text(json.dumps(small_traces.execution_trace()))
    (tmp_path / "device.json").write_text(json.dumps(small_traces.kineto()))
    return str(tmp_path / "host.json"), str(tmp_path / "device.json")


@pytest.mark.slow
def test_every_form_of_link_writes_the_same(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    named = {"chakra_host_trace": files[0], "chakra_device_trace": files[1], "output_file": str(out)}
    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((*files, out), {}),
        ((0, *files, str(out)), {}),
        ((*files, out, 0), {}),
        ((*files, out), {"rank": 0}),
        ((), named),
        ((), {"rank": 0, **named}),
        ((0,), named),
    ]
    written = set()
    for arguments, names in forms:
        TraceLinker().link(*arguments, **names)
        written.add(out.read_bytes())
        out.unlink()
    assert len(written) == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("a", "b"), {}),
        ((0, 1, "a", "b", "c"), {}),
        (("a", "b", "c", "d"), {}),
        ((0, "a", "b", "c"), {"rank": 1}),
    ],
)
def test_other_arguments_are_refused(arguments: tuple[Any, ...], names: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected link\(rank, ") as error:
        TraceLinker().link(*arguments, **names)
    assert isinstance(error.value, EtloomError)


def test_the_steps_together_are_link(files: tuple[str, str], tmp_path: Path) -> None:
    linker = TraceLinker()
    linker.link(0, *files, tmp_path / "whole.json")
    device = linker.chakra_device_trace_loader.load(files[1])
    linked = linker.link_traces(linker.chakra_host_trace_loader.load(files[0]), device)
    data = linker.construct_et_plus_data(linked)
    linker.dump_chakra_execution_trace_plus(data, tmp_path / "steps.json")
    assert json.loads((tmp_path / "steps.json").read_text()) == json.loads(
        (tmp_path / "whole.json").read_text()
    )
    events = dict(linked.events.select("id", "name").iter_rows())
    names = {node["id"]: node["name"] for node in data["nodes"]}
    pairs = linker.map_host_to_device_ops(linked)
    assert pairs and all(names[node] == events[event] for node, event in pairs.items())
    launched = linker.group_gpu_ops_by_cpu_launchers(linked)
    assert {events[operator]: [events[id] for id in ids] for operator, ids in launched.items()} == {
        "aten::mm": ["gemm"]
    }
    assert linker.enforce_inter_thread_order(device).columns == ["event", "after", "kind"]
