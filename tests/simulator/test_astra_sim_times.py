"""Times of collectives, next to values of ASTRA-sim's analytical network."""

from __future__ import annotations

import pytest

from etloom.simulator.network.astra_sim import Dimension, Settings, collective_time, message_time


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
    ],
)
def test_times_of_collectives(
    collective: str, size: int, dimensions: list[Dimension], settings: Settings, time: int
) -> None:
    assert collective_time(collective, size, dimensions, settings) == pytest.approx(time, rel=1e-3)


def test_messages_and_groups() -> None:
    switch = Dimension("Switch", 16, 50, 500)
    assert message_time(1, 2, switch, aware=False) == 1000
    assert message_time(1 << 20, 2, switch, aware=False) == 20531
    ring = Dimension("Ring", 8, 50, 500, "ring")
    whole = collective_time("all_gather", 1 << 20, [ring]) or 0
    pair = collective_time("all_gather", 1 << 20, [ring], members=[0, 4]) or 0
    assert whole > pair > message_time(1 << 20, 4, ring, aware=False)
    assert collective_time("all_to_all", 1 << 20, [Dimension("Ring", 8, 50, 500, "halvingDoubling")]) is None
