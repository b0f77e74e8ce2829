"""The page of two runs in a headless browser: it sorts, filters, turns dark, and neither runs nor fetches anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Job
from support.real_runs import open_run
from support.reports import hostile_job

pytestmark = pytest.mark.browser


def opened(browser: Any, before: Job, after: Job, path: Path, said: list[str], **context: Any) -> Any:
    etloom.report(etloom.diff(before, after), path)
    page = browser.new_context(**context).new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None
    )
    page.goto(path.as_uri())
    return page


@pytest.mark.slow
def test_it_sorts_filters_and_turns_dark(browser: Any, data: Path, tmp_path: Path) -> None:
    jobs = [open_run(data / "tracelens" / f"{name}_qwen.json.gz") for name in ("mi300", "h100")]
    said: list[str] = []
    page = opened(browser, *jobs, tmp_path / "diff.html", said, color_scheme="light")
    first = "() => document.querySelector('#operator tbody tr:not([hidden]) td').textContent"
    assert page.evaluate(first) == "aten::mul"
    page.get_by_role("button", name="operator", exact=True).click()
    assert page.evaluate(first) == "aten::_flash_attention_forward"
    page.get_by_label("Filter the rows of Operators").fill("aten::mm")
    assert page.evaluate(first) == "aten::mm"
    page.locator("#theme").click()
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    widths = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    long = page.locator("#kernel td.long[title]").first
    closed, short, whole = long.bounding_box()["height"], long.inner_text(), long.get_attribute("title")
    assert len(short) < len(whole)
    page.get_by_label("Filter the rows of Kernels").fill(whole)
    assert page.locator("#kernel tbody tr:not([hidden])").count() == 1
    long.click()
    assert long.bounding_box()["height"] > closed
    assert long.inner_text() == whole
    long.click()
    assert (long.inner_text(), long.get_attribute("title")) == (short, whole)
    assert said == []


@pytest.mark.slow
def test_on_a_phone_nothing_sticks_out(browser: Any, own: Path, tmp_path: Path) -> None:
    job = open_run(own / "ddp_2")
    said: list[str] = []
    phone = {"width": 390, "height": 800}
    page = opened(browser, job, job, tmp_path / "diff.html", said, viewport=phone)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.locator("svg .step").count() == 4
    assert said == []


@pytest.mark.slow
def test_a_hostile_trace_runs_nothing(browser: Any, own: Path, tmp_path: Path) -> None:
    said: list[str] = []
    opened(browser, hostile_job(), open_run(own / "ddp_2"), tmp_path / "diff.html", said)
    assert said == []
