"""What PARAM's replay gets wrong, by the list in docs/coming-from-param.md: here it is planned and run on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.replayer.comms.plan_builder import PlanOptions, plan_replay
from etloom.replayer.plan import Plan
from support.processes import ended, processes
from support.real_runs import open_run
from support.replays import FLOATS, TENSOR_LIST, comms_node, comms_tensor


def positional(
    number: int,
    name: str,
    values: list[Any],
    types: list[str],
    *,
    seq: Any = 7,
    rank: int = 0,
    more: Any = (),
) -> dict[str, Any]:
    """record_param_comms as of 1.0.3, which names no attributes."""
    rest = [seq, ["g1", "tp"], rank, name, [], [], *more]
    kinds = [
        "Int",
        "Tuple[String,String]",
        "Int",
        "String",
        "GenericList[]",
        "GenericList[]",
        *["Int"] * len(more),
    ]
    return comms_node(number, "record_param_comms", [*values, *rest], [*types, *kinds])


def record(
    folder: Path, nodes: list[dict[str, Any]], schema: str = "1.0.3-chakra.0.0.4", world: int = 2
) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        path = folder / f"torch_et_{rank}.json"
        path.write_text(json.dumps({"schema": schema, "nodes": nodes}))
    return folder


def planned(folder: Path, world: int = 2, **asked: Any) -> Plan:
    return plan_replay(etloom.open(folder, use_cache=False), world, PlanOptions(**asked))


def init(number: int, groups: list[dict[str, Any]], cut: int = 0) -> dict[str, Any]:
    text = json.dumps(groups)
    return comms_node(number, "## process_group:init ##", [text[: len(text) - cut]], ["String"])


def reduced(number: int, **more: Any) -> dict[str, Any]:
    return positional(number, "allreduce", [[comms_tensor(9, 8)]], [TENSOR_LIST], **more)


def test_a_missing_group_is_all_ranks(tmp_path: Path) -> None:
    made = planned(record(tmp_path / "run", [reduced(2)]))
    assert [(call.collective, call.group, call.inputs) for call in made.calls[1]] == [
        ("all_reduce", (0, 1), (8,))
    ]


@pytest.mark.slow
def test_a_list_of_groups_that_was_cut_off_and_a_second_one(tmp_path: Path) -> None:
    """Groups whose names are no numbers, in two nodes, of which one ends in the middle of its second group."""
    first = [
        {"pg_name": "g1", "pg_desc": "tp", "ranks": [0, 2]},
        {"pg_name": "g2", "pg_desc": "dp", "ranks": [1]},
    ]
    second = [{"pg_name": "g3", "pg_desc": "pp", "ranks": [1, 2]}]
    nodes = [init(2, first, cut=9), init(3, second), reduced(4)]
    nodes.append(positional(5, "allreduce", [[comms_tensor(9, 8)]], [TENSOR_LIST]))
    nodes[-1]["inputs"]["values"][2] = ["g3", "pp"]
    job = etloom.open(record(tmp_path / "run", nodes, world=3), use_cache=False)
    assert job[0].groups.select("pg_name", "ranks").rows() == [("g1", "[0, 2]"), ("g3", "[1, 2]")]
    assert plan_replay(job, 3).groups == [(0, 2), (1, 2)]


def test_an_all_to_all_of_one_tensor(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [positional(2, "all_to_all", [comms_tensor(9, 8)], [FLOATS])])
    assert [(call.collective, call.inputs) for call in planned(run).calls[0]] == [("all_to_all", (8,))]


def test_the_root_is_the_recorded_one(tmp_path: Path) -> None:
    nodes = [positional(2, "broadcast", [[comms_tensor(9, 8)]], [TENSOR_LIST], rank=1, more=(0, 1, 2))]
    assert [own[0].root for own in planned(record(tmp_path / "run", nodes)).calls] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("its_group", [["g1", "tp"], ["", ""]])
def test_a_wait_that_does_not_name_its_group(tmp_path: Path, its_group: list[str]) -> None:
    """Two calls in flight; the second is waited for before a third."""
    wait = comms_node(
        4, "record_param_comms", [2, its_group, 0, "wait", [], []], ["Int", "Tuple", "Int", "String", "", ""]
    )
    nodes = [reduced(2, seq=1), reduced(3, seq=2), wait, reduced(5, seq=3)]
    made = planned(record(tmp_path / "run", nodes))
    assert [call.waits_for for call in made.calls[0]] == [(), (), (1,)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "nccl_ddp", "et_schemas/1.1.0-chakra.0.0.4_resnet_2gpu.json.gz"])
def test_recordings_that_end_it(data: Path, name: str) -> None:
    """Schemas 1.0.1, 1.0.3 and 1.1.0; of the last two one rank was recorded."""
    job = open_run(data / name)
    made = (
        plan_replay(job, 2, PlanOptions(shrink=True))
        if len(job) > 1
        else plan_replay(job, 2, PlanOptions(one_for_all=True))
    )
    kinds = {"dlrm": {"all_to_all", "all_reduce"}}.get(name, {"all_reduce", "broadcast"})
    assert [{call.collective for call in own} for own in made.calls] == [kinds] * 2
    assert made.skipped == ()


@pytest.mark.slow
def test_gaps_of_an_execution_trace_with_times(data: Path) -> None:
    gaps = [call.gap_ns for call in plan_replay(open_run(data / "cpu/pp_4"), 4).calls[0]]
    assert gaps[0] is None and all(gap is not None and gap > 0 for gap in gaps[1:])


@pytest.mark.slow
def test_another_number_of_processes_is_an_error(data: Path) -> None:
    job = open_run(data / "cpu/coll_4")
    with pytest.raises(
        EtloomError, match="2 processes for 4 recorded ranks; start 4 processes, or add --shrink"
    ):
        plan_replay(job, 2)
    with pytest.raises(EtloomError, match="8 processes, but only 4 recorded ranks"):
        plan_replay(job, 8)


@pytest.mark.slow
@pytest.mark.torch
def test_a_blocking_and_checked_replay(tmp_path: Path) -> None:
    """Of positional records: a bool, a list of lists, two groups of one set of ranks."""
    lists = f"GenericList[GenericList[{FLOATS},{FLOATS}]]"
    gathered = positional(3, "allgather", [[comms_tensor(5, 4)]], [TENSOR_LIST])
    gathered["outputs"] = {
        "values": [[[comms_tensor(6, 4), comms_tensor(7, 4)]]],
        "shapes": [[]],
        "types": [lists],
        "strides": [[]],
    }
    truths = positional(4, "allreduce", [[comms_tensor(8, 4)]], ["GenericList[Tensor(bool)]"])
    again = reduced(5)
    again["inputs"]["values"][2] = ["g2", "dp"]
    groups = [{"pg_name": name, "pg_desc": "", "ranks": []} for name in ("g1", "g2")]
    run = record(tmp_path / "run", [init(1, groups), reduced(2), gathered, truths, again])
    assert [len(call.outputs) for call in planned(run).calls[0]][1] == 2
    sums = tmp_path / "sums.json"
    options = ("--blocking", "--verify", "--repeats", "2", "--per", "call", "--json", str(sums))
    found = ended(processes(2, run, *options))
    assert [status for status, _, _ in found] == [0, 0], found
    rows = json.loads(sums.read_text())["table"]
    assert [(row["collective"], row["count"]) for row in rows] == [
        ("all_reduce", 4), ("all_gather", 4), ("all_reduce", 4), ("all_reduce", 4),
    ]  # fmt: skip
    assert [row["bytes"] for row in rows] == [32, 32, 4, 32]
