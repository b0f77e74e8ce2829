"""The minimum latency of each kind of dependency, estimated from a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etloom.graphs.graph import Int64Array

LOW_QUANTILE = 0.05
"""The quantile that is taken as the minimum, because the smallest value is often a clock error."""

DEFAULT_ENTRY_NS = 2_000
"""Cost of entering a blocking call if no call of its name returned without waiting."""


@dataclass(frozen=True)
class MinimumLatencies:
    """The minimum latency of each kind of dependency on one rank, ns; 0 if the recording does not show it.

    ``submission``: from the return of a launch call to the start of a kernel on an idle stream. ``launch``: from
    the submission to the start. ``stream``: from the end of a GPU activity to the start of the next. ``sync``: from
    the end of a GPU activity to the return of the call that waited for it. ``entry``: duration of a blocking call
    that does not have to wait, by its name; ``entry_default`` for all other names.
    """

    submission: int = 0
    launch: int = 0
    stream: int = 0
    sync: int = 0
    entry: Mapping[str, int] = field(default_factory=dict)
    entry_default: int = DEFAULT_ENTRY_NS

    def get_entry(self, name: str) -> int:
        """Return the duration (ns) of a call of the blocking function ``name`` that does not have to wait."""
        return self.entry.get(name, self.entry_default)


def low_quantile(values: Int64Array) -> int:
    """Return the low quantile (`LOW_QUANTILE`) of the nonnegative values; 0 if there are none."""
    return _lower_quantile(values[values >= 0], LOW_QUANTILE)


def median_positive(values: Int64Array) -> int:
    """Return the median of the positive values; 0 if there are none."""
    return _lower_quantile(values[values > 0], 0.5)


def _lower_quantile(values: Int64Array, share: float) -> int:
    """Return the quantile at ``share`` (0 to 1) as numpy's method "lower"; 0 without values. Reorders the values."""
    if not values.size:
        return 0
    position = int((values.size - 1) * share)
    values.partition(position)
    return int(values[position])
