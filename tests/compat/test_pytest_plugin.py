"""The pytest plug-in in projects of its own."""

from __future__ import annotations

import sys

import pytest

from etloom.cli.demo import RECORDING

pytest_plugins = ["pytester"]
COPY = f"""
import shutil
import pytest

def record(folder):
    shutil.copytree({str(RECORDING)!r}, folder)
"""


def run_project(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    pytester.makepyfile(COPY + test)
    return pytester.runpytest_subprocess(
        "-p", "no:etloom", "-p", "etloom.compat.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers"
    )


@pytest.mark.slow
def test_limits_are_checked_after_the_test(pytester: pytest.Pytester) -> None:
    outcome = run_project(
        pytester,
        """
@pytest.mark.etloom(max_step_ms=1000, min_overlap=0.01, allow=(
    "stragglers", "small-collectives", "data-loading", "exposed-communication", "oversubscription"))
def test_within(etloom_run):
    record(etloom_run)

@pytest.mark.etloom(max_step_ms=50)
def test_slow(etloom_run):
    record(etloom_run)

@pytest.mark.etloom(min_overlap=0.9)
def test_exposed(etloom_run):
    record(etloom_run)

@pytest.mark.etloom(allow=("stragglers",))
def test_findings(etloom_run):
    record(etloom_run)

@pytest.mark.etloom(max_step_ms=50)
def test_without_a_recording(etloom_run):
    pass

@pytest.mark.etloom(max_step_ms=50)
def test_that_fails_itself(etloom_run):
    record(etloom_run)
    assert False, "its own"

def test_without_limits(etloom_run):
    assert not etloom_run.exists()
""",
    )
    outcome.assert_outcomes(passed=2, failed=5)
    outcome.stdout.fnmatch_lines_random(
        [
            "*the median step takes 231 ms, above max_step_ms=50; largest finding: stragglers, rank 1 delays*",
            "*12% of communication overlaps computation, below min_overlap=0.9*",
            "*findings that are not allowed: small-collectives, data-loading*",
            "*run: no such file or folder*",
            "*AssertionError: its own*",
        ]
    )
    assert "Traceback" not in outcome.stdout.str()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            "@pytest.mark.etloom(max_step_ms=1)\ndef test_it():\n    pass",
            "the marker etloom needs the fixture etloom_run",
        ),
        (
            "@pytest.mark.etloom(min_overlap=30)\ndef test_it(etloom_run):\n    record(etloom_run)",
            "min_overlap: expected a share from 0 to 1, got 30",
        ),
        (
            "@pytest.mark.etloom(50)\ndef test_it(etloom_run):\n    record(etloom_run)",
            "the marker etloom: name the limit of 50, as in max_step_ms=50",
        ),
    ],
)
def test_wrong_limits_are_refused(pytester: pytest.Pytester, test: str, message: str) -> None:
    outcome = run_project(pytester, test)
    assert outcome.ret != 0
    assert message in outcome.stdout.str() + outcome.stderr.str()


@pytest.mark.slow
def test_it_imports_only_pytest(pytester: pytest.Pytester) -> None:
    code = "import etloom.compat.pytest_plugin, sys; print({'numpy', 'polars', 'torch'} & set(sys.modules))"
    assert pytester.run(sys.executable, "-c", code).outlines == ["set()"]
