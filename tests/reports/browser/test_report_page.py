"""The report in a headless browser: it draws, moves, sorts, answers, and neither runs nor fetches anything.

Frame times are printed (pytest -s), not judged, since they are the machine's; the picture of the README is made with
``ETLOOM_PICTURE=docs/report.png pytest tests/browser -k picture``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core import categories
from etloom.core.trace import Job, Trace
from etloom.reports.summary import summarize_run
from etloom.reports.timeline_path import place_pieces, select_pieces
from etloom.reports.timeline_selection import find_first_work, find_origins
from support.browser_pages import COPY, RED, VIEW, Open, colors, settle
from support.real_runs import open_run
from support.reports import HOSTILE, hostile_job

pytestmark = pytest.mark.browser


@contextmanager
def changes(page: Any) -> Iterator[list[list[float]]]:
    views = [page.evaluate(VIEW)]
    yield views
    settle(page)
    views.append(page.evaluate(VIEW))


def middle(page: Any) -> tuple[float, float]:
    box = page.locator("#tracks canvas").bounding_box()
    return box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5


@pytest.mark.slow
def test_it_draws_every_event(show: Open, multirank: Job) -> None:
    page = show(multirank)
    assert len(colors(page)) > 20
    events = page.evaluate("() => etloom.timeline.ranks.map((rank) => [rank.rank, rank.events])")
    assert events == [[rank, trace.events.height] for rank, trace in multirank.items()]
    trace = multirank[0]
    longest = trace.events.filter(pl.col("cat") == "kernel").sort("dur", descending=True).row(0, named=True)
    index = page.evaluate("(id) => etloom.timeline.ranks[0].id.indexOf(id)", longest["id"])
    assert page.evaluate("(i) => etloom.timeline.ranks[0].dur[i]", index) == longest["dur"]
    # The page counts from the first work; the recorder's own span began 0.85 s before it.
    zero = min(one.events.select(categories.recorded_extent()[0]).item() for one in multirank.values())
    assert page.evaluate("(i) => etloom.timeline.ranks[0].start[i]", index) == longest["ts"] - zero
    first = min(int(one.events["ts"].min()) for one in multirank.values())  # type: ignore[arg-type]
    assert page.evaluate("() => etloom.timeline.extent[0]") == first - zero < -800_000_000
    low, high = page.evaluate(VIEW)
    assert -0.02 * high < low < 0
    step = trace.events.filter(name="ProfilerStep#551").row(0, named=True)
    assert page.evaluate("() => etloom.timeline.ranks[0].steps[0]") == [551, step["ts"] - zero, step["dur"]]
    tracks = page.evaluate("() => etloom.timeline.ranks[0].tracks.map((track) => [track.name, track.work])")
    assert tracks[-1] == ["recorder", False]
    assert [name for name, work in tracks if not work] == ["recorder"]


@pytest.mark.slow
def test_the_wheel_zooms_at_the_pointer(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.mouse.move(*middle(page))
    at = page.evaluate(
        "(x) => etloom.timeline.time(x - document.querySelector('canvas').getBoundingClientRect().x)",
        middle(page)[0],
    )
    with changes(page) as views:
        page.mouse.wheel(0, -120)
        page.wait_for_timeout(100)
    (low, high), (left, right) = views
    assert right - left == pytest.approx((high - low) * np.exp(-0.3), rel=1e-6)
    assert (at - left) / (right - left) == pytest.approx((at - low) / (high - low), abs=1e-3)


@pytest.mark.slow
def test_drag_pans_and_a_double_click_fits(show: Open, ddp: Job) -> None:
    page = show(ddp)
    home = page.evaluate(VIEW)
    page.locator("button[data-act=in]").click()
    x, y = middle(page)
    with changes(page) as views:
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x - 40, y, steps=4)
        page.mouse.up()
    (low, high), (left, right) = views
    assert right - left == pytest.approx(high - low)
    assert left - low == pytest.approx(40 / page.evaluate("() => etloom.timeline.scale"), rel=0.01)
    page.mouse.dblclick(x, y)
    settle(page)
    assert page.evaluate(VIEW) == home


@pytest.mark.slow
def test_the_keyboard_does_all_of_it(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.locator("#tracks canvas").focus()
    home = page.evaluate(VIEW)
    for key, check in {
        "w": lambda old, new: new[1] - new[0] < old[1] - old[0],
        "d": lambda old, new: new[0] > old[0],
        "ArrowLeft": lambda old, new: new[0] < old[0],
        "s": lambda old, new: new[1] - new[0] > old[1] - old[0],
        "f": lambda old, new: new == home,
    }.items():
        with changes(page) as views:
            page.keyboard.press(key)
        assert check(*views), key
    page.keyboard.press(".")
    assert page.locator("#details dd").first.inner_text() == "ProfilerStep#0"
    page.keyboard.press("Escape")
    assert page.locator("#details kbd").count() > 5
    page.keyboard.press("/")
    page.keyboard.type("gloo:all_reduce")
    assert page.locator("#matches").inner_text().startswith("4 events")
    page.keyboard.press("Enter")
    assert page.locator("#details dd").first.inner_text() == "gloo:all_reduce"


@pytest.mark.slow
def test_hover_shows_details_and_click_selects(show: Open, multirank: Job) -> None:
    page = show(multirank)
    # The longest kernel of rank 0: where it is on the screen, the timeline itself knows.
    index = page.evaluate(
        """() => {
          const { timeline } = etloom, [rank] = timeline.ranks;
          let best = 0;
          rank.launch.forEach((launch, i) => { if (launch && rank.dur[i] > rank.dur[best]) best = i; });
          best = rank.launch[best] ? best : rank.launch.findIndex((launch) => launch);
          timeline.zoomTo(rank, best);
          return best;
        }"""
    )
    settle(page)
    page.locator("#tracks").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """(i) => {
          const { timeline } = etloom, canvas = timeline.canvas.getBoundingClientRect();
          const box = timeline.box(timeline.ranks[0], i);
          return [canvas.x + box.x + box.width / 2, canvas.y + box.y + 8];
        }""",
        index,
    )
    page.mouse.move(x, y)
    tip = page.locator(".tip")
    tip.wait_for(state="visible")
    assert "duration" in tip.inner_text()
    assert "correlation" in tip.inner_text()
    page.mouse.click(x, y)
    settle(page)
    event = multirank[0].events.filter(
        pl.col("id") == page.evaluate("(i) => etloom.timeline.ranks[0].id[i]", index)
    )
    details = page.locator("#details").inner_text()
    assert event["name"][0] in details
    assert str(event["correlation"][0]) in details
    page.get_by_role("button", name="go to its launch").click()
    assert page.locator("#details dd").first.inner_text() == "cudaLaunchKernel"
    page.get_by_role("button", name="go to its device event").click()
    assert page.locator("#details dd").first.inner_text() == event["name"][0]


@pytest.mark.slow
def test_tables_sort_and_filter(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.get_by_text("Operators by rank").click()
    table = page.locator("#top-ops")
    heads = table.locator("th").all_inner_texts()
    column = next(i for i, head in enumerate(heads) if head.startswith("count"))
    expected = sorted(
        (row for trace in ddp.values() for row in etloom.analyze(trace, "top-ops")["count"]), reverse=True
    )

    def values() -> list[int]:
        cells = table.locator(f"tbody tr td:nth-child({column + 1})").all()
        return [int(cell.get_attribute("data-value")) for cell in cells]

    button = table.locator("th button").nth(column)
    button.click()
    assert table.locator("th").nth(column).get_attribute("aria-sort") == "descending"
    assert values() == expected
    button.click()
    assert table.locator("th").nth(column).get_attribute("aria-sort") == "ascending"
    assert values() == expected[::-1]
    assert table.locator("th[aria-sort]").count() == 1
    table.locator("th button").nth(heads.index("name")).click()
    names = table.locator("tbody tr td.long").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    page.locator("input[data-table=top-ops]").fill("aten::copy_")
    visible = [row for row in table.locator("tbody tr").all() if row.is_visible()]
    assert len(visible) == 2
    assert all("aten::copy_" in row.inner_text() for row in visible)


@pytest.mark.slow
def test_absent_values_sort_last(show: Open, multirank: Job) -> None:
    page = show(multirank)
    steps = page.locator("#comm-overlap")
    button = steps.locator("th button").nth(1)
    for _ in range(2):
        button.click()
        assert steps.locator("tbody tr td:nth-child(2)").all_inner_texts()[-2:] == ["all", "all"]


@pytest.mark.slow
def test_hostile_names_are_shown_and_not_run(show: Open) -> None:
    page = show(hostile_job())
    strings = page.evaluate("() => etloom.timeline.ranks[0].strings")
    assert set(HOSTILE) <= set(strings)
    kernels = page.locator("#kernel-breakdown td.long").all_inner_texts()
    assert HOSTILE[0] in kernels
    page.locator("#tracks canvas").focus()
    page.keyboard.press(".")
    assert page.locator("#details dd").first.inner_text() in HOSTILE
    page.locator("#search").fill("<script>")
    assert page.locator("#matches").inner_text().startswith("3 events")
    assert page.locator("script").count() == 2  # the facts and the page's own; a rank's data goes when read


@pytest.mark.slow
def test_light_and_dark(show: Open, ddp: Job) -> None:
    page = show(ddp)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, drawn = page.evaluate(ground), colors(page)
    page.locator("#theme").click()
    settle(page)
    assert light == "rgb(255, 255, 255)"
    assert page.evaluate(ground) == "rgb(15, 19, 24)"
    assert 0xFFFFFFFF in drawn
    assert 0xFF18130F in colors(page)  # the ground, as little-endian RGBA
    assert page.locator("#theme").inner_text() == "Light"
    dark = show(ddp, dark=True)
    assert dark.evaluate(ground) == "rgb(15, 19, 24)"
    assert dark.locator("#theme").inner_text() == "Light"
    dark.locator("#theme").click()
    assert dark.locator("#theme").inner_text() == "Dark"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(show: Open, ddp: Job, width: int) -> None:
    page = show(ddp, width=width, height=844)
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    canvas = page.locator("#tracks canvas").bounding_box()
    assert canvas["width"] > width * 0.5


def many_events(count: int) -> Trace:
    """Operators in nests of four on 4 threads and kernels on 4 streams, back to back."""
    tracks, each = 8, count // 8
    start = np.tile(np.arange(each) * 1000, tracks)
    track = np.repeat(np.arange(tracks), each)
    device = track >= 4
    depth = np.where(device, 0, np.arange(count) % 4)
    events = pl.DataFrame(
        {
            "cat": np.where(device, "kernel", "cpu_op"),
            "name": [f"name {i % 300}" for i in range(count)],
            "ts": start - depth * 1000,
            "dur": np.where(device, 900, 3990 - depth * 990),
            "pid": np.where(device, 0, 1),
            "tid": track,
            "stream": pl.Series(np.where(device, track, -1)).replace(-1, None),
            "depth": pl.Series(np.where(device, -1, depth)).replace(-1, None),
        }
    ).sort("ts", maintain_order=True)
    return Trace({"events": events.with_row_index("id")}, {"rank": 0, "linked": True, "clock": "epoch"})


@pytest.mark.slow
def test_many_events_stay_smooth(show: Open) -> None:
    count = 200_000
    page = show(Job({0: many_events(count)}))
    assert page.evaluate("() => etloom.timeline.ranks[0].events") == count
    page.evaluate("() => { etloom.timeline.frames.length = 0; }")
    for factor in (0.8, 0.8, 0.5, 0.5, 0.1, 0.1, 10, 10, 2, 2, 1.25, 1.25) * 3:
        page.evaluate("(factor) => etloom.timeline.zoom(factor)", factor)
        settle(page)
    frames = page.evaluate("() => etloom.timeline.frames")
    assert len(frames) >= 30
    median = float(np.median(frames))
    print(f"\n{count:,} events: median frame {median:.1f} ms, longest {max(frames):.1f} ms")
    # Drawing every event takes seconds; ten times the aim of 50 ms tells a slow machine from a wrong algorithm.
    assert median < 500


@pytest.mark.slow
def test_the_picture_of_the_readme(show: Open, ddp: Job) -> None:
    page = show(ddp, width=1280, height=1000)
    page.evaluate(
        """() => {
          const { timeline } = etloom, [rank] = timeline.ranks;
          const find = (name) => rank.name.findIndex((text) => rank.strings[text - 1] === name);
          timeline.select(rank, find("gloo:all_reduce"));
        }"""
    )
    settle(page)
    picture = page.screenshot()
    assert len(picture) > 50_000
    if target := os.environ.get("ETLOOM_PICTURE"):
        Path(target).write_bytes(picture)


@pytest.mark.slow
def test_the_critical_path_is_marked_on_request(show: Open, data: Path) -> None:
    page = show(open_run(data / "cpu/ddp_2"))
    path = page.locator('button[data-act="path"]')
    before = page.evaluate(COPY)
    path.click()
    settle(page)
    assert path.get_attribute("aria-pressed") == "true"
    marked = page.evaluate("() => etloom.timeline.ranks.map((rank) => rank.path_event.length)")
    # Rank 1 is the slower one: the path runs on it alone.
    assert marked[0] == 0 < marked[1]
    assert page.evaluate(COPY) != before
    # In the color of the path, and the track that holds most of it in sight; nothing else is coloured.
    assert page.evaluate(RED) > 300
    most = page.evaluate(
        "() => etloom.timeline.items.find((item) => item.rank.rank === 1 && item.track).y"
        " - etloom.timeline.scroller.scrollTop"
    )
    assert 0 <= most < page.evaluate("() => etloom.timeline.visible")
    path.click()
    settle(page)
    assert path.get_attribute("aria-pressed") == "false"
    assert page.evaluate(RED) == 0


@pytest.mark.slow
def test_the_page_has_each_event_and_piece_of_the_path_exactly(show: Open, data: Path) -> None:
    run = open_run(data / "dlrm")
    page = show(run)
    page.wait_for_selector("#tracks[data-whole]")
    columns = ("id", "start", "dur", "correlation", "path_event", "path_start", "path_dur")
    drawn = page.evaluate(
        """(columns) => etloom.timeline.ranks.map((rank) => [rank.rank, Object.fromEntries(
          columns.map((name) => [name, [...rank[name]].map((value) => Number.isNaN(value) ? null : value)]))])""",
        columns,
    )
    assert [rank for rank, _ in drawn] == list(run)
    starts = find_origins(run)
    zeros, path = find_first_work(run, starts), summarize_run(run).tables["critical-path"]
    assert any(content["path_event"] for _, content in drawn)
    for rank, content in drawn:
        events = run[rank].events
        rows = pl.DataFrame({"id": content["id"]}).join(events.cast({"id": pl.Int64}), on="id", how="left")
        assert sorted(content["id"]) == events["id"].to_list()
        assert content["start"] == (rows["ts"] - zeros[rank]).to_list()
        assert [content[name] for name in ("dur", "correlation")] == [
            rows[name].to_list() for name in ("dur", "correlation")
        ]
        pieces = place_pieces(select_pieces(path, rank), rows).sort("place", "start")
        assert content["path_event"] == pieces["place"].to_list()
        assert content["path_start"] == (pieces["start"] - zeros[rank]).to_list()
        assert content["path_dur"] == pieces["dur"].to_list()


@pytest.mark.slow
def test_without_a_path_nothing_is_highlighted(
    show: Open, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etloom.reports.summary.MAX_GRAPH_EVENTS", 1)
    page = show(etloom.open(own / "ddp_2"))
    page.wait_for_selector("#tracks[data-whole]")
    path = page.locator('button[data-act="path"]')
    assert path.is_disabled() and path.get_attribute("title") == "no event here is on a critical path"


@pytest.mark.slow
def test_more_findings_are_a_click_away(show: Open, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etloom.reports.html_sections.OPEN_FINDINGS", 4)
    page = show(open_run(data / "dlrm"))
    assert page.locator(".findings .what").nth(3).is_visible()
    hidden = page.locator(".findings .what").nth(6)
    assert not hidden.is_visible()
    page.get_by_text(" more, up to ").click()
    assert hidden.is_visible()


@pytest.mark.slow
def test_ranks_and_collectives_are_side_by_side(show: Open, data: Path) -> None:
    page = show(open_run(data / "dlrm"))
    for name in ("collective-summary", "stragglers", "imbalance", "clocks", "critical-path"):
        assert page.locator(f"table#{name} tbody tr").count() > 0
    assert page.locator("table#stragglers tbody tr").first.locator("td").first.inner_text() == "2"


@pytest.mark.slow
def test_many_ranks_open_folded_and_unfold_completely(show: Open, data: Path) -> None:
    one = open_run(data / "dlrm")[0]
    ranks = {rank: one.replace(meta={**one.meta, "rank": rank, "world_size": 12}) for rank in range(12)}
    page = show(Job(ranks))
    page.wait_for_selector("#tracks[data-whole]")
    assert page.evaluate("() => etloom.timeline.ranks.map((rank) => rank.open)") == [True] * 8 + [False] * 4
