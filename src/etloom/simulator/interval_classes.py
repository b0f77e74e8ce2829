"""Errors of predictions by what they extrapolate, and the 90 % intervals that follow from them.

`ERRORS` is the only table of such values. benchmarks/predict/held_out.py sets each class without a group of its
measurements (a job, a model, a publication) and counts how many of that group are inside. A class is calibrated if it
has enough measurements and this share is large enough. Others have an assumed deviation, and predictions that rest on
them say "not calibrated".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Holds = bool | NDArray[np.bool_]
MIN_MEASUREMENTS, MIN_COVERAGE = 9, 0.85
"""With fewer measurements, or a smaller share of held-out ones inside, a class is not calibrated."""


class ClassError(NamedTuple):
    """Standard deviation of the logarithm of predicted over measured step times, beyond what a prediction knows itself.

    ``measurements``: number of measured steps from which it follows. ``coverage``: share of them inside the 90 %
    interval that follows from other groups.
    """

    deviation: float
    measurements: int = 0
    coverage: float = 0.0

    @property
    def is_calibrated(self) -> bool:
        """Whether the interval holds on held-out measurements."""
        return self.measurements >= MIN_MEASUREMENTS and self.coverage >= MIN_COVERAGE


ERRORS: Mapping[str, ClassError] = {
    # Predictions from a recording: benchmarks/predict/lab.py.
    "another rate, collectives": ClassError(0.005, 30, 0.93),
    "another rate, messages": ClassError(0.011, 15, 0.93),
    "another rate, all-to-all": ClassError(0.005, 15, 1.0),
    "another number of ranks": ClassError(0.022, 60, 0.9),
    "communication of GPUs": ClassError(0.07),  # the lab measures gloo
    "several levels of the network": ClassError(0.12),
    "another device": ClassError(0.05, 4),
    "another host": ClassError(0.05),
    "pipeline sizes": ClassError(0.06, 3),
    # Predictions from operators or sizes: benchmarks/predict/vtrain.py and published.py.
    "never run": ClassError(0.2),
    "unfused kernels": ClassError(0.103, 708, 0.9),  # GPTs on a node of A100s
    "fused kernels": ClassError(0.144, 12, 0.92),
    "torch kernels": ClassError(0.06, 11, 0.64),  # without one of four publications, the others are too near
    "several nodes": ClassError(0.1, 6),
    "recomputation not full": ClassError(0.1, 4),
    "ZeRO 2 or 3": ClassError(0.05, 1),
    "context parallelism": ClassError(0.1, 5),
    "experts": ClassError(0.15, 4),
    "another GPU": ClassError(0.12),
    "another vendor": ClassError(0.3),
    "FP8": ClassError(0.15),
}
"""What a prediction extrapolates -> its error."""


def combine_errors(holds: Mapping[str, Holds]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the standard deviation of predictions to which several classes apply, and whether all are calibrated.

    Args:
        holds: class -> whether it applies, to one prediction or to each of several.
    """
    variance, guessed = np.zeros(()), np.zeros((), bool)
    for name, applies in holds.items():
        error = ERRORS[name]
        variance = variance + error.deviation**2 * np.asarray(applies)
        guessed = guessed | (np.asarray(applies) & (not error.is_calibrated))
    return np.sqrt(variance), ~guessed


def explain_interval(classes: Iterable[str]) -> str:
    """Return a sentence on the measurements that calibrate an interval, or on the classes that lack them."""
    names = list(classes)
    if missing := [name for name in names if not ERRORS[name].is_calibrated]:
        return f"interval not calibrated: {', '.join(missing)}"
    return "interval calibrated: " + ", ".join(
        f"{name} ({ERRORS[name].measurements} measurements)" for name in names
    )
