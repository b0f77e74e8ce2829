"""Selects the ranks whose timelines the report draws, their time origins, and notes on what is omitted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import rows_of_ids, take_rows, to_array
from etloom.core.machine import run_in_parallel
from etloom.core.text import count_noun, format_ranges, format_ranks
from etloom.core.text_codes import find_distinct, read_codes
from etloom.core.trace import Job, Trace
from etloom.reports.colors import list_color_codes
from etloom.reports.packed_columns import Column, encode_column, frame_columns
from etloom.reports.timeline_path import encode_pieces, select_pieces
from etloom.reports.timeline_tracks import (
    MAX_ROWS,
    add_track_key,
    assign_rows,
    keep_longest,
    list_tracks,
    track_headers,
)
from etloom.reports.timeline_waits import NO_WAITS, encode_waits, find_waits
from etloom.timeline.activity import find_steps

MAX_TOTAL_EVENTS = 1_200_000
"""Events drawn for all ranks together: a browser still opens the file quickly, and it fits into a mail."""
OPEN_RANKS = 8
"""Ranks that are unfolded when the page opens, the first ones; with more ranks, those that findings name come first."""
MAX_RANK_NOTES = 4
"""Up to this number of ranks, each rank has its own note; of more ranks, one note has the sums."""


@dataclass(frozen=True)
class Timelines:
    """The timelines of the report: the packed data of each drawn rank, and the times shown as zero.

    Attributes:
        packed: One per rank, from the top; none on a page of a server.
        zeros: The time that the page shows as zero, by rank.
        common_clock: Whether times of different ranks can be compared.
        notes: What the timelines omit.
        served: On a page of a server, what its script needs: see `etloom.reports.served_run`.
    """

    packed: list[PackedTimeline]
    zeros: Mapping[int, int]
    common_clock: bool
    notes: list[str]
    served: Mapping[str, Any] | None = None


def pack_timelines(
    job: Job, max_events: int, max_ranks: int, path: pl.DataFrame, named_ranks: Sequence[int] = ()
) -> Timelines:
    """Select the ranks of a job to draw, and pack their timelines for the HTML report.

    Args:
        max_events: events drawn per rank.
        max_ranks: ranks drawn.
        path: the critical path by edge.
        named_ranks: ranks that findings name; of many ranks they are drawn first.
    """
    ranks = job.rank_facts.filter(pl.col("events") > 0)["rank"].to_list()
    notes = []
    if empty := sorted(set(job) - set(ranks)):
        notes.append(f"No profiler events were read for {format_ranks(empty)}: there is no timeline.")
    if len(ranks) > OPEN_RANKS:
        has_events = set(ranks)
        first = [rank for rank in named_ranks if rank in has_events]
        ranks = list(dict.fromkeys((*first, *ranks)))
        if first:
            notes.append(f"The ranks that the findings name are at the top: {format_ranges(first)}.")
    if len(ranks) > max_ranks:
        rest = sorted(ranks[max_ranks:])
        notes.append(
            f"The timelines of {count_noun(len(rest), 'rank')} ({format_ranges(rest)}) are omitted; "
            "the tables cover them."
        )
    timed = {rank: job[rank] for rank in ranks[:max_ranks]}
    starts = find_origins(timed)
    zeros = find_first_work(timed, starts)
    common_clock = len(set(starts.values())) <= 1
    if not common_clock:
        notes.append("The ranks have no common clock: each timeline starts at its own zero.")
    max_per_rank = min(max_events, MAX_TOTAL_EVENTS // max(1, len(timed)))

    waits = find_waits(job)

    def pack(rank: int) -> PackedTimeline:
        return pack_timeline(
            timed[rank],
            rank=rank,
            origin=starts[rank],
            zero=zeros[rank],
            max_events=max_per_rank,
            pieces=select_pieces(path, rank),
            waits=waits.get(rank, NO_WAITS),
        )

    # Compression and polars release the interpreter's lock.
    packed = list(run_in_parallel(pack, list(timed), os.cpu_count() or 1).values())
    return Timelines(packed, zeros, common_clock, [*notes, *_describe_omissions(packed)])


def _describe_omissions(packed: list[PackedTimeline]) -> Iterator[str]:
    for total, omitted, crowded, subject in _summarize_omissions(packed):
        if omitted:
            yield (
                f"{subject}: {omitted:,} of {total:,} events are omitted from the timeline; "
                "the longest of each track and time are drawn. The tables include all."
            )
        if crowded:
            yield f"{subject}: {crowded:,} events overlap so many others that they share a row."


def _summarize_omissions(packed: list[PackedTimeline]) -> list[tuple[int, int, int, str]]:
    """Return (events, omitted events, events that share a row, subject of the note) per rank, or summed over many."""
    if len(packed) <= MAX_RANK_NOTES:
        return [
            (timeline.total, timeline.omitted, timeline.sharing_last_row, f"Rank {timeline.rank}")
            for timeline in packed
        ]
    total, omitted, crowded = (
        sum(values)
        for values in zip(
            *((timeline.total, timeline.omitted, timeline.sharing_last_row) for timeline in packed),
            strict=True,
        )
    )
    return [(total, omitted, crowded, f"All {len(packed):,} ranks together")]


def find_origins(traces: Mapping[int, Trace]) -> dict[int, int]:
    """Return {rank: time origin in ns}: the first event of the rank, or of all ranks if they share a clock.

    They share a clock if each file states its base time and the ranks ran at the same time; otherwise a rank would
    appear as a dot far away from the others.
    """
    bounds = pl.col("first_ts").min(), pl.col("last_ts").max()
    spans = {
        rank: trace.compute_once(categories.count_events).select(bounds).row(0)
        for rank, trace in traces.items()
    }
    starts = {rank: start or 0 for rank, (start, _) in spans.items()}
    if not spans:
        return {}
    is_absolute = all(trace.meta.get("clock") == "epoch" for trace in traces.values())
    is_concurrent = max(starts.values()) <= min(end or 0 for _, end in spans.values())
    if is_absolute and is_concurrent:
        return dict.fromkeys(spans, min(starts.values()))
    return starts


def find_first_work(traces: Mapping[int, Trace], starts: Mapping[int, int]) -> dict[int, int]:
    """Return {rank: time shown as zero, ns}: the earliest start of work on all ranks with the same time origin.

    The recorder's own span may begin seconds earlier: see `etloom.core.categories`.
    """
    first_starts: dict[int, Any] = {
        rank: trace.compute_once(categories.count_events)["work_start"].min()
        for rank, trace in traces.items()
    }
    starts_or_origin = {rank: starts[rank] if at is None else at for rank, at in first_starts.items()}
    first = {
        start: min(at for rank, at in starts_or_origin.items() if starts[rank] == start)
        for start in set(starts.values())
    }
    return {rank: first[start] for rank, start in starts.items()}


# Packs the events of one rank into columns for the timeline of the report, as `packed_columns` describes them.
#
# `timeline_tracks` assigns tracks and rows. Events are stored by row and start; starts are differences within their
# row. Text is an index into ``strings``, and a reference to a text, a step or another event is 0 where there is none,
# else 1 + index. `timeline_path` has the columns ``path_*``.

MAX_TEXT = 2000
_NULL = np.iinfo(np.int64).min


@dataclass(frozen=True)
class PackedTimeline:
    """The compressed timeline of a rank, the number of its events, and the number of events that are drawn."""

    rank: int
    data: bytes
    total: int
    plotted: int
    colors: frozenset[int]  # occurring colors, as indices into colors.COLORS
    sharing_last_row: int  # events that share the last row of their track with an overlapping event

    @property
    def omitted(self) -> int:
        return self.total - self.plotted


_EVENT_COLUMNS = (
    *(
        "id",
        "cat",
        "name",
        "ph",
        "ts",
        "dur",
        "pid",
        "tid",
        "device",
        "stream",
        "correlation",
        "depth",
        "step",
    ),
)
"""Columns of events that the timeline shows, or that determine their tracks."""
NO_PIECES = pl.DataFrame(schema={"event": pl.Int64, "start": pl.Int64, "end": pl.Int64})


def pack_timeline(
    trace: Trace,
    *,
    rank: int,
    origin: int,
    max_events: int,
    zero: int | None = None,
    pieces: pl.DataFrame | None = None,
    waits: pl.DataFrame = NO_WAITS,
    changes: tuple[Mapping[int, int], Sequence[tuple[int, int, bool]]] | None = None,
) -> PackedTimeline:
    """Pack events, steps and critical path of a rank into the compressed format that the report's script reads.

    Args:
        origin: time from which starts are counted, ns; no event starts earlier.
        zero: time that the page shows as zero, ns; default: origin.
        pieces: the pieces of the critical path, as `select_pieces` returns them.
        waits: the waits in collectives, as `find_waits` returns them.
        changes: of a comparison: event id -> its place in a list, and what the page says about it.
        max_events: with more events, those on the critical path are kept, then the longest of their track and time
            bucket.
    """
    pieces = NO_PIECES if pieces is None else pieces
    placed = place_events(trace, max_events, pieces)
    header, columns = encode_events(trace, placed.events, origin, find_steps(trace).sort("start"), pieces)
    columns += encode_waits(waits, placed.events)
    if changes:
        columns.append(encode_column("compared", "u32", _find_places(placed.events, changes[0])))
    header |= {
        "rank": rank,
        "zero": 0 if zero is None else zero - origin,
        "tracks": track_headers(placed.tracks, placed.events),
        "changes": changes and changes[1],
    }
    data, used = frame_columns(header, columns), frozenset(placed.events["_color"].unique().to_list())
    return PackedTimeline(rank, data, placed.total, placed.events.height, used, placed.sharing_last_row)


class PlacedEvents(NamedTuple):
    """Events on the rows of tracks: ``tracks`` of `list_tracks` with _drawn; ``events`` by track, row and start, with
    _track, _row and _color; the number of all events, and of those that share the last row of their track."""

    tracks: pl.DataFrame
    events: pl.DataFrame
    total: int
    sharing_last_row: int


def place_events(
    trace: Trace, max_events: int | None = None, pieces: pl.DataFrame = NO_PIECES
) -> PlacedEvents:
    """Place the events of a rank on tracks and rows; with more than ``max_events``, some of them (`keep_longest`)."""
    events = add_track_key(trace.events.select(_EVENT_COLUMNS))
    tracks = list_tracks(trace, events)
    key = ["_pid", "_tid", "_class"]
    placed = events.drop_nulls("ts").join(tracks.select(*key, "_track"), on=key, how="left", nulls_equal=True)
    if max_events is not None:
        on_path = pl.col("id").cast(pl.Int64).is_in(pieces["event"].drop_nulls().implode())
        placed = keep_longest(placed.with_columns(on_path.alias("_critical")), max_events)
    placed, crowded = _place_on_rows(placed)
    placed = placed.with_columns(list_color_codes(placed).alias("_color"))
    tracks = tracks.join(placed.group_by("_track").agg(pl.len().alias("_drawn")), on="_track", how="left")
    return PlacedEvents(tracks, placed, events.height, crowded)


def encode_events(
    trace: Trace, plotted: pl.DataFrame, origin: int, steps: pl.DataFrame, pieces: pl.DataFrame
) -> tuple[dict[str, Any], list[Column]]:
    """Return the header (events, strings, steps) and the columns of placed events.

    Args:
        trace: the tables with the details of the events.
        plotted: the events, as `place_events` returns them, or some of them.
        origin: time from which starts are counted, ns.
        steps: the steps, by start.
        pieces: the pieces of the critical path.
    """
    strings, texts = _encode_texts(trace, plotted)
    step_rows, step = _encode_steps(steps, plotted, origin)
    references = {**texts, **_encode_launches(trace, plotted)}
    columns = [
        encode_column("start", "wide", _measure_distances(plotted, origin)),
        encode_column("dur", "wide", plotted["dur"]),
        encode_column("correlation", "wide", plotted["correlation"], by_difference=True),
        encode_column("id", "u32", plotted["id"], by_difference=True),
        encode_column("color", "u8", plotted["_color"]),
        encode_column("step", "u32", step),
        *(encode_column(name, "u32", values, by_difference=True) for name, values in references.items()),
        *encode_pieces(pieces, plotted, number_rows(plotted), origin),
    ]
    return {"events": plotted.height, "strings": strings, "steps": step_rows}, columns


def _find_places(plotted: pl.DataFrame, places: Mapping[int, int]) -> pl.Series:
    """Return 1 + the place of each event in a list; 0 if it has none."""
    return pl.Series([1 + places.get(event, -1) for event in plotted["id"]], dtype=pl.Int64)


def _place_on_rows(plotted: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Add the row of each event in its track as ``_row``, sort by track, row and start; also count events that share
    the last row."""
    rows, crowded = assign_rows(plotted)
    keys = [plotted["id"].to_numpy(), plotted["ts"].to_numpy(), rows, plotted["_track"].to_numpy()]
    placed = plotted.hstack([pl.Series("_row", rows.astype(np.uint32))])
    return take_rows(placed, np.lexsort(keys)), crowded


def _encode_texts(trace: Trace, plotted: pl.DataFrame) -> tuple[list[str], dict[str, pl.Series]]:
    """Return the distinct texts, and for each text column 1 + the index of each event's text (0: no text)."""
    columns = {"name": plotted["name"].cast(pl.Categorical)}
    for name, table, text in (
        ("shapes", trace.arguments, pl.col("dims")),
        ("geometry", trace.kernels, _format_geometry()),
        ("communication", trace.comms, _format_communication()),
    ):
        event_texts = table.select(id="event", text=text.cast(pl.Categorical))
        if table.height:
            event_texts = event_texts.filter(event_texts["text"] != "")
        columns[name] = take_rows(event_texts["text"], rows_of_ids(event_texts, plotted["id"]))
    texts = pl.concat([column.alias("text") for column in columns.values()])
    rows, positions = find_distinct(read_codes(texts))
    firsts = np.full(rows.size + 1, texts.len())  # the last one is for null
    np.minimum.at(firsts, positions, np.arange(texts.len()))
    order = np.argsort(firsts[:-1])
    shortened = [_shorten(text) for text in take_rows(texts, rows[order]).cast(pl.String)]
    places = {text: place for place, text in enumerate(dict.fromkeys(shortened), 1)}
    index = np.zeros(rows.size + 1, np.uint32)
    index[order] = [places[text] for text in shortened]
    parts = np.split(index[positions], len(columns))
    return list(places), {name: pl.Series(part) for name, part in zip(columns, parts, strict=True)}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _format_geometry() -> pl.Expr:
    def triple(name: str) -> pl.Expr:
        return pl.concat_str([f"{name}_{axis}" for axis in "xyz"], separator=" x ")

    parts = [
        pl.format("grid {}", triple("grid")),
        pl.format("block {}", triple("block")),
        pl.format("{} registers", "registers"),
        pl.format("{} B shared memory", "shared_mem"),
        pl.format("occupancy {} %", "occupancy"),
        pl.format("{} B", "bytes"),
        pl.format("{} GB/s", pl.col("bandwidth").round(2)),
    ]
    return pl.concat_str(parts, separator=", ", ignore_nulls=True)


def _format_communication() -> pl.Expr:
    parts = [
        pl.col("collective").cast(pl.String),
        pl.format("{} B", "bytes"),
        pl.format("{} elements in", "in_nelems"),
        pl.format("{} out", "out_nelems"),
        pl.col("dtype").cast(pl.String),
        pl.format("group {}", pl.col("pg_name").cast(pl.String)),
        pl.format("of {} ranks", "group_size"),
        pl.format("to or from rank {}", "peer"),
    ]
    return pl.concat_str(parts, separator=", ", ignore_nulls=True)


def _encode_steps(
    steps: pl.DataFrame, plotted: pl.DataFrame, origin: int
) -> tuple[list[list[int]], pl.Series]:
    """Return [number, start, duration] (ns) of each step, and for each plotted event 1 + its step's index (0: none)."""
    rows = [[step, start - origin, end - start] for step, start, end in steps.iter_rows()]
    if not rows:
        return [], pl.Series(np.zeros(plotted.height, np.uint32))
    numbers = steps["step"].to_numpy()
    order = np.argsort(numbers)
    step = to_array(plotted["step"], _NULL)
    at = order[np.minimum(np.searchsorted(numbers[order], step), len(rows) - 1)]
    return rows, pl.Series(np.where(numbers[at] == step, at + 1, 0))


def _encode_launches(trace: Trace, plotted: pl.DataFrame) -> dict[str, pl.Series]:
    """Return 1 + the row in ``plotted`` of each event's launch call and of its operator; 0 if there is none."""
    launches = trace.launches.select("launch", "operator", id="device_event").drop_nulls("id")
    rows = rows_of_ids(launches, plotted["id"])
    return {
        column: pl.Series(rows_of_ids(plotted, take_rows(launches[column], rows)) + 1)
        for column in ("launch", "operator")
    }


def _measure_distances(plotted: pl.DataFrame, origin: int) -> pl.Series:
    """Return each event's start minus that of the previous event on its row (ns); the first minus ``origin``."""
    start = plotted["ts"].to_numpy() - origin
    before = np.where(np.diff(number_rows(plotted), prepend=-1) != 0, 0, np.append(0, start[:-1]))
    return pl.Series(np.maximum(start - before, 0))


def number_rows(plotted: pl.DataFrame) -> NDArray[np.int64]:
    """Return the number of each event's row among the rows that have events, from the top."""
    row = plotted["_track"].to_numpy().astype(np.int64) * MAX_ROWS + plotted["_row"].to_numpy()
    return np.cumsum(np.diff(row, prepend=row[:1]) != 0)
