"""Calls whose group gloo does not record: told by what the ranks of the groups that were made call next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.core.trace import Job
from etloom.replayer.comms.call_mapping import map_calls
from etloom.replayer.comms.plan_builder import build_plan, infer_groups
from etloom.replayer.recorded_calls import RecordedCall
from support.processes import ended, processes
from support.replays import write_calls

GROUPS = [(0, 1, 2, 3), (0, 1, 2), (1, 3), (2, 3), (0, 2), (2,)]


def row(collective: str, size: int, group: tuple[int, ...], rank: int) -> RecordedCall:
    """As a rank of the group records it, but for the group; elements are as many as that collective has them."""
    ins = outs = (size,)
    if collective == "all_gather":
        outs = (size,) * len(group)
    if collective == "reduce_scatter":
        ins = (size * len(group),)
    root = len(group) - 1 if collective in ("broadcast", "reduce") else None
    return RecordedCall(collective, f"c10d::{collective}_", ins, outs, "float", None, root=root)


CALLS = st.tuples(
    st.sampled_from(GROUPS),
    st.sampled_from(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]),
)


def test_at_most_256_unawaited_calls_are_in_flight_and_messages_are_unlimited() -> None:
    rows = [row("all_reduce", 8, (0, 1), 0) for _ in range(600)]
    for at, one in enumerate(rows):
        one.group, one.seq, one.is_async = (0, 1), at, True
    calls, _ = map_calls(rows, 0, {0: 0, 1: 1}, (0, 1))
    assert [call.waits_for for call in calls] == [()] * 256 + [(at,) for at in range(600 - 256)]
    rows = [
        RecordedCall("send", "c10d::send", (8,), (), "float", (0, 1), peer=1, is_async=True, start=0, end=9)
        for _ in range(600)
    ]
    calls, _ = map_calls(rows, 0, {0: 0, 1: 1}, (0, 1))
    assert {call.waits_for for call in calls} == {()}


@given(st.lists(CALLS, max_size=30))
def test_each_call_gets_the_group_that_issued_it(calls: list[tuple[tuple[int, ...], str]]) -> None:
    """Of calls in a random order, each of another size, so that none can be taken for another."""
    rows: dict[int, list[RecordedCall]] = {rank: [] for rank in range(4)}
    right: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(4)}
    for at, (group, collective) in enumerate(calls):
        collective = "all_reduce" if collective == "barrier" else collective
        for rank in group:
            rows[rank].append(row(collective, 100 + at, group, rank))
            right[rank].append(group)
    infer_groups(rows, GROUPS)
    assert {rank: [one.group for one in own] for rank, own in rows.items()} == right
    for own in rows.values():
        assert all(one.root in (None, one.group[-1]) for one in own if one.group)


@given(st.lists(CALLS, max_size=30))
def test_equal_calls_are_still_matched(calls: list[tuple[tuple[int, ...], str]]) -> None:
    """Whatever they are taken for: ranks of a group make the same calls in it, or have a reason why not."""
    rows: dict[int, list[RecordedCall]] = {rank: [] for rank in range(4)}
    for group, collective in calls:
        for rank in group:
            rows[rank].append(row(collective, 5, group, rank))
    infer_groups(rows, GROUPS)
    for group in GROUPS:
        made = [[one.collective for one in rows[rank] if one.group == group] for rank in group]
        assert made == made[:1] * len(group)
    assert all((one.group is None) == (one.missing is not None) for own in rows.values() for one in own)


def recorded(rank: int, calls: list[dict[str, Any]], groups: list[list[int]]) -> etloom.Trace:
    """What PyTorch's observer records of gloo."""
    nodes = pl.DataFrame(
        [{"id": at, "name": f"c10d::{call['collective']}_"} for at, call in enumerate(calls)]
    )
    comms = [{"id": at, "node": at, "dtype": "float", **call} for at, call in enumerate(calls)]
    made = [{"pg_name": str(at), "ranks": json.dumps(ranks)} for at, ranks in enumerate(groups)]
    tables = {"nodes": nodes, "comms": pl.DataFrame(comms), "groups": pl.DataFrame(made)}
    return etloom.Trace(tables, {"rank": rank, "world_size": 3})


def test_a_call_without_an_inferred_group_is_a_row_with_a_reason() -> None:
    def sized(collective: str, size: int) -> dict[str, Any]:
        return {"collective": collective, "in_nelems": size, "out_nelems": size}

    own = {
        0: [sized("all_reduce", 8), sized("all_reduce", 3), sized("all_reduce", 5)],
        1: [sized("all_reduce", 8), sized("all_reduce", 3), sized("broadcast", 5)],
        2: [sized("all_reduce", 8)],
    }
    groups = [[0, 1, 2], [0, 1]]
    made = build_plan(Job({rank: recorded(rank, calls, groups) for rank, calls in own.items()}))
    assert [[(call.group, call.inputs) for call in own] for own in made.calls] == [
        [((0, 1, 2), (8,)), ((0, 1), (3,))],
        [((0, 1, 2), (8,)), ((0, 1), (3,))],
        [((0, 1, 2), (8,))],
    ]
    reason = "its group was not recorded and cannot be inferred from the calls of other ranks"
    assert [(one.rank, one.name, one.reason) for one in made.skipped] == [
        (0, "c10d::all_reduce_", reason),
        (1, "c10d::broadcast_", reason),
    ]


def test_peers_of_messages_are_places_in_their_group() -> None:
    def message(kind: str, peer: int) -> dict[str, Any]:
        return {"collective": kind, "peer": peer, "in_nelems": 6, "out_nelems": 6, "ranks": "[1, 2]"}

    own = {0: [], 1: [message("send", 1)], 2: [message("recv", 0)]}
    job = Job({rank: recorded(rank, calls, [[1, 2]]) for rank, calls in own.items() if calls})
    made = build_plan(job)
    assert [[(call.collective, call.peer) for call in own] for own in made.calls] == [
        [("send", 1)],
        [("recv", 0)],
    ]
    assert made.recorded_ranks == (1, 2)


def of_group(start: int, stride: int, size: int, name: str, **sizes: Any) -> dict[str, Any]:
    group = {"pg_name": str(start * 10 + size), "pg_size": size, "global_rank_start": start}
    return {**group, "global_rank_stride": stride, "collective_name": name, "dtype": "Float", **sizes}


@pytest.mark.slow
@pytest.mark.torch
def test_groups_of_uneven_sizes_run_again(tmp_path: Path) -> None:
    """Three ranks, two of which one is among them, one alone, and all, with shares that differ."""

    def calls(rank: int) -> list[dict[str, Any]]:
        own = [of_group(0, 1, 4, "allreduce", in_msg_nelems=10, out_msg_nelems=10)]
        if rank < 3:
            sent, got = [(rank + 1) * one for one in (1, 2, 3)], [(rank + 1) * one for one in (1, 2, 3)]
            own += [
                of_group(0, 1, 3, "allreduce", in_msg_nelems=7, out_msg_nelems=7),
                of_group(0, 1, 3, "_allgather_base", in_msg_nelems=5, out_msg_nelems=15),
                of_group(
                    *(0, 1, 3, "all_to_allv"), in_msg_nelems=sum(sent), out_msg_nelems=sum(got),
                    in_split_size=json.dumps(sent), out_split_size=json.dumps(got),
                ),
            ]  # fmt: skip
        if rank in (1, 3):
            own += [
                of_group(1, 2, 2, "broadcast", in_msg_nelems=11, out_msg_nelems=11),
                of_group(1, 2, 2, "barrier"),
            ]
        if rank == 2:
            own.append(of_group(2, 1, 1, "allreduce", in_msg_nelems=13, out_msg_nelems=13))
        return [*own, of_group(0, 1, 4, "_reduce_scatter_base", in_msg_nelems=12, out_msg_nelems=3)]

    run = write_calls(tmp_path, {rank: calls(rank) for rank in range(4)})
    asked = (
        "--verify",
        "--repeats",
        "1",
        "--warmup",
        "0",
        "--format",
        "json",
        "--json",
        str(tmp_path / "sums.json"),
    )
    found = ended(processes(4, run, *asked))
    assert [status for status, _, _ in found] == [0] * 4, found
    assert "not replayed" not in found[0][2]
    made = build_plan(etloom.open(run))
    assert [len(own) for own in made.calls] == [5, 7, 6, 4]
    counts: dict[str, int] = {}
    for one in json.loads(found[0][1]):
        counts[one["group"]] = counts.get(one["group"], 0) + one["count"]
    assert counts == {"[0, 1, 2, 3]": 8, "[0, 1, 2]": 9, "[1, 3]": 4, "[2]": 1}


def test_ranks_may_name_a_group_in_different_orders() -> None:
    """The call after it, of which no group was recorded, is told all the same."""
    rows = {rank: [row("all_reduce", size, (0, 1), rank) for size in (8, 9)] for rank in (0, 1)}
    rows[0][0].group, rows[1][0].group = (1, 0), (0, 1)
    infer_groups(rows, [(0, 1)])
    assert [[one.missing for one in own] for own in rows.values()] == [[None, None], [None, None]]
    assert (rows[0][1].group, rows[1][1].group) == ((0, 1), (0, 1))
