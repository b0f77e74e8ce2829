"""Source lines of a recording: shown next to a finding, escaped, and never read from a path that a trace states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.collector.session.source_lines import MAX_FRAMES, read_source_lines
from etloom.comparison.source_lines import MAX_QUOTED, find_changed_functions, find_source_lines
from etloom.core.trace import Job, Trace
from etloom.reports.difference_page import render_page
from etloom.reports.source_code import render_changed_functions, render_source_lines
from support.reports import HOSTILE

FRAME = "train.py(2): main"


def make_facts(entry: Any, frame: str = FRAME) -> dict[str, Any]:
    return {"run": {"ranks": [{"source_lines": {frame: entry}}]}}


def make_job(entry: Any, frame: str = FRAME) -> Job:
    return Job({0: Trace()}, make_facts(entry, frame))


def test_lines_are_numbered_and_escaped() -> None:
    for text in HOSTILE:
        sources = find_source_lines(make_job({"file": f"/a b/{text}", "lines": ["def main():", text]}))
        html = render_source_lines(FRAME, sources)
        assert "    2  def main():\n    3  " in html and 'href="vscode://file/a%20b/' in html
        assert html.count("<") == 10 and html.count('"') == 6


@pytest.mark.parametrize(
    "entry",
    [None, 5, [], {"file": 3, "lines": []}, {"file": "x", "lines": [1]}, {"file": "x", "lines": "text"}],
)
def test_invalid_entries_are_ignored(entry: Any) -> None:
    assert find_source_lines(make_job(entry)) == {}


def test_no_file_is_read_for_a_report(tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("password\n" * 5)
    sources = find_source_lines(make_job({"file": str(secret), "lines": []}))
    assert "password" not in render_source_lines(FRAME, sources)


@pytest.mark.slow
def test_functions_that_changed_between_two_runs_are_listed(data: Path) -> None:
    first = {"file": "/x/train.py", "lines": ["def main():", "    a = 1", f"    b = {HOSTILE[0]}"]}
    second = {"file": "/x/train.py", "lines": ["def main():", "    a = 1", "    b = 2"]}
    before = make_job(first)
    assert find_changed_functions(before, make_job(first, "train.py(9): main")) == []  # it moved
    html = render_changed_functions(find_changed_functions(before, make_job(second)))
    assert "+    b = 2" in html and "-    b = &lt;" in html and "<script" not in html
    job = etloom.open(data / "cpu" / "ddp_2")
    difference = etloom.diff(job.replace(make_facts(first)), job.replace(make_facts(second)))
    assert "Functions whose source lines changed" in render_page(difference)
    quoted = f"b = {HOSTILE[0]}"[:MAX_QUOTED]
    assert difference.source_changes == f"source lines changed in main (/x/train.py:2: - {quoted}, + b = 2)"
    assert etloom.diff(job, job).source_changes is None


def test_the_collector_keeps_lines_of_the_job_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import torch\ndef main():\n    pass\n")
    library = tmp_path / "site-packages" / "lib.py"
    library.parent.mkdir()
    library.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    frames = [FRAME, f"{library}(1): x", "absent.py(3): y", "<built-in function len>", "train.py(99): z"]
    kept = read_source_lines(frames)
    assert kept == {FRAME: {"file": str(tmp_path / "train.py"), "lines": ["def main():", "    pass"]}}
    many = [f"train.py({1 + i % 3}): f{i}" for i in range(2 * MAX_FRAMES)]
    assert len(read_source_lines(many)) == MAX_FRAMES
