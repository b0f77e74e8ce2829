"""The browser that pages are opened in, and the page of a report."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from etloom.cli.run_arguments import RunOptions
from etloom.cli.ui import PageServer, RunPages
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


class Tab:
    """Opens pages in the browser; they must be silent, and ask for nothing but what begins with an allowed address."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self._allowed: list[str] = []
        self.said: list[str] = []
        self.asked: list[str] = []

    def open(
        self, url: str, *, allowed: str, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Any:
        scheme = "dark" if dark else "light"
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self._contexts.append(context)
        self._allowed.append(allowed)
        page = context.new_page()
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)
        page.wait_for_selector("#tracks[data-ready]", timeout=60_000)
        page.evaluate("() => document.getElementById('timeline')?.scrollIntoView({ behavior: 'instant' })")
        settle(page)
        return page

    def close(self) -> None:
        """Close the pages, and check what they said and asked for."""
        for context in self._contexts:
            context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(tuple(self._allowed))] == []


@pytest.fixture
def show(browser: Any, pages: Callable[..., Path]) -> Iterator[Open]:
    """Opens the report of a job; afterwards the page must have been silent and have asked for nothing."""
    tab = Tab(browser)
    opened = []

    def show(
        job: Job, width: int = 1280, height: int = 900, dark: bool = False, state: str = "", **options: Any
    ) -> Any:
        url = pages(job, **options).as_uri()
        opened.append(url)
        return tab.open(url + state, allowed=url, width=width, height=height, dark=dark)

    yield show
    tab.close()
    assert len(tab.asked) == len(opened)


@pytest.fixture
def serve(browser: Any) -> Iterator[Open]:
    """Opens the page of the run at a path from a server; it must have been silent and have asked only the server."""
    tab, servers = Tab(browser), []

    def serve(path: Path, state: str = "", is_summarized: bool = True, **options: Any) -> Any:
        server = PageServer(0, RunPages(path, RunOptions(cache=False)))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while is_summarized and json.load(urlopen(f"{server.url}ready")) is not True:
            time.sleep(0.05)
        page = tab.open(server.url + state, allowed=server.url, **options)
        page.wait_for_selector("#tracks[data-whole]")
        return page

    yield serve
    tab.close()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def ddp(data: Path) -> Job:
    return open_run(data / "cpu" / "ddp_2")


@pytest.fixture(scope="module")
def multirank(data: Path) -> Job:
    return open_run(data / "hta_multirank")
