"""Perfetto's protobuf traces (.pftrace, .perfetto-trace), as the Perfetto SDK, rocprofv3 and `etloom export` do.

Read: track events (slices, instants, counters, flows) with their tracks, interned names and debug annotations, clock
snapshots, packets compressed with zlib or zstd, the older events that hold phases of the Trace Event Format, and the
members of a Chrome trace that was converted. Events become those of a Kineto trace: annotations are arguments, so that
a converted trace of PyTorch's profiler is linked as the original; rocprofv3's categories become Kineto's. A track
without a thread is identified by its name. Other packets (ftrace, heap graphs, CPU samples) are not read, but counted.

Times are since the epoch if a clock snapshot states the wall clock, else those of the trace's clock.

Format: https://perfetto.dev/docs/reference/trace-packet-proto, read by field number in native/parse/perfetto.cpp.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import zstandard

from etloom import _native
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats import kineto
from etloom.formats.io.compression import (
    DECOMPRESSION_ERRORS,
    SizeLimit,
    open_decompressed,
    read_buffer,
)
from etloom.formats.io.limits import check_bytes, check_ratio, check_rows, max_rows, max_text_bytes
from etloom.formats.io.native_parser import (
    FIRST_TEXT_ID,
    ParsedFile,
    build_frames,
    load_header,
    state_troubles,
)
from etloom.formats.io.protobuf_fields import LENGTH, VARINT, MessageData
from etloom.formats.perfetto.rocprofv3 import categorize

RANKS_MEMBER = "etloom_ranks"
"""Member of a file that has several ranks or tracks of an analysis: rank -> processes (number in the file -> recorded
number), header, clock."""
_MAX_BYTES = 1 << 36
_CHUNK = 1 << 20
_ZSTD_CHUNK = 1 << 11
"""Compressed bytes that are decompressed at once; to at most 64 MiB."""
_DAMAGED_PACKET = b"\x0a\x03\x92\x03\x00"
"""A packet with an empty field 50, which is counted as not read."""
_MAX_FIELD = 1 << 10
_SNIFFED_PACKETS = 3
_NUMBERS = (3, 8, 10, 13, 41, 42, 58, 79, 87, 98)
"""Fields of a packet that are numbers; all others are messages or bytes."""
_EVIDENCE = ((8, VARINT), (10, VARINT), *((number, LENGTH) for number in (6, 11, 33, 36, 50, 60, 89, 133)))
"""Fields of which each trace has one in its first packets."""
_HEAD_BYTES = 1 << 16
_RANK = re.compile(rb'distributedInfo.{1,12}?\{[^{}\[]{0,4096}?"rank"\s*:\s*"?(\d{1,9})', re.DOTALL)
_ANNOTATION_FIELDS = 1 << 30
_NAMES = {
    1: "ftrace events", 2: "process tree", 5: "Chrome events as JSON", 7: "system statistics", 9: "process statistics",
    33: "trace configuration", 34: "ftrace statistics", 35: "trace statistics", 37: "heap profile",
    43: "process descriptor", 50: "compressed packets that are damaged", 51: "Chrome metadata",
    56: "heap graph", 66: "CPU samples", 67: "CPU information", 89: "trace identifier",
    133: "compressed packets that are damaged", 135: "stack samples",
}  # fmt: skip
_COMPRESSED = {50, 133}
_ABOUT_TRACE = (33, 34, 35, 36, 45, 51, 69, 72, 89, 124, 126)
"""Packets that describe the recording, without which nothing is missing."""


def sniff(head: bytes) -> bool:
    """Return whether a file starts with packets of a Perfetto trace."""
    at, has_evidence = 0, False
    for _ in range(_SNIFFED_PACKETS):
        length, start = _read_length(head, at)
        is_cut = start + length > len(head) if start else head[at:] == b"\x0a"
        if not start:
            return has_evidence and (is_cut or at == len(head))
        packet = MessageData(head[start : start + length])
        fields = packet.scan_all()
        numbers, types = fields.number.tolist(), fields.wire.tolist()
        has_evidence |= any(field in _EVIDENCE for field in zip(numbers, types, strict=True))
        for number, wire in zip(numbers, types, strict=True):
            if number > _MAX_FIELD or wire != (VARINT if number in _NUMBERS else LENGTH):
                return False
        if is_cut or packet.damaged:
            return has_evidence and is_cut
        at = start + length
    return has_evidence


def _read_length(head: bytes, at: int) -> tuple[int, int]:
    """Return the length of the packet at an offset, and the offset of its content; (0, 0) if there is none."""
    value = 0
    if head[at : at + 1] != b"\x0a":
        return 0, 0
    for i, byte in enumerate(head[at + 1 : at + 6]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + 2 + i
    return 0, 0


def find_rank(path: Path) -> int | None:
    """Return the rank of a trace that was converted from PyTorch's profiler, or None. Raises ReadError."""
    with open_decompressed(path, _HEAD_BYTES) as stream:
        try:
            match = _RANK.search(stream.read(_HEAD_BYTES))
        except DECOMPRESSION_ERRORS:
            return None
    return None if match is None else int(match[1])


def read(path: Path, *, limit: SizeLimit = _MAX_BYTES) -> Trace | Job:
    """Read a Trace, or a Job if `etloom export` wrote several ranks to the file.

    Raises:
        ReadError: The file has no event that can be read.
        LimitError: The file is too large, or a decompression bomb.
    """
    content, error = read_buffer(path, limit)
    stats: list[Stat] = []
    if error is not None:
        example = f"damaged or cut-off compressed data: {error}"
        stats.append(Stat("read.corrupt_compression", "data_loss", 1, example))
    rows = max_rows()
    columns, summary = _native.read_perfetto(content, rows)
    if _COMPRESSED & summary["unread_packets"].keys():
        columns, summary = _native.read_perfetto(_decompress_packets(content, path, limit), rows)
    tables = build_frames(columns, summary["packets"])
    check_rows(summary["rows"], path, rows)
    stats += [*state_troubles(summary["troubles"]), *_state_losses(summary)]
    if not tables["events"].height + tables["counters"].height + tables["memory"].height:
        raise ReadError(
            f"has no track event{_name_packets(summary['unread_packets'])}",
            where=path,
            remedy="record track events: the data source track_event of the Perfetto SDK",
        )
    header = load_header(summary["header"], stats)
    if summary["epoch"]:
        header["baseTimeNanoseconds"] = summary["epoch"]
    ranks = header.pop(RANKS_MEMBER, None)
    parsed = ParsedFile(tables, header, stats, summary["packets"])
    parts = dict(_separate_ranks(parsed, ranks)) if isinstance(ranks, dict) else {}
    if len(parts) < 2:
        return _build_trace(next(iter(parts.values()), parsed), path)
    return Job({rank: _build_trace(part, path) for rank, part in parts.items()}, {"formats": ["perfetto"]})


def _build_trace(parsed: ParsedFile, path: Path) -> Trace:
    trace = kineto.to_trace(parsed, path)
    return categorize(trace.replace(meta={**trace.meta, "formats": ["perfetto"]}))


def _decompress_packets(content: bytearray, path: Path, limit: int) -> bytes:
    """Return a trace with the packets of its compressed packets in their place.

    Raises:
        LimitError: They are larger than allowed.
    """
    compressed = _native.find_compressed_packets(content)
    limit = max_text_bytes(limit)
    pieces: list[bytes | bytearray] = []
    total = last = 0
    for start, end, data, size, is_zstd in compressed:
        pieces.append(content[last:start])
        packets: list[bytes] = []
        try:
            for piece in _decompress(bytes(content[data : data + size]), is_zstd):
                total += len(piece)
                check_ratio(len(content), total, path)
                check_bytes(total, path, limit)
                packets.append(piece)
        except (zlib.error, zstandard.ZstdError):
            packets = [_drop_cut_packet(b"".join(packets)), _DAMAGED_PACKET]
        pieces += packets
        last = end
    return b"".join([*pieces, content[last:]])


def _decompress(data: bytes, is_zstd: bool) -> Iterator[bytes]:
    """Yield the decompressed bytes. Raises an error of the library where the data is damaged or ends early."""
    if is_zstd:
        frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        for at in range(0, len(data), _ZSTD_CHUNK):
            if not frame.eof:
                yield frame.decompress(data[at : at + _ZSTD_CHUNK])
        is_complete = frame.eof
    else:
        decompressor = zlib.decompressobj()
        while piece := decompressor.decompress(data, _CHUNK):
            yield piece
            data = decompressor.unconsumed_tail
        is_complete = decompressor.eof
    if not is_complete:
        raise zlib.error("ends early")


def _drop_cut_packet(data: bytes) -> bytes:
    """Return the packets before the first that is cut off, behind which the next packet of the file would be lost."""
    at = 0
    while (place := _read_length(data, at))[1] and sum(place) <= len(data):
        at = sum(place)
    return data[:at]


def _state_losses(summary: Mapping[str, Any]) -> Iterator[Stat]:
    yield Stat(
        "read.truncated",
        "data_loss",
        int(summary["is_cut"]),
        f"the file ends inside a packet; everything before was read ({summary['trailing']:,} bytes are left)",
    )
    trailing = 0 if summary["is_cut"] else summary["trailing"]
    yield Stat("read.trailing_bytes", "data_loss", trailing, "bytes from the first that are not a packet")
    yield Stat("read.pftrace_damaged", "data_loss", summary["damaged"], "a field that exceeds its message")
    unread: dict[int, int] = summary["unread_packets"]
    about = {number: count for number, count in unread.items() if number in _ABOUT_TRACE}
    lost = {number: n for number, n in unread.items() if number not in (*_ABOUT_TRACE, *_COMPRESSED)}
    damaged = sum(unread.get(number, 0) for number in _COMPRESSED)
    yield Stat("read.corrupt_compression", "data_loss", damaged, "compressed packets that are damaged")
    yield Stat(
        "read.pftrace_other_packet", "info", sum(lost.values()), _name_packets(lost).removeprefix(", only ")
    )
    yield Stat(
        "read.pftrace_description", "info", sum(about.values()), _name_packets(about).removeprefix(", only ")
    )
    fields = ", ".join(
        f"{'annotation' if number >= _ANNOTATION_FIELDS else 'event'} field {number % _ANNOTATION_FIELDS} ({count:,})"
        for number, count in sorted(summary["unread_fields"].items())[:8]
    )
    yield Stat("read.pftrace_field", "info", sum(summary["unread_fields"].values()), fields)


def _name_packets(unread: Mapping[int, int]) -> str:
    """Return the kinds of packets that are not read, most frequent first, after ", only "; empty if there are none."""
    largest = sorted(unread.items(), key=lambda item: -item[1])[:6]
    names = ", ".join(
        f"{_NAMES.get(number, f'packet field {number}')} ({count:,})" for number, count in largest
    )
    return f", only {names}" if names else ""


def _separate_ranks(parsed: ParsedFile, ranks: Mapping[str, Any]) -> Iterator[tuple[int, ParsedFile]]:
    """Yield the ranks of a file in which the processes of each have numbers of their own.

    Processes that the member RANKS_MEMBER does not name (tracks of an analysis) are left out.
    """
    stats = parsed.stats
    present = {
        pid
        for table in parsed.tables.values()
        if "pid" in table.columns
        for pid in table["pid"].unique().to_list()
    }
    for rank, description in ranks.items():
        processes = description.get("processes") if isinstance(description, dict) else None
        if not (rank.isdecimal() and len(rank) < 10 and isinstance(processes, dict)):
            continue
        # A process belongs to one rank, so that a file cannot have more ranks than processes.
        pids = {
            number: own
            for pid, own in processes.items()
            if pid.isdecimal() and len(pid) < 19 and (number := int(pid)) in present
            if isinstance(own, str) or (type(own) is int and abs(own) < 1 << 63)
        }
        present -= pids.keys()
        if not pids:
            continue
        header = description.get("header")
        header = header if isinstance(header, dict) else {}
        if "baseTimeNanoseconds" in parsed.header and description.get("clock") == "epoch":
            header = header | {"baseTimeNanoseconds": parsed.header["baseTimeNanoseconds"]}
        tables = _select_processes(parsed.tables, pids, rank)
        header = {"distributedInfo": {"rank": int(rank)}} | header
        yield int(rank), ParsedFile(tables, header, stats, tables["events"].height)
        stats = []


def _select_processes(
    tables: Mapping[str, pl.DataFrame], processes: Mapping[int, int | str], rank: str
) -> dict[str, pl.DataFrame]:
    """Return the rows of some processes, with the recorded numbers (or names) of the processes."""
    names = tables["tracks"]["name"].cast(pl.String).to_list()
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return FIRST_TEXT_ID - texts.setdefault(text, len(texts))

    pids = {pid: number(own) if isinstance(own, str) else own for pid, own in processes.items()}
    selected = {}
    for name, table in tables.items():
        if "pid" not in table.columns:
            continue
        table = table.with_row_index("row").filter(pl.col("pid").is_in(list(pids)))
        ids = table["tid"].unique() if "tid" in table.columns else pl.Series([], dtype=pl.Int64)
        tids = {
            tid: number(names[FIRST_TEXT_ID - tid])
            for tid in ids.to_list()
            if tid is not None and 0 <= FIRST_TEXT_ID - tid < len(names)
        }
        selected[name] = table.with_columns(
            pl.col("pid").replace_strict(pids, return_dtype=pl.Int64),
            *([pl.col("tid").replace(tids)] if tids else []),
        )
    # The name of a process states its rank, and its number the order of the processes in the file.
    selected["metadata"] = (
        selected["metadata"]
        .filter(pl.col("kind").cast(pl.String) != "process_sort_index")
        .with_columns(pl.col("args").cast(pl.String).str.replace(f'"rank {rank}: ', '"', literal=True))
    )
    rows = selected["events"].select(
        pl.col("row").alias("event"), new=pl.int_range(pl.len(), dtype=pl.UInt32)
    )
    for name, table in tables.items():
        if "event" in table.columns:
            moved = table.join(rows, on="event", how="inner", maintain_order="left")
            selected[name] = moved.with_columns(event="new").drop("new")
    tracks = pl.DataFrame({"name": pl.Series(list(texts), dtype=pl.Categorical)})
    return {name: table.drop("row", strict=False) for name, table in selected.items()} | {"tracks": tracks}
