"""Calls without counterparts on other ranks are left out of a replay; calls that contradict each other are an error."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.replayer.comms.call_mapping import select_calls as kept_of
from etloom.replayer.comms.plan_builder import PlanOptions, match_calls, plan_replay
from etloom.replayer.plan import Call, Plan


def collective(
    kind: str = "all_reduce", group: tuple[int, ...] = (0, 1), size: int = 8, **other: object
) -> Call:
    return replace(Call(0, kind, group, "float", (size,), (size,)), **other)  # type: ignore[arg-type]


def message(kind: str, group: tuple[int, int], peer: int, size: int = 8) -> Call:
    ins, outs = ((size,), ()) if kind == "send" else ((), (size,))
    return Call(0, kind, group, "float", ins, outs, peer=peer)


def test_calls_missing_on_one_rank_are_omitted_with_a_reason() -> None:
    calls = [
        [collective(), message("send", (0, 1), 1), message("send", (0, 1), 1), collective(group=(0, 1, 2))],
        [message("recv", (0, 1), 0), collective(), collective(group=(0, 1, 2)), collective()],
        [collective(group=(0, 1, 2)), message("recv", (0, 2), 0)],
    ]
    kept, left = match_calls(calls)
    assert kept == [{0, 1, 3}, {0, 1, 2}, {0}]
    assert [(one.rank, one.reason) for one in left] == [
        (0, "rank 1 has no matching call"),
        (1, "rank 0 has no matching call"),
        (2, "rank 0 has no matching call"),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (collective(), collective("broadcast", root=0)),
        (collective("broadcast", root=0), collective("broadcast", root=1)),
        (collective(), collective(size=9)),
        (collective(), collective(dtype="double")),
        (collective(dtype="int", inputs=(2,)), collective(dtype="short", inputs=(4,))),
        (collective(), collective(inputs=(4, 4))),
        (collective("all_gather", inputs=(4, 4), coalesced=True), collective("all_gather")),
        (collective(), collective(reduce_op="max")),
        (message("send", (0, 1), 1), message("recv", (0, 1), 0, 9)),
        (
            collective("all_to_all", in_split=(3, 5), out_split=(3, 5)),
            collective("all_to_all", in_split=(4, 4), out_split=(5, 3)),
        ),
        (collective("all_gather", inputs=(4,)), collective("all_gather", inputs=(8,))),
        (collective("reduce_scatter", outputs=(4,)), collective("reduce_scatter", outputs=(8,))),
    ],
)
def test_contradicting_calls_are_an_error(one: Call, other: Call) -> None:
    with pytest.raises(
        EtloomError, match=rf"call 0 of rank \d \({one.collective}, .* does not match call 0 of rank"
    ):
        match_calls([[one], [other]])


def test_fields_that_may_differ_between_ranks() -> None:
    rooted = [collective("gather", root=0, outputs=(8, 8)), collective("gather", root=0, outputs=())]
    uneven = [
        collective("all_to_all", inputs=(8,), outputs=(7,), in_split=(3, 5), out_split=(3, 4)),
        collective("all_to_all", inputs=(10,), outputs=(11,), in_split=(4, 6), out_split=(5, 6)),
    ]
    types = [collective(), collective(dtype="int")]
    # Played as one tensor; and what does not reduce has no operation.
    whole = [collective("all_gather", inputs=(4, 4), reduce_op="max"), collective("all_gather")]
    barriers = [collective("barrier", dtype="double", inputs=()), collective("barrier")]
    own = [list(one) for one in zip(rooted, uneven, types, whole, barriers, strict=True)]
    assert match_calls(own) == ([{0, 1, 2, 3, 4}] * 2, [])


def test_the_error_of_a_contradiction_names_the_difference() -> None:
    one, other = collective(dtype="int", inputs=(1, 1)), collective(dtype="short", inputs=(4,))
    said = r"rank 0 \(all_reduce, 8 B, 2 tensors of int, sum\) does not match call 0 of rank 1 \(all_reduce, 8 B, short"
    with pytest.raises(EtloomError, match=said):
        match_calls([[one], [other]])


GROUPS = [(0, 1), (0, 1, 2), (1, 2), (0, 2)]
SCRIPT = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["all_reduce", "barrier"]), st.sampled_from(GROUPS)),
        st.tuples(st.just("message"), st.sampled_from([(0, 1), (1, 0), (2, 1), (0, 2)])),
    ),
    max_size=30,
)


@given(SCRIPT, st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_any_beginnings_of_one_program_end_together(
    script: list[tuple[str, tuple[int, ...]]], ends: list[int]
) -> None:
    """A program of three ranks, of which each was recorded up to some call: what is kept runs to its end."""
    calls: list[list[Call]] = [[], [], []]
    for kind, where in script:
        for rank in where:
            peer = where[1 - where.index(rank)]
            made = (
                message("send" if rank == where[0] else "recv", (min(where), max(where)), peer)
                if kind == "message"
                else collective(kind, where)
            )
            calls[rank].append(replace(made, index=len(calls[rank])))
    recorded = [own[:end] for own, end in zip(calls, ends, strict=True)]
    kept, left = match_calls(recorded)
    own = [kept_of(calls, places) for calls, places in zip(recorded, kept, strict=True)]
    assert sum(map(len, own)) + len(left) == sum(map(len, recorded))
    # Run it: a call ends when all of its ranks have come to it.
    at = [0, 0, 0]
    while True:
        waiting = {rank: own[rank][at[rank]] for rank in range(3) if at[rank] < len(own[rank])}
        done = [
            rank
            for rank, call in waiting.items()
            if all(
                other in waiting and set(waiting[other].group) == set(call.group)
                and (call.peer is None or waiting[other].peer == rank)
                for other in call.group
                if other != rank
            )
        ]  # fmt: skip
        if not done:
            break
        for rank in done:
            at[rank] += 1
    assert at == [len(calls) for calls in own]
    counts = [Counter(call.group for call in calls if call.peer is None) for calls in own]
    assert all(counts[rank][group] == counts[group[0]][group] for group in GROUPS for rank in group)


def test_gaps_of_removed_calls_are_kept() -> None:
    calls = [
        replace(collective(), index=at, gap_ns=None if at == 0 else 10**at, waits_for=(at - 1,))
        for at in range(4)
    ]
    found = kept_of(calls, {1, 3})
    assert [(call.index, call.gap_ns, call.waits_for) for call in found] == [(0, None, ()), (1, 1_100, ())]


def recorded(*rows: dict[str, object], **meta: object) -> Trace:
    import polars as pl

    plain = {"dtype": "float", "in_nelems": 8, "out_nelems": 8, "collective": "all_reduce"}
    nodes = pl.DataFrame({"id": range(len(rows)), "name": ["record_param_comms"] * len(rows)})
    comms = pl.DataFrame([{"id": at, "node": at, **plain, **row} for at, row in enumerate(rows)])
    return Trace({"nodes": nodes, "comms": comms}, {"rank": 0, **meta})


def test_one_trace_on_more_processes_than_were_recorded() -> None:
    job = Job(
        {
            0: recorded(
                {"ranks": "[0, 1]", "group_size": 2},
                {"ranks": "[0]", "group_size": 1},
                {"collective": "all_to_all", "in_split": "[6, 2]", "out_split": "[3, 1]", "out_nelems": 4},
                {"collective": "send", "peer": 1},
                world_size=2,
            )
        }
    )
    made: Plan = plan_replay(job, 3, PlanOptions(one_for_all=True))
    world = (0, 1, 2)
    # The group of all that were recorded is that of all processes; shares of one rank would not fit each other.
    assert [[(call.collective, call.group) for call in own] for own in made.calls[1:]] == [
        [("all_reduce", world), ("all_to_all", world)]
    ] * 2
    assert made.calls[0][1].group == (0,)
    assert {(call.inputs, call.outputs, call.in_split) for own in made.calls for call in own[-1:]} == {
        ((8,), (8,), ())
    }
    reasons = {one.reason for one in made.skipped}
    assert reasons == {"its peer is the rank itself", "rank 1 has no matching call", "rank 1 is not in its group",
                       "rank 2 is not in its group"}  # fmt: skip


def test_one_trace_of_several_processes_names_its_flag() -> None:
    job = Job({0: recorded({"ranks": "[0, 1]"}, world_size=2)})
    with pytest.raises(EtloomError, match="replay the one trace on all processes \\(--use-one-trace\\)"):
        plan_replay(job, 1)


@pytest.fixture(scope="module")
def pipeline(data: Path) -> Job:
    return etloom.open(data / "cpu" / "pp_4")


@pytest.mark.parametrize("first", range(1, 17))
def test_the_first_calls_of_a_pipeline_end_together(pipeline: Job, first: int) -> None:
    made = plan_replay(pipeline, 4, PlanOptions(first=first))
    messages: Counter[tuple[int, int]] = Counter()
    for rank, own in enumerate(made.calls):
        for call in own:
            assert call.peer is not None
            sent = call.collective == "send"
            messages[(rank, call.peer) if sent else (call.peer, rank)] += 1 if sent else -1
    assert messages and not any(messages.values())
