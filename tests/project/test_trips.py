"""The number of files and levels that a reader passes who follows a verb with a debugger (benchmarks/trips.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import ROOT

LIMITS = {"open": (55, 7, 15), "replay": (80, 11, 20)}
"""Verb -> at most so many modules, packages and levels."""


@pytest.mark.parametrize("verb", LIMITS)
@pytest.mark.slow
def test_a_verb_passes_few_files_and_levels(verb: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "trips.py"), "--figures", verb]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = [int(figure) for figure in process.stdout.split()]
    assert all(figure <= limit for figure, limit in zip(figures, LIMITS[verb], strict=True)), figures
