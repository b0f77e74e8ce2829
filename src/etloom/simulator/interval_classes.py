"""Errors of predictions by what they extrapolate, and the 90 % intervals that follow from them.

`ERRORS` is the only table of such values. benchmarks/predict compares them with measurements. A class with few
measurements has an assumed deviation, and predictions that rest on it say "not calibrated".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Holds = bool | NDArray[np.bool_]
MIN_MEASUREMENTS = 9
"""Fewer measurements calibrate no class."""


class ClassError(NamedTuple):
    """Standard deviation of the logarithm of predicted over measured step times, beyond what a prediction knows itself.

    ``measurements``: number of measured steps from which it follows.
    """

    deviation: float
    measurements: int = 0


ERRORS: Mapping[str, ClassError] = {
    # Predictions from a recording: benchmarks/predict/lab.py.
    "another rate, collectives": ClassError(0.045, 18),
    "another rate, messages": ClassError(0.01, 9),
    "another rate, all-to-all": ClassError(0.005, 9),
    "another number of ranks": ClassError(0.07, 36),
    "several levels of the network": ClassError(0.12),
    "another device": ClassError(0.05, 4),
    "another host": ClassError(0.05),
    "pipeline sizes": ClassError(0.06, 3),
    # Predictions from operators or sizes: benchmarks/predict/vtrain.py and published.py.
    "never run": ClassError(0.2),
    "unfused kernels": ClassError(0.103, 708),  # GPTs on a node of A100s
    "fused kernels": ClassError(0.085, 11),
    "torch kernels": ClassError(0.06, 13),
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
        guessed = guessed | (np.asarray(applies) & (error.measurements < MIN_MEASUREMENTS))
    return np.sqrt(variance), ~guessed


def explain_interval(classes: Iterable[str]) -> str:
    """Return a sentence on the measurements that calibrate an interval, or on the classes that lack them."""
    names = list(classes)
    if missing := [name for name in names if ERRORS[name].measurements < MIN_MEASUREMENTS]:
        return f"interval not calibrated: {', '.join(missing)}"
    return "interval calibrated: " + ", ".join(
        f"{name} ({ERRORS[name].measurements} measurements)" for name in names
    )
