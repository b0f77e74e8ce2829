"""Repair of truncated or damaged JSON traces: PyTorch execution traces and Kineto traces.

PyTorch's execution-trace observer writes names without escaping them, and a killed job or a full disk leaves a file
without its end. The file is split where one row ends and the next begins. A row that is valid JSON is copied byte for
byte. In any other row the name, control characters and invalid escapes are escaped, and ``nan`` and ``inf`` are quoted;
if it is still not JSON, it is skipped and counted. The parts before and after the rows are kept; a missing end is
added. At most one row and one chunk of the file are in memory at a time. A Kineto trace whose end was missing gets a
member that states it: GPU events are written last, and without them the trace would be read as one of the CPU.

Limit: an unescaped name that happens to be valid JSON, such as ``back\\name`` with one backslash, is left unchanged.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from etloom.core.errors import EtloomError, LimitError, ReadError
from etloom.formats.io.atomic_file import replacing
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, read_chunks
from etloom.formats.io.native_parser import SALVAGED_MEMBER

ROW_BYTES = 1 << 26
"""The longest row, head or tail that is processed."""
_MAX_JOINED = 8  # pieces that may form one row, if arrays inside it look like rows

_ROWS = re.compile(rb'"(nodes|traceEvents)"\s*:\s*\[')
_NEXT = {
    # In an execution trace only nodes begin with an id; in the old flat schema the name comes first.
    "nodes": re.compile(rb'\}\s*,?\s*(?=\{\s*(?:"name"\s*:\s*"[^"]*"\s*,\s*)?"id"\s*:)'),
    "traceEvents": re.compile(rb'\}\s*,?\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"\s*:)'),
}
_END = re.compile(r'\]\s*(?:,\s*"finish_ts"\s*:\s*-?\d+\s*)?\}')


@dataclass
class SalvagedFile:
    """The result of `salvage`: path of the new file, counts of rows, and kinds of damage.

    Attributes:
        path: The new file; not written if ``is_intact``.
        kept: Rows in the new file.
        repaired: Rows of these that were not valid JSON.
        lost: Pieces that are not rows even after repair.
        problems: Kind of damage -> (count, first example).
    """

    path: Path
    kept: int = 0
    repaired: int = 0
    lost: int = 0
    problems: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def is_intact(self) -> bool:
        """True if the input file needed no repair."""
        return not self.problems

    def add_problem(self, problem: str, example: str = "") -> None:
        count, first = self.problems.get(problem, (0, " ".join(example[:120].split())))
        self.problems[problem] = (count + 1, first)


def salvage(path: Path, out: Path, progress: Callable[[int], None] | None = None) -> SalvagedFile:
    """Repair a JSON trace: write all complete rows to a new file, which is not created if the trace is intact.

    Args:
        path: The damaged file.
        out: The new file; compressed if its name ends in .gz, .zst or .zstd.
        progress: Called with the number of bytes of the damaged file as they are read.

    Returns:
        The number of rows kept, repaired and lost, and the kinds of damage.

    Raises:
        ReadError: If the file has no rows.
        LimitError: If a row has more than `ROW_BYTES`.
        EtloomError: If ``out`` is the file itself or cannot be written.
    """
    if out.exists() and path.exists() and out.samefile(path):
        raise EtloomError(
            "the output file is the file to read", where=path, remedy="choose another output file"
        )
    result = SalvagedFile(out)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            new = Path(scratch, out.name)
            with _open_output(new) as file:
                _copy(_RowSource(path, result, progress), file, result)
            if not result.is_intact:
                new.replace(out)
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=out, remedy="choose another output file"
        ) from None
    return result


def default_output_path(path: Path) -> Path:
    """Return the default path of the repaired file: x.salvaged.json.gz next to x.json.gz."""
    stem, dot, suffixes = path.name.partition(".json")
    return path.with_name(f"{stem}.salvaged{dot}{suffixes}")


class _RowSource:
    """Reads a damaged file in chunks, into a buffer of the bytes that are not processed yet."""

    def __init__(self, path: Path, result: SalvagedFile, progress: Callable[[int], None] | None) -> None:
        self.path, self.buffer, self._result = path, bytearray(), result
        self._pieces: Iterator[bytes] = read_chunks(path, progress=progress)

    def more(self) -> bool:
        """Append the next chunk of the file to the buffer; return False at the end of the readable data."""
        if len(self.buffer) > ROW_BYTES:
            raise LimitError(f"a row has more than {ROW_BYTES:,} bytes", where=self.path)
        try:
            piece = next(self._pieces, None)
        except DECOMPRESSION_ERRORS as error:
            self._result.add_problem("the compressed data is damaged or cut off", str(error))
            return False
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror or error}", where=self.path) from None
        if piece is None:
            return False
        self.buffer += piece
        return True

    def rows(self, pattern: re.Pattern[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Yield the text up to each possible end of a row and whether a comma follows; finally the remaining text."""
        while True:
            start = 0
            for match in pattern.finditer(self.buffer):
                yield bytes(self.buffer[start : match.start() + 1]), b"," in match[0]
                start = match.end()
            del self.buffer[:start]
            if not self.more():
                yield bytes(self.buffer), True
                return


def _copy(source: _RowSource, file: BinaryIO, result: SalvagedFile) -> None:
    kind, head = _read_head(source, result)
    file.write(head)
    rows = _RowWriter(file, result, kind)
    for piece, comma in source.rows(_NEXT[kind]):
        rows.add(piece, comma)
    if rows.end():
        return
    if not result.kept and not result.lost:
        result.add_problem("no rows")
    mark = f', "{SALVAGED_MEMBER}": true' if kind == "traceEvents" else ""
    file.write(b"\n]" + (f"{mark}}}".encode() if head.lstrip()[:1] == b"{" else b""))


def _read_head(source: _RowSource, result: SalvagedFile) -> tuple[str, bytes]:
    """Return the key of the rows (nodes or traceEvents), and the repaired text of the document before the first row."""
    while not (match := _ROWS.search(source.buffer)) and source.buffer.lstrip()[:1] != b"[":
        if not source.more():
            raise ReadError(
                "no rows of a trace found",
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
    text = _decode(head, result)
    if is_valid(text + "]}"):
        return kind, text.encode()
    result.add_problem("the head of the document is damaged", text)
    members = _salvage_members(text.partition("{")[2][: -len(match[0])], result)
    return kind, f'{{{"".join(f"{member}, " for member in members)}"{kind}": ['.encode()


class _RowWriter:
    """Receives the text of a damaged file in pieces and writes those that are, or can be repaired to, valid rows."""

    def __init__(self, file: BinaryIO, result: SalvagedFile, kind: str) -> None:
        self._file, self._result, self._kind = file, result, kind
        self._pending: list[bytes] = []  # pieces that are not a row alone, but may form one together
        self._tail: list[bytes] | None = None  # what follows the last row
        self._closing = ""
        self._tail_bytes = 0

    def add(self, piece: bytes, comma: bool) -> None:
        if self._tail is not None:
            self._keep_tail(piece + (b"," if comma else b""))
            return
        if self._closing:
            self._result.add_problem("the document continues after its end: two processes wrote it")
            self._closing = ""
        if self._pending:
            joined = b",".join([*self._pending, piece])
            if len(self._pending) < _MAX_JOINED and is_valid(joined):
                self._pending = []
                self._write(joined.decode())
                return
        if not self._write_row(piece):
            self._pending.append(piece)
            if len(self._pending) > _MAX_JOINED:
                self._skip(self._pending.pop(0))
        else:
            self._drop_pending()
            if self._tail is not None and comma:
                self._keep_tail(b",")
            if not comma:
                self._result.add_problem("a comma between rows is missing")

    def _write_row(self, piece: bytes) -> bool:
        """Write the row at the start of a piece of text, repaired if necessary; return False if it is not a row."""
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
            self._result.repaired += 1
            self._result.add_problem(reason, text)
        self._drop_pending()
        self._write(text[:end])
        if rest.strip(","):
            self._write_rest(rest)
        return True

    def _write_rest(self, rest: str) -> None:
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
            raise LimitError(f"the part after the rows has more than {ROW_BYTES:,} bytes")

    def _write(self, text: str) -> None:
        self._file.write((b",\n" if self._result.kept else b"\n") + text.strip().encode())
        self._result.kept += 1

    def _skip(self, piece: bytes, reason_skipped: str = "damaged, skipped") -> None:
        self._result.lost += 1
        self._result.add_problem(
            f"{_SINGULAR[self._kind]} {reason_skipped}", piece.decode("utf-8", "replace")
        )

    def _drop_pending(self) -> None:
        for piece in self._pending:
            self._skip(piece)
        self._pending = []

    def end(self) -> bool:
        """Write the repaired text that follows the last row; return False if the file is cut off before that text."""
        if self._tail is None and not self._closing:
            if (
                not self._result.kept
                and self._pending
                and _END.match(self._pending[-1].decode("utf-8", "replace").strip())
            ):
                self._write_rest(self._pending.pop().decode("utf-8", "replace").strip())
                return self.end()
            last = self._pending.pop() if self._pending else b""
            self._drop_pending()
            if last.strip():
                self._skip(last, "cut off, skipped")
            self._result.add_problem("the end of the document is missing")
            return False
        self._drop_pending()
        text = self._closing
        if self._tail is not None:
            # Pieces are split where a row might begin; only white space and a comma were removed there.
            text = b"".join(self._tail).decode("utf-8", "replace").rstrip(",\0 \t\r\n")
        if not is_valid_tail(text):
            self._result.add_problem("the part after the rows is damaged", text)
            members = _salvage_members(text.lstrip("] \n\r\t,"), self._result)
            text = "]" + "".join(f", {member}" for member in members) + "}"
        self._file.write(b"\n" + text.encode())
        return True


_SINGULAR = {"nodes": "node", "traceEvents": "event"}


def _salvage_members(text: str, result: SalvagedFile) -> list[str]:
    members, damaged = split_members(text)
    if damaged:
        result.add_problem("a member of the document is damaged, skipped", damaged)
    return members


def _decode(head: bytes, result: SalvagedFile) -> str:
    try:
        return head.decode()
    except UnicodeDecodeError:
        result.add_problem("invalid UTF-8 bytes, replaced")
        return head.decode("utf-8", "replace")


@contextlib.contextmanager
def _open_output(path: Path) -> Iterator[BinaryIO]:
    with replacing(path) as partial, partial.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(partial.name, "wb", 6, raw) as file:
                yield cast("BinaryIO", file)
        elif path.suffix in (".zst", ".zstd"):
            with zstandard.ZstdCompressor().stream_writer(raw) as writer:
                yield cast("BinaryIO", writer)
        else:
            yield raw


# Checks and repairs JSON text: one row (node or event) of a damaged trace, or the members of its document.

_NAME = re.compile(r'"name"\s*:\s*"')
_NAME_ENDS = re.compile(r'"\s*,\s*"(?:ctrl_deps|parent|id|rf_id|ph|cat|pid|tid|ts|dur|args)"\s*:')
_MAX_NAME_ENDS = 16
"""The number of possible ends of an unescaped name that are tried: each requires a scan of the whole row."""
# An unterminated string extends to the end of the text and is not searched again.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|-?\b(?:nan|inf|NaN|Infinity)\b', re.DOTALL)
_MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*"\s*:\s*)')
_INVALID_CHARACTER = re.compile(r"[\x00-\x1f]|\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})|\\")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def is_valid(text: str | bytes) -> bool:
    """Return whether the text is one JSON value other than null."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return _JSON.decode(text) is not None
    except (ValueError, RecursionError):
        return False


def is_valid_tail(text: str) -> bool:
    """Return whether the text after the last row, such as ``], "finish_ts": 1}``, ends a JSON document validly."""
    return text == "]" or is_valid('{"rows": [' + text)


def find_row_end(text: str) -> int:
    """Return the position after the JSON object at the beginning of the text, or 0 if there is none."""
    start = len(text) - len(text.lstrip(" \t\r\n,"))
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    return end if isinstance(value, dict) and value else 0


def repair_row(text: str) -> tuple[str, int, str]:
    """Repair the JSON text of one row: escape its name, control characters and backslashes, quote nan and inf.

    Returns:
        The repaired text, the position after the row in it (0: not repairable), and a description of the repair.
    """
    text = text.lstrip(" \t\r\n,")
    if end := find_row_end(text):
        return text, end, "invalid UTF-8 bytes, replaced"
    escaped = _escape_invalid_tokens(text)
    if end := find_row_end(escaped):
        return escaped, end, "unescaped control character or backslash, nan or inf; escaped"
    if name := _NAME.search(text):
        for ends in islice(_NAME_ENDS.finditer(text, name.end()), _MAX_NAME_ENDS):
            quoted = json.dumps(text[name.end() : ends.start()], ensure_ascii=False)
            named = text[: name.end() - 1] + quoted + text[ends.start() + 1 :]
            for attempt in (named, _escape_invalid_tokens(named)):
                if end := find_row_end(attempt):
                    return attempt, end, "unescaped name"
    return text, 0, ""


def _escape_invalid_tokens(text: str) -> str:
    """Return JSON text with raw control characters and invalid backslashes escaped, and nan and inf quoted."""

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return f"\\u{ord(character):04x}" if character < " " else "\\\\" if character == "\\" else character

    def escape_token(match: re.Match[str]) -> str:
        return _INVALID_CHARACTER.sub(escape, match[0]) if match[0][0] == '"' else f'"{match[0]}"'

    return _TOKEN.sub(escape_token, text)


def split_members(text: str) -> tuple[list[str], str]:
    """Split the text of a JSON object into the texts of its members, up to the first damaged member.

    Args:
        text: The object without its first brace.

    Returns:
        The text of each member up to the first that is damaged, and the text from that one on.
    """
    members: list[str] = []
    at = 0
    while match := _MEMBER.match(text, at):
        try:
            _, end = _JSON.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return members, text[at:]
        members.append(text[match.start(1) : end])
        at = end
    return members, ""
