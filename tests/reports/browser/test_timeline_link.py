"""A link reopens a view of the timeline."""

from __future__ import annotations

from typing import Any

import pytest

from etloom.core.trace import Job
from support.browser_pages import Open, settle

pytestmark = pytest.mark.browser

STATE = """() => {
  const { view, measured, selected, query, path, ranks, scroller } = etloom.timeline;
  return {
    view: view.map(Math.round), measured, query, path, top: Math.round(scroller.scrollTop),
    by: document.getElementById("statistics-by").value,
    selected: selected && [selected.rank.rank, selected.index],
    open: ranks.map((rank) => [rank.rank, rank.open, rank.tracks.map((track) => track.open)]),
  };
}"""
LAST_STEP = "() => etloom.timeline.ranks.at(-1).steps.at(-1)"


def read_fragment(page: Any) -> str:
    """Return the fragment of the address once the timeline rests."""
    settle(page)
    page.wait_for_timeout(300)
    return page.evaluate("() => location.hash")


@pytest.mark.slow
def test_a_link_reopens_the_view(show: Open, multirank: Job) -> None:
    page = show(multirank)
    page.wait_for_selector("#tracks[data-whole]")
    assert read_fragment(page) == "", "the view at first needs no link"
    entries = page.evaluate("() => history.length")
    page.locator("#search").fill("nccl")
    _, start, duration = page.evaluate(LAST_STEP)
    page.evaluate(
        """([start, end]) => {
          const { timeline } = etloom;
          document.querySelector('button[data-act="path"]').click();
          timeline.ranks.reverse();
          timeline.fold(timeline.ranks[1]);
          timeline.fold(timeline.ranks[0].tracks[0]);
          timeline.next(1);
          timeline.setView(start, end);
          timeline.measure(start + 1000, end - 1000);
        }""",
        [start, start + duration],
    )
    page.locator("#statistics-by").select_option("callers")
    fragment, state = read_fragment(page), page.evaluate(STATE)
    assert page.evaluate("() => history.length") == entries
    assert (
        state["path"] and state["selected"] and state["measured"] == [start + 1000, start + duration - 1000]
    )

    other = show(multirank, state=fragment)
    other.wait_for_selector("#tracks[data-whole]")
    settle(other)
    assert other.evaluate(STATE) == state
    assert other.locator("#search").input_value() == "nccl"
    assert other.locator("#details dd").first.inner_text().startswith("nccl")
    assert other.locator("#statistics-calls button").count() > 10
    assert read_fragment(other) == fragment


@pytest.mark.slow
def test_the_link_is_copied(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.wait_for_selector("#tracks[data-whole]")
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    page.locator("#link").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("() => window.copied === location.href && location.hash.startsWith('#t=')")


@pytest.mark.slow
@pytest.mark.parametrize(
    "state", ["#t=1e9_2", "#t=5_1", "#steps", "#t=0_1000&e=9.9&s=x&f=77.1&o=5_6&y=-1&q=%00<b>"]
)
def test_no_address_breaks_the_page(show: Open, ddp: Job, state: str) -> None:
    page = show(ddp, state=state)
    page.wait_for_selector("#tracks[data-whole]")
    settle(page)
    view = page.evaluate(STATE)
    assert view["selected"] is None and view["measured"] is None
    assert all(open_ for _, open_, _ in view["open"])
    page.evaluate("() => { location.hash = '#t=100_5000'; }")
    page.wait_for_function("() => Math.round(etloom.timeline.view[1]) === 5000")


@pytest.mark.slow
def test_a_link_keeps_the_filter_and_the_order_of_the_statistics(show: Open, multirank: Job) -> None:
    rows = """() => [...document.querySelectorAll("#statistics-table tbody tr:not([hidden])")].map(
      ({ cells }) => cells[0].textContent)"""
    page = show(multirank)
    page.wait_for_selector("#tracks[data-whole]")
    page.evaluate("() => etloom.timeline.measure(...etloom.timeline.home)")
    page.wait_for_selector("#statistics-table tbody tr")
    assert "c=" not in read_fragment(page) and "g=" not in read_fragment(page)
    page.get_by_role("button", name="max (µs)").click()
    page.get_by_role("button", name="max (µs)").click()
    page.get_by_label("Filter names").fill("aten::")
    names, fragment = page.evaluate(rows), read_fragment(page)
    assert len(names) > 10 and all("aten::" in name for name in names)
    other = show(multirank, state=fragment)
    other.wait_for_function(
        "() => document.querySelectorAll('#statistics-table tbody tr[hidden]').length > 0"
    )
    assert other.evaluate(rows) == names
    assert read_fragment(other) == fragment
    odd = show(multirank, state=fragment.replace("c=5.1", "c=77.1") + "&c=<b>")
    odd.wait_for_function("() => document.querySelectorAll('#statistics-table tbody tr[hidden]').length > 0")
    assert sorted(odd.evaluate(rows)) == sorted(names) != odd.evaluate(rows)
