"""Jobs do under `etloom collect` what they do alone: each script of `scripts`, under each set of options."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from etloom.collector.launcher.collection import collect
from etloom.collector.options import CollectOptions
from etloom.core.errors import CollectError
from support.script_runs import EXCEPTED, NAMES, OPTIONS, STARTING, Comparison, Server

pytestmark = pytest.mark.torch
ALL_PAIRS_S = 20.0
FAST = [
    ("fork", "steps by time"),
    ("fork_at_once", "steps by time"),
    ("threads", "from the first step"),
    ("fork_own_profiler", "steps"),
    ("closed_descriptors", "ring"),
    ("subprocesses", "every"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FAST)
def test_a_script_does_the_same_under_collect(
    tmp_path: Path, script_server: Server, name: str, options: str
) -> None:
    comparison = Comparison(tmp_path, script_server)
    comparison.compare(name, options)
    assert comparison.differences == []


@pytest.mark.slow
def test_every_script_under_all_options(tmp_path: Path, script_server: Server) -> None:
    """Goes through the pairs diagonally, so that each script and each set of options has its turn on a slow machine."""
    comparison = Comparison(tmp_path, script_server)
    names = [name for name in NAMES if name not in STARTING]
    deadline = time.monotonic() + ALL_PAIRS_S
    for shift in range(len(OPTIONS)):
        for number, name in enumerate(names):
            options = list(OPTIONS)[(number + shift) % len(OPTIONS)]
            if (name, options) not in EXCEPTED and time.monotonic() < deadline:
                comparison.compare(name, options)
    assert comparison.differences == []
    assert comparison.recorded > comparison.runs / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STARTING))
def test_scripts_that_start_pythons(tmp_path: Path, name: str) -> None:
    comparison = Comparison(tmp_path)
    comparison.compare(name, "from the first step")
    assert comparison.differences == []


def test_without_nsys_no_job_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CollectError, match="nsys is not on the PATH"):
        collect(
            [sys.executable, "-c", f"open('{tmp_path}/ran', 'w')"],
            tmp_path / "run",
            CollectOptions(sources="nsys"),
        )
    assert list(tmp_path.iterdir()) == []
