"""Verbs that describe a run: no deadlock with few threads, exit status with lost data, what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from etloom import cli
from etloom.core.trace import Trace
from etloom.loading.rank_stores import CachedRun
from support import small_traces


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_traces.write_run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_report_with_few_threads_ends(run: Path, threads: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etloom", "report", run, "--no-cache", "--jobs", threads],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_strict_fails_each_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "kineto_trace_1.json").write_text((run / "kineto_trace_1.json").read_text()[:900])
    for _ in range(2):
        assert cli.main(["info", str(run), "--strict"]) == 1
        assert "read.truncated" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["info", "link"])
def test_small_work_imports_no_masked_arrays(run: Path, tmp_path: Path, verb: str) -> None:
    """Their import takes 10 ms; polars needs them to convert an array, `arrays.to_series` does not."""
    code = "import sys; from etloom import cli; status = cli.main(sys.argv[1:]); assert 'numpy.ma' not in sys.modules"
    words = (
        ["info", run, "--no-cache"] if verb == "info" else ["link", run, "--out", tmp_path / "linked.parquet"]
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_cache_states_its_size_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))

    def run_verb(*words: str) -> str:
        assert cli.main(["cache", *words]) == 0
        return capsys.readouterr().out.removeprefix(f"{tmp_path / 'cache'}: ").strip()

    assert run_verb() == "0 runs, 0.0 MB; 0 copies of remote runs, 0.0 MB"
    copy = tmp_path / "cache" / "remote" / "unit"
    copy.mkdir(parents=True)
    (copy / "file").write_bytes(bytes(2_000_000))
    CachedRun("a").add(0, Trace({"events": pl.DataFrame({"id": [0], "ts": [0], "name": ["a"]})}))
    assert run_verb().startswith("1 run, 0.0 MB; 1 copy of a remote run, 2.0 MB")
    assert run_verb("--clear") == "2.0 MB removed"
    assert run_verb() == "0 runs, 0.0 MB; 0 copies of remote runs, 0.0 MB"
