"""The memory section in a browser: a moment shows its holders, and the chart and the timeline show each other's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Job
from etloom.reports import html_report
from support import small_traces
from support.allocator_snapshots import T0, SnapshotWriter
from support.browser_pages import VIEW, Open, settle

pytestmark = pytest.mark.browser
MB = 1 << 20
PIXELS = """() => {
  const { width, height } = document.getElementById("memory-canvas");
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(document.getElementById("memory-canvas"), 0, 0);
  return [...new Set(new Uint32Array(copy.getImageData(0, 0, width, height).data.buffer))];
}"""
"""The distinct colors of the chart, read from a copy."""


def record(folder: Path, name: str = "rank0_memory_snapshot.pickle", start_us: int = T0) -> Path:
    """Write a snapshot of four requests and a free: 30 MiB by model.py:1 twice, 20 MiB and 2 MiB by model.py:2."""
    writer = SnapshotWriter()
    first = writer.alloc(30 * MB, "forward (model.py:1)")
    writer.alloc(30 * MB, "forward (model.py:1)")
    writer.alloc(20 * MB, "forward (model.py:2)")
    writer.free(first)
    writer.alloc(2 * MB, "forward (model.py:2)")
    path = folder / name
    for entry in writer.history:
        entry["time_us"] += start_us - T0
    path.write_bytes(pickle.dumps(writer.snapshot()))
    return path


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = small_traces.write_run(tmp_path_factory.mktemp("linked") / "run", (0,))
    first: Any = etloom.open(folder, use_cache=False)[0].events["ts"].min()
    record(folder, start_us=first // 1000 + 20)
    return etloom.open(folder, use_cache=False)


def rows(page: Any) -> list[list[str]]:
    return [row.split("\t") for row in page.locator("#memory-moment tbody").inner_text().splitlines() if row]


@pytest.mark.slow
def test_a_moment_shows_its_holders(show: Open, linked: Job) -> None:
    page = show(linked)
    page.wait_for_selector("#memory-canvas[data-ready]")
    title = page.locator("#memory-moment h3")
    assert "after 3 requests and frees, the peak" in title.inner_text()
    assert "83.89 MB in use" in page.locator("#memory-moment p").inner_text()
    assert rows(page) == [
        ["62.91 MB", "75.0 %", "2", "forward (model.py:1)"],
        ["20.97 MB", "25.0 %", "1", "forward (model.py:2)"],
    ]
    canvas = page.locator("#memory-canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] - 14, "y": 100})
    assert "after 5 requests and frees" in title.inner_text()
    assert rows(page)[1] == ["23.07 MB", "42.3 %", "2", "forward (model.py:2)"]
    page.keyboard.press("ArrowLeft")
    assert "after 4 requests and frees" in title.inner_text()
    page.locator("#memory-peak").click()
    assert "the peak" in title.inner_text()


@pytest.mark.slow
def test_the_chart_and_the_timeline_show_each_other(show: Open, linked: Job) -> None:
    page = show(linked)
    page.wait_for_selector("#memory-canvas[data-ready]")
    times = page.evaluate("() => etloom.memory.data.times")
    zero = page.evaluate("() => etloom.timeline.ranks[0].zero")
    first = int(linked[0].events["ts"].min())  # type: ignore[arg-type]
    requests = linked[0].allocator.filter(action="alloc")["ts"]
    assert times[0] == requests[0] - first - zero
    page.locator("#memory-show").click()
    settle(page)
    low, high = page.evaluate(VIEW)
    moment = page.evaluate("() => etloom.memory.data.times[etloom.memory.moment]")
    assert low < moment < high
    assert page.evaluate("() => etloom.timeline.measured") == [moment, moment]
    # The last event begins after the last request.
    page.evaluate(
        "() => { const [rank] = etloom.timeline.ranks; const at = [...rank.start];"
        "etloom.timeline.select(rank, at.indexOf(Math.max(...at))); }"
    )
    assert page.evaluate("() => etloom.memory.moment") == len(times) - 1


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(800, True), (1440, False)])
def test_a_snapshot_alone_has_a_page(browser: Any, tmp_path: Path, width: int, dark: bool) -> None:
    job = etloom.open(record(tmp_path, "snap.pickle"), use_cache=False)
    html_report.write_page(job, tmp_path / "r.html")
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((tmp_path / "r.html").as_uri())
    page.wait_for_selector("#memory-canvas[data-ready]")
    assert page.locator("nav a").all_inner_texts() == ["Memory", "Data quality"]
    assert rows(page)[0][3] == "forward (model.py:1)"
    assert page.locator("#memory-show").is_hidden()
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    assert len(page.evaluate(PIXELS)) > 5
    before = page.evaluate(PIXELS)
    page.locator("#theme").click()
    assert page.evaluate(PIXELS) != before
    assert said == []
    context.close()
