"""Reports of mutated traces, whose texts are scripts and addresses: a small part of `make fuzz-reports`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fuzzing.cases import build_seeds
from fuzzing.reports import Reader, open_reports

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_no_text_of_a_trace_runs_or_loads(browser: Any, tmp_path: Path) -> None:
    build_seeds(tmp_path / "seeds")
    opened, _, faulty = open_reports(Reader(browser), tmp_path / "seeds", 0, range(3), time.monotonic() + 60)
    assert opened > 0
    assert faulty == 0


@pytest.mark.slow
def test_the_reader_sees_scripts_messages_and_requests(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><script>window.etloomBroken = 1; console.log('message')</script><img src='other.png'>"
    )
    faults = Reader(browser).open(page)
    assert [fault.partition(":")[0] for fault in sorted(faults)] == [
        "a script of the trace ran", "console", "console", "request",
    ]  # fmt: skip
