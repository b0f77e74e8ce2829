"""How much a test tries: a quarter in `make check` and `make test`, all of it in pytest alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

FULL_EXAMPLES = 100
QUICK_EXAMPLES = 25


def examples(count: int) -> int:
    """Number of random examples where a full run tries ``count``: a quarter of it with the profile "quick"."""
    return max(3, count * settings.default.max_examples // FULL_EXAMPLES)


def is_quick() -> bool:
    """Whether the profile is "quick"."""
    return settings.default.max_examples < FULL_EXAMPLES


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which all but the first ``count`` are marked as slow."""
    return [
        pytest.param(value, marks=[pytest.mark.slow] if number >= count else [])
        for number, value in enumerate(values)
    ]
