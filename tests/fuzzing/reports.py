"""Open reports of mutated traces in a browser: ``python -m fuzzing.reports --inputs 2000``; ``make fuzz-reports``.

Each input is a run of a seed of `fuzzing.seeds`, mutated, in which any text may be replaced by one that would run as a
script or load something if a page did not escape it. Its report is opened in one headless Chromium, from a file, as users
do. A fault is a script of the trace that runs, a message on the console (refusals of the content security policy are
such), an error of the page, a dialog, or a request for anything but the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import etloom
from etloom.core.errors import EtloomError
from fuzzing.cases import build_seeds
from fuzzing.documents import mutate_file
from fuzzing.seeds import SEEDS

FILES = {
    "kineto": "kineto_trace_*.json",
    "nsys": "*.sqlite",
    "execution-trace": "torch_et_*.json",
    "parquet": "saved",
}
"""Format -> the files of its seed that make the run; with two kinds of files, few mutated runs can be linked."""
_WEIGHTS = (5, 2, 1, 1)
TEXTS = (
    "<script>window.etloomBroken=1</script>",
    "</script><script>window.etloomBroken=1</script>",
    "</SCRIPT ><script type=module>window.etloomBroken=1</script>",
    "<img src=x onerror=window.etloomBroken=1>",
    "'\"><svg/onload=window.etloomBroken=1>",
    '" autofocus onfocus="window.etloomBroken=1',
    "</style><style>@import 'https://host.invalid/a.css'</style>",
    "</title><link rel=stylesheet href=https://host.invalid/b.css>",
    "<iframe srcdoc='<script>parent.etloomBroken=1</script>'>",
    "<meta http-equiv=refresh content='0;url=https://host.invalid/'>",
    "<a href=javascript:window.etloomBroken=1>text</a>",
    "javascript:window.etloomBroken=1",
    "<!--<script>",
    "--!><script>window.etloomBroken=1</script>",
    "{{csp}}{{script}}{{title}}",
    "${window.etloomBroken=1}",
    "\\u003cscript\\u003ewindow.etloomBroken=1\\u003c/script\\u003e",
    "&lt;script&gt;window.etloomBroken=1&lt;/script&gt;",
    "\u2028window.etloomBroken=1\u2029",
    "__proto__",
    "constructor",
    "]]><script>window.etloomBroken=1</script>",
    "\x00\x1b[31m\ufeff\u202e",
    "url(https://host.invalid/c.png)",
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
_READY = "() => document.querySelector('#tracks')?.dataset.ready !== undefined || !document.querySelector('#tracks')"

_SELECT_ALL = """() => {
  const timeline = window.etloom?.timeline;
  if (!timeline) return;
  timeline.measure(...timeline.extent);
  const rows = document.getElementById("statistics-by");
  for (const { value } of rows.options) {
    rows.value = value;
    for (const act of timeline.atRest) act();
  }
}"""
"""Shows all statistics of the whole time."""


def make_report(rng: random.Random, seeds: Path, folder: Path) -> Path | None:
    """Write the report of a mutated run; None if the run is refused."""
    run = folder / "run"
    (name,) = rng.choices(list(FILES), _WEIGHTS)
    run.mkdir()
    for path in sorted((seeds / name).glob(FILES[name])):
        shutil.copytree(path, run / path.name) if path.is_dir() else shutil.copy(path, run)
    for file in sorted(run.glob("*.json")):
        _replace_texts(rng, file)
    for file in sorted(run.glob("*.sqlite")):
        _replace_strings(rng, file)
    if rng.random() < 0.5:
        mutate_file(rng, run / rng.choice(SEEDS[name].files))
    report = folder / "report.html"
    try:
        etloom.report(run, report)
    except EtloomError:
        return None
    return report


def _replace_texts(rng: random.Random, file: Path) -> None:
    """Replace some texts of a JSON file, and names of members, by `TEXTS`."""
    share = rng.choice((0.02, 0.1, 0.3))

    def replace(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {
                rng.choice(TEXTS) if key == "args" and rng.random() < share / 10 else name: replace(
                    inner, name
                )
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [replace(inner, key) for inner in value]
        if not isinstance(value, str) or key in ("ph", "schema", "type") or rng.random() > share:
            return value
        # A category or a kind of operator stays what it is, so that the event is drawn.
        return value if key == "cat" and rng.random() < 0.9 else value * rng.randrange(2) + rng.choice(TEXTS)

    try:
        document = json.loads(file.read_bytes())
    except ValueError:
        return
    file.write_text(json.dumps(replace(document)))


def _replace_strings(rng: random.Random, file: Path) -> None:
    """Replace some names of a profile of Nsight Systems by `TEXTS`."""
    with closing(sqlite3.connect(file)) as connection:
        for text in rng.sample(TEXTS, 6):
            where = (rng.randint(2, 9), rng.randint(0, 9))
            connection.execute(
                "update StringIds set value = ? where id % ? = ?", (text.replace("\0", ""), *where)
            )
        connection.commit()


class Reader:
    """A page that opens reports one after the other and notes what happens."""

    def __init__(self, browser: Any) -> None:
        self.events: list[str] = []
        self._page = browser.new_page()
        self._page.on("console", lambda message: self.events.append(f"console: {message.text[:200]}"))
        self._page.on("pageerror", lambda error: self.events.append(f"error: {str(error)[:200]}"))
        self._page.on("dialog", self._dismiss)
        self._page.on("popup", lambda page: self.events.append(f"popup: {page.url[:200]}"))
        self._page.on("request", lambda request: self.events.append(f"request: {request.url[:200]}"))

    def _dismiss(self, dialog: Any) -> None:
        self.events.append(f"dialog: {dialog.message[:200]}")
        dialog.dismiss()

    def open(self, report: Path) -> list[str]:
        """Open a report, click through it, select all of its timeline, and return its faults."""
        self.events.clear()
        self._page.goto(report.as_uri())
        self._page.wait_for_function(_READY, timeout=60_000)
        for button in self._page.query_selector_all("button:visible")[:8]:
            button.evaluate("(button) => button.click()")
        self._page.evaluate(_SELECT_ALL)
        if self._page.evaluate("() => 'etloomBroken' in window"):
            self.events.append("a script of the trace ran")
        allowed = f"request: {report.as_uri()[:200]}"
        return [event for event in self.events if event != allowed]


@contextmanager
def launch() -> Iterator[Any]:
    """Start the browser."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        raise SystemExit(f"no browser: none of {', '.join(_BROWSERS)} is installed")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


def open_reports(
    reader: Reader, seeds: Path, seed: int, numbers: range, deadline: float
) -> tuple[int, int, int]:
    """Open the reports of some inputs; return how many were opened, refused and faulty. Prints the faults.

    Args:
        numbers: As many reports are opened; inputs that are refused do not count.
    """
    opened = refused = faulty = 0
    for number in itertools.count(numbers.start):
        if opened == len(numbers) or time.monotonic() > deadline:
            break
        if opened and opened % 100 == 0:
            print(f"{opened:,} reports", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="etloom-fuzz-") as folder:
            report = make_report(random.Random(f"{seed}:{number}"), seeds, Path(folder))
            faults = reader.open(report) if report else []
        opened, refused, faulty = (
            opened + (report is not None),
            refused + (report is None),
            faulty + bool(faults),
        )
        for fault in faults[:3]:
            print(f"--seed {seed} --first {number} --inputs 1: {fault}", flush=True)
    return opened, refused, faulty


def main() -> int:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etloom-fuzz-") as scratch, launch() as browser:
        seeds = Path(scratch, "seeds")
        build_seeds(seeds)
        deadline = time.monotonic() + args.seconds
        numbers = range(args.first, args.first + args.inputs)
        opened, refused, faulty = open_reports(Reader(browser), seeds, args.seed, numbers, deadline)
    print(f"{opened} reports opened, {refused} runs refused, {faulty} with a fault")
    return faulty > 0


if __name__ == "__main__":
    sys.exit(main())
