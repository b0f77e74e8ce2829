"""The statistics of a time that is selected on the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl
import pytest

from etloom.core import categories
from etloom.core.trace import Job
from support.browser_pages import Open, settle
from support.reports import HOSTILE, hostile_job

pytestmark = pytest.mark.browser

ROWS = """() => [...document.querySelectorAll("#statistics-table tbody tr")].map(({ cells }) =>
  [...cells].map((cell) => (cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value))))"""


def select_time(page: Any, left: float, right: float) -> tuple[int, int]:
    """Select a part of the timeline's width with the mouse; return the selected time."""
    box = page.locator("canvas").bounding_box()
    y = box["y"] + 200
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + box["width"] * left, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * right, y, steps=5)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.locator("#statistics").wait_for(state="visible")
    start, end = page.evaluate("() => etloom.timeline.measured")
    return start, end


def sum_events(job: Job, ranks: Iterable[int], start: int, end: int) -> dict[str, tuple[int, int]]:
    """Return {name: (count, sum of the parts of durations inside)} of the events in a time of the page."""
    zero = min(trace.events.select(categories.recorded_extent()[0]).item() for trace in job.values())
    events = pl.concat(
        job[rank].events.select(
            pl.col("name").cast(pl.String),
            start=pl.col("ts") - zero,
            end=pl.col("ts") + pl.col("dur").fill_null(0) - zero,
        )
        for rank in ranks
    )
    inside = events.filter(pl.col("start") < end, pl.col("end") > start)
    part = pl.min_horizontal("end", pl.lit(end)) - pl.max_horizontal("start", pl.lit(start))
    return {
        name: (count, time) for name, count, time in inside.group_by("name").agg(pl.len(), part.sum()).rows()
    }


@pytest.mark.slow
def test_the_statistics_equal_the_events(show: Open, multirank: Job) -> None:
    page = show(multirank)
    start, end = select_time(page, 0.4, 0.6)
    expected = sum_events(multirank, multirank, start, end)
    rows = page.evaluate(ROWS)
    assert 10 < len(rows) == min(500, len(expected))
    assert [row[3] for row in rows] == sorted((time for _, time in expected.values()), reverse=True)[:500]
    for name, _, count, total, mean, share in rows:
        assert (count, total) == expected[name]
        assert (mean, share) == (total / count, total / (end - start))
    assert "only their part inside counts" in page.locator("#statistics-note").inner_text()
    first = page.locator("#statistics-table tbody tr").first.locator("td").nth(3).inner_text()
    assert first == f"{rows[0][3] // 1000:,}.{rows[0][3] % 1000:03d}"


@pytest.mark.slow
def test_the_statistics_of_each_track_and_of_unfolded_rows(show: Open, multirank: Job) -> None:
    page = show(multirank)
    start, end = select_time(page, 0.3, 0.7)
    page.evaluate("() => etloom.timeline.fold(etloom.timeline.ranks[1])")
    page.locator("#statistics-by").select_option("track")
    page.wait_for_function(f"() => !({ROWS})().some((row) => row[1].startsWith('rank 1'))")
    sums: dict[str, tuple[int, int]] = {}
    for name, track, count, total, *_ in page.evaluate(ROWS):
        assert track.startswith("rank 0, ")
        sums[name] = (sums.get(name, (0, 0))[0] + count, sums.get(name, (0, 0))[1] + total)
    assert sums == sum_events(multirank, [0], start, end)
    page.locator("#statistics input").fill("stream 7")
    visible = page.locator("#statistics-table tbody tr:visible").all_inner_texts()
    assert visible and all("stream 7" in text for text in visible)
    page.locator("canvas").focus()
    page.keyboard.press("Escape")
    page.locator("#statistics").wait_for(state="hidden")


@pytest.mark.slow
def test_hostile_names_are_text_in_the_statistics(show: Open) -> None:
    page = show(hostile_job())
    page.evaluate("() => etloom.timeline.measure(...etloom.timeline.extent)")
    page.locator("#statistics").wait_for(state="visible")
    settle(page)
    assert {row[0] for row in page.evaluate(ROWS)} == set(HOSTILE)
