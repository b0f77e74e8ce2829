"""Opening a trace file whatever it is packed in: plain, gzip or zstd, bounded against bombs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard
from isal import igzip_lib

from etloom.core.errors import LimitError, ReadError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BOMB_RATIO = 400
"""Real traces pack 5 to 60 times; gzip's own limit is 1,032."""
BOMB_FLOOR = 1 << 28
"""Below this size (256 MiB) the ratio says nothing: a few bytes of zeros are no attack."""
_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 16

DECOMPRESSION_ERRORS: tuple[type[Exception], ...] = (
    EOFError,
    cast("type[Exception]", igzip_lib.error),
    zstandard.ZstdError,
)
"""What reading a damaged packing raises."""


@contextlib.contextmanager
def _open_raw(path: Path) -> Iterator[BinaryIO]:
    try:
        raw = path.open("rb")
    except OSError as error:
        raise ReadError(f"cannot be opened: {error.strerror}", where=path) from None
    with raw:
        yield raw


def detect_compression(path: Path) -> str | None:
    """gzip | zstd, or None for a plain file, by its first bytes. Raises ReadError."""
    with _open_raw(path) as raw:
        magic = raw.read(4)
    return "gzip" if magic[:2] == GZIP else "zstd" if magic == ZSTD else None


class _DecompressedStream:
    """A stream of unpacked bytes. What came before a damage is given out before the damage is raised."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = piece
        size = len(self._rest) if size < 0 else size
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


def _iter_gzip(raw: BinaryIO) -> Iterator[bytes]:
    """Raises one of `UNPACK_ERRORS` after the last piece that could be unpacked."""
    packed = b""
    while True:
        # isal's own GzipFile would drop up to a whole read of good bytes before the place of an error.
        member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while not member.eof:
            if member.needs_input:
                packed = packed or raw.read(_COMPRESSED_CHUNK)
                if not packed:
                    raise EOFError("the packing ends early")
            piece = member.decompress(packed, _CHUNK)
            packed = b""
            if piece:
                yield piece
        packed = (member.unused_data or raw.read(_COMPRESSED_CHUNK)).lstrip(b"\0")  # tape blocks are padded
        if not packed:
            return


def _iter_decompressed(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    kind = detect_compression(path)
    if kind == "gzip":
        yield from _iter_gzip(raw)
        return
    source: Any = raw
    if kind == "zstd":
        zstd = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        source = zstd.stream_reader(raw, read_across_frames=True)
    while piece := source.read(_CHUNK):
        yield piece


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[_DecompressedStream]:
    """The content of path as a stream, which has ``read`` only: up to so many bytes, none at the end.

    Raises ReadError when the file cannot be opened; reading a damaged one raises one of `UNPACK_ERRORS`.
    """
    with _open_raw(path) as raw:
        yield _DecompressedStream(_iter_decompressed(path, raw))


def read_chunks(
    path: Path, limit: int | None = None, progress: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """The unpacked content in pieces of at most 1 MiB; all that is whole comes before one of `UNPACK_ERRORS`.

    progress: called with the number of bytes of the file itself, packed or not, as they are read.

    Raises LimitError beyond ``limit`` bytes, or when a packed file grows by more than `BOMB_RATIO`.
    """
    packed = detect_compression(path) is not None
    with _open_raw(path) as raw:
        size = path.stat().st_size
        bound = max(size * BOMB_RATIO, BOMB_FLOOR)
        total = told = 0
        for piece in _iter_decompressed(path, raw):
            if progress is not None:
                told, before = raw.tell(), told
                progress(told - before)
            total += len(piece)
            if packed and total > bound:
                raise LimitError(
                    f"unpacks to more than {BOMB_RATIO} times its {size:,} bytes",
                    where=path,
                    remedy="unpack it yourself if you trust it",
                )
            if limit is not None and total > limit:
                raise LimitError(f"holds more than {limit:,} bytes", where=path, remedy="raise the limit")
            yield piece


def read_content(path: Path, limit: int) -> tuple[bytes, str | None]:
    """The whole unpacked content, and what cut it short: None, or the packing's own complaint.

    A file that was cut off inside its packing gives what came before the cut. Raises ReadError, LimitError.
    """
    buffer = bytearray()
    try:
        for piece in read_chunks(path, limit):
            buffer += piece
    except DECOMPRESSION_ERRORS as error:
        return bytes(buffer), str(error)
    except OSError as error:
        raise ReadError(f"cannot be read: {error}", where=path) from None
    return bytes(buffer), None


@contextlib.contextmanager
def decompressed_file(path: Path, suffix: str) -> Iterator[Path]:
    """path itself, or where it is packed a temporary unpacked copy, for libraries that want a file.

    Raises ReadError for a damaged packing and a full disk, LimitError as `chunks` does.
    """
    if detect_compression(path) is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        copy = Path(folder) / f"unpacked{suffix}"
        try:
            with copy.open("wb") as out:
                for piece in read_chunks(path):
                    out.write(piece)
        except DECOMPRESSION_ERRORS as error:
            raise ReadError(f"the packing is damaged: {error}", where=path) from None
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise ReadError(
                f"cannot be unpacked: {error}", where=path, remedy=f"{free:,} bytes are free in {folder}"
            ) from None
        yield copy
