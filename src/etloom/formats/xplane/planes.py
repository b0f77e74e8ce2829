"""Decodes the planes of an XSpace protobuf to frames of lines, events and values.

A plane is a device or the host, a line is a stream or a thread. Names are stored once per plane, as metadata; a value
("stat") belongs to an event, to the metadata of events of one name, or to the plane.

Messages and field numbers: tsl/profiler/protobuf/xplane.proto of openxla/xla.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from etloom.core.errors import LimitError
from etloom.formats.io.protobuf_fields import FIXED64, LENGTH, VARINT, Fields, MessageData
from etloom.formats.xplane.programs import Estimate, estimate_program

MAX_EVENTS = 200_000_000
_LATEST_NS = 2 * 10**18
_MAX_PS = 1 << 61
_SPACE_PLANES, _SPACE_ERRORS, _SPACE_WARNINGS, _SPACE_HOSTS = 1, 2, 3, 4
_PLANE_NAME, _PLANE_LINES, _PLANE_EVENTS, _PLANE_STAT_NAMES, _PLANE_STATS = 2, 3, 4, 5, 6
_LINE_ID, _LINE_NAME, _LINE_TIMESTAMP, _LINE_EVENTS, _LINE_DISPLAY_ID, _LINE_DISPLAY_NAME = 1, 2, 3, 4, 10, 11
_EVENT_METADATA, _EVENT_OFFSET, _EVENT_DURATION, _EVENT_STATS, _EVENT_OCCURRENCES = 1, 2, 3, 4, 5
_NAME_ID, _NAME_TEXT, _NAME_DISPLAY, _NAME_STATS = 1, 2, 4, 5
_STAT_METADATA, _STAT_DOUBLE, _STAT_UINT, _STAT_INT, _STAT_TEXT, _STAT_BYTES, _STAT_REFERENCE = range(1, 8)
_MAP_KEY, _MAP_VALUE = 1, 2
_METADATA_PLANE = "/host:metadata"
_LONGEST_TEXT = 4096
"""Characters of a value that are stored; dumps of whole programs are longer."""


@dataclass(frozen=True)
class Plane:
    """A decoded plane of an XSpace: lines, events and values of a device or of the host.

    Attributes:
        name: "/device:GPU:0", "/host:CPU", ...
        stats: Values of the plane, by name.
        lines: Columns line (index), id, name.
        events: Columns line, metadata, name, full_name (if the name is a short one), start_ps (from ``base_ns``,
            which is the line's) and duration_ps.
        values: Values of events: event (row), key, integer, text (JSON).
        shared_values: Values of all events of one metadata: metadata, key, text (JSON).
        untimed: Number of events that state only how often they occurred.
        invalid: Number of events without a valid time.
    """

    name: str
    stats: dict[str, Any]
    lines: pl.DataFrame
    events: pl.DataFrame
    values: pl.DataFrame
    shared_values: pl.DataFrame
    untimed: int
    invalid: int


@dataclass(frozen=True)
class Space:
    """A decoded .xplane.pb file: its planes, host names, and the profiler's errors and warnings.

    ``programs``: number of a program -> its operations, by name.
    """

    planes: list[Plane]
    hosts: list[str]
    problems: list[str]
    programs: dict[int, dict[str, Estimate]]


def decode_space(messages: MessageData, where: Path) -> Space:
    """Decode the protobuf messages of an .xplane.pb file.

    Raises:
        LimitError: It has too many events.
    """
    space = messages.scan_all()
    spans = space.select(_SPACE_PLANES, LENGTH)
    decoders = [
        _PlaneDecoder(messages, start, end, where)
        for start, end in zip(spans.start.tolist(), spans.ends.tolist(), strict=True)
    ]
    planes = [decoder.decode() for decoder in decoders]
    programs = {
        number: estimate_program(messages, start, end)
        for decoder, plane in zip(decoders, planes, strict=True)
        if plane.name == _METADATA_PLANE
        for number, start, end in decoder.find_programs()
    }
    problems = [
        text
        for number in (_SPACE_ERRORS, _SPACE_WARNINGS)
        for text in messages.read_texts(space.select(number, LENGTH))
    ]
    return Space(planes, messages.read_texts(space.select(_SPACE_HOSTS, LENGTH)), problems, programs)


class _PlaneDecoder:
    """Decodes the message of one plane."""

    def __init__(self, messages: MessageData, start: int, end: int, where: Path) -> None:
        self.messages = messages
        self.where = where
        self.fields = messages.scan(np.array([start], np.int64), np.array([end], np.int64), clip=True)
        self.stat_names = self._read_stat_names()

    def decode(self) -> Plane:
        lines, line_fields = self._read_lines()
        metadata, shared_values = self._read_event_metadata()
        spans = line_fields.select(_LINE_EVENTS, LENGTH)
        if spans.start.size > MAX_EVENTS:
            raise LimitError(f"has more than {MAX_EVENTS:,} events in one plane", where=self.where)
        events, event_fields = self._read_events(spans, lines)
        untimed = np.zeros(events.height, bool)
        untimed[event_fields.select(_EVENT_OCCURRENCES, VARINT).message] = True
        events = events.with_columns(untimed=untimed).join(
            metadata, on="metadata", how="left", maintain_order="left"
        )
        valid = pl.all_horizontal(
            pl.col("start_ps", "duration_ps").is_between(-_MAX_PS, _MAX_PS),
            pl.col("base_ns").is_between(-_LATEST_NS, _LATEST_NS),
        )
        events = events.with_row_index("event").with_columns(
            pl.col("event").cast(pl.Int64), valid=valid & ~pl.col("untimed")
        )
        return Plane(
            self._read_name(),
            self._read_plane_stats(),
            lines.select("line", "id", "name"),
            events.filter("valid").drop("valid", "untimed"),
            self._read_values(event_fields.select(_EVENT_STATS, LENGTH), "event"),
            shared_values,
            int(untimed.sum()),
            int((~events["valid"] & ~events["untimed"]).sum()),
        )

    def find_programs(self) -> list[tuple[int, int, int]]:
        """Return number, start and end of the programs (HloProto) that metadata of events hold."""
        keys, fields = self._read_map(_PLANE_EVENTS)
        owners = fields.select(_NAME_STATS, LENGTH)
        content = self._scan(owners).select(_STAT_BYTES, LENGTH)
        numbers = [keys[row] for row in owners.message[content.message].tolist()]
        return list(zip(numbers, content.start.tolist(), content.ends.tolist(), strict=True))

    def _read_name(self) -> str:
        names = self.messages.read_texts(self.fields.select(_PLANE_NAME, LENGTH))
        return names[-1] if names else ""

    def _scan(self, spans: Fields) -> Fields:
        return self.messages.scan(spans.start, spans.ends)

    def _read_map(self, number: int) -> tuple[list[int], Fields]:
        """Return a protobuf map's keys and the fields of its values; a field's ``message`` is the index of its key."""
        entries = self.fields.select(number, LENGTH)
        fields = self._scan(entries)
        keys = fields.get_integers(_MAP_KEY, entries.start.size)
        values = fields.select(_MAP_VALUE, LENGTH)
        content = self._scan(values)
        rows = values.message[content.message]
        return keys.tolist(), Fields(rows, content.number, content.wire, content.value, content.start)

    def _read_stat_names(self) -> dict[int, str]:
        keys, fields = self._read_map(_PLANE_STAT_NAMES)
        names = fields.select(_NAME_TEXT, LENGTH)
        texts = self.messages.read_texts(names)
        return {keys[row]: text for row, text in zip(names.message.tolist(), texts, strict=True)}

    def _read_event_metadata(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return two tables of the event metadata: names (metadata, name, full_name), values (metadata, key, text)."""
        keys, fields = self._read_map(_PLANE_EVENTS)
        columns: dict[int, list[str | None]] = {}
        for number in (_NAME_TEXT, _NAME_DISPLAY):
            texts: list[str | None] = [None] * len(keys)
            names = fields.select(number, LENGTH)
            for row, text in zip(names.message.tolist(), self.messages.read_texts(names), strict=True):
                texts[row] = text
            columns[number] = texts
        frame = pl.DataFrame(
            {"metadata": keys, "text": columns[_NAME_TEXT], "display": columns[_NAME_DISPLAY]},
            schema={"metadata": pl.Int64, "text": pl.String, "display": pl.String},
        )
        short = pl.when(pl.col("display").str.len_bytes() > 0).then("display")
        frame = frame.unique("metadata", keep="last", maintain_order=True).select(
            "metadata",
            name=pl.coalesce(short, "text"),
            full_name=pl.when(short.is_not_null() & (pl.col("display") != pl.col("text"))).then(
                pl.col("text").str.head(_LONGEST_TEXT)
            ),
        )
        values = self._read_values(fields.select(_NAME_STATS, LENGTH), "row")
        ids = pl.DataFrame(
            {"row": range(len(keys)), "metadata": keys}, schema=dict.fromkeys(("row", "metadata"), pl.Int64)
        )
        return frame, values.join(ids, on="row").select("metadata", "key", "text")

    def _read_lines(self) -> tuple[pl.DataFrame, Fields]:
        """Return a frame of lines (line index, id, name, base_ns) and their protobuf fields."""
        spans = self.fields.select(_PLANE_LINES, LENGTH)
        fields = self.messages.scan(spans.start, spans.ends, clip=True)
        count = spans.start.size
        names = [""] * count
        for number in (_LINE_NAME, _LINE_DISPLAY_NAME):
            texts = fields.select(number, LENGTH)
            for row, text in zip(texts.message.tolist(), self.messages.read_texts(texts), strict=True):
                names[row] = text or names[row]
        display = fields.get_integers(_LINE_DISPLAY_ID, count)
        frame = pl.DataFrame(
            {
                "line": np.arange(count),
                "id": np.where(display != 0, display, fields.get_integers(_LINE_ID, count)),
                "name": pl.Series(names, dtype=pl.String),
                "base_ns": fields.get_integers(_LINE_TIMESTAMP, count),
            }
        )
        return frame, fields

    def _read_events(self, spans: Fields, lines: pl.DataFrame) -> tuple[pl.DataFrame, Fields]:
        """Return a frame of events (line, metadata, start_ps, duration_ps, base_ns) and their protobuf fields."""
        fields = self._scan(spans)
        count = spans.start.size
        frame = pl.DataFrame(
            {
                "line": spans.message,
                "metadata": fields.get_integers(_EVENT_METADATA, count),
                "start_ps": fields.get_integers(_EVENT_OFFSET, count),
                "duration_ps": fields.get_integers(_EVENT_DURATION, count),
                "base_ns": lines["base_ns"].to_numpy()[spans.message],
            }
        )
        return frame, fields

    def _read_plane_stats(self) -> dict[str, Any]:
        values = self._read_values(self.fields.select(_PLANE_STATS, LENGTH), "plane")
        return {key: json.loads(text) for key, text in values.select("key", "text").iter_rows()}

    def _read_values(self, spans: Fields, owner: str) -> pl.DataFrame:
        """Decode values to rows: index of the message (in the column named ``owner``), key, integer, text (JSON).

        Bytes (whole programs) and values without a name are left out.
        """
        fields = self._scan(spans)
        keys = fields.get_integers(_STAT_METADATA, spans.start.size, -1)
        frame = pl.DataFrame(
            {
                "row": fields.message,
                "number": fields.number,
                "wire": fields.wire,
                "value": fields.value,
                "start": fields.start,
            }
        ).filter(
            (pl.col("number").is_in([_STAT_UINT, _STAT_INT, _STAT_REFERENCE]) & (pl.col("wire") == VARINT))
            | ((pl.col("number") == _STAT_DOUBLE) & (pl.col("wire") == FIXED64))
            | ((pl.col("number") == _STAT_TEXT) & (pl.col("wire") == LENGTH))
        )
        rows = frame["row"].to_numpy()
        names = pl.DataFrame(
            {"stat": list(self.stat_names), "key": list(self.stat_names.values())},
            schema={"stat": pl.Int64, "key": pl.String},
        )
        signed = pl.col("value").reinterpret(signed=True)
        unsigned = pl.col("value") < 1 << 63
        is_integer = (pl.col("number") == _STAT_INT) | ((pl.col("number") == _STAT_UINT) & unsigned)
        return (
            frame.select(
                pl.Series(owner, spans.message[rows], dtype=pl.Int64),
                pl.Series("stat", keys[rows], dtype=pl.Int64),
                pl.when(is_integer).then(signed).alias("integer"),
                pl.when(pl.col("number") == _STAT_UINT)
                .then(pl.col("value").cast(pl.String))
                .alias("unsigned"),
                pl.Series("other", self._format_texts(frame), dtype=pl.String),
            )
            .join(names, on="stat", how="inner", maintain_order="left")
            .select(
                owner,
                "key",
                "integer",
                text=pl.coalesce("other", "unsigned", pl.col("integer").cast(pl.String)),
            )
        )

    def _format_texts(self, values: pl.DataFrame) -> list[str | None]:
        """Return, per value, the JSON of a text, a referenced text or a floating-point number; None for integers."""
        texts: list[str | None] = [None] * values.height
        references = {key: json.dumps(name[:_LONGEST_TEXT]) for key, name in self.stat_names.items()}
        others = values.with_row_index().filter(
            pl.col("number").is_in([_STAT_REFERENCE, _STAT_TEXT, _STAT_DOUBLE])
        )
        for row, number, value, start in others.select("index", "number", "value", "start").iter_rows():
            if number == _STAT_REFERENCE:
                texts[row] = references.get(value, "null")
            elif number == _STAT_TEXT:
                texts[row] = json.dumps(self.messages.read_text(start, min(value, _LONGEST_TEXT)))
            else:
                (real,) = struct.unpack("<d", struct.pack("<Q", value))
                texts[row] = json.dumps(real) if math.isfinite(real) else "null"
        return texts
