"""The statistics of a time that is selected on the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from etloom.core import categories
from etloom.core.trace import Job
from support.browser_pages import Open, settle
from support.real_runs import open_run
from support.reports import HOSTILE, host_row, hostile_job, kernel_row, link_events

pytestmark = pytest.mark.browser

ROWS = """() => [...document.querySelectorAll("#statistics-table tbody tr")].map(({ cells }) =>
  [...cells].map((cell) => (cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value))))"""


def select_time(page: Any, left: float, right: float) -> tuple[int, int]:
    """Select a part of the timeline's width with the mouse; return the selected time."""
    box = page.locator("#tracks canvas").bounding_box()
    y = box["y"] + 200
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + box["width"] * left, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * right, y, steps=5)
    page.wait_for_timeout(300)
    assert page.locator("#statistics").is_hidden(), "nothing is summed while the mouse moves"
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


def find_longest(job: Job, start: int, end: int) -> dict[str, int]:
    """Return {name: the longest duration} of the events in a time of the page, with all of their time."""
    zero = min(trace.events.select(categories.recorded_extent()[0]).item() for trace in job.values())
    events = pl.concat(
        trace.events.select(pl.col("name").cast(pl.String), "ts", dur=pl.col("dur").fill_null(0))
        for trace in job.values()
    )
    inside = events.filter(pl.col("ts") - zero < end, pl.col("ts") + pl.col("dur") - zero > start)
    return dict(inside.group_by("name").agg(pl.col("dur").max()).iter_rows())


@pytest.mark.slow
def test_the_statistics_equal_the_events(show: Open, multirank: Job) -> None:
    page = show(multirank)
    start, end = select_time(page, 0.4, 0.6)
    expected = sum_events(multirank, multirank, start, end)
    longest_calls = find_longest(multirank, start, end)
    rows = page.evaluate(ROWS)
    assert 10 < len(rows) == min(500, len(expected))
    assert [row[3] for row in rows] == sorted((time for _, time in expected.values()), reverse=True)[:500]
    for name, _, count, total, mean, longest, share in rows:
        assert (count, total) == expected[name]
        assert (mean, share) == (total / count, total / (end - start))
        assert longest == longest_calls[name]
    assert "count with their part inside" in page.locator("#statistics-note").inner_text()
    first = page.locator("#statistics-table tbody tr").first.locator("td").nth(3).inner_text()
    assert first == f"{rows[0][3] // 1000:,}.{rows[0][3] % 1000:03d}"


@pytest.mark.slow
def test_the_copied_statement_answers_with_the_statistics(show: Open, multirank: Job) -> None:
    page = show(multirank)
    select_time(page, 0.4, 0.6)
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    page.locator("#statistics-sql").click()
    page.get_by_role("button", name="Copied").wait_for()
    answer = multirank.query(page.evaluate("() => window.copied"))
    expected = [(name, count, total) for name, _, count, total, *_ in page.evaluate(ROWS)]
    assert sorted(expected) == sorted(answer.rows())


def sum_launched(job: Job, start: int, end: int) -> dict[str, tuple[int, int]]:
    """Return {name: (count, sum of durations)} of the device events that were launched in a time of the page."""
    zero = min(trace.events.select(categories.recorded_extent()[0]).item() for trace in job.values())
    tables = []
    for trace in job.values():
        events = trace.events.select("id", "ts", "dur", pl.col("name").cast(pl.String))
        launched = trace.launches.join(events, left_on="launch", right_on="id").filter(
            pl.col("ts") - zero >= start, pl.col("ts") - zero < end
        )
        tables.append(events.filter(pl.col("id").is_in(launched["device_event"].implode())))
    sums = pl.concat(tables).group_by("name").agg(pl.len(), pl.col("dur").sum())
    return {name: (count, time) for name, count, time in sums.rows()}


@pytest.mark.slow
def test_a_step_is_selected_by_a_click_and_what_it_launched_is_summed(show: Open, multirank: Job) -> None:
    page = show(multirank)
    page.evaluate("() => etloom.timeline.fit()")
    settle(page)
    box = page.locator("#tracks canvas").bounding_box()
    middle = page.evaluate(
        """() => { const [, start, dur] = etloom.timeline.ranks[0].steps[1];
          return etloom.timeline.x(start + dur / 2); }"""
    )
    page.mouse.move(box["x"] + middle, box["y"] + 34 + 26 + 12)
    page.locator(".tip").wait_for(state="visible")
    assert page.locator(".tip").inner_text().startswith("step 552, ")
    page.mouse.down()
    page.mouse.up()
    page.locator("#statistics").wait_for(state="visible")
    start, end = page.evaluate("() => etloom.timeline.measured")
    step = page.evaluate("() => etloom.timeline.ranks[0].steps[1]")
    assert (start, end) == (step[1], step[1] + step[2])
    page.locator("#statistics-by").select_option("launched")
    expected = sum_launched(multirank, start, end)
    page.wait_for_function(f"(rows) => ({ROWS})().length === rows", arg=len(expected))
    rows = page.evaluate(ROWS)
    assert {name: (count, total) for name, _, count, total, *_ in rows} == expected != {}
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    page.locator("#statistics-sql").click()
    page.get_by_role("button", name="Copied").wait_for()
    answer = multirank.query(page.evaluate("() => window.copied"))
    assert {name: (count, total) for name, count, total in answer.rows()} == expected


@pytest.mark.slow
def test_the_kernels_of_the_backward_of_a_step_are_found_by_a_search(show: Open, data: Path) -> None:
    run = open_run(data / "nccl_ddp")
    events = run[0].events
    backward = events.filter(
        pl.col("name") == "## backward ##", pl.col("step") == 5, pl.col("cat") == "user_annotation"
    )
    zero = events.select(categories.recorded_extent()[0]).item()
    start, end = (backward["ts"].item() - zero, backward["ts"].item() - zero + backward["dur"].item())
    page = show(run)
    page.locator("#search").fill("## backward ##")
    for _ in range(3):
        page.locator("#search").press("Enter")
    page.locator("#tracks canvas").focus()
    page.keyboard.press("m")
    page.locator("#statistics-by").select_option("launched")
    expected = sum_launched(run, start, end)
    page.wait_for_function(f"(rows) => ({ROWS})().length === rows", arg=len(expected))
    first = page.evaluate(ROWS)[0]
    assert (first[2], first[3]) == max(expected.values(), key=lambda entry: entry[1]) == (5, 12_261_533)


@pytest.mark.slow
def test_a_column_of_the_chart_of_steps_shows_the_step(show: Open, multirank: Job) -> None:
    page = show(multirank)
    page.wait_for_selector("#tracks[data-whole]")
    page.locator('.columns [data-step="552"] rect').first.click()
    settle(page)
    step = page.evaluate("() => etloom.timeline.ranks[0].steps[1]")
    assert page.evaluate("() => etloom.timeline.measured") == [step[1], step[1] + step[2]]
    low, high = page.evaluate("() => etloom.timeline.view")
    assert low < step[1] and step[1] + step[2] < high


@pytest.mark.slow
def test_the_statistics_of_each_track_and_of_unfolded_rows(show: Open, multirank: Job) -> None:
    page = show(multirank)
    start, end = select_time(page, 0.3, 0.7)
    page.evaluate("() => etloom.timeline.fold(etloom.timeline.ranks[1])")
    page.locator("#statistics-by").select_option("track")
    page.wait_for_function(f"() => ({ROWS})().every((row) => row[1].startsWith('rank 0, '))")
    sums: dict[str, tuple[int, int]] = {}
    for name, _, count, total, *_ in page.evaluate(ROWS):
        sums[name] = (sums.get(name, (0, 0))[0] + count, sums.get(name, (0, 0))[1] + total)
    assert sums == sum_events(multirank, [0], start, end)
    page.locator("#statistics input").fill("stream 7")
    visible = page.locator("#statistics-table tbody tr:visible").all_inner_texts()
    assert visible and all("stream 7" in text for text in visible)
    page.locator("#tracks canvas").focus()
    page.keyboard.press("Escape")
    page.locator("#statistics").wait_for(state="hidden")


BOXES = """() => [...document.querySelectorAll("#statistics-calls button")].map(({ title, style }) => {
  const [name, numbers] = title.split("\\n"), [, count, time] = /^([\\d,]+) calls, ([\\d,.]+) µs/.exec(numbers);
  const [left, width, top] = [style.left, style.width, style.top].map(parseFloat);
  const number = (digits) => Number(digits.replaceAll(",", ""));
  return { name, count: number(count), ns: Math.round(1000 * number(time)), left, width, top };
})"""


@pytest.mark.slow
def test_the_calls_of_the_selected_time(show: Open) -> None:
    def call(name: str, ts: int, dur: int, depth: int, cat: str = "cpu_op") -> dict[str, Any]:
        return host_row(cat, name, ts, dur, depth)

    events = [
        call("main", 0, 10_000, 0, "python_function"),
        *(call("outer", ts, 3000, 1) for ts in (1000, 5000)),
        *(call("inner", ts, 1000, 2) for ts in (1500, 5500)),
        call("inner", 9000, 500, 1),
        {**kernel_row("gemm", 2000, 7000), "depth": None},
    ]
    page = show(Job({0: link_events(events)}))
    page.evaluate("() => etloom.timeline.measure(2000, 9500)")
    page.locator("#statistics-by").select_option("calls")
    page.wait_for_selector("#statistics-calls button")
    boxes = page.evaluate(BOXES)
    assert {(box["name"], box["count"], box["ns"], box["top"]) for box in boxes} == {
        ("all calls", 1, 7500, 0),
        ("main", 1, 7500, 18),
        ("outer", 2, 5000, 36),  # 2 of 3 µs inside, and 3
        ("inner", 1, 500, 36),
        ("inner", 2, 1500, 54),  # half of 1 µs inside, and 1
    }
    for box in boxes:
        assert box["width"] == pytest.approx(100 * box["ns"] / 7500)
    page.locator("#statistics-calls button[title^=outer]").click()
    assert [(box["name"], box["width"]) for box in page.evaluate(BOXES)] == [("outer", 100), ("inner", 30)]
    page.locator("#statistics-by").select_option("callers")
    page.wait_for_function(f"() => ({BOXES})().length > 2")
    boxes = page.evaluate(BOXES)
    assert {(box["name"], box["ns"], box["top"]) for box in boxes} == {
        ("all calls", 7500, 0),
        ("outer", 3500, 18),
        ("main", 3500, 36),
        ("inner", 2000, 18),
        ("outer", 1500, 36),
        ("main", 500, 36),
        ("main", 1500, 54),
        ("main", 2000, 18),
    }


@pytest.mark.slow
def test_hostile_names_are_text_in_the_statistics(show: Open) -> None:
    page = show(hostile_job())
    page.evaluate("() => etloom.timeline.measure(...etloom.timeline.extent)")
    page.locator("#statistics").wait_for(state="visible")
    settle(page)
    assert {row[0] for row in page.evaluate(ROWS)} == set(HOSTILE)
