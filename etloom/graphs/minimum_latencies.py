"""The least that each kind of dependency takes, as far as a recording shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etloom.graphs.algorithms import Int64Array

LOW_QUANTILE = 0.05
"""The quantile of what was seen that stands for the least. The very least is often an error of a clock."""

DEFAULT_ENTRY_NS = 2_000
"""What entering a blocking call costs, where no call of its name returned without waiting."""


@dataclass(frozen=True)
class MinimumLatencies:
    """Of one rank, in ns. Those that a recording does not show are 0.

    ``submission``: from the return of a launch call to the start of a kernel on an idle stream. ``launch``: from
    the submission to the start. ``stream``: from the end of device work to the start of the next. ``sync``: from
    the end of device work to the return of the call that waited for it. ``entry``: what a blocking call takes
    that need not wait, by its name; ``entry_default`` for the others.
    """

    submission: int = 0
    launch: int = 0
    stream: int = 0
    sync: int = 0
    entry: Mapping[str, int] = field(default_factory=dict)
    entry_default: int = DEFAULT_ENTRY_NS

    def entry_of(self, name: str) -> int:
        return self.entry.get(name, self.entry_default)


def low_quantile(values: Int64Array) -> int:
    """The low quantile of the values that are not negative; 0 of none."""
    return _lower_quantile(values[values >= 0], LOW_QUANTILE)


def median_positive(values: Int64Array) -> int:
    """The median of the values above 0; 0 of none."""
    return _lower_quantile(values[values > 0], 0.5)


def _lower_quantile(values: Int64Array, share: float) -> int:
    """The lower quantile, as numpy has it, of values that are put out of order; 0 of none."""
    if not values.size:
        return 0
    at = int((values.size - 1) * share)
    values.partition(at)
    return int(values[at])
