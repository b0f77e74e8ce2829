"""The page in the output of a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Job
from support.reports import hostile_job

pytestmark = pytest.mark.browser


IN_SIGHT = """(node) => new Promise((done) => {
  new IntersectionObserver(([{ isIntersecting }]) => isIntersecting && done(true)).observe(node);
})"""


@pytest.mark.slow
def test_a_notebook_shows_the_page_in_a_frame(browser: Any, ddp: Job, tmp_path: Path) -> None:
    shown = etloom.show(ddp, height=700)
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>notebook</title><div>{shown._repr_html_()}</div>")
    said: list[str] = []
    asked: list[str] = []
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#tracks[data-whole]").wait_for()
    assert page.locator("iframe").bounding_box()["height"] == 700
    frame.locator("#search").fill("gloo:all_reduce")
    assert frame.locator("#matches").inner_text().startswith("4 events")
    frame.locator("#search").press("Enter")
    assert frame.locator("#details dd").first.inner_text() == "gloo:all_reduce"
    frame.get_by_role("link", name="Steps").click()
    heading = frame.locator("#steps-section h2")
    assert heading.evaluate(IN_SIGHT)
    assert frame.locator("h1").inner_text() == "ddp_2"
    assert not frame.locator("#link").is_visible()
    page.close()
    assert said == []
    assert {url.partition("#")[0] for url in asked} <= {notebook.as_uri(), "about:srcdoc"}


@pytest.mark.slow
def test_the_frame_of_a_hostile_run_cannot_reach_the_notebook(browser: Any, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>notebook</title>{etloom.show(hostile_job())._repr_html_()}")
    page = browser.new_page()
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    page.goto(notebook.as_uri())
    page.frame_locator("iframe").locator("#tracks[data-whole]").wait_for()
    (inner,) = page.main_frame.child_frames
    reached = "() => { try { return Boolean(parent.document.title); } catch { return false; } }"
    assert inner.evaluate(reached) is False
    page.close()
