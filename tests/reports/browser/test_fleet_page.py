"""The heat map of many ranks in a browser: a cell shows its ranks and opens their timelines."""

from __future__ import annotations

import pytest

import etloom
from etloom.core.trace import Job
from support.browser_pages import VIEW, Open, settle
from support.fleets import write_fleet

pytestmark = pytest.mark.browser
SLOW = (5, 17)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(write_fleet(tmp_path_factory.mktemp("fleet"), 20, slow=SLOW), use_cache=False)


@pytest.mark.slow
def test_a_cell_shows_its_rank_and_opens_its_timeline(show: Open, fleet: Job) -> None:
    page = show(fleet)
    page.wait_for_selector("#fleet-map[data-ready]")
    cell = page.locator("#fleet-cell")
    assert "rank 17" in cell.inner_text()  # the slowest one is selected first
    assert "% longer than the median of all ranks" in cell.inner_text()
    labels = page.locator("#fleet-rows span").all_inner_texts()
    assert [label for label in labels if label] == [f"rank {rank}" for rank in range(0, 20, 2)]
    assert page.locator("#fleet-columns span").all_inner_texts() == ["step 0", "step 2"]
    canvas = page.locator("#fleet-map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.9, "y": box["height"] * (5 + 0.5) / 20})
    assert "rank 5, step 2" in cell.inner_text()
    assert canvas.get_attribute("title") == "rank 5, step 2"
    page.locator("#fleet-cell button").click()
    settle(page)
    opened = page.evaluate("() => etloom.timeline.ranks.filter((rank) => rank.open).map((rank) => rank.rank)")
    assert 5 in opened and len(opened) == 2
    start, end = page.evaluate(
        "() => etloom.timeline.ranks.find((rank) => rank.rank === 5).steps[2].slice(1)"
    )
    view = page.evaluate(VIEW)
    assert view[0] <= start and start + end <= view[1]


@pytest.mark.slow
def test_arrow_keys_move_between_cells(show: Open, fleet: Job) -> None:
    page = show(fleet)
    page.wait_for_selector("#fleet-map[data-ready]")
    page.locator("#fleet-map").focus()
    for _ in range(20):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    assert "rank 1, step" in page.locator("#fleet-cell").inner_text()
    assert "takes no longer than the median" in page.locator("#fleet-cell").inner_text()
