"""Times of collectives, next to values of ASTRA-sim's analytical network."""

from __future__ import annotations

import pytest

from etloom.simulator.network.astra_sim import (
    Dimension,
    Network,
    Settings,
    collective_time,
    compute_time,
    message_time,
)


def dims(*dimensions: tuple[str, int, float, float, str]) -> list[Dimension]:
    return [Dimension(*each) for each in dimensions]


@pytest.mark.parametrize(
    ("collective", "size", "dimensions", "settings", "time"),
    [
        ("all_reduce", 1024, dims(("Ring", 2, 50, 500, "ring")), Settings(), 1048),
        ("all_reduce", 1 << 20, dims(("Ring", 4, 50, 500, "ring")), Settings(), 33829),
        ("all_gather", 1 << 20, dims(("Ring", 4, 50, 500, "ring")), Settings(), 60133),
        ("reduce_scatter", 1 << 20, dims(("Ring", 4, 50, 500, "ring")), Settings(), 17653),
        ("all_to_all", 1 << 20, dims(("Ring", 4, 50, 500, "ring")), Settings(), 32362),
        ("all_reduce", 1024, dims(("Switch", 4, 50, 500, "doubleBinaryTree")), Settings(aware=True), 4240),
        ("all_reduce", 1 << 20, dims(("Ring", 8, 50, 500, "doubleBinaryTree")), Settings(), 134081),
        ("all_gather", 1024, dims(("Ring", 4, 50, 500, "direct")), Settings(aware=True), 1077),
        (
            "all_reduce",
            1 << 28,
            dims(("Ring", 4, 200, 50, "ring"), ("Switch", 2, 100, 500, "ring")),
            Settings(),
            2942810,
        ),
        (
            "all_reduce",
            1 << 28,
            dims(("Ring", 4, 200, 50, "ring"), ("Switch", 2, 100, 500, "ring")),
            Settings(optimization="baseline"),
            5006545,
        ),
        (
            "all_to_all",
            1 << 28,
            dims(("Ring", 4, 200, 50, "ring"), ("Switch", 2, 100, 500, "ring")),
            Settings(splits=4),
            2190000,
        ),
        # The second half begins before the part of the farthest rank is processed.
        ("all_reduce", 1 << 22, dims(("Ring", 4, 50, 500, "direct")), Settings(), 42557),
        ("all_reduce", 1 << 12, dims(("Switch", 4, 100, 0, "direct")), Settings(aware=True), 93),
        # Of the chunks that wait for a dimension, the last one begins first.
        (
            "all_reduce",
            1 << 24,
            dims(("Ring", 4, 200, 50, "direct"), ("Ring", 4, 100, 500, "direct")),
            Settings(splits=4),
            47876,
        ),
    ],
)
def test_times_of_collectives(
    collective: str, size: int, dimensions: list[Dimension], settings: Settings, time: int
) -> None:
    assert collective_time(collective, size, dimensions, settings) == time


def test_messages_and_groups() -> None:
    switch = Dimension("Switch", 16, 50, 500)
    assert message_time(1, 2, switch, aware=False) == 1000
    assert message_time(1 << 20, 2, switch, aware=False) == 20531
    ring = Dimension("Ring", 8, 50, 500, "ring")
    whole = collective_time("all_gather", 1 << 20, [ring]) or 0
    pair = collective_time("all_gather", 1 << 20, [ring], members=[0, 4]) or 0
    assert whole > pair > message_time(1 << 20, 4, ring, aware=False)
    assert collective_time("all_to_all", 1 << 20, [Dimension("Ring", 8, 50, 500, "halvingDoubling")]) is None


def test_a_late_rank_delays_those_that_wait_for_it() -> None:
    pair = [Dimension("Ring", 2, 50, 500, "ring")]
    assert collective_time("all_gather", 1024, pair) == 10 + 519 + 10
    assert collective_time("all_gather", 1024, pair, delays={1: 2000}) == 2010 + 519 + 10


def test_chunks_at_a_time_share_the_links_only_with_congestion() -> None:
    pair = [Dimension("Ring", 2, 50, 500, "ring")]
    times = [
        collective_time(
            "all_gather", 1024, pair, Settings(aware=aware, splits=2, active_chunks=chunks, queues=queues)
        )
        for aware, chunks, queues in ((False, 1, 1), (False, 2, 1), (False, 1, 2), (True, 2, 1))
    ]
    assert times == [2 * 529, 529, 529, 529 + 9]


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("kind", ["Ring", "Switch", "FullyConnected"])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_one_rank_represents_all(kind: str, algorithm: str, aware: bool) -> None:
    """A rank that is late by nothing makes the simulation follow each rank."""
    for name in ("all_reduce", "all_to_all"):
        network = Network(Dimension(kind, 6, 50, 500, algorithm), Settings(aware=aware, local_mem_bw=100))
        alone = compute_time(network, name, 1 << 16)
        network.is_symmetric = False
        assert compute_time(network, name, 1 << 16) == alone


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_single_rank_exchanges_nothing(collective: str) -> None:
    ring, halving = (
        collective_time(collective, 1000, [Dimension("Ring", 1, 50, 500, algorithm)])
        for algorithm in ("ring", "halvingDoubling")
    )
    assert ring == halving == 10
