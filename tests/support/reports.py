"""Pages of reports: traces with hostile names, and the elements of a page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import polars as pl

from etloom.core.trace import Job, Trace

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "a\u2028b\u2029c",
    "{{csp}} & \" '",
]


def link_events(events: list[dict[str, Any]], **tables: pl.DataFrame) -> Trace:
    frame = pl.DataFrame(events, infer_schema_length=None)
    frame = frame.sort("ts", -pl.col("dur"), maintain_order=True).with_row_index("id")
    return Trace({"events": frame, **tables}, {"rank": 0, "linked": True, "clock": "epoch"})


def host_row(cat: str, name: str, ts: int, dur: int, depth: int) -> dict[str, Any]:
    """Return an event of a host thread as a row of the timeline; times in ns."""
    place = {"pid": 1, "tid": 1, "stream": None, "depth": depth}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, **place}


def kernel_row(name: str, ts: int, dur: int, stream: int = 7) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": stream, "stream": stream}


class PageElements(HTMLParser):
    """The elements of a page with their attributes, what scripts and styles hold, and the text of the rest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.content: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in self.content:
            self._inside = tag
            self.content[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.content[self._inside][-1] += data
        else:
            self.text.append(data)


def hostile_job() -> Job:
    events = [kernel_row(name, 1000 * i, 900) for i, name in enumerate(HOSTILE)]
    events += [{"cat": "cpu_op", "name": HOSTILE[0], "ts": 0, "dur": 50, "pid": 1, "tid": 1, "depth": 0}]
    names = pl.DataFrame({"pid": [1], "tid": [1], "name": [HOSTILE[1]]})
    trace = link_events(events, threads=names).with_stats([(HOSTILE[1], "info", 1, HOSTILE[0])])
    trace = trace.replace(
        meta={"device_properties": [{"name": HOSTILE[0]}], "distributed": {"backend": HOSTILE[1]}}
    )
    return Job({0: trace}, {"path": HOSTILE[1]})
