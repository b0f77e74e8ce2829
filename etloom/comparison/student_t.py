"""Approximate quantiles of Student's t distribution."""

from __future__ import annotations

from math import pi, sqrt, tan
from statistics import NormalDist


def student_t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for a probability from 0.9 to 0.99.

    ``freedom``: degrees of freedom. Exact for 1 and 2, else within 1 % by Cornish and Fisher's expansion (Abramowitz
    and Stegun, 26.7.5).
    """
    if freedom <= 1:
        return tan(pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, 1)))
