"""The layout of the page: narrow screens, long names, contrast of text."""

from __future__ import annotations

from typing import Any

import pytest

from etloom.core.trace import Job
from support.browser_pages import Open
from support.examples import slow_after

pytestmark = pytest.mark.browser

CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.closest("svg, script, [hidden]") || node.disabled || !node.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${node.tagName} ${node.className}: ${node.textContent.slice(0, 30)}`);
  }
  return low;
}"""
"""Texts whose contrast is below 4.5, as WCAG 2.2 AA asks for."""


@pytest.mark.slow
@pytest.mark.parametrize("dark", slow_after(1, [True, False]))
def test_text_has_contrast(show: Open, ddp: Job, dark: bool) -> None:
    assert show(ddp, dark=dark).evaluate(CONTRASTS) == []


def right_ends(page: Any) -> list[float]:
    return page.evaluate(
        "() => [...document.querySelectorAll('#breakdown .bars rect')].map((bar) => bar.getBoundingClientRect().right)"
    )


@pytest.mark.slow
def test_the_breakdown_fits_a_phone(show: Open, ddp: Job) -> None:
    """The part at the end, idle, is visible without scrolling."""
    page = show(ddp, width=390, height=844)
    ends = right_ends(page)
    assert ends and max(ends) == pytest.approx(376, abs=2)
    size = page.evaluate(
        "() => parseFloat(getComputedStyle(document.querySelector('.bars .inside')).fontSize)"
    )
    assert size >= 11


@pytest.mark.slow
@pytest.mark.parametrize("width", [1024, 1440])
def test_a_long_name_leaves_the_header_as_it_is(show: Open, ddp: Job, width: int) -> None:
    short = show(ddp, width=width).locator("header").bounding_box()
    job = Job(dict(ddp.items()), {**ddp.meta, "path": "/runs/" + "a_very_long_name_of_a_run_" * 9})
    page = show(job, width=width)
    assert page.locator("header").bounding_box() == short
    assert page.evaluate("() => document.documentElement.scrollWidth") == width


@pytest.mark.slow
def test_the_first_stop_of_the_keyboard_skips_the_header(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "summary"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1440])
def test_the_top_finding_is_the_headline(show: Open, ddp: Job, width: int) -> None:
    page = show(ddp, width=width)
    page.evaluate("() => scrollTo({ top: 0, behavior: 'instant' })")
    tiles = page.locator(".summary li")
    whole = page.locator(".summary").bounding_box()
    first, second = tiles.first.bounding_box(), tiles.nth(1).bounding_box()
    assert first["width"] > 0.95 * whole["width"] > 1.5 * second["width"]
    assert first["y"] + first["height"] < 450
