"""The page of `etloom ui`: what it draws, sums, searches and selects are all events, which stay on the server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.cli.run_arguments import RunOptions
from etloom.cli.ui import PageServer, RunPages
from etloom.core.trace import Job
from etloom.reports import served_run
from etloom.reports.timeline_waits import find_waits
from reports.browser.test_timeline_selection import BOXES, ROWS, sum_events, sum_launched
from reports.browser.test_timeline_views import IN_SIGHT, SELECTED, show_finding
from support.browser_pages import COPY, VIEW, Open, settle
from support.fleets import write_fleet
from support.real_runs import open_run
from support.reports import HOSTILE, hostile_job
from support.small_traces import write_stepped_run

pytestmark = pytest.mark.browser

LOADED = """() => etloom.timeline.ranks.filter(({ open }) => open).every((rank) => {
  const shown = etloom.timeline.listRows(rank, 0);
  return !shown.length || (!rank.pending && etloom.timeline.covers(rank, shown));
})"""
EDGES = f"""() => {{
  const isEmpty = ({COPY})().map((color) => color === 0xffffffff);
  return [...isEmpty.keys()].filter((i) => i && isEmpty[i] !== isEmpty[i - 1]).concat(isEmpty.length);
}}"""
"""Where empty pixels of the timeline begin and end, from the first pixel, which is not empty."""
COUNT = "() => etloom.timeline.ranks.reduce((sum, rank) => sum + rank.events, 0)"


def read_pixels(page: Any) -> np.ndarray:
    """Return which pixels of the timeline are empty. Their colors may differ: shades depend on the order of names."""
    edges = page.evaluate(EDGES)
    return np.repeat(np.arange(len(edges)) % 2, np.diff([0, *edges]))


def wait_until_loaded(page: Any) -> None:
    settle(page)
    page.wait_for_function(LOADED)
    settle(page)


def move_to(page: Any, start: float, end: float) -> None:
    page.evaluate("([from, to]) => etloom.timeline.setView(from, to)", [start, end])
    wait_until_loaded(page)


@pytest.fixture
def both(show: Open, serve: Open, data: Path, multirank: Job) -> tuple[Any, Any]:
    """The page of one run as a file, and from a server."""
    return show(multirank), serve(data / "hta_multirank")


FAIL_ONCE = """() => {
  const { timeline } = etloom;
  const ask = timeline.ask.bind(timeline);
  timeline.ask = async (question, ...others) => {
    if (question !== "slice") return ask(question, ...others);
    timeline.ask = ask;
    throw new Error("lost");
  };
}"""


@pytest.mark.slow
def test_after_a_failed_slice_the_next_movement_asks_again(serve: Open, data: Path) -> None:
    page = serve(data / "hta_multirank")
    wait_until_loaded(page)
    start, end = page.evaluate(VIEW)[:2]
    page.evaluate(FAIL_ONCE)
    page.evaluate("([from, to]) => etloom.timeline.setView(from, to)", [start, start + (end - start) / 50])
    page.wait_for_function("() => document.getElementById('status').textContent === 'lost'")
    move_to(page, start, start + (end - start) / 60)
    assert page.evaluate(LOADED)


@pytest.mark.slow
def test_a_view_is_the_same_from_a_server_and_in_a_file(both: tuple[Any, Any], multirank: Job) -> None:
    file, served = both
    file.wait_for_selector("#tracks[data-whole]")
    assert file.evaluate(VIEW) == served.evaluate(VIEW)
    events = sum(trace.rows("events") for trace in multirank.values())
    for start, end in ((0, 1.3e9), (2e8, 2.2e8), (9e8, 9.001e8)):
        for page in both:
            page.evaluate("([from, to]) => etloom.timeline.setView(from, to)", [start, end])
        wait_until_loaded(served)
        settle(file)
        different = np.mean(read_pixels(file) != read_pixels(served))
        assert different < 0.005, (start, end)
        assert served.evaluate(COUNT) < (events if end - start > 1e9 else events / 5)
    assert different == 0, "every event is in a narrow view"


@pytest.mark.slow
def test_statistics_and_calls_are_those_of_all_events(both: tuple[Any, Any], multirank: Job) -> None:
    file, served = both
    start, end = 100_000_000, 1_100_000_001
    for page in both:
        page.evaluate("([from, to]) => etloom.timeline.measure(from, to)", [start, end])
        page.wait_for_selector("#statistics-table tbody tr")
    move_to(served, 2e8, 2.01e8)
    assert served.evaluate(COUNT) < 500
    expected = sum_events(multirank, multirank, start, end)
    rows = served.evaluate(ROWS)
    assert {row[0]: (row[2], row[3]) for row in rows} == {row[0]: expected[row[0]] for row in rows}
    assert sorted(rows) == sorted(file.evaluate(ROWS))
    for by, script in (("track", ROWS), ("calls", BOXES), ("callers", BOXES)):
        answers = []
        for page in both:
            page.evaluate(
                "() => document.getElementById('statistics-calls').replaceChildren()"
            )  # of the kind before
            page.locator("#statistics-by").select_option(by)
            wait = (
                f"() => JSON.stringify(({ROWS})()[0]?.[1] || '').includes('rank')" if by == "track" else None
            )
            page.wait_for_function(
                wait or "() => document.querySelectorAll('#statistics-calls button').length > 9"
            )
            answers.append(page.evaluate(script))
        keyed = [sorted(answer, key=str) for answer in answers]
        assert keyed[0] == keyed[1], by
    launched = sum_launched(multirank, start, end)
    for page in both:
        page.locator("#statistics-by").select_option("launched")
        page.wait_for_function(f"(rows) => ({ROWS})().length === rows", arg=len(launched))
        assert {row[0]: (row[2], row[3]) for row in page.evaluate(ROWS)} == launched


@pytest.mark.slow
def test_a_search_counts_and_visits_all_matches(serve: Open, data: Path, multirank: Job) -> None:
    page = serve(data / "hta_multirank")
    matching = [
        (rank, *row)
        for rank, trace in multirank.items()
        for row in trace.events.filter(pl.col("name").cast(pl.String).str.contains("(?i)cudaLaunch"))
        .sort("ts", maintain_order=True)
        .select("id", "dur")
        .iter_rows()
    ]
    page.locator("#search").fill("CUDAlaunch")
    page.wait_for_function("() => document.getElementById('matches').textContent.includes('events')")
    assert page.locator("#matches").inner_text().startswith(f"{len(matching):,} events")
    time = page.evaluate("() => etloom.timeline.matches.time")
    assert time == sum(dur or 0 for *_, dur in matching)
    for number, press in ((0, "Enter"), (1, "Enter"), (0, "Shift+Enter"), (len(matching) - 1, "Shift+Enter")):
        page.locator("#search").press(press)
        page.wait_for_function(
            f"() => document.getElementById('matches').textContent.startsWith('{number + 1:,} of ')"
        )
        assert page.evaluate(SELECTED) == list(matching[number][:2])
        assert page.evaluate("() => etloom.timeline.isInSight(...Object.values(etloom.timeline.selected))")


@pytest.mark.slow
def test_a_search_stays_in_the_selected_time(both: tuple[Any, Any], multirank: Job) -> None:
    for page in both:
        page.wait_for_selector("#tracks[data-whole]")
        _, start, duration = page.evaluate("() => etloom.timeline.ranks[0].steps[1]")
        end = start + duration
        page.locator("#search").fill("nccl")
        page.wait_for_function(
            "() => /^[0-9,]+ events, /.test(document.getElementById('matches').textContent)"
        )
        total = page.evaluate("() => etloom.timeline.matches.events")
        assert page.get_by_role("button", name="Search all times").is_hidden()
        page.evaluate("([from, to]) => etloom.timeline.measure(from, to)", [start, end])
        inside = page.locator("#matches", has_text="events in the selected time")
        inside.wait_for()
        counted = {name: count for name, (count, _) in sum_events(multirank, multirank, start, end).items()}
        expected = sum(count for name, count in counted.items() if "nccl" in name.lower())
        assert page.evaluate("() => etloom.timeline.matches.events") == expected < total
        for number in (1, 2):
            page.locator("#search").press("Enter")
            page.wait_for_function(
                f"() => document.getElementById('matches').textContent.startsWith('{number} of ')"
            )
            page.wait_for_function("() => etloom.timeline.selected")
            at, length = page.evaluate(
                """() => { const { rank, index } = etloom.timeline.selected;
                  return [rank.start[index], rank.dur[index]]; }"""
            )
            assert at < end and at + length > start
        page.wait_for_timeout(300)
        assert "a=" not in page.evaluate("() => location.hash")
        page.get_by_role("button", name="Search all times").click()
        page.wait_for_function(f"() => etloom.timeline.matches.events === {total}")
        assert page.locator("#everywhere").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_a_row_of_the_operators_shows_its_longest_call(both: tuple[Any, Any], multirank: Job) -> None:
    for page in both:
        page.wait_for_selector("#tracks[data-whole]")
        for table in ("top-ops-sum", "kernel-breakdown-sum"):
            row = page.locator(f"#{table} tbody tr").first
            name = row.evaluate(
                "(row) => row.querySelector('.long').title || row.querySelector('.long').textContent"
            )
            rank, event, start, length, count = map(
                int, row.locator("button.call").get_attribute("data-call").split(".")
            )
            row.locator("button.call").click()
            page.wait_for_function(
                "([from, to]) => String(etloom.timeline.measured) === `${from},${to}`",
                arg=[start, start + length],
            )
            page.wait_for_function(f"() => ({SELECTED})()")
            events = multirank[rank].events.filter(pl.col("name").cast(pl.String) == name)
            assert events.filter(id=event)["dur"].item() == length == events["dur"].max()
            assert page.locator("#caption").inner_text() == f"The longest of {count:,}, on rank {rank}."
            assert count == events.height


@pytest.mark.slow
def test_a_selected_event_stays_selected_and_has_its_details(serve: Open, data: Path, multirank: Job) -> None:
    page = serve(data / "hta_multirank")
    launches = multirank[0].launches.drop_nulls("operator")
    device, launch, operator = launches.select("device_event", "launch", "operator").row(launches.height // 2)
    page.evaluate(
        """async (id) => {
          const { timeline } = etloom, [rank] = timeline.ranks;
          const index = await timeline.seek(rank, id);
          timeline.select(rank, index);
          timeline.zoomTo(rank, index);
        }""",
        device,
    )
    wait_until_loaded(page)
    kernel = multirank[0].kernels.filter(event=device).row(0, named=True)
    place = multirank[0].events.filter(id=device).row(0, named=True)
    names = dict(multirank[0].events.select("id", pl.col("name").cast(pl.String)).iter_rows())
    text = page.locator("#details").inner_text()
    assert f"grid {kernel['grid_x']} x {kernel['grid_y']}" in text
    assert names[device] in text and names[launch] in text and names[operator] in text
    move_to(page, 1.2e9, 1.2001e9)  # far away
    assert page.evaluate(SELECTED) == [0, device]
    assert f"grid {kernel['grid_x']} x {kernel['grid_y']}" in page.locator("#details").inner_text()
    page.get_by_role("button", name="go to its operator").click()
    wait_until_loaded(page)
    assert page.evaluate(SELECTED) == [0, operator]
    page.get_by_role("button", name="device event").click()
    wait_until_loaded(page)
    row = page.evaluate(
        "() => { const { rank, index } = etloom.timeline.selected; return rank.launch[index]; }"
    )
    assert row > 0
    page.locator("#tracks canvas").focus()
    page.keyboard.press(".")
    page.wait_for_function(f"() => ({SELECTED})()[1] !== {device}")
    stream = multirank[0].events.filter(pl.col("stream") == place["stream"], pl.col("ts") > place["ts"])
    assert page.evaluate(SELECTED) == [0, stream.sort("ts")["id"][0]]


@pytest.mark.slow
def test_a_finding_is_shown_with_its_peer(serve: Open, data: Path) -> None:
    page = serve(data / "dlrm")
    show_finding(page, "rank 2 delays other ranks once")
    page.wait_for_function("() => etloom.timeline.selected")
    wait_until_loaded(page)
    assert page.locator("#caption").inner_text() == "Rank 1 waits 7.116 ms for rank 2 in all_to_all."
    rank, event = page.evaluate(SELECTED)
    assert rank == 2
    name = open_run(data / "dlrm")[2].events.filter(id=event)["name"].item()
    assert name.startswith("ncclKernel_SendRecv")
    assert {1, 2} <= set(page.evaluate(IN_SIGHT))


@pytest.mark.slow
def test_the_critical_path_is_marked(serve: Open, data: Path) -> None:
    job = open_run(data / "dlrm")
    page = serve(data / "dlrm")
    path = etloom.analyze(job, "critical-path", by="edge").group_by("rank").agg(pl.col("time_ns").sum())
    page.locator('button[data-act="path"]').click()
    wait_until_loaded(page)
    for start, end in ((2e6, 2.02e6), (15e6, 15.001e6)):
        move_to(page, start, end)
        page.locator('button[data-act="path"]').click()
        page.locator('button[data-act="path"]').click()
        wait_until_loaded(page)
        page.wait_for_function("() => etloom.findPiece(etloom.timeline, 1, true) !== null")
    page.evaluate("() => etloom.timeline.fit()")
    wait_until_loaded(page)
    shown = dict(
        page.evaluate("() => etloom.timeline.ranks.map((rank) => [rank.rank, etloom.sumPath(rank)])")
    )
    assert {rank for rank, time in shown.items() if time} == set(path.filter(pl.col("time_ns") > 0)["rank"])


@pytest.mark.slow
def test_a_link_opens_the_view_again(serve: Open, data: Path) -> None:
    page = serve(data / "dlrm")
    page.locator("#search").fill("gemm")
    page.locator("#search").press("Enter")
    page.wait_for_function("() => etloom.timeline.selected")
    move_to(page, 5e6, 7e6)
    page.wait_for_timeout(300)
    fragment, selected = page.evaluate("() => location.hash"), page.evaluate(SELECTED)
    other = serve(data / "dlrm", state=fragment)
    other.wait_for_function("() => etloom.timeline.selected")
    wait_until_loaded(other)
    assert other.evaluate(SELECTED) == selected
    assert [round(time) for time in other.evaluate(VIEW)] == [5_000_000, 7_000_000]
    odd = serve(data / "dlrm", state="#t=0_1000&e=0.999999&r=x_3&q=%00<b>")
    wait_until_loaded(odd)
    assert odd.evaluate(SELECTED) is None


@pytest.mark.slow
def test_hostile_names_are_text(serve: Open, tmp_path: Path) -> None:
    etloom.export(hostile_job(), tmp_path / "run.parquet")
    page = serve(tmp_path / "run.parquet")
    page.evaluate("() => etloom.timeline.measure(...etloom.timeline.extent)")
    page.wait_for_selector("#statistics-table tbody tr")
    assert {row[0] for row in page.evaluate(ROWS)} == set(HOSTILE)
    page.locator("#search").fill("<script>")
    page.wait_for_function("() => document.getElementById('matches').textContent.startsWith('3 events')")
    page.locator("#search").press("Enter")
    page.wait_for_selector("#details.filled")
    assert page.locator("#details dd").first.inner_text() in HOSTILE


@pytest.mark.slow
def test_the_timeline_comes_before_the_summary(
    serve: Open, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()
    render = served_run.render_page

    def render_later(*arguments: Any, **options: Any) -> str:
        proceed.wait(60)
        return render(*arguments, **options)

    monkeypatch.setattr(served_run, "render_page", render_later)
    page = serve(data / "dlrm", is_summarized=False)
    assert page.locator("section").count() == 2
    move_to(page, 5e6, 7e6)
    page.wait_for_timeout(300)
    proceed.set()
    page.get_by_role("button", name="Show the summary").click(timeout=60_000)
    page.wait_for_selector("#tracks[data-whole]")
    assert page.locator(".findings li").count() > 3
    page.wait_for_function("() => Math.round(etloom.timeline.view[1]) === 7e6")


@pytest.mark.slow
def test_any_rank_of_a_stored_run_can_be_shown(serve: Open, tmp_path: Path) -> None:
    etloom.store_add(write_fleet(tmp_path / "fleet", 20, slow=(5, 17)), to=tmp_path / "store")
    page = serve(tmp_path / "store")
    ranks = "() => etloom.timeline.ranks.map(({ rank }) => rank)"
    first = page.evaluate(ranks)
    assert len(first) == 8 and 17 in first
    page.locator("#add-rank input").fill("11")
    page.locator("#add-rank button").click()
    page.wait_for_function("() => etloom.timeline.ranks.some(({ rank }) => rank === 11)")
    wait_until_loaded(page)
    assert 11 in page.evaluate(IN_SIGHT)
    map_ = page.locator("#fleet-map")
    map_.scroll_into_view_if_needed()
    box = map_.bounding_box()
    map_.click(position={"x": box["width"] * 0.9, "y": box["height"] * (14 + 0.5) / 20})
    page.locator("#fleet-cell button").click()
    page.wait_for_function("() => etloom.timeline.ranks.some(({ rank, open }) => rank === 14 && open)")
    wait_until_loaded(page)
    page.wait_for_timeout(300)
    fragment = page.evaluate("() => location.hash")
    runs = serve(tmp_path / "store", state=fragment)
    runs.wait_for_function("() => etloom.timeline.ranks.length === 10")


@pytest.mark.slow
def test_the_runs_of_a_store_are_sorted_filtered_and_opened(browser: Any, tmp_path: Path) -> None:
    for name, time in (("monday", 2000.0), ("tuesday", 1500.0), ("wednesday", 1800.0)):
        run = write_stepped_run(tmp_path / name, [time] * 3)
        etloom.store_add(run, to=tmp_path / "store", name=name)
    said: list[str] = []
    with PageServer(0, RunPages(tmp_path / "store", RunOptions(cache=False))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(server.url)
        rows = "[...document.querySelectorAll('#store-runs tbody tr:not([hidden])')]"
        column = rows + ".map((row) => row.cells[{}].textContent)"
        cells, changes = column.format(0), column.format(5)
        assert page.evaluate(cells) == ["monday", "tuesday", "wednesday"]
        page.get_by_role("button", name="mean step (µs)").click()
        assert page.evaluate(cells) == ["monday", "wednesday", "tuesday"]
        assert page.evaluate(changes) == ["-", "20.00", "-25.00"]
        page.get_by_label("Filter the rows of Runs").fill("tues")
        assert page.evaluate(cells) == ["tuesday"]
        page.get_by_role("link", name="tuesday").click()
        page.wait_for_selector("#tracks[data-whole]")
        assert said == []
        page.close()
        server.shutdown()


@pytest.mark.slow
def test_a_collective_shows_the_rank_that_it_waits_for(serve: Open, data: Path, multirank: Job) -> None:
    event = find_waits(multirank)[0].sort("wait").row(-1, named=True)
    page = serve(data / "hta_multirank")
    page.evaluate(
        """async (id) => {
          const { timeline } = etloom, [rank] = timeline.ranks, index = await timeline.seek(rank, id);
          timeline.select(rank, index);
          timeline.reveal(rank, index);
        }""",
        event["event"],
    )
    page.get_by_text("1.292 ms for rank 1, which arrived later").wait_for()
    page.get_by_role("button", name="show rank 1, which is late").click()
    page.wait_for_function("() => etloom.timeline.measured?.[1] - etloom.timeline.measured?.[0] === 1292000")
    assert page.evaluate(SELECTED) == [0, event["event"]]
