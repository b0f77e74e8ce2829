"""The page of benchmarks: figures next to those asked for, ratios to peers and distances to limits."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import etloom
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


def test_a_page_is_not_written_from_a_run_that_failed(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = import_module("write_page")
    (tmp_path / "bench_broken.py").write_text('"""A benchmark."""\nraise SystemExit(3)\n')
    (tmp_path / "page.md").write_text("before")
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "SCRIPTS", {"broken": []})
    monkeypatch.setattr(page, "measure_copying", lambda: 1e9)
    monkeypatch.setattr(page, "measure_touching", lambda: 1e9)
    with pytest.raises(SystemExit, match=r"broken: .* exit status 3: page\.md is not changed"):
        page.main([])
    assert (tmp_path / "page.md").read_text() == "before"


def test_without_the_shared_traces_inputs_are_made_of_own_recordings(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = import_module("make")
    monkeypatch.setattr(maker, "DATA", tmp_path / "absent")
    monkeypatch.setattr(maker, "CACHE", tmp_path)
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    sources = maker.find_sources()
    assert {file.name for file in sources.iterdir()} >= set(maker.FILES.values())
    copies = maker.make_copies("kineto", 3, sources / maker.FILES["kineto"])
    one = etloom.read(sources / maker.FILES["kineto"]).rows("events")
    assert etloom.read(copies).rows("events") > 2.9 * one
    assert etloom.read(maker.find_device_trace()).events.filter(cat="kernel").height > 1000
