"""Figures of a replay against ones worked out by hand: bandwidths of every collective, a row a call, a whole report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from etloom.replayer.plan import Call, Plan

pytestmark = pytest.mark.torch
WORLD = (0, 1, 2, 3)


def measured(
    own: Sequence[Sequence[Call]], repeats: int = 1, made: int = 100, done: int = 1_300, apart: int = 10_000
) -> tuple[Plan, dict[int, object]]:
    """Each rank makes a call ``made`` ns after the rank before it, all end at ``done``; calls ``apart`` ns apart."""
    from etloom.replayer.comms.runner import CallTimes

    times = {}
    for rank, calls in enumerate(own):
        start = (
            np.array([[call.index * apart for call in calls]] * repeats) + np.arange(repeats)[:, None] * 10**6
        )
        zeros = np.zeros(repeats, dtype=np.int64)
        times[rank] = CallTimes(start + rank * made, start + rank * made, start + done, 0, zeros, zeros)
    return Plan(tuple(map(tuple, own))), times


@pytest.mark.parametrize(
    ("collective", "ins", "outs", "size", "bus"),
    [
        ("all_reduce", 1_000, 1_000, 4_000, 2 * 3 / 4),
        ("all_gather", 250, 1_000, 4_000, 3 / 4),
        ("reduce_scatter", 1_000, 250, 4_000, 3 / 4),
        ("all_to_all", 1_000, 1_000, 4_000, 3 / 4),
        ("gather", 250, 1_000, 4_000, 3 / 4),
        ("scatter", 1_000, 250, 4_000, 3 / 4),
        ("broadcast", 1_000, 1_000, 4_000, 1),
        ("reduce", 1_000, 1_000, 4_000, 1),
    ],
)
def test_bandwidths_on_four_ranks(collective: str, ins: int, outs: int, size: int, bus: float) -> None:
    """From the last call (at 300 ns) to the last end (at 1,300 ns): 4,000 B in 1,000 ns are 4 GB/s."""
    from etloom.replayer.comms.results import call_table, summarize_calls

    call = Call(0, collective, WORLD, "float", (ins,), (outs,))
    (row,) = summarize_calls(call_table(*measured([[call]] * 4))).iter_rows(named=True)
    assert (row["bytes"], row["count"], row["group_size"]) == (size, 4, 4)
    assert row["algo_gb_per_s"] == pytest.approx(4.0)
    assert row["bus_gb_per_s"] == pytest.approx(4.0 * bus)
    # Latencies of 1.3, 1.2, 1.1 and 1 us.
    assert (row["p50_us"], row["min_us"], row["max_us"]) == (1.15, 1.0, 1.3)
    assert (row["p95_us"], row["p99_us"]) == pytest.approx((1.2 + 0.85 * 0.1, 1.2 + 0.97 * 0.1))
    assert row["skew_p50_us"] == pytest.approx(0.3)


def test_an_uneven_all_to_all_by_its_bytes() -> None:
    """Rank 0 keeps 3 elements and sends 12, rank 1 sends 6 and keeps none: 48 B go over the bus, rank 0 puts in 60."""
    from etloom.replayer.comms.results import call_table, summarize_calls

    own = [
        Call(0, "all_to_all", (0, 1), "float", (15,), (9,), in_split=(3, 12), out_split=(3, 6)),
        Call(0, "all_to_all", (0, 1), "float", (6,), (12,), in_split=(6, 0), out_split=(12, 0)),
    ]
    (row,) = summarize_calls(call_table(*measured([[one] for one in own], made=0, done=10))).iter_rows(
        named=True
    )
    assert (row["bytes"], row["algo_gb_per_s"], row["bus_gb_per_s"]) == (60, 6.0, 4.8)


@pytest.mark.parametrize(
    "told",
    [
        {"inputs": (3, 12), "outputs": (3, 6)},
        {"inputs": (15,), "outputs": (9,), "in_split": (3, 12)},
        {"inputs": (15,), "outputs": (9,), "out_split": (3, 6)},
        {"inputs": (15,), "outputs": (3, 6)},
    ],
)
def test_bytes_over_the_bus_follow_from_either_side_of_an_uneven_all_to_all(told: dict[str, Any]) -> None:
    from etloom.replayer.comms.results import _bus_bytes

    assert _bus_bytes(Call(0, "all_to_all", (0, 1), "float", **told), 0) == 48


@pytest.mark.slow
def test_sizes_are_those_of_the_recording(data: Path) -> None:
    """Of an uneven all-to-all, where ranks put in 40 B each and get 16 to 64 B, as of all others."""
    import etloom
    from etloom.replayer.comms.plan_builder import plan_replay
    from etloom.replayer.comms.results import call_table, summarize_calls

    recording = etloom.open(data / "cpu/coll_4")
    plan, times = measured(list(plan_replay(recording, 4).calls))
    replayed = summarize_calls(call_table(plan, times), "all")
    key = ("collective", "group_size", "bytes")
    members = pl.when(pl.col("collective") == "message").then(2).otherwise("group_size")
    # Barriers, of which gloo does not time all, have no size.
    got = replayed.select(*key, pl.col("count") // members).drop_nulls().sort(*key).rows()
    by_axis = etloom.analyze(recording, "collective-summary")
    recorded = by_axis.group_by(key).agg(pl.col("count").sum()).drop_nulls().sort(*key).rows()
    assert {row[2:] for row in got if row[0] == "all_to_all"} == {(40, 1), (64, 3)}
    assert got == recorded


def test_barriers_and_calls_without_duration_have_no_bandwidth() -> None:
    from etloom.replayer.comms.results import call_table, summarize_calls

    own = [Call(0, "barrier", (0, 1), "float", (), ()), Call(1, "all_reduce", (0, 1), "float", (8,), (8,))]
    rows = {
        row["collective"]: row
        for row in summarize_calls(call_table(*measured([own] * 2, made=0, done=0))).iter_rows(named=True)
    }
    assert (rows["barrier"]["bytes"], rows["barrier"]["bus_gb_per_s"]) == (None, None)
    assert (rows["all_reduce"]["bytes"], rows["all_reduce"]["algo_gb_per_s"]) == (32, None)


def test_a_row_a_call() -> None:
    """Three ranks, two repeats; the calls of two groups and one size are told apart, and are in their order."""
    from etloom.replayer.comms.results import call_table, summarize_calls

    def reduced(at: int, group: tuple[int, ...]) -> Call:
        return Call(at, "all_reduce", group, "float", (8,), (8,))

    own = [
        [reduced(0, (0, 1, 2)), reduced(1, (0, 1)), Call(2, "send", (0, 2), "float", (4,), (), peer=2)],
        [reduced(0, (0, 1, 2)), reduced(1, (0, 1))],
        [reduced(0, (0, 1, 2)), Call(1, "recv", (0, 2), "float", (), (4,), peer=0), reduced(2, (0, 1, 2))],
    ]
    own[0].append(reduced(3, (0, 1, 2)))
    own[1].append(reduced(2, (0, 1, 2)))
    table = call_table(*measured(own, repeats=2))
    rows = summarize_calls(table, "call")
    assert rows.select("call", "collective", "group", "count").rows() == [
        (0, "all_reduce", "[0, 1, 2]", 6),
        (1, "all_reduce", "[0, 1]", 4),
        (2, "message", "[0, 2]", 4),
        (3, "all_reduce", "[0, 1, 2]", 6),
    ]
    assert rows["share_pct"].sum() == pytest.approx(100)
    assert summarize_calls(table).height == 3
    assert rows["total_ms"].sum() == pytest.approx(summarize_calls(table, "all")["total_ms"].sum())
