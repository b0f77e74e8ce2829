"""The pytest plug-in: limits on the recording that a test makes.

    @pytest.mark.etloom(max_step_ms=50, min_overlap=0.3)
    def test_training_is_fast(etloom_run):
        with etloom.record(etloom_run) as recording:
            for batch in batches:
                train(batch)
                recording.step()

Every pytest session of an environment with etloom imports this module, so it imports nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from etloom.core.trace import Job

_MIN_GAIN_PCT = 5.0
"""Gain of the job from which a finding needs the permission of ``allow``."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "etloom(max_step_ms=None, min_overlap=None, allow=None): limits on the run that the test records into the "
        "fixture etloom_run: the median step of the slowest rank, the least share (0 to 1) of communication that "
        "overlaps computation, and the only patterns of findings that may cost 5 % or more",
    )


@pytest.fixture
def etloom_run(tmp_path: Path) -> Path:
    """A new folder to record into; the limits of the marker ``etloom`` are checked after the test."""
    return tmp_path / "run"


@pytest.hookimpl(trylast=True)  # after the test itself; wrappers differ between versions of pytest
def pytest_runtest_call(item: pytest.Item) -> None:
    """Check the limits of a test that passed."""
    marker = item.get_closest_marker("etloom")
    if marker is not None and (limits := _read_limits(*marker.args, **marker.kwargs)):
        _check_limits(getattr(item, "funcargs")["etloom_run"], **limits)  # noqa: B009


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a marker whose limits are invalid, or would never be checked because the test lacks the fixture."""
    for item in items:
        marker = item.get_closest_marker("etloom")
        if marker is None:
            continue
        if "etloom_run" not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid}: the marker etloom needs the fixture etloom_run")
        _read_limits(*marker.args, **marker.kwargs)


def _read_limits(
    *unnamed: object,
    max_step_ms: float | None = None,
    min_overlap: float | None = None,
    allow: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the limits that are set. Raises pytest.UsageError for one without a name, or no share of overlap."""
    if unnamed:
        raise pytest.UsageError(f"the marker etloom: name the limit of {unnamed[0]!r}, as in max_step_ms=50")
    if min_overlap is not None and not 0 <= min_overlap <= 1:
        raise pytest.UsageError(f"min_overlap: expected a share from 0 to 1, got {min_overlap!r}")
    limits = {"max_step_ms": max_step_ms, "min_overlap": min_overlap, "allow": allow}
    return {name: value for name, value in limits.items() if value is not None}


def _check_limits(
    folder: Path,
    max_step_ms: float | None = None,
    min_overlap: float | None = None,
    allow: Sequence[str] | None = None,
) -> None:
    """Fail the test if the recording in the folder exceeds a limit, or cannot state the value."""
    import etloom

    try:
        job = etloom.open(folder)
        problems = [*_check_steps(job, max_step_ms), *_check_overlap(job, min_overlap)]
        findings = etloom.analyze(job, "findings", min_pct=_MIN_GAIN_PCT)
    except etloom.EtloomError as error:
        pytest.fail(f"etloom: {error}", pytrace=False)
    if allow is not None:
        refused = [name for name in dict.fromkeys(findings["pattern"]) if name not in allow]
        problems += [f"findings that are not allowed: {', '.join(refused)}"] * bool(refused)
    if problems:
        cause = (
            f"; largest finding: {findings['pattern'][0]}, {findings['title'][0]}" if findings.height else ""
        )
        pytest.fail(f"etloom: {'; '.join(problems)}{cause} (etloom report {folder})", pytrace=False)


def _check_steps(job: Job, limit_ms: float | None) -> Iterator[str]:
    import etloom

    if limit_ms is None:
        return
    steps = etloom.analyze(job, "steps")
    medians = [median(rows["dur_ns"]) / 1e6 for _, rows in steps.drop_nulls("dur_ns").group_by("rank")]
    if not medians:
        yield "max_step_ms: the recording has no steps with times"
    elif max(medians) > limit_ms:
        yield f"the median step takes {max(medians):,.4g} ms, above max_step_ms={limit_ms:g}"


def _check_overlap(job: Job, least: float | None) -> Iterator[str]:
    import etloom

    if least is None:
        return
    table = etloom.analyze(job, "comm-overlap")
    total = table.filter(table["step"].is_null())
    communication, overlapped = sum(total["communication_ns"]), sum(total["overlapped_ns"])
    if not communication:
        yield "min_overlap: the recording has no communication"
    elif (share := overlapped / communication) < least:
        yield f"{share:.0%} of communication overlaps computation, below min_overlap={least:g}"
