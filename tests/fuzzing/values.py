"""Odd values: a file may hold one wherever the schema knows an argument."""

from __future__ import annotations

import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, "", " ", "text", "0", "-1", "1.5", "[1, 2]", "{}", "null", "NaN", "ProfilerStep#7", "nccl",
    "\ud800", "a\udfffb", "\x00", "\n\t\x1b[31m", "<script>", "../../x", "é" * 50, "x" * 5_000,
    0, 1, -1, 2, 7, 1.5, -0.0, 1e300, -1e-300, 5e-324, float("nan"), float("inf"), float("-inf"),
    2**31, 2**32 - 1, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, -(2**31), -(2**63), -(2**70),
    [], [[]], [None], ["x"], [1], [-1], [1, 2, 3, 4], [1.5, "x", None], [2**63], [[1, 2], [3]], [[[[[0]]]]], [0, 0, 0],
    [10**12, 10**12, 10**12], [{"a": 1}], {}, {"a": 1}, {"rank": "x"}, {"": None}, ["float", "float"], [True, False],
    "(1, 2)", "[0, 1, ..., 31]", "[0, 1", "cuda:0", "cuda:x", "cuda:99999999999", "Tensor(", "GenericList[Tensor(float)]",
)  # fmt: skip

MANY = 2_000
"""Elements of the longest list."""


def odd_value(rng: random.Random) -> Any:
    """Return an odd value: one of `ODD_VALUES`, a random number, or a long or deeply nested list."""
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(ODD_VALUES)
    if kind < 0.95:
        return rng.randint(-(2 ** rng.randint(0, 70)), 2 ** rng.randint(0, 70))
    if kind < 0.98:
        return [rng.randint(0, 9)] * rng.randint(1, MANY)
    value: Any = rng.choice((None, 1, "x"))
    for _ in range(rng.randint(1, 200)):
        value = [value]
    return value
