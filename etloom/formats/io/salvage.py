"""Making a truncated or damaged JSON trace whole: PyTorch execution traces, and Kineto traces.

PyTorch's execution-trace observer writes names without escaping them, and a job that is killed, or a full disk, leaves
a file without its end. Here the file is cut where one row ends and the next begins. A row that is valid JSON is copied
byte for byte; one that is not has its name escaped anew, its raw control characters and unknown escapes spelt out, and
its ``nan`` and ``inf`` quoted; one that is no JSON even then is left out and counted. Head and tail of the document are
kept, or closed. No more than one row and one chunk of the file are in memory at a time.

What cannot be known: a raw name that happens to be valid JSON, as ``back\\name`` with one backslash, is left as it is.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from etloom.core.errors import EtloomError, LimitError, ReadError
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, read_chunks
from etloom.formats.io.json_repair import find_row_end, is_valid, is_valid_tail, repair_row, split_members

ROW_BYTES = 1 << 26
"""The longest row, head or tail that is looked at."""
_JOINED = 8  # pieces that may be one row: a row whose own arrays look like rows

_ROWS = re.compile(rb'"(nodes|traceEvents)"\s*:\s*\[')
_NEXT = {
    # Of an execution trace only nodes begin with an id; in the flat schema of old the name comes first.
    "nodes": re.compile(rb'\}\s*,?\s*(?=\{\s*(?:"name"\s*:\s*"[^"]*"\s*,\s*)?"id"\s*:)'),
    "traceEvents": re.compile(rb'\}\s*,?\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"\s*:)'),
}
_END = re.compile(r'\]\s*(?:,\s*"finish_ts"\s*:\s*-?\d+\s*)?\}')


@dataclass
class SalvageResult:
    """What became of a file."""

    kept: int = 0  # rows in the new file
    repaired: int = 0  # of these, rows that were no valid JSON
    lost: int = 0  # pieces that were no row even after repair
    troubles: dict[str, tuple[int, str]] = field(default_factory=dict)  # what -> how often, the first

    @property
    def whole(self) -> bool:
        """Whether there was nothing to repair."""
        return not self.troubles

    def note(self, what: str, example: str = "") -> None:
        count, first = self.troubles.get(what, (0, " ".join(example[:120].split())))
        self.troubles[what] = (count + 1, first)


def salvage(path: Path, out: Path, progress: Callable[[int], None] | None = None) -> SalvageResult:
    """Write a valid trace with every whole row of ``path`` to ``out``, packed as the end of its name says.

    Nothing is written where there is nothing to repair. Raises ReadError for a file without rows, LimitError for a row
    of more than `ROW_BYTES`, EtloomError where ``out`` is the file itself or cannot be written.
    """
    if out.exists() and path.exists() and out.samefile(path):
        raise EtloomError("would be overwritten", where=path, remedy="name another file with --out")
    found = SalvageResult()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            new = Path(scratch, out.name)
            with _open_output(new) as file:
                _copy(_RowSource(path, found, progress), file, found)
            if not found.whole:
                new.replace(out)
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=out, remedy="name another file with --out"
        ) from None
    return found


def default_output_path(path: Path) -> Path:
    """x.json.gz -> x.salvaged.json.gz, beside it."""
    stem, dot, suffixes = path.name.partition(".json")
    return path.with_name(f"{stem}.salvaged{dot}{suffixes}")


class _RowSource:
    """The file as a growing buffer of what has not been used yet."""

    def __init__(self, path: Path, found: SalvageResult, progress: Callable[[int], None] | None) -> None:
        self.path, self.buffer, self._found = path, bytearray(), found
        self._pieces: Iterator[bytes] = read_chunks(path, progress=progress)

    def more(self) -> bool:
        """Append the next chunk; False at the end."""
        if len(self.buffer) > ROW_BYTES:
            raise LimitError(f"a row holds more than {ROW_BYTES:,} bytes", where=self.path)
        try:
            piece = next(self._pieces, None)
        except DECOMPRESSION_ERRORS as error:
            self._found.note("the packing is damaged or cut off", str(error))
            return False
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror or error}", where=self.path) from None
        if piece is None:
            return False
        self.buffer += piece
        return True

    def rows(self, pattern: re.Pattern[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Pieces that end where a row may end, and whether a comma follows; the last is all that is left."""
        while True:
            start = 0
            for match in pattern.finditer(self.buffer):
                yield bytes(self.buffer[start : match.start() + 1]), b"," in match[0]
                start = match.end()
            del self.buffer[:start]
            if not self.more():
                yield bytes(self.buffer), True
                return


def _copy(source: _RowSource, file: BinaryIO, found: SalvageResult) -> None:
    kind, head = _read_head(source, found)
    file.write(head)
    rows = _RowWriter(file, found, kind)
    for piece, comma in source.rows(_NEXT[kind]):
        rows.take(piece, comma)
    if rows.end():
        return
    if not found.kept and not found.lost:
        found.note("it holds no row")
    file.write(b"\n]" + (b"}" if head.lstrip()[:1] == b"{" else b""))


def _read_head(source: _RowSource, found: SalvageResult) -> tuple[str, bytes]:
    """The kind of rows, and the document up to the first of them, made valid."""
    while not (match := _ROWS.search(source.buffer)) and source.buffer.lstrip()[:1] != b"[":
        if not source.more():
            raise ReadError(
                "no rows of a trace are in it",
                where=source.path,
                remedy="expected JSON with nodes or traceEvents",
            )
    if match is None or source.buffer.lstrip()[:1] == b"[":  # a bare array of events
        end = source.buffer.index(b"[") + 1
        head = bytes(source.buffer[:end])
        del source.buffer[:end]
        return "traceEvents", head
    head, kind = bytes(source.buffer[: match.end()]), match[1].decode()
    del source.buffer[: match.end()]
    text = _decode(head, found)
    if is_valid(text + "]}"):
        return kind, text.encode()
    found.note("the head of the document is damaged", text)
    members = _salvage_members(text.partition("{")[2][: -len(match[0])], found)
    return kind, f'{{{"".join(f"{one}, " for one in members)}"{kind}": ['.encode()


class _RowWriter:
    """Takes pieces one after another, writes those that are rows."""

    def __init__(self, file: BinaryIO, found: SalvageResult, kind: str) -> None:
        self._file, self._found, self._kind = file, found, kind
        self._held: list[bytes] = []  # pieces that are no row alone, and may be one together
        self._tail: list[bytes] | None = None  # what stands behind the last row
        self._closing = ""
        self._tail_bytes = 0

    def take(self, piece: bytes, comma: bool) -> None:
        if self._tail is not None:
            self._keep_tail(piece + (b"," if comma else b""))
            return
        if self._closing:
            self._found.note("the document was closed, and goes on: written by two processes")
            self._closing = ""
        if self._held:
            joined = b",".join([*self._held, piece])
            if len(self._held) < _JOINED and is_valid(joined):
                self._held = []
                self._write(joined.decode())
                return
        if not self._row(piece):
            self._held.append(piece)
            if len(self._held) > _JOINED:
                self._lose(self._held.pop(0))
        else:
            self._drop_held()
            if self._tail is not None and comma:
                self._keep_tail(b",")
            if not comma:
                self._found.note("a comma between rows is missing")

    def _row(self, piece: bytes) -> bool:
        """Write the row that a piece is or begins with; False where it is none."""
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = ""
        end = find_row_end(text)
        reason = ""
        if not end:
            text, end, reason = repair_row(piece.decode("utf-8", "replace"))
        if not end:
            return not piece.strip()
        rest = text[end:].strip()
        if rest and not rest.startswith(("]", ",")):
            return False
        if reason:
            self._found.repaired += 1
            self._found.note(reason, text)
        self._drop_held()
        self._write(text[:end])
        if rest.strip(","):
            self._behind(rest)
        return True

    def _behind(self, rest: str) -> None:
        if _END.fullmatch(rest):
            self._closing = rest
        else:
            self._tail = []
            self._keep_tail(rest.encode())

    def _keep_tail(self, piece: bytes) -> None:
        assert self._tail is not None
        self._tail.append(piece)
        self._tail_bytes += len(piece)
        if self._tail_bytes > ROW_BYTES:
            raise LimitError(f"what follows the rows holds more than {ROW_BYTES:,} bytes")

    def _write(self, text: str) -> None:
        self._file.write((b",\n" if self._found.kept else b"\n") + text.strip().encode())
        self._found.kept += 1

    def _lose(self, piece: bytes, what: str = "damaged, left out") -> None:
        self._found.lost += 1
        self._found.note(f"{_SINGULAR[self._kind]} {what}", piece.decode("utf-8", "replace"))

    def _drop_held(self) -> None:
        for piece in self._held:
            self._lose(piece)
        self._held = []

    def end(self) -> bool:
        """Write the end of the document, if the file has it; whether it was."""
        if self._tail is None and not self._closing:
            if (
                not self._found.kept
                and self._held
                and _END.match(self._held[-1].decode("utf-8", "replace").strip())
            ):
                self._behind(self._held.pop().decode("utf-8", "replace").strip())
                return self.end()
            last = self._held.pop() if self._held else b""
            self._drop_held()
            if last.strip():
                self._lose(last, "cut off, left out")
            self._found.note("the end of the document is missing")
            return False
        self._drop_held()
        text = self._closing
        if self._tail is not None:
            # Pieces were cut where a row might begin; what was cut there is white space and a comma.
            text = b"".join(self._tail).decode("utf-8", "replace").rstrip(",\0 \t\r\n")
        if not is_valid_tail(text):
            self._found.note("what follows the rows is damaged", text)
            members = _salvage_members(text.lstrip("] \n\r\t,"), self._found)
            text = "]" + "".join(f", {one}" for one in members) + "}"
        self._file.write(b"\n" + text.encode())
        return True


_SINGULAR = {"nodes": "node", "traceEvents": "event"}


def _salvage_members(text: str, found: SalvageResult) -> list[str]:
    members, damaged = split_members(text)
    if damaged:
        found.note("a member of the document is damaged, left out", damaged)
    return members


def _decode(head: bytes, found: SalvageResult) -> str:
    try:
        return head.decode()
    except UnicodeDecodeError:
        found.note("bytes that are no UTF-8, replaced")
        return head.decode("utf-8", "replace")


@contextlib.contextmanager
def _open_output(path: Path) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=6) as file:
            yield cast("BinaryIO", file)
    elif path.suffix in (".zst", ".zstd"):
        with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as writer:
            yield cast("BinaryIO", writer)
    else:
        with path.open("wb") as raw:
            yield raw
