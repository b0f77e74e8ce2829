"""The page of `etloom ui` on one large rank, and that of `etloom report`: opening, first paint, zooms, frames, size.

    python benchmarks/bench_page.py --millions 10
    python benchmarks/bench_page.py --millions 1 --run STORE/run=NAME    # also a run of many ranks

A zoom ends when all events of the new view are on the screen. Zooms are measured while the server computes the summary
of the run, too. Frames are those of the browser's own trace while the page moves through 67,000 events. Needs
playwright and chromium.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import polars as pl
from _measure import machine, table
from make import CACHE, make_copies
from playwright.sync_api import sync_playwright

import etloom
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace

CHROMIUM = "/usr/bin/chromium"
REPORT_EVENTS = 67_000
PAN_SECONDS = 4
LOADED = """() => document.querySelector('#tracks[data-whole]') && etloom.timeline.ranks.every((rank) => {
  const shown = etloom.timeline.listRows(rank, 0);
  return !shown.length || (!rank.pending && etloom.timeline.covers(rank, shown));
})"""
ZOOM = f"""([from, to]) => new Promise((done) => {{
  const began = performance.now(), loaded = {LOADED};
  etloom.timeline.setView(from, to);
  const look = () => requestAnimationFrame(() => {{
    if (loaded() && !etloom.timeline.pending) done(performance.now() - began);
    else look();
  }});
  look();
}})"""
PAN = f"""() => new Promise((done) => {{
  const {{ timeline }} = etloom, began = performance.now();
  const move = (now) => {{
    timeline.pan(Math.sin((now - began) / 500) / 60);
    if (now - began < {1000 * PAN_SECONDS}) requestAnimationFrame(move);
    else done();
  }};
  requestAnimationFrame(move);
}})"""


def make_rank(events: int) -> Path:
    """Return a linked run of one rank of at least so many events: a real rank, repeated; created if missing."""
    source = etloom.open(make_copies("kineto", 1), use_cache=False)
    trace = next(iter(source.values()))
    copies = -(-events // trace.rows("events"))
    path = CACHE / f"linked_x{copies}.parquet"
    if not path.exists():
        tables = {name: _repeat(name, trace, copies) for name in trace.table_names}
        etloom.export(Job({0: Trace(tables, trace.meta)}), path)
    return path


def _repeat(name: str, trace: Trace, copies: int) -> pl.DataFrame:
    """Return a table of a trace repeated: ids, references to events and times are those of the copy."""
    rows, events = trace.table(name), trace.events
    referring = [column.name for column in TABLES[name].columns if column.refers == "events"]
    if name != "events" and not referring:
        return rows
    numbered = [column for column in ("id",) if column in rows.columns]
    times = [column for column in ("ts",) if column in rows.columns]
    span = int(events["ts"].max() - events["ts"].min()) + 1_000_000  # type: ignore[operator]
    moved = (
        rows.with_columns(
            *(pl.col(column) + pl.lit(copy * events.height, pl.UInt32) for column in referring),
            *(pl.col(column) + pl.lit(copy * events.height, pl.UInt32) for column in numbered),
            *(pl.col(column) + copy * span for column in times),
        )
        for copy in range(copies)
    )
    return pl.concat(moved)


@contextmanager
def serve(run: Path) -> Iterator[tuple[str, float, subprocess.Popen[str]]]:
    """Start `etloom ui`; yield its address, the seconds until it was printed, and the process."""
    command = [sys.executable, "-m", "etloom", "ui", str(run), "--no-browser"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), time.perf_counter() - began, process
        finally:
            process.terminate()


def open_page(browser: Any, url: str, ready: str) -> tuple[Any, list[float]]:
    """Open a page; return it, and the ms until its first paint and until a condition holds."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(url)
    page.wait_for_function(f"() => window.etloom?.timeline && ({ready})()")
    elapsed = page.evaluate("() => performance.now()")
    paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    return page, [paint, elapsed]


def measure_zooms(page: Any) -> list[float]:
    """Zoom into five places of the timeline and move there; return the ms until each view was complete."""
    low, high = page.evaluate("() => etloom.timeline.home")
    times = []
    for place in (0.13, 0.31, 0.52, 0.77, 0.94):
        span = high - low
        middle = low + place * span
        while span > 20_000:
            times.append(page.evaluate(ZOOM, [middle - span / 2, middle + span / 2]))
            span /= 3
        times.append(page.evaluate(ZOOM, [middle + 3 * span, middle + 4 * span]))
    return times


def measure_questions(page: Any) -> dict[str, float]:
    """Return the ms of questions about all events: a search, statistics and calls of the whole time."""
    scripts = {
        "search": "await timeline.search('launch'), await timeline.counting",
        "next match": "await timeline.next(1)",
        "statistics by name": "await timeline.sumNames(timeline.extent, false)",
        "statistics by track": "await timeline.sumNames(timeline.extent, true)",
        "calls of the threads": "await timeline.buildCalls(timeline.extent)",
    }
    script = "async () => {{ const {{ timeline }} = etloom, t = performance.now(); {}; return performance.now() - t; }}"
    return {name: page.evaluate(script.format(code)) for name, code in scripts.items()}


def count_frames(browser: Any, page: Any) -> tuple[float, float]:
    """Return frames per second and the longest ms between two frames while the page moves, by the browser's trace."""
    browser.start_tracing(
        page=page, categories=["disabled-by-default-devtools.timeline.frame", "devtools.timeline.frame"]
    )
    page.evaluate(PAN)
    trace = json.loads(browser.stop_tracing())
    frames = sorted(event["ts"] for event in trace["traceEvents"] if event["name"] == "DrawFrame")
    gaps = [(after - before) / 1000 for before, after in itertools.pairwise(frames)]
    return 1000 * len(gaps) / sum(gaps), max(gaps)


def format_times(times: list[float]) -> list[str]:
    return [f"{len(times)}", f"{statistics.median(times):.0f}", f"{max(times):.0f}"]


def measure_server(browser: Any, run: Path) -> None:
    with serve(run) as (url, seconds, process):
        page, first = open_page(browser, url, LOADED)
        page.close()
        page, again = open_page(browser, url, LOADED)
        rows = [["zoom, while the summary is computed", *format_times(measure_zooms(page))]]
        began = time.perf_counter()
        while json.load(urlopen(f"{url}ready")) is not True:
            time.sleep(0.5)
        summarized = time.perf_counter() - began
        rows.append(["zoom", *format_times(measure_zooms(page))])
        sizes = page.evaluate(
            "() => performance.getEntriesByType('resource').map((part) => [part.duration, part.transferSize])"
        )
        rows.append(
            ["of it, answer of the server", *format_times([time for time, _ in sizes[-len(sizes) // 2 :]])]
        )
        questions = measure_questions(page)
        page.close()
        page, whole = open_page(browser, url, LOADED)
        size = len(urlopen(url).read())
        events = page.evaluate("() => etloom.timeline.ranks.reduce((sum, rank) => sum + rank.total, 0)")
        with Path(f"/proc/{process.pid}/status").open() as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e6
        page.close()
    table(
        f"{run.name}: {events:,} events, opened in {seconds:.1f} s, summary {summarized:.0f} s later, {peak:.1f} GB",
        ["page", "first paint ms", "all in view ms"],
        [
            ["the first one", *(f"{value:.0f}" for value in first)],
            ["before the summary", *(f"{value:.0f}" for value in again)],
            [f"whole, {size / 1e6:.2f} MB", *(f"{value:.0f}" for value in whole)],
        ],
    )
    table("times of zooms", ["", "number", "median ms", "worst ms"], rows)
    largest = max(size for _, size in sizes)
    print(f"\nlargest answer {largest / 1e6:.2f} MB")
    table(
        "questions about all events",
        ["", "ms"],
        [[name, f"{value:.0f}"] for name, value in questions.items()],
    )


def measure_report(browser: Any, folder: Path) -> None:
    """Measure the file of a run of at least `REPORT_EVENTS` events."""
    job = etloom.open(make_rank(REPORT_EVENTS))
    path = etloom.report(job, folder / "report.html")
    page, times = open_page(browser, path.as_uri(), "() => document.querySelector('#tracks[data-whole]')")
    events = page.evaluate("() => etloom.timeline.ranks[0].events")
    page.evaluate("() => document.getElementById('timeline').scrollIntoView({ behavior: 'instant' })")
    rows = []
    for share in (1, 0.1, 0.01):
        page.evaluate("(share) => { etloom.timeline.fit(); etloom.timeline.zoom(share); }", share)
        rate, longest = count_frames(browser, page)
        rows.append([f"{share:.0%} of the time in view", f"{rate:.1f}", f"{longest:.0f}"])
    table(
        f"report of {events:,} events: {path.stat().st_size / 1e6:.2f} MB, first paint {times[0]:.0f} ms, "
        f"interactive {times[1]:.0f} ms",
        ["moving", "frames per second", "longest ms"],
        rows,
    )
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=float, default=10, help="events of the rank (default: 10)")
    parser.add_argument("--run", type=Path, help="also measure the server of this run")
    options = parser.parse_args()
    machine()
    runs = [make_rank(round(options.millions * 1e6)), *([options.run] if options.run else [])]
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        measure_report(browser, Path(folder))
        for run in runs:
            measure_server(browser, run)
        browser.close()


if __name__ == "__main__":
    main()
