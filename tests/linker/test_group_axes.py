"""The axis of parallelism of process groups, from names and from use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.collector.workload_card import PARALLELISM_NAMES
from etloom.core.parallel_axes import parse_axis
from etloom.core.trace import Trace
from etloom.linker.group_axes import add_group_axes, infer_group_axes


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp+cp"),
        ("MODEL_PARALLEL_GROUP", "tp+pp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "expert-dp"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert-tp+ep"),
        ("EMBEDDING_GROUP", "embedding"),
        ("mesh_dp", "dp"),
        ("mesh_dp_shard_cp", "dp+cp"),
        ("dp_cp", "dp+cp"),
        ("tp:0", "tp"),
        ("moe_ep", "ep"),
        ("fsdp", "dp"),
        ("default_pg", "world"),
        ("my_data_loader", None),
        ("undefined", None),
        ("mesh_dim_0", None),
        ("0", None),
        (None, None),
    ],
)
def test_names_state_the_axis(name: str | None, axis: str | None) -> None:
    assert parse_axis(name) == axis


@pytest.mark.parametrize("kind", PARALLELISM_NAMES)
def test_names_of_the_workload_card_are_those_of_process_groups(kind: str) -> None:
    """The collector runs without the rest of etloom, so it has names of its own."""
    assert {parse_axis(name) for name in PARALLELISM_NAMES[kind]} <= {kind[:2], "dp+cp"}


def make_trace(calls: dict[str, list[dict[str, Any]]], groups: dict[str, list[int]], *names: str) -> Trace:
    """calls: group -> rows of comms; names of operators."""
    comms = [{"pg_name": group} | call for group, rows in calls.items() for call in rows]
    return Trace(
        {
            "comms": pl.DataFrame(comms, infer_schema_length=None).with_row_index("id"),
            "groups": pl.DataFrame(
                [
                    {"pg_name": name, "pg_desc": "undefined", "ranks": str(ranks), "size": len(ranks)}
                    for name, ranks in groups.items()
                ]
            ),
            "nodes": pl.DataFrame(
                {"id": range(len(names)), "name": names}, schema_overrides={"id": pl.UInt32}
            ),
        },
        {"rank": 0, "world_size": 4},
    )


def axes_of(trace: Trace) -> dict[str, str | None]:
    return dict(infer_group_axes(trace).drop_nulls("pg_name").select("pg_name", "axis").iter_rows())


def call(collective: str, size: int = 1 << 20, **more: Any) -> dict[str, Any]:
    return {"collective": collective, "bytes": size} | more


WORLD = [0, 1, 2, 3]
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def test_use_recognizes_groups_without_a_telling_name() -> None:
    messages = [call("send", peer=1), call("recv", peer=1), call("send", peer=3), call("recv", peer=3)]
    ring = [call("send", peer=1), call("recv", peer=3)]
    assert axes_of(make_trace({"7": messages}, {"7": WORLD})) == {"7": "pp"}
    assert axes_of(make_trace({"7": ring}, {"7": WORLD})) == {"7": "cp"}
    experts = [call("all_to_all"), call("all_reduce", 64)]
    assert axes_of(make_trace({"7": experts}, {"7": WORLD})) == {"7": "ep"}
    reductions = {"7": [call("all_reduce")]}
    assert axes_of(make_trace(reductions, {"7": WORLD}, BACKWARD)) == {"7": "dp"}
    assert axes_of(make_trace(reductions, {"7": WORLD}, "aten::mm")) == {"7": "tp"}
    two = {"7": [call("all_reduce")], "8": [call("all_reduce")]}
    both = axes_of(make_trace(two, {"7": [0, 1], "8": [0, 2]}, BACKWARD))
    assert both == {"7": "tp", "8": "dp"}


def test_ambiguous_use_has_no_axis() -> None:
    mixed = [call("all_to_all"), call("all_reduce", 1 << 24)]
    assert axes_of(make_trace({"7": mixed}, {"7": WORLD}, BACKWARD)) == {"7": None}
    one_part = {"7": [call("all_reduce")]}
    assert axes_of(make_trace(one_part, {"7": [0, 1]}, BACKWARD)) == {"7": None}
    assert axes_of(make_trace(one_part, {"7": WORLD}, "aten::copy_")) == {"7": None}


def test_the_table_of_groups_states_where_the_axis_comes_from() -> None:
    trace = make_trace({"7": [call("all_reduce")]}, {"7": WORLD}, BACKWARD)
    assert add_group_axes(trace).groups.select(pl.col("axis", "axis_from").cast(pl.String)).rows() == [
        ("dp", "use")
    ]


@pytest.mark.slow
def test_recorded_runs(data: Path) -> None:
    pipeline, replicas = (etloom.open(data / "cpu" / name) for name in ("pp_4", "ddp_2"))
    for run, axis in ((pipeline, "pp"), (replicas, "dp")):
        for trace in run.values():
            assert trace.groups["axis"].to_list() == [axis]
    table = etloom.analyze(replicas, "collectives")
    assert table["axis"].unique().to_list() == ["dp"]
    dumps = etloom.open(data / "flight_recorder" / "lock_gil_1st")
    groups = pl.concat(
        trace.groups.select(pl.col("pg_desc", "axis").cast(pl.String)) for trace in dumps.values()
    )
    axes = dict(groups.unique().iter_rows())
    assert axes["TENSOR_MODEL_PARALLEL_GROUP"] == "tp" and axes["default_pg"] == "world"
