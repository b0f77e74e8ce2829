"""The examples in the docstrings of the API run as they are written, next to a folder ``run/``."""

from __future__ import annotations

import doctest
import shutil
from pathlib import Path

import pytest

import etloom

VERBS = [name for name in etloom.__all__ if ">>>" in (getattr(etloom, name).__doc__ or "")]


def test_most_verbs_have_an_example() -> None:
    assert len(VERBS) >= 15


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_runs(
    verb: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("run", "before", "after", "baseline", "main"):
        shutil.copytree(own / "ddp_2", tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in finder.find(getattr(etloom, verb), verb, globs={"etloom": etloom}):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
