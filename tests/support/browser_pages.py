"""Scripts and steps that the browser tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIEW = "() => [...etloom.timeline.view]"
RED = """() => {
  const { canvas } = etloom.timeline;
  const { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height);
  let red = 0;
  for (let i = 0; i < data.length; i += 4) if (data[i] === 163 && data[i + 1] === 24 && data[i + 2] === 31) red++;
  return red;
}"""
"""How many pixels of the timeline have the color of the critical path."""


Open = Callable[..., Any]


COPY = """() => {
  const canvas = document.querySelector("canvas");
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  copy.getContext("2d").drawImage(canvas, 0, 0);
  return new Uint32Array(copy.getContext("2d").getImageData(0, 0, copy.width, copy.height).data.buffer);
}"""
"""The pixels of the timeline, read from a copy: reading the canvas itself would slow it down, and it says so."""


def colors(page: Any) -> set[int]:
    """The distinct colors of the timeline."""
    return set(page.evaluate(f"() => [...new Set(({COPY})())]"))


def settle(page: Any) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
