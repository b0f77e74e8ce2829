"""What ASTRA-sim requires of .et files beyond the format: sizes, groups, starts and resources."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.trace import Job
from etloom.exports import chakra
from etloom.exports.chakra import find_changes
from etloom.exports.chakra.communication_nodes import _describe_communication
from etloom.exports.chakra.group_numbering import GroupNumbers, number_world
from etloom.exports.chakra.rank_timing import count_overlaps_once
from etloom.exports.chakra_lint import lint
from etloom.exports.chakra_lint.list_schedule import Resource, required_resource, schedule_nodes
from etloom.formats.chakra.et_files import load_file
from support import small_traces
from support.small_traces import OperatorTraceBuilder, RankBuilder

COMP, SEND, RECV, COLL = 4, 5, 6, 7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(small_traces.write_run(tmp_path_factory.mktemp("run")), use_cache=False)


def communications(*rows: tuple[int, int, int, int, int | None, int | None]) -> pl.DataFrame:
    columns = ["rank", "id", "type", "comm_size", "comm_src", "comm_dst"]
    table = pl.DataFrame(rows, schema=columns, orient="row", infer_schema_length=None)
    return table.with_columns(
        comm_type=pl.lit(6), comm_tag=pl.lit(0), pg_name=pl.lit(None, pl.String)
    ).with_columns(pl.col("comm_src", "comm_dst").cast(pl.Int64))


def test_the_ranks_of_a_collective_state_one_size() -> None:
    table = communications(
        (0, 1, COLL, 24, None, None), (0, 2, COLL, 5, None, None),
        (1, 7, COLL, 40, None, None), (1, 8, COLL, 5, None, None),
    )  # fmt: skip
    assert find_changes(table, [0, 1]).rows() == [(0, 1, False, 40)]


def test_messages_have_the_size_of_the_send_and_are_replayed_without_their_other_end() -> None:
    table = communications(
        (0, 1, SEND, 8, 0, 1), (1, 3, RECV, 16, 0, 1), (1, 4, SEND, 8, 1, 0), (1, 5, SEND, 8, 1, 2),
    )  # fmt: skip
    assert sorted(find_changes(table, [0, 1]).rows()) == [(1, 3, False, 8), (1, 4, True, 8)]


def test_all_ranks_are_numbered_next_to_other_groups() -> None:
    alone = GroupNumbers({("0", None): 0}, {})
    assert number_world(alone, 4) == alone
    numbered = number_world(GroupNumbers({("0", None): 0, ("tp", "[0, 1]"): 1}, {1: [0, 1]}, {(0, 5): 0}), 4)
    assert numbered.number == {("0", None): 2, ("tp", "[0, 1]"): 1}
    assert (numbered.ranks[2], numbered.event_numbers, numbered.default) == ([0, 1, 2, 3], {(0, 5): 2}, 2)


def test_a_collective_of_one_rank_is_a_computation() -> None:
    groups = GroupNumbers({("1", "[2]"): 1}, {1: [2]})
    fact = {"collective": "all_reduce", "bytes": 64, "pg_name": "1", "ranks": "[2]"}
    assert _describe_communication("gloo:all_reduce", fact, 2, groups, {})["type"] == COMP


def test_ranges_without_a_name_are_exported(tmp_path: Path) -> None:
    """An event that outlasts the one around it is a range, whatever its name."""
    made = (
        OperatorTraceBuilder()
        .operator("aten::mm", 0, 100)
        .operator("lost", 50, 100)
        .operator("aten::mm", 200, 9)
    )
    trace = made.open(tmp_path)[0]
    nameless = trace.events.with_columns(name=pl.when(pl.col("name") != "lost").then("name"))
    chakra.write(trace.replace(events=nameless), tmp_path / "job.et")
    assert load_file(tmp_path / "job.0.et").nodes


@pytest.mark.slow
def test_a_rank_that_starts_later_has_a_start_node(run: Job, tmp_path: Path) -> None:
    late = run[1].replace(events=run[1].events.with_columns(pl.col("ts") + 5_000_000))
    chakra.write(Job({0: run[0], 1: late}), tmp_path / "job.et")
    first, second = (load_file(tmp_path / f"job.{rank}.et").nodes for rank in (0, 1))
    assert "start" not in {node.name for node in first}
    start = second[0]
    assert (start.id, start.name, start.message.duration_micros, start.runs_on_host) == (
        1,
        "start",
        5000,
        True,
    )
    assert [node.id for node in second] == list(range(1, len(second) + 1))
    assert all(node.message.data_deps for node in second[1:])
    ends = [schedule_nodes(nodes).makespan_ns for nodes in (first, second)]
    assert ends[1] - ends[0] == 5_000_000


@pytest.mark.slow
def test_the_delay_of_a_communication_does_not_occupy_the_device(run: Job, tmp_path: Path) -> None:
    stripped = run[0].replace(comms=run[0].comms.head(0))
    chakra.write(stripped, tmp_path / "job.et")
    nodes = load_file(tmp_path / "job.0.et").nodes
    replayed = [node for node in nodes if node.attributes.get("replayed")]
    assert [node.name for node in replayed] == ["delay", "ncclDevKernel_AllReduce_Sum"]
    assert {required_resource(node) for node in replayed} == {Resource.COMMUNICATION}
    assert etloom.read(tmp_path / "job.0.et").comms["collective"].cast(pl.String).to_list() == ["all_reduce"]


@pytest.mark.slow
def test_a_single_rank_has_its_number_in_the_name(run: Job, tmp_path: Path) -> None:
    etloom.export(run[1], tmp_path / "job.et")
    etloom.export(run[1], tmp_path / "other.1.et")
    etloom.export(run[1], tmp_path / "plain", "chakra")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.1.et", "other.1.et", "plain.1.et"]


def test_overlapping_work_of_one_resource_counts_once() -> None:
    table = pl.DataFrame(
        {
            "start_time_micros": [0, 5, 6, 20, 30, 0],
            "duration_micros": [10, 10, 2, 5, 5, 50],
            "type": [COMP] * 6,
            "is_cpu_op": [True] * 6,
            "cat": ["cpu_op"] * 5 + ["idle"],
        }
    )
    # The idle thread takes what is left of 50 us.
    assert count_overlaps_once(table)["duration_micros"].to_list() == [10, 5, 0, 5, 5, 25]
    apart = table.with_columns(type=pl.Series([COMP, COLL, RECV] * 2), is_cpu_op=pl.lit(False)).head(3)
    assert count_overlaps_once(apart)["duration_micros"].to_list() == [10, 10, 2]


@pytest.mark.slow
def test_computations_state_their_operations_and_bytes_for_a_roofline(data: Path, tmp_path: Path) -> None:
    trace = etloom.open(data / "simple_add")[0]
    etloom.export(trace, tmp_path / "job.et")
    nodes = load_file(tmp_path / "job.0.et").nodes
    costs = [node.attributes for node in nodes if "num_ops" in node.attributes]
    flops = etloom.analyze(trace, "flops").filter(pl.col("flops") > 0)
    assert sum(node["num_ops"] for node in costs) == flops["flops"].sum() == 2 * 256 * 256
    assert sum(node["tensor_size"] for node in costs) == flops["bytes"].sum()
    assert not any(node["is_cpu_op"] for node in costs)
    assert etloom.lint(tmp_path / "job.0.et").findings == []


@pytest.mark.slow
def test_copies_between_host_and_device_become_memory_nodes(tmp_path: Path) -> None:
    run = RankBuilder()
    for at, name in enumerate(
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD")
    ):
        run.op("aten::copy_", 100 * at, 50).kernel(
            100 * at + 1, 100 * at + 5, 40, name, "gpu_memcpy", bytes=1000 + at
        )
    run.op("aten::mm", 300, 50).kernel(301, 305, 40)
    trace = run.trace(tmp_path)
    etloom.export(trace, tmp_path / "plain.0.et")
    (tmp_path / "memory").mkdir()
    etloom.export(trace, tmp_path / "memory" / "job.et", memory=True)
    nodes = load_file(tmp_path / "memory" / "job.0.et").nodes
    sized = [(node.type, node.attributes["tensor_size"]) for node in nodes if node.type in (2, 3)]
    assert sized == [(2, 1000), (3, 1001)]
    assert {node.type for node in load_file(tmp_path / "plain.0.et").nodes} == {COMP}
    result, plain = lint(tmp_path / "memory"), lint(tmp_path / "plain.0.et")
    assert (result.verdict, result.replay_verdict, result.has_errors) == ("abort", "finish", False)
    assert {one.code for one in result.findings} == {"memory-node"}
    assert result.simulated_ns == plain.simulated_ns == result.recorded_ns
