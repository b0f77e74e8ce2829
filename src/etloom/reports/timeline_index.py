"""Answers questions about the timeline of one rank whose events stay on the server: slices, sums, calls and search.

A slice holds the events of a part of the time, and of some rows, in the format of `timeline_selection`. Time is
divided into cells, about one for each pixel. Of events that are shorter than a cell, a slice has those that are the
first of their row to start or to end in it: its size depends on the screen, not on the number of events.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom._native import sum_calls
from etloom.core.arrays import find_values, mask_members, sort_rows, take_rows, to_array
from etloom.core.text_codes import find_distinct, read_codes
from etloom.core.trace import Trace
from etloom.reports.packed_columns import encode_column, frame_columns
from etloom.reports.timeline_selection import MAX_TEXT, NO_PIECES, encode_events, place_events
from etloom.reports.timeline_tracks import track_headers
from etloom.reports.timeline_waits import NO_WAITS, encode_waits
from etloom.timeline.activity import find_steps

Positions = NDArray[np.int64]

SHADES = 3
"""Shades of a color on the page: an event keeps its own in all slices."""
MAX_RELATED = 1_000
"""Device events of an operator that a slice includes."""
_MAX_KEPT = 8
"""Queries and selections whose results are kept."""
_NO_NAME = "(no name)"
_COLUMNS = ("id", "ts", "dur", "name", "correlation", "step", "_track", "_row", "_color")


class Part(NamedTuple):
    """A part of a timeline: a time (ns of the page), and rows as (track, first row, end of the rows)."""

    start: int
    end: int
    rows: Sequence[tuple[int, int, int]]


class TimelineIndex:
    """The events of a rank by track, row and start.

    Args:
        trace: the rank, linked.
        rank: its number.
        zero: the time that the page shows as zero, ns.
    """

    def __init__(self, trace: Trace, rank: int, zero: int) -> None:
        placed = place_events(trace)
        self.trace, self.rank, self.zero = trace, rank, zero
        self.pieces, self.waits = NO_PIECES, NO_WAITS
        self._events = events = placed.events.select(_COLUMNS)
        self._starts = events["ts"].to_numpy()
        self._stops = self._starts + to_array(events["dur"], 0)
        self._origin = int(self._starts.min(initial=zero))
        self._ids = events["id"].to_numpy()
        self._by_id = np.argsort(self._ids, kind="stable")
        self._headers = track_headers(placed.tracks, events)
        self._bounds = [np.array(header["rows"]) for header in self._headers]
        self._ends = self._stops.copy()
        for first, last in itertools.chain(*map(itertools.pairwise, self._bounds)):
            np.maximum.accumulate(self._ends[first:last], out=self._ends[first:last])
        for header, bounds in zip(self._headers, self._bounds, strict=True):
            first, last = bounds[0], bounds[-1]
            span = int(self._starts[first:last].min()), int(self._stops[first:last].max())
            header["span"] = [time - zero for time in span]
        firsts, codes = find_distinct(read_codes(events["name"]))
        names = take_rows(events["name"], firsts).cast(pl.String).str.slice(0, MAX_TEXT)
        self._names = [*names, _NO_NAME]
        self._codes = np.where(codes < 0, firsts.size, codes)
        self._steps = find_steps(trace).sort("start")
        self._matches: dict[str, tuple[Positions, Positions]] = {}
        self._selections: dict[tuple[int, ...], tuple[Trace, Positions]] = {}

    @property
    def events(self) -> int:
        """The number of events."""
        return self._events.height

    def pack_overview(self, cells: int, rows: int) -> bytes:
        """Return a slice of the first rows of each track over the whole time."""
        spans = [header["span"] for header in self._headers if header["work"]] or [[0, 1]]
        work = max(span[1] for span in spans) - min(span[0] for span in spans)
        start, end = (
            at(header["span"][side] for header in self._headers) for side, at in enumerate((min, max))
        )
        part = Part(start, end + 1, [(track, 0, rows) for track in range(len(self._headers))])
        return self.pack(part, min(10 * cells, cells * (end - start) // max(work, 1) + 1))

    def pack(self, part: Part, cells: int, query: str = "", ids: Sequence[int] = ()) -> bytes:
        """Return a slice.

        Args:
            part: the time and the rows.
            cells: cells of the time.
            query: part of a name; the slice has the first match in each cell.
            ids: selected events: the slice has them and their launches, operators and device events, with all details.
        """
        start, end = part.start + self.zero, part.end + self.zero
        size = max((end - start) // cells, 1)
        grid = np.arange(start // size, end // size + 1) * size
        details, selected = self._describe(tuple(ids))
        pieces = self._select_pieces(start, end, grid)
        on_path = np.sort(self._find_positions(pieces["event"].drop_nulls()))
        positions, hidden = self._select(part, grid, [on_path, self._match(query)[0]], selected)
        plotted = take_rows(self._events, positions)
        header, columns = encode_events(details, plotted, self._origin, self._steps, pieces)
        header |= {
            "rank": self.rank,
            "zero": self.zero - self._origin,
            "total": self.events,
            "tracks": [
                {**track, "rows": np.searchsorted(positions, bounds).tolist()}
                for track, bounds in zip(self._headers, self._bounds, strict=True)
            ],
        }
        columns += [
            encode_column("hidden", "u32", pl.Series(hidden)),
            encode_column("shade", "u8", pl.Series((self._codes[positions] + 1) % SHADES)),
            *encode_waits(self.waits, plotted),
        ]
        return frame_columns(header, columns, is_compressed=False)

    def sum_names(self, part: Part, *, by_track: bool) -> list[tuple[str, int, int, int, int]]:
        """Return (name, track or -1, count, ns inside, ns of the longest) of the events of a part, as the statistics
        of the page."""
        size = len(self._names)
        keys, sums, longest = ([np.zeros(0, np.int64)] for _ in range(3))
        for track, rows, times in self._clip(part):
            keys.append(self._codes[rows] + np.int64(track * size if by_track else 0))
            sums.append(times)
            longest.append(self._stops[rows] - self._starts[rows])
        return [
            (self._names[key % size], key // size if by_track else -1, *figures)
            for key, *figures in _sum_by_key(*map(np.concatenate, (keys, sums, longest)))
        ]

    def sum_launched(self, part: Part) -> list[tuple[str, int, int, int, int]]:
        """Return (name, -1, count, ns, ns of the longest) of the device events that were launched in the time of a
        part."""
        device, launch = self._launched
        starts = self._starts[launch]
        rows = device[(starts >= part.start + self.zero) & (starts < part.end + self.zero)]
        times = self._stops[rows] - self._starts[rows]
        return [
            (self._names[code], -1, *figures)
            for code, *figures in _sum_by_key(self._codes[rows], times, times)
        ]

    @cached_property
    def _launched(self) -> tuple[Positions, Positions]:
        """The places of device events and of their launches."""
        launches = self.trace.launches.select("device_event", "launch").drop_nulls()
        device, launch = (self._locate(launches[name]) for name in ("device_event", "launch"))
        is_placed = (device >= 0) & (launch >= 0)
        return device[is_placed], launch[is_placed]

    def sum_calls(self, part: Part) -> list[tuple[int, str, int, int, int]]:
        """Return the call tree of the threads of a part: (caller's place or -1, name, color, count, ns inside)."""
        by_stack: dict[int, list[Positions]] = {}
        for track, rows, _ in self._clip(part):
            if (stack := self._headers[track]["stack"]) is not None:
                by_stack.setdefault(stack, []).append(rows)
        if not by_stack:
            return []
        stacks = [np.concatenate(parts) for parts in by_stack.values()]
        rows = np.concatenate([rows[sort_rows(self._starts[rows], -self._stops[rows])] for rows in stacks])
        numbers = np.repeat(np.arange(len(stacks)), [rows.size for rows in stacks])
        codes = self._codes[rows].astype(np.int64)
        limits = part.start + self.zero, part.end + self.zero
        parents, firsts, counts, sums = sum_calls(
            numbers, self._starts[rows], self._stops[rows], codes, *limits
        )
        colors = self._events["_color"].to_numpy()[rows[firsts]]
        names = (self._names[code] for code in codes[firsts])
        return list(
            zip(parents.tolist(), names, colors.tolist(), counts.tolist(), sums.tolist(), strict=True)
        )

    def search(self, query: str, span: tuple[int, int] | None = None) -> dict[str, int]:
        """Return the number of events whose names contain a text, and the sum of their times, ns.

        Args:
            query: the text.
            span: only events that overlap this time, from and to (ns of the page).
        """
        rows = self._filter(self._match(query)[0], span)
        return {"events": rows.size, "time": int((self._stops[rows] - self._starts[rows]).sum())}

    def find_match(self, query: str, number: int, span: tuple[int, int] | None = None) -> int | None:
        """Return the id of a match of a search, counted from 0 by start; None if there are fewer."""
        rows = self._filter(self._match(query)[1], span)
        return int(self._ids[rows[number]]) if 0 <= number < rows.size else None

    def _filter(self, rows: Positions, span: tuple[int, int] | None) -> Positions:
        """Return those of some events that overlap a time, as the statistics count them."""
        if span is None:
            return rows
        start, end = (time + self.zero for time in span)
        inside: Positions = rows[(self._stops[rows] > start) & (self._starts[rows] < end)]
        return inside

    def find_neighbor(self, event: int, step: int) -> int | None:
        """Return the id of the event that is ``step`` places after an event in its row; None if there is none."""
        position = int(self._find_positions(pl.Series([event], dtype=pl.UInt32)).max(initial=-1))
        bounds = np.concatenate(self._bounds)
        row = np.searchsorted(bounds, position, side="right")
        is_inside = position >= 0 and bounds[row - 1] <= position + step < bounds[row]
        return int(self._ids[position + step]) if is_inside else None

    def _list_rows(self, part: Part) -> Iterator[tuple[int, int, int]]:
        """Yield (track, first event, end of the events) of each row of a part that has events in its time."""
        start, end = part.start + self.zero, part.end + self.zero
        for track, first_row, last_row in sorted(part.rows):
            bounds = self._bounds[track][first_row : last_row + 1] if track < len(self._bounds) else ()
            for first, last in itertools.pairwise(bounds):
                low = first + np.searchsorted(self._ends[first:last], start, side="right")
                high = first + np.searchsorted(self._starts[first:last], end)
                if low < high:
                    yield track, int(low), int(high)

    def _clip(self, part: Part) -> Iterator[tuple[int, Positions, NDArray[np.int64]]]:
        """Yield the track, the events and their times inside of a part, ns, for each of its rows."""
        start, end = part.start + self.zero, part.end + self.zero
        for track, low, high in self._list_rows(part):
            rows = low + np.flatnonzero(self._stops[low:high] > start)
            yield track, rows, np.minimum(self._stops[rows], end) - np.maximum(self._starts[rows], start)

    def _select(
        self, part: Part, grid: NDArray[np.int64], marked: Sequence[Positions], selected: Positions
    ) -> tuple[Positions, Positions]:
        """Return the events of a slice, and the number of events that each stands for besides itself.

        Args:
            part: the time and the rows.
            grid: the starts of the cells.
            marked: sets of events of which the slice has the first one in each cell, ascending.
            selected: further events.
        """
        chosen, hidden = [selected[:0]], [selected[:0]]
        for _, low, high in self._list_rows(part):
            if high - low <= grid.size:
                rows = np.arange(low, high)
            else:
                by_end = low + np.searchsorted(self._ends[low:high], grid, side="right")
                by_start = low + np.searchsorted(self._starts[low:high], grid)
                rows = find_values(np.concatenate((by_end, by_start)))[0]
                rows = rows[rows < high]
                for places in marked:
                    within = places[np.searchsorted(places, low) : np.searchsorted(places, high)]
                    firsts = find_values(np.searchsorted(within, rows))[0]
                    rows = find_values(np.concatenate((rows, within[firsts[firsts < within.size]])))[0]
            chosen.append(rows)
            hidden.append(np.diff(np.append(rows, high)) - 1)
        positions, counts = np.concatenate(chosen), np.concatenate(hidden)
        added = selected[~mask_members(selected, positions)]
        places = np.searchsorted(positions, added)
        return np.insert(positions, places, added), np.insert(counts, places, 0)

    def _select_pieces(self, start: int, end: int, grid: NDArray[np.int64]) -> pl.DataFrame:
        """Return the pieces of the critical path in a time; of many, the first one that ends in each cell."""
        ends = self.pieces["end"].to_numpy()
        low, high = (
            np.searchsorted(ends, start, side="right"),
            np.searchsorted(self.pieces["start"].to_numpy(), end),
        )
        if high - low <= grid.size:
            return self.pieces[low : max(low, high)]
        rows = low + find_values(np.searchsorted(ends[low:high], grid, side="right"))[0]
        return take_rows(self.pieces, rows[rows < high])

    def _match(self, query: str) -> tuple[Positions, Positions]:
        """Return the events whose names contain a text, ascending, and the same by start."""
        text = query.strip().lower()
        if not text:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if text not in self._matches:
            mask = np.array([text in name.lower() for name in self._names[:-1]] + [False])
            rows = np.flatnonzero(mask[self._codes])
            _keep(self._matches, text, (rows, rows[np.argsort(self._starts[rows], kind="stable")]))
        return self._matches[text]

    def _describe(self, ids: tuple[int, ...]) -> tuple[Trace, Positions]:
        """Return a trace with the details of events only, and the places of these, their causes and effects."""
        if ids not in self._selections:
            events = pl.Series(ids, dtype=pl.UInt32).implode()
            launches = self._scan("launches", pl.any_horizontal(pl.col(*_LAUNCH_COLUMNS).is_in(events)))
            related = pl.concat(
                [pl.Series(ids, dtype=pl.UInt32), *launches.select(_LAUNCH_COLUMNS)]
            ).drop_nulls()
            is_related = pl.col("event").is_in(related.implode())
            tables = {name: self._scan(name, is_related) for name in ("arguments", "kernels", "comms")}
            places = self._find_positions(related.unique())
            _keep(self._selections, ids, (Trace({**tables, "launches": launches}), np.sort(places)))
        return self._selections[ids]

    def _scan(self, table: str, condition: pl.Expr) -> pl.DataFrame:
        return self.trace.scan(table).filter(condition).head(MAX_RELATED).collect(engine=self.trace.engine)

    def _find_positions(self, ids: pl.Series) -> Positions:
        """Return the places of events, without those of ids that no event has."""
        places = self._locate(ids)
        return places[places >= 0]

    def _locate(self, ids: pl.Series) -> Positions:
        """Return the place of each event, -1 where no event has the id."""
        wanted = ids.cast(pl.UInt32).to_numpy()  # of the same type, else all ids would be converted
        at = np.searchsorted(self._ids, wanted, sorter=self._by_id)
        places = self._by_id[np.minimum(at, self._ids.size - 1)]
        located: Positions = np.where(self._ids[places] == wanted, places, -1)
        return located


_LAUNCH_COLUMNS = ("launch", "operator", "device_event")


def _sum_by_key(
    keys: Positions, times: Positions, durations: Positions
) -> Iterator[tuple[int, int, int, int]]:
    """Yield each key with its number of times, their sum, and the longest duration, ns."""
    distinct, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    totals, longest = np.zeros(distinct.size, np.int64), np.zeros(distinct.size, np.int64)
    np.add.at(totals, places, times)
    np.maximum.at(longest, places, durations)
    yield from zip(distinct.tolist(), counts.tolist(), totals.tolist(), longest.tolist(), strict=True)


def _keep(results: dict[Any, Any], key: Any, value: Any) -> None:
    """Add a result; the oldest of more than `_MAX_KEPT` is dropped."""
    results[key] = value
    if len(results) > _MAX_KEPT:
        results.pop(next(iter(results)), None)
