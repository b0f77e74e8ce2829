"""The page of two runs in a headless browser: it sorts, filters, turns dark, and neither runs nor fetches anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Job
from support.browser_pages import settle
from support.real_runs import open_run
from support.reports import hostile_job
from support.small_traces import write_stepped_run

pytestmark = pytest.mark.browser

RUNS = {"old": [1000.0, 1004, 1002], "new": [1100.0, 1104.4, 1102.2]}


def opened(
    browser: Any, before: Job, *after: Job, path: Path, said: list[str], state: str = "", **context: Any
) -> Any:
    etloom.report([etloom.diff(before, job) for job in after], path)
    page = browser.new_context(**context).new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None
    )
    page.goto(path.as_uri() + state)
    page.wait_for_selector("#tracks[data-whole]", timeout=60_000)
    return page


SHOWN = """() => etloom.timeline.ranks.map((rank) => ({
  rank: rank.title, starts: rank.steps.map(([, start]) => start), first: Math.min(...rank.start),
  colors: [...new Set(rank.color)].map((color) => etloom.colors[color]).sort(),
}))"""
TEXTS = """() => etloom.timeline.ranks.map(
  (rank) => [...rank.start.keys()].map((i) => etloom.formatCompared(rank, i)).filter(Boolean))"""
VIEW = "() => etloom.timeline.view.map(Math.round)"


@pytest.mark.slow
def test_the_steps_of_all_runs_begin_together(browser: Any, own: Path, data: Path, tmp_path: Path) -> None:
    jobs = [open_run(data / "cpu" / "ddp_2"), open_run(own / "ddp_2"), open_run(data / "cpu" / "ddp_2")]
    said: list[str] = []
    path = tmp_path / "diff.html"
    page = opened(browser, *jobs, path=path, said=said)
    assert [rank["rank"] for rank in page.evaluate(SHOWN)] == ["0 of A", "0 of B", "0 of C"]
    for step in range(page.locator("#compare-step option").count()):
        page.locator("#compare-step").select_option(index=step)
        starts = [rank["starts"] for rank in page.evaluate(SHOWN)]
        assert all(0 in times for times in starts), starts
    page.locator("#compare-rank").select_option("1")
    ranks = page.evaluate(SHOWN)
    assert [rank["rank"] for rank in ranks] == ["1 of A", "1 of B", "1 of C"]
    assert all(0 in rank["starts"] for rank in ranks)
    page.locator("#compare-step").select_option(index=page.locator("#compare-step option").count() - 1)
    settle(page)
    page.wait_for_timeout(300)
    ranks, state = page.evaluate(SHOWN), page.evaluate("() => location.hash")
    again = opened(browser, *jobs, path=path, said=said, state=state)
    assert again.evaluate(SHOWN) == ranks
    assert again.evaluate(VIEW) == page.evaluate(VIEW)
    assert page.locator(".waterfall").count() == 2
    assert said == []


@pytest.mark.slow
def test_operators_have_the_color_of_their_change(browser: Any, tmp_path: Path) -> None:
    jobs = [etloom.open(write_stepped_run(tmp_path / name, times)) for name, times in RUNS.items()]
    said: list[str] = []
    page = opened(browser, *jobs, path=tmp_path / "diff.html", said=said)
    assert "slower-1" in {color for rank in page.evaluate(SHOWN) for color in rank["colors"]}
    texts = page.evaluate(TEXTS)
    assert all(text.endswith("per step (+10.0 %)") for text in texts[1])
    assert texts[0] == texts[1] != []
    page.locator("#compare-colors").select_option("category")
    assert "slower-1" not in {color for rank in page.evaluate(SHOWN) for color in rank["colors"]}
    assert page.locator(".toolbar .legend li:visible").count() < 7
    page.evaluate("() => etloom.timeline.measure(0, 500000)")
    page.wait_for_selector("#statistics:not([hidden])")
    assert page.locator("#statistics-table tbody tr").count() > 0
    assert said == []


@pytest.mark.slow
def test_a_click_on_a_step_of_the_chart_shows_its_timelines(browser: Any, tmp_path: Path) -> None:
    jobs = [etloom.open(write_stepped_run(tmp_path / name, times)) for name, times in RUNS.items()]
    said: list[str] = []
    page = opened(browser, *jobs, path=tmp_path / "diff.html", said=said)
    page.locator('.hit[data-step="2"]').click()
    assert page.locator("#compare-step").input_value() == "2"
    assert [rank["starts"][2] for rank in page.evaluate(SHOWN)] == [0, 0]
    title = page.locator('.hit[data-step="2"] title').text_content()
    assert title == "step 2: before 1.002 ms, after 1.102 ms, change +10.0 %"
    assert said == []


@pytest.mark.slow
def test_it_sorts_filters_and_turns_dark(browser: Any, data: Path, tmp_path: Path) -> None:
    jobs = [open_run(data / "tracelens" / f"{name}_qwen.json.gz") for name in ("mi300", "h100")]
    said: list[str] = []
    page = opened(browser, *jobs, path=tmp_path / "diff.html", said=said, color_scheme="light")
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
    page = opened(browser, job, job, path=tmp_path / "diff.html", said=said, viewport=phone)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.locator(".step-chart circle").count() == 4
    assert said == []


@pytest.mark.slow
def test_a_hostile_trace_runs_nothing(browser: Any, own: Path, tmp_path: Path) -> None:
    said: list[str] = []
    opened(browser, hostile_job(), open_run(own / "ddp_2"), path=tmp_path / "diff.html", said=said)
    assert said == []
