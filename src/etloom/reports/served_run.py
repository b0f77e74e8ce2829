"""Answers the requests of the page of a run whose events stay on the server: the page, and parts of its timelines."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.trace import Job
from etloom.reports.html_report import MAX_RANKS, render_page, render_timeline_page
from etloom.reports.timeline_index import Part, TimelineIndex
from etloom.reports.timeline_path import select_pieces
from etloom.reports.timeline_selection import OPEN_RANKS, Timelines, find_first_work, find_origins
from etloom.reports.timeline_waits import NO_WAITS, find_waits

MAX_INDEXED_EVENTS = 30_000_000
"""Events of the ranks that stay prepared; those used longest ago are prepared again when they are shown again."""
OVERVIEW_CELLS, OVERVIEW_ROWS = 800, 4
MAX_CELLS = 20_000
MAX_IDS, MAX_QUERY = 10, 1_000
_IDS = range(1 << 32)
MAX_FIRST_EVENTS = 10_000_000
"""Events of the ranks that are prepared before the page opens, if the first rank does not have more."""
_ROWS = re.compile(r"(?:\d{1,6}\.\d{1,3}\.\d{1,3}(?:_|$))*", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


class ServedRun:
    """A linked run and what its page asks for.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._events = dict(job.rank_facts.filter(pl.col("events") > 0).select("rank", "events").iter_rows())
        timed = {rank: job[rank] for rank in itertools.islice(self._events, MAX_RANKS)}
        origins = find_origins(timed)
        self._zeros = find_first_work(timed, origins)
        self._common_clock = len(set(origins.values())) <= 1
        self._path: pl.DataFrame | None = None
        self._waits: Mapping[int, pl.DataFrame] = {}
        self._page: str | None = None
        self._failure = ""
        self._indexes: OrderedDict[int, TimelineIndex] = OrderedDict()
        self._lock = threading.Lock()
        self._questions: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
            "overview": self._pack_overview,
            "slice": self._pack_slice,
            "names": self._sum_names,
            "launched": self._sum_launched,
            "calls": self._sum_calls,
            "search": self._search,
            "event": self._find_event,
            "ready": lambda _: self._failure or self._page is not None,
        }

    def summarize(self) -> None:
        """Compute the summary, the findings and the tables of the page, which may take long."""
        try:
            self._page = render_page(self.job, select_timelines=self._select_timelines)
        except Exception as error:
            self._failure = f"The summary could not be computed: {type(error).__name__}: {error}"

    def render(self) -> str:
        """Return the page; before `summarize` has ended, it has the timeline only."""
        if not self._events and not self._page:  # without a timeline, nothing can be shown before
            self.summarize()
        return self._page or render_timeline_page(self.job, self._select_timelines(None, ()))

    def answer(self, question: str, arguments: Mapping[str, str]) -> bytes | str:
        """Return the answer to a question of the page: bytes of a slice, or JSON.

        Raises:
            EtloomError: the question or the rank does not exist, or an argument is not valid.
        """
        if question not in self._questions:
            raise EtloomError(f"unknown question {question!r}")
        answer = self._questions[question](arguments)
        return answer if isinstance(answer, bytes) else json.dumps(answer, separators=(",", ":"))

    def open_rank(self, rank: int) -> TimelineIndex:
        """Return the prepared timeline of a rank; it is prepared at the first call."""
        if rank not in self._events:
            raise InvalidValue(f"the run has no events of rank {rank}", option="rank")
        with self._lock:
            if rank not in self._indexes:
                self._indexes[rank] = index = TimelineIndex(self.job[rank], rank, self._find_zero(rank))
                if self._path is not None:
                    index.pieces = select_pieces(self._path, rank)
                    index.waits = self._waits.get(rank, NO_WAITS)
            self._indexes.move_to_end(rank)
            while (
                len(self._indexes) > 1
                and sum(map(_count_events, self._indexes.values())) > MAX_INDEXED_EVENTS
            ):
                self._indexes.popitem(last=False)
            return self._indexes[rank]

    def list_first_ranks(self, named: Sequence[int] = ()) -> list[int]:
        """Return the ranks that the page shows when it opens: those that findings name, else the first ones."""
        ranks = list(dict.fromkeys((*(rank for rank in named if rank in self._events), *self._events)))
        ranks = ranks[:OPEN_RANKS] if len(self._events) > OPEN_RANKS else list(self._events)
        totals = itertools.accumulate(self._events[rank] for rank in ranks)
        return [
            rank
            for rank, total in zip(ranks, totals, strict=True)
            if rank == ranks[0] or total <= MAX_FIRST_EVENTS
        ]

    def _select_timelines(self, path: pl.DataFrame | None, named: Sequence[int]) -> Timelines:
        """Return which timelines the page shows; see `pack_timelines`. Keep the path and the waits for slices."""
        if path is not None:
            waits = find_waits(self.job)
            with self._lock:
                self._path, self._waits = path, waits
                for rank, index in self._indexes.items():
                    index.pieces, index.waits = select_pieces(path, rank), waits.get(rank, NO_WAITS)
        first = self.list_first_ranks(named)
        zeros = {rank: self._find_zero(rank) for rank in (*first, *named) if rank in self._events}
        served = {"ranks": first, "count": len(self._events), "summarized": path is not None}
        return Timelines([], zeros, self._common_clock, [], served)

    def _find_zero(self, rank: int) -> int:
        """Return the time that the page shows as zero: one of all ranks with a common clock."""
        if rank not in self._zeros:
            trace = self.job[rank]
            shared = next(iter(self._zeros.values()))
            is_shared = self._common_clock and trace.meta.get("clock") == "epoch"
            self._zeros[rank] = (
                shared if is_shared else find_first_work({rank: trace}, find_origins({rank: trace}))[rank]
            )
        return self._zeros[rank]

    def _pack_overview(self, arguments: Mapping[str, str]) -> bytes:
        return self._open(arguments).pack_overview(OVERVIEW_CELLS, OVERVIEW_ROWS)

    def _pack_slice(self, arguments: Mapping[str, str]) -> bytes:
        index = self._open(arguments)
        cells = min(max(_read_number(arguments, "cells"), 1), MAX_CELLS)
        ids = [int(number) for number in arguments.get("ids", "").split(".") if _NUMBER.fullmatch(number)]
        ids = [number for number in ids if number in _IDS]
        return index.pack(_read_part(arguments), cells, _read_query(arguments), ids[:MAX_IDS])

    def _sum_names(self, arguments: Mapping[str, str]) -> Any:
        by_track = arguments.get("by") == "track"
        return self._open(arguments).sum_names(_read_part(arguments), by_track=by_track)

    def _sum_launched(self, arguments: Mapping[str, str]) -> Any:
        return self._open(arguments).sum_launched(_read_part(arguments))

    def _sum_calls(self, arguments: Mapping[str, str]) -> Any:
        return self._open(arguments).sum_calls(_read_part(arguments))

    def _search(self, arguments: Mapping[str, str]) -> Any:
        return self._open(arguments).search(_read_query(arguments), _read_span(arguments))

    def _find_event(self, arguments: Mapping[str, str]) -> Any:
        """Return the id of an event: the match of a search with a number, or the neighbor of an event in its row."""
        index, number = self._open(arguments), _read_number(arguments, "number")
        if "q" in arguments:
            return index.find_match(_read_query(arguments), number, _read_span(arguments))
        event = _read_number(arguments, "id")
        return index.find_neighbor(event, number) if event in _IDS else None

    def _open(self, arguments: Mapping[str, str]) -> TimelineIndex:
        return self.open_rank(_read_number(arguments, "rank"))


def _count_events(index: TimelineIndex) -> int:
    return index.events


def _read_number(arguments: Mapping[str, str], name: str) -> int:
    text = arguments.get(name, "")
    if not _NUMBER.fullmatch(text):
        raise InvalidValue(f"expected an integer, got {text[:40]!r}", option=name)
    return int(text)


def _read_query(arguments: Mapping[str, str]) -> str:
    return arguments.get("q", "")[:MAX_QUERY]


def _read_span(arguments: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the time that arguments name, from and to (ns); None if they name none."""
    if "from" not in arguments and "to" not in arguments:
        return None
    start, end = _read_number(arguments, "from"), _read_number(arguments, "to")
    if start >= end:
        raise InvalidValue(f"expected from before to, got {start} and {end}")
    return start, end


def _read_part(arguments: Mapping[str, str]) -> Part:
    """Return the part that arguments name: from, to (ns) and rows, "track.first.end" separated by "_"."""
    span, rows = _read_span(arguments), arguments.get("rows", "")
    if span is None or not _ROWS.fullmatch(rows):
        raise InvalidValue("expected from before to, and rows as TRACK.FIRST.END separated by _")
    start, end = span
    ranges = (map(int, part.split(".")) for part in rows.split("_") if part)
    return Part(start, end, sorted({(track, first, last) for track, first, last in ranges}))
