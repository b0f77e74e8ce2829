"""The browser that pages are opened in, and the page of a report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etloom.core.trace import Job
from etloom.reports import html_report
from support.browser_pages import Open, settle
from support.real_runs import open_run

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the report of a job; of the same job with the same options once."""
    folder = tmp_path_factory.mktemp("pages")
    written: dict[tuple[int, str], tuple[Job, Path]] = {}  # with the job, so that no other has its id

    def write(job: Job, **options: Any) -> Path:
        key = id(job), repr(sorted(options.items()))
        if key not in written:
            path = folder / f"report_{len(written)}.html"
            html_report.write_page(job, path, **options)
            written[key] = job, path
        return written[key][1]

    return write


@pytest.fixture
def show(browser: Any, pages: Callable[..., Path]) -> Iterator[Open]:
    """Opens the report of a job; afterwards the page must have been silent and have asked for nothing."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def show(
        job: Job, width: int = 1280, height: int = 900, dark: bool = False, state: str = "", **options: Any
    ) -> Any:
        path = pages(job, **options)
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri() + state)
        page.wait_for_selector("#tracks[data-ready]", timeout=60_000)
        page.evaluate("() => document.getElementById('timeline')?.scrollIntoView({ behavior: 'instant' })")
        settle(page)
        return page

    yield show
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("file://")] == []
    assert len(asked) == len(contexts)


@pytest.fixture(scope="module")
def ddp(data: Path) -> Job:
    return open_run(data / "cpu" / "ddp_2")


@pytest.fixture(scope="module")
def multirank(data: Path) -> Job:
    return open_run(data / "hta_multirank")
