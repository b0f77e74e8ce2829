"""What the timeline shows of a finding and of the critical path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Job
from etloom.reports.packed_columns import encode_column
from etloom.reports.timeline_waits import find_waits
from support.browser_pages import RED, VIEW, Open, settle
from support.real_runs import open_run

pytestmark = pytest.mark.browser

SELECTED = """() => {
  const { selected } = etloom.timeline;
  return selected && [selected.rank.rank, selected.rank.id[selected.index]];
}"""
IN_SIGHT = """() => {
  const { timeline } = etloom, top = timeline.scroller.scrollTop, height = timeline.visible - 60;
  return timeline.items.filter((item) => item.y + 24 > top && item.y < top + height).map((item) => item.rank.rank);
}"""


@pytest.fixture(scope="module")
def dlrm(data: Path) -> Job:
    return open_run(data / "dlrm")


def show_finding(page: Any, text: str) -> None:
    page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.locator(".findings li", has_text=text).first.locator("button.show").click()
    settle(page)


@pytest.mark.slow
def test_a_wait_is_shown_with_its_cause(show: Open, dlrm: Job) -> None:
    page = show(dlrm)
    show_finding(page, "rank 2 delays other ranks once")
    assert page.locator("#caption").inner_text() == "Rank 1 waits 7.116 ms for rank 2 in all_to_all."
    start, end = page.evaluate("() => etloom.timeline.measured")
    assert end - start == pytest.approx(7_116_000, abs=50_000)
    low, high = page.evaluate(VIEW)
    assert low < start < end < high < low + 2 * (end - start)
    rank, event = page.evaluate(SELECTED)
    assert rank == 2
    assert dlrm[2].events.filter(id=event)["name"].item().startswith("ncclKernel_SendRecv")
    assert {1, 2} <= set(page.evaluate(IN_SIGHT))
    page.keyboard.press("Escape")  # the timeline has the focus
    assert page.evaluate(SELECTED) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu/ddp_2", "dlrm", "critical_path/alexnet.json.gz"])
def test_each_finding_is_shown_at_its_time(show: Open, data: Path, name: str) -> None:
    job = open_run(data / name)
    findings = etloom.analyze(job, "findings").head(20)
    page = show(job)
    page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.locator("button.show").count() == findings.height > 0
    for i, row in enumerate(findings.iter_rows(named=True)):
        page.locator("button.show").nth(i).click()
        settle(page)
        low, high = page.evaluate(VIEW)
        start, end = page.evaluate("() => etloom.timeline.measured")
        assert low < start < end < high
        assert end - start >= row["end_ns"] - row["start_ns"]
        assert end - start > 0.3 * (high - low) or high - low < 1000
        assert page.evaluate(SELECTED)[0] == row["rank"]


@pytest.mark.slow
def test_the_view_of_a_finding_of_a_rank_far_below(show: Open, data: Path) -> None:
    """The rank that waits and the rank it waits for stand far apart: both are in sight."""
    job = open_run(data / "dlrm")
    numbers = [0, 9, 19, 3]
    ranks = {
        number: job[rank].replace(meta={**job[rank].meta, "rank": number, "world_size": 20})
        for rank, number in enumerate(numbers)
    }
    idle = {
        rank: job[0].replace(meta={**job[0].meta, "rank": rank}) for rank in range(20) if rank not in ranks
    }
    page = show(Job(dict(sorted((ranks | idle).items()))))
    page.wait_for_selector("#tracks[data-whole]")
    page.evaluate(
        """() => etloom.showFinding(etloom.timeline,
          { rank: 9, event: null, start: 3.1e6, end: 10.2e6, peer: 19, peer_event: null, late: 19, caption: "" })"""
    )
    settle(page)
    assert {9, 19} <= set(page.evaluate(IN_SIGHT))


RED_COLUMNS = """() => {
  const { timeline } = etloom, { rank, index } = timeline.selected, box = timeline.box(rank, index);
  const copy = new OffscreenCanvas(timeline.canvas.width, timeline.canvas.height).getContext("2d");
  copy.drawImage(timeline.canvas, 0, 0);
  const { data, width } = copy.getImageData(0, Math.round(box.y + 13), timeline.canvas.width, 1);
  const red = [];
  for (let x = 0; x < width; x++) if (data[4 * x] === 163 && data[4 * x + 1] === 24) red.push(x);
  return red.map((x) => (x - box.x) / box.width);
}"""
"""Where the underline of the selected event is red, as shares of the event."""


@pytest.mark.slow
def test_only_the_pieces_of_an_event_that_are_on_the_path_are_marked(
    show: Open, dlrm: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = dlrm[0].events.filter(pl.col("cat") == "kernel").sort("dur").row(-1, named=True)
    shares = [(0.25, 0.5), (0.75, 0.8)]
    pieces = pl.DataFrame(
        {
            "event": [event["id"]] * 2,
            "start": [event["ts"] + round(share * event["dur"]) for share, _ in shares],
            "end": [event["ts"] + round(share * event["dur"]) for _, share in shares],
        },
        schema_overrides={"event": pl.Int64},
    )
    monkeypatch.setattr("etloom.reports.timeline_selection.select_pieces", lambda path, rank: pieces)
    page = show(Job({0: dlrm[0]}))
    page.locator('button[data-act="path"]').click()
    page.evaluate(
        """(id) => {
          const { timeline } = etloom, [rank] = timeline.ranks, index = rank.id.indexOf(id);
          timeline.select(rank, index);
          timeline.zoomTo(rank, index);
        }""",
        event["id"],
    )
    settle(page)
    marked = page.evaluate(RED_COLUMNS)
    assert len(marked) > 50
    assert all(any(low - 0.01 <= at <= high + 0.01 for low, high in shares) for at in marked)


@pytest.mark.slow
def test_the_critical_path_is_never_an_empty_view(show: Open, dlrm: Job) -> None:
    page = show(dlrm)
    path = page.locator('button[data-act="path"]')
    for start, end in ((-1e6, -0.9e6), (2e6, 2.02e6), (15e6, 15.001e6), (30e6, 31e6)):
        page.evaluate("([from, to]) => etloom.timeline.setView(from, to)", [start, end])
        page.evaluate("() => { etloom.timeline.scroller.scrollTop = 0; }")
        path.click()
        settle(page)
        assert path.get_attribute("aria-pressed") == "true"
        assert page.evaluate("() => etloom.findPiece(etloom.timeline, 1, true) !== null"), (start, end)
        assert page.evaluate(RED) > 0
        path.click()


@pytest.mark.slow
def test_the_pieces_sum_to_the_path(show: Open, dlrm: Job) -> None:
    page = show(dlrm)
    path = etloom.analyze(dlrm, "critical-path", by="edge")
    sums = page.evaluate("() => etloom.timeline.ranks.map((rank) => [rank.rank, etloom.sumPath(rank)])")
    expected = dict(path.group_by("rank").agg(pl.col("time_ns").sum()).rows())
    assert {rank: time for rank, time in sums if time} == expected


@pytest.mark.slow
def test_on_a_phone_tracks_have_distinct_names(show: Open, dlrm: Job) -> None:
    page = show(dlrm, width=390, height=844)
    labels = page.evaluate(
        "() => etloom.timeline.ranks.map(({ tracks }) => tracks.map(({ label }) => label))"
    )
    assert all(len(set(names)) == len(names) for names in labels)
    assert "GPU 0 str 84" in labels[0]
    cases = [f"GPU 0 stream {n}, annotations" for n in (7, 20, 24)] + [
        "pt_autograd_0" * 3,
        "pt_autograd_0" * 3,
    ]
    labels = page.evaluate("(names) => etloom.fitNames(names, 15)", cases)
    assert len(set(labels)) == len(cases) and max(map(len, labels)) <= 15


@pytest.mark.slow
def test_tracks_and_ranks_fold_by_key(show: Open, dlrm: Job) -> None:
    page = show(dlrm)
    page.locator("#tracks canvas").focus()
    page.keyboard.press(".")
    page.keyboard.press("t")
    assert page.evaluate("() => etloom.timeline.ranks[0].tracks[0].open") is False
    page.keyboard.press("r")
    assert page.evaluate("() => etloom.timeline.ranks.map(({ open }) => open)") == [False, True, True, True]


@pytest.mark.slow
def test_python_frames_are_folded_until_they_are_shown(show: Open, data: Path) -> None:
    page = show(open_run(data / "tracelens" / "h100_qwen.json.gz"))
    tracks = page.evaluate("() => etloom.timeline.ranks[0].tracks.map(({ name, open }) => [name, open])")
    assert tracks[0][0].startswith("GPU 0 stream")
    assert {name for name, open_ in tracks if not open_} == {
        name for name, _ in tracks if name.endswith(", Python")
    }
    page.locator("#search").fill("forward")
    page.locator("#search").press("Enter")
    settle(page)
    assert page.evaluate("() => etloom.timeline.isInSight(...Object.values(etloom.timeline.selected))")
    assert page.evaluate("() => etloom.timeline.ranks[0].tracks.filter(({ open }) => open).length") > sum(
        open_ for _, open_ in tracks
    )


@pytest.mark.slow
def test_matches_are_counted_and_visited_in_both_directions(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.wait_for_selector("#tracks[data-whole]")
    page.locator("#search").fill("gloo:all_reduce")
    events = page.evaluate("() => etloom.timeline.matches.events")
    matches = page.locator("#matches")
    assert matches.inner_text().startswith(f"{events} events")
    page.locator("#tracks canvas").focus()
    visited = []
    for key, place in (("Shift+N", events), ("n", 1), ("n", 2), ("Shift+N", 1), ("p", events)):
        page.keyboard.press(key)
        assert matches.inner_text().startswith(f"{place} of {events} events"), key
        visited.append(page.evaluate(SELECTED))
    assert visited[0] == visited[4] != visited[1] == visited[3] != visited[2]
    page.get_by_role("button", name="Next match").click()
    assert page.evaluate(SELECTED) == visited[1]
    page.locator("#search").focus()
    page.keyboard.press("Shift+Enter")
    assert page.evaluate(SELECTED) == visited[0]


@pytest.mark.slow
def test_keys_select_the_time_of_an_event_and_fit_it(show: Open, ddp: Job) -> None:
    page = show(ddp)
    home = page.evaluate(VIEW)
    page.evaluate(
        """() => {
          const { timeline } = etloom, [rank] = timeline.ranks, [{ rows }] = rank.tracks;
          timeline.select(rank, rows[rows.findIndex((from, row) => rows[row + 1] - from > 5)]);
        }"""
    )
    start, end = page.evaluate(
        """() => {
          const { rank: { start, dur }, index } = etloom.timeline.selected;
          return [start[index], start[index] + dur[index]];
        }"""
    )
    page.locator("#tracks canvas").focus()
    page.keyboard.press("m")
    assert page.evaluate("() => etloom.timeline.measured") == [start, end]
    page.keyboard.press("f")
    margin = (end - start) * 0.05
    assert page.evaluate(VIEW) == pytest.approx([start - margin, end + margin])
    page.keyboard.press("0")
    assert page.evaluate(VIEW) == home
    page.keyboard.press(".")  # the next event in the row is what F fits now
    after = page.evaluate(SELECTED)
    page.keyboard.press("f")
    low, high = page.evaluate(VIEW)
    assert end <= (low + high) / 2
    page.keyboard.press("?")
    assert page.locator("#details kbd").count() > 5 and page.evaluate(SELECTED) == after
    page.keyboard.press("?")
    assert page.locator("#details dd").count() > 3 and page.locator("#details kbd").count() == 0


@pytest.mark.slow
def test_gpu_tracks_stay_in_sight_while_the_others_scroll(show: Open, multirank: Job) -> None:
    page = show(multirank)
    tops = """() => etloom.timeline.items.filter(({ pin }) => pin).map((item) => [
      item.rank.rank, item.track?.gpu ?? true, etloom.timeline.at(item),
    ])"""
    first = [place for place in page.evaluate(tops) if place[0] == 0]
    assert len(first) > 3 and all(gpu for _, gpu, _ in first)
    thread = "() => etloom.timeline.items.find(({ track }) => track?.host)"
    before = page.evaluate(f"() => etloom.timeline.at(({thread})())")
    page.evaluate("() => { etloom.timeline.scroller.scrollTop = 120; }")
    settle(page)
    assert [place for place in page.evaluate(tops) if place[0] == 0] == first
    assert page.evaluate(f"() => etloom.timeline.at(({thread})())") == before - 120
    # What is under the pointer is what is drawn there: a GPU track, not the thread that has scrolled below it.
    x, y = page.evaluate(
        """() => {
          const { timeline } = etloom, box = timeline.canvas.getBoundingClientRect();
          const item = timeline.items.find(({ track }) => track?.gpu);
          return [box.x + 40, box.y + timeline.at(item) + 8];
        }"""
    )
    page.mouse.move(x, y)
    page.locator(".tip").wait_for(state="visible")
    assert page.locator(".tip").inner_text().startswith("GPU 0 stream")
    # The next rank takes their place.
    page.evaluate("() => etloom.timeline.scrollTo(etloom.timeline.ranks[1])")
    settle(page)
    places = page.evaluate(tops)
    head = min(at for rank, _, at in places if rank == 1)
    assert max(at for rank, _, at in places if rank == 0) < head
    assert places[0][2] < first[0][2]
    # An event is brought into sight below the tracks that stay.
    page.evaluate(
        """() => {
          const { timeline } = etloom, [rank] = timeline.ranks, track = rank.tracks.find(({ host }) => host);
          timeline.reveal(rank, track.rows[track.rows.length - 2]);
        }"""
    )
    settle(page)
    assert page.evaluate(
        """() => {
          const { timeline } = etloom, [rank] = timeline.ranks, track = rank.tracks.find(({ host }) => host);
          const { y } = timeline.place(rank, track.rows[track.rows.length - 2]);
          return y >= 60 + timeline.pinnedHeight(rank) && y + 16 <= timeline.visible;
        }"""
    )


@pytest.mark.slow
def test_the_page_unpacks_great_integers(show: Open, multirank: Job) -> None:
    great = 2**53 - 1
    values = [0, great, -great, 2**52, -(2**52) - 1, -1, 7]
    column = encode_column("values", "signed", pl.Series(values))
    script = resources.files("etloom.reports").joinpath("data.js").read_text(encoding="utf-8")
    decode = "Array.from(decodeColumn(Uint8Array.from(bytes), form, n, false), String)"
    unpacked = show(multirank).evaluate(
        f"([bytes, form, n]) => {{ {script}; return {decode}; }}",
        [list(column.data), column.form, column.size],
    )
    assert [int(text) for text in unpacked] == values


@pytest.mark.slow
def test_a_collective_says_for_which_rank_it_waits_and_shows_it(show: Open, multirank: Job) -> None:
    waits = find_waits(multirank)
    event = waits[0].sort("wait").row(-1, named=True)
    assert (event["late"], event["wait"]) == (1, 1_292_000)
    page = show(multirank)
    select = """([number, id]) => {
      const { timeline } = etloom, rank = timeline.ranks.find(({ rank }) => rank === number);
      timeline.select(rank, rank.id.indexOf(id));
    }"""
    page.evaluate(select, [1, event["late_event"]])
    assert "none; others wait for it, up to 1.292 ms" in page.locator("#details").inner_text()
    assert page.get_by_role("button", name="which is late").count() == 0
    page.evaluate(select, [0, event["event"]])
    assert "1.292 ms for rank 1, which arrived later" in page.locator("#details").inner_text()
    page.get_by_role("button", name="show rank 1, which is late").click()
    settle(page)
    start, end = page.evaluate("() => etloom.timeline.measured")
    assert end - start == 1_292_000
    assert page.evaluate("() => etloom.timeline.ranks.map(({ open }) => open)") == [True, True]
    assert page.evaluate(SELECTED)[0] == 0
