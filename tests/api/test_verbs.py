"""Every verb takes a path, refuses unknown keywords by name, and has examples in its docstring that run."""

from __future__ import annotations

import doctest
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom import api
from etloom.core.errors import EtloomError, UnknownName

EXAMPLE_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def folder(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that contains a run of two ranks in run/."""
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for file in (own / "ddp_2").glob("*_*_[01].json.gz"):
        (tmp_path / "run" / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("verb", api.__all__)
def test_the_examples_of_a_verb_run(verb: str, folder: Path) -> None:
    function = getattr(api, verb)
    tests = doctest.DocTestFinder(recurse=False).find(function, verb, globs={"etloom": etloom})
    assert tests[0].examples, f"etloom.{verb} has no example"
    runner = doctest.DocTestRunner(optionflags=EXAMPLE_FLAGS)
    report: list[str] = []
    assert runner.run(tests[0], out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("verb", api.__all__)
def test_a_keyword_that_a_verb_lacks_is_an_error_of_etloom(verb: str, folder: Path) -> None:
    positional: dict[str, tuple[Any, ...]] = {
        "analyze": ("run", "top-ops"),
        "convert": ("run/kineto_trace_0.json", "x.parquet"),
        "diff": ("run", "run"),
        "check": ("run", "run"),
        "export": ("run", "x.json"),
        "link": ("run/kineto_trace_0.json",),
        "plot": ("run", "breakdown"),
        "query": ("run", "select 1"),
        "read": ("run/kineto_trace_0.json",),
        "report": ("run", "x.html"),
        "collect": (["true"], "out"),
        "lint": ("run",),
    }
    with pytest.raises(EtloomError, match="'no_such_option'"):
        getattr(api, verb)(*positional.get(verb, ("run",)), no_such_option=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        lambda run: etloom.analyze(run, "steps").rows(),
        lambda run: etloom.info(run)["tables"],
        lambda run: etloom.query(run, "select count(*) n from events").rows(),
        lambda run: etloom.select(run, rank=1).ranks,
        lambda run: etloom.simulate(run, "comm x0").table.rows(),
        lambda run: etloom.diff(run, run).verdict,
        lambda run: etloom.check(run, run).verdict,
        lambda run: etloom.graph(run).graph.time.tolist(),
        lambda run: etloom.replay(run, dry_run=True).rows(),
    ],
)
def test_a_verb_opens_a_path(verb: Callable[[Any], Any], folder: Path) -> None:
    assert verb("run") == verb(Path("run")) == verb(etloom.open("run"))


@pytest.mark.slow
def test_the_nearest_keyword_is_suggested(folder: Path) -> None:
    with pytest.raises(EtloomError, match=r"etloom.open has no option 'job'; did you mean 'jobs'\?"):
        etloom.open("run", job=1)  # type: ignore[call-arg]
    with pytest.raises(EtloomError, match=r"etloom.replay has no option 'repeat'; did you mean 'repeats'\?"):
        etloom.replay("run", repeat=1)
    with pytest.raises(UnknownName, match="device 'tpu'"):
        etloom.replay("run", "compute", device="tpu")
    with pytest.raises(EtloomError, match="no step 9"):
        etloom.replay("run", "compute", step=9)
    with pytest.raises(UnknownName, match="expected one of comms, compute, full"):
        etloom.replay("run", "communication")
