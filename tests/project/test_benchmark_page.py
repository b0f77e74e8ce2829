"""The page of benchmarks: figures next to those asked for, ratios to peers and distances to limits."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("_measure")


def test_figures_are_compared_with_their_goals(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "targets.jsonl"
    monkeypatch.setenv(measure.TARGETS, str(file))
    speed = measure.Target("read", 1500.0, "MB/s", 1200, is_maximum=False, baseline="HTA", ratio=31.26)
    late = measure.Target("info", 0.3, "s", 0.25, limit="start of Python", distance=6.02)
    measure.note_targets(speed, late)
    measure.note_targets(measure.Target("other", 2.0, "x", baseline="HTA"))
    lines = import_module("write_page").format_targets(measure.read_targets(file)).splitlines()
    assert lines[2:] == [
        "| read | 1,500 MB/s | at least 1200 MB/s | yes | HTA: 31.3x |  |",
        "| info | 0.3 s | at most 0.25 s | no |  | start of Python: 6.0x |",
        "| other | 2 x |  |  | HTA: not run |  |",
    ]


def test_each_benchmark_of_the_page_exists(measure: Any) -> None:
    names = import_module("write_page").SCRIPTS
    assert all((ROOT / "benchmarks" / f"bench_{name}.py").is_file() for name in names)


def test_a_slow_program_runs_once(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run_once(task: Any, timeout: float) -> Any:
        runs.append(task.name)
        return (11.0 if task.name == "peer" else 1.0, 1.0, 1, 5)

    monkeypatch.setattr(measure, "run_once", run_once)
    measure.measure([measure.Task("etloom", "", ""), measure.Task("peer", "", "")], 3)
    assert runs == ["etloom", "peer", "etloom", "etloom"]
