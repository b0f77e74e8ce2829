"""Fixtures of all tests: `data` is the folder of shared real traces, `own` the traces recorded for this project."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from etloom import cli
from etloom.core import names
from support.examples import FULL_EXAMPLES, QUICK_EXAMPLES
from support.paths import DATA, HAS_DATA, NO_DATA, ROOT

# Full collections look at all modules and trees again and again: an eighth of the tests' time.
gc.set_threshold(100_000, 50, 100)

# No deadline: a busy machine is not a failure, speed is measured by the benchmarks.
settings.register_profile("full", deadline=None, max_examples=FULL_EXAMPLES)
settings.register_profile(
    "quick", deadline=None, max_examples=QUICK_EXAMPLES
)  # see `make check` and `make test`
settings.load_profile("full")


@pytest.fixture(scope="session", autouse=True)
def isolated_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache of this test run: entries in the user's cache may have been written by other code."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETLOOM_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True)
def forgotten_names() -> Iterator[None]:
    """Remove the files of names that a command added with --names: answers depend on them."""
    yield
    if names.list_user_files():
        names._user_files.clear()
        names.list_names.cache_clear()


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of shared real traces (ETLOOM_DATA); the test is skipped where it is absent or empty."""
    if not HAS_DATA:
        pytest.skip(NO_DATA)
    return DATA


@pytest.fixture(scope="session")
def golden(data: Path) -> Path:
    """The folder of figures that were checked with other tools, next to the data."""
    folder = data.parent / "golden"
    if not folder.is_dir():
        pytest.skip(f"no golden figures at {folder}")
    return folder


@pytest.fixture(scope="session")
def own() -> Path:
    """Small traces that were recorded for this project."""
    return ROOT / "tests" / "data"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that were skipped because the shared traces are absent, by file."""
    names: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(NO_DATA):
            file, _, test = report.nodeid.partition("::")
            names.setdefault(file, []).append(test)
    if names:
        count = sum(map(len, names.values()))
        terminalreporter.section(
            f"{count} tests need the shared traces of ETLOOM_DATA ({DATA}) and were skipped"
        )
        for file, tests in sorted(names.items()):
            terminalreporter.line(f"{file}: {', '.join(sorted(tests))}")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; returns (exit status, stdout, stderr)."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_command
