"""What the readers say of communication: who with whom, and how much goes in and comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core import categories
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.formats.execution_trace.communication import build_comms
from etloom.formats.tables import comms_table
from support.replays import FLOATS, TENSOR_LIST, comms_node, comms_tensor


def comms_of(folder: Path, *nodes: dict[str, Any]) -> list[dict[str, Any]]:
    path = folder / "et.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    return trace.comms.to_dicts()


GROUP = "__torch__.torch.classes.c10d.ProcessGroup process_group"


@pytest.mark.parametrize(
    ("name", "arguments", "values", "types", "sizes"),
    [
        ("_allgather_base_", "Tensor output_tensor, Tensor input_tensor", [32, 8], [FLOATS] * 2, (8, 32)),
        ("allgather_", "Tensor[][] output_tensors, Tensor[] input_tensors", [[16, 16], [8]], None, (8, 32)),
        ("_reduce_scatter_base_", "Tensor output_tensor, Tensor input_tensor", [8, 32], None, (32, 8)),
        ("alltoall_base_", "Tensor output, Tensor input", [12, 20], None, (20, 12)),
        ("scatter_", "Tensor[] output_tensors, Tensor[][] input_tensors", [[8], [8, 8]], None, (16, 8)),
        ("allreduce_", "Tensor[] tensors", [[5, 7]], None, (12, 12)),
        ("broadcast_", "Tensor[] tensors", [[5]], None, (5, 5)),
        ("send", "Tensor[] tensors", [[6]], None, (6, 6)),
        ("recv_", "Tensor[] tensors", [[6]], None, (6, 6)),
        ("allreduce_", "Tensor[] tensors", [[2**63 - 1, 64]], None, (None, None)),
    ],
)
def test_outputs_of_an_operator_are_not_counted_as_sent(
    tmp_path: Path,
    name: str,
    arguments: str,
    values: list[Any],
    types: Any,
    sizes: tuple[int | None, int | None],
) -> None:
    def given(value: Any) -> Any:
        return [given(one) for one in value] if isinstance(value, list) else comms_tensor(value, value)

    def described(value: Any) -> str:
        return f"GenericList[{','.join(map(described, value))}]" if isinstance(value, list) else FLOATS

    types = types or list(map(described, values))
    schema = f"c10d::{name}({arguments}, {GROUP}, int timeout=-1) -> {arguments}"
    made = comms_node(
        2, f"c10d::{name}", [*map(given, values), "<Object>", -1], [*types, "Object", "Int"], schema
    )
    (comm,) = comms_of(tmp_path, made)
    assert (comm["in_nelems"], comm["out_nelems"]) == sizes
    assert comm["bytes"] == (sizes[0] and 4 * sizes[0])


def record(number: int, collective: str, rank: int, place: list[int], seq: Any = 7) -> dict[str, Any]:
    values = [[comms_tensor(9, 5)], seq, ["3", "tp"], rank, collective, [], [], *place]
    types = [TENSOR_LIST, "Int", "Tuple[String,String]", "Int", "String", "GenericList[]", "GenericList[]"]
    return comms_node(number, "record_param_comms", values, [*types, "Int", "Int", "Int"])


@pytest.mark.parametrize(
    ("collective", "rank", "root", "peer"),
    [
        ("broadcast", 1, 6, None),
        ("reduce", 0, 4, None),
        ("send", 1, None, 6),
        ("recv", 0, None, 4),
        ("allreduce", 1, None, None),
        ("broadcast", 2, None, None),
    ],
)
def test_the_rank_of_a_record_is_counted_within_its_group(
    tmp_path: Path, collective: str, rank: int, root: int | None, peer: int | None
) -> None:
    (comm,) = comms_of(tmp_path, record(2, collective, rank, [4, 2, 2]))
    assert (comm["root"], comm["peer"]) == (root, peer)
    assert (comm["ranks"], comm["seq"]) == ("[4, 6]", 7)


def test_unevenly_spaced_ranks_are_those_of_the_group(tmp_path: Path) -> None:
    config = json.dumps([{"pg_name": "3", "pg_desc": "tp", "ranks": [1, 2, 5], "group_size": 3}])
    init = comms_node(2, "## process_group:init ##", [config], ["String"])
    (comm,) = comms_of(tmp_path, init, record(3, "broadcast", 2, [1, 0, 3]))
    assert comm["root"] == 5
    (comm,) = comms_of(tmp_path, record(3, "broadcast", 2, [1, 0, 3]))
    assert comm["root"] is None


@pytest.mark.parametrize(
    ("groups", "peer", "root"),
    [
        ([[2, 3]], 3, 2),
        ([[], [0, 1]], 1, 0),  # of all four ranks, and of two: both groups say the same
        ([[], [2, 3]], None, None),
        ([], None, None),
    ],
)
def test_the_other_end_of_an_operator_is_counted_within_its_group(
    tmp_path: Path, groups: list[list[int]], peer: int | None, root: int | None
) -> None:
    """c10d::send to 1 in the group [2, 3] goes to rank 3; which group it is the operator does not say."""
    config = [
        {"pg_name": str(at), "ranks": ranks, "group_size": len(ranks) or 4} for at, ranks in enumerate(groups)
    ]
    init = comms_node(2, "## process_group:init ##", [json.dumps(config)], ["String"])
    message = f"c10d::send(Tensor[] tensors, {GROUP}, int dst, int tag) -> Work"
    rooted = f"c10d::broadcast_(Tensor[] tensors, {GROUP}, int root_rank, int root_tensor) -> Work"
    types = [TENSOR_LIST, "Object", "Int", "Int"]
    send = comms_node(3, "c10d::send", [[comms_tensor(9, 5)], "<Object>", 1, 0], types, message)
    broadcast = comms_node(4, "c10d::broadcast_", [[comms_tensor(9, 5)], "<Object>", 0, 0], types, rooted)
    one, other = comms_of(tmp_path, init, send, broadcast)
    assert (one["peer"], other["root"]) == (peer, root)
    trace = etloom.read(tmp_path / "et.json")
    lost = trace.stats.filter(name="read.rank_within_unknown_group").select("severity", "count").rows()
    assert lost == ([] if peer else [("data_loss", 2)])
    if groups == [[], [2, 3]]:
        # As a recorder that notes the groups of operators tells.
        stats: list[Any] = []
        tables = trace.nodes, trace.tensors, pl.DataFrame()
        told = (
            build_comms(*tables, stats, dict(zip((one["node"], other["node"]), "10", strict=True)))
            .select("peer", "root")
            .rows()
        )
        assert (told, stats) == ([(3, None), (None, 0)], [])


def test_a_sequence_number_with_a_flag_for_messages(tmp_path: Path) -> None:
    (comm,) = comms_of(tmp_path, record(2, "send", 1, [0, 1, 2], seq=[12, True]))
    assert (comm["seq"], comm["peer"], comm["is_p2p"]) == (12, 1, True)


def test_the_other_end_of_a_message_in_kineto(tmp_path: Path) -> None:
    def event(name: str, **ends: int) -> dict[str, Any]:
        args = {"Collective name": name, "In msg nelems": 5, "dtype": "Float"}
        args |= {key.replace("_", " "): rank for key, rank in ends.items()}
        return {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 1, "dur": 1, "args": args}

    events = [event("send", Dst_Rank=3), event("recv", Src_Rank=2), event("broadcast", Src_Rank=1)]
    path = tmp_path / "kineto.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    assert trace.comms["peer"].to_list() == [3, 2, None]
    assert trace.comms["root"].to_list() == [None, None, 1]


def test_gloo_on_four_ranks(data: Path) -> None:
    trace = etloom.read(data / "cpu" / "coll_4" / "torch_et_0.json.gz")
    assert isinstance(trace, Trace)
    named = trace.comms.join(trace.nodes.select("name", node="id"), on="node")
    found = {
        row["name"].removeprefix("c10d::"): (row["in_nelems"], row["out_nelems"])
        for row in named.iter_rows(named=True)
    }
    assert found["_allgather_base_"] == found["allgather_"] == found["gather_"] == (8, 32)
    assert found["_reduce_scatter_base_"] == found["reduce_scatter_"] == found["scatter_"] == (32, 8)
    assert found["alltoall_base_"] == found["send"] == found["recv_"] == (16, 16)


def test_traces_without_communication_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    parse = categories.parse_collectives

    def record(names: pl.Series) -> pl.Series:
        calls.append(len(names))
        return parse(names)

    monkeypatch.setattr(categories, "parse_collectives", record)
    comms_table._convert_no_comms.cache_clear()
    path = tmp_path / "rank_0.json"
    path.write_text(
        '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2}]}'
    )
    first, second = (etloom.read(path).comms for _ in range(2))
    assert first.schema == TABLES["comms"].conform(first.clear()).schema
    assert second.schema == first.schema
    assert calls == [0]
