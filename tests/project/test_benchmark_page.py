"""The page of benchmarks: figures, ratios to peers and distances to limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_a_figure_has_all_its_ratios_in_one_row(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "comparisons.jsonl"
    monkeypatch.setenv(measure.COMPARISONS, str(file))
    speeds = [
        measure.Comparison("read", 1500.0, "MB/s", peer, ratio)
        for peer, ratio in (("HTA", 31.26), ("json", 8.0))
    ]
    late = measure.Comparison("info", 0.3, "s", limit="start of Python", distance=6.02)
    measure.note_comparisons(*speeds, late)
    measure.note_comparisons(measure.Comparison("other", 2.0, "x", baseline="HTA"))
    lines = import_module("write_page").format_figures(measure.read_comparisons(file)).splitlines()
    assert lines[2:] == [
        "| read | 1,500 MB/s | HTA: 31.3x, json: 8.0x |  |",
        "| info | 0.3 s |  | start of Python: 6.0x |",
        "| other | 2 x | HTA: not run |  |",
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


@pytest.mark.slow
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


def test_an_empty_folder_of_shared_traces_counts_as_absent(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = import_module("make")
    monkeypatch.setattr(maker, "DATA", tmp_path)
    assert maker.list_recordings(["a.json.gz"]) == [maker.SOURCES]
    (tmp_path / "a.json.gz").touch()
    assert [maker.format_name(path) for path in maker.list_recordings(["a.json.gz", "b"])] == ["a"]
    assert maker.format_name(tmp_path.parent / "demo") == "demo"


def test_small_ranks_differ_in_their_rank(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = import_module("make")
    monkeypatch.setattr(maker, "CACHE", tmp_path)
    files = sorted(maker.make_small_ranks(2).iterdir())
    infos = [json.loads(file.read_text())["distributedInfo"] for file in files]
    assert [(info["rank"], info["world_size"]) for info in infos] == [(0, 2), (1, 2)]


def test_only_a_peer_may_fail(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_once", lambda task, timeout: f"no {task.name}")
    (outcome,) = measure.measure([measure.Task("peer", "", "", python=measure.PEERS)], 2)
    assert outcome == measure.Failure("peer", "no peer")
    with pytest.raises(SystemExit, match="etloom: no etloom"):
        measure.measure([measure.Task("etloom", "", "")], 2)


@pytest.mark.slow
def test_tests_without_the_shared_traces_are_skipped_and_counted(tmp_path: Path) -> None:
    tests = ("core/test_native_reference.py::test_every_real_file", "linker/test_launch_keys.py")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(f"tests/{test}" for test in tests),
        ],
        cwd=ROOT,
        env={**os.environ, "ETLOOM_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "tests need the shared traces" in line]
    count = int(line.strip("= ").split()[0])
    assert count > 1 and f"{count} skipped" in done.stdout and str(tmp_path) in line
    assert "test_native_reference.py: test_every_real_file" in done.stdout
