"""Reads plain, gzip and zstd files as a stream of decompressed bytes, with limits against decompression bombs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import zstandard
from isal import igzip_lib

from etloom.core.errors import ReadError
from etloom.formats.io.limits import check_bytes, check_ratio, max_text_bytes

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 18

DECOMPRESSION_ERRORS: tuple[type[Exception], ...] = (
    EOFError,
    cast("type[Exception]", igzip_lib.error),
    zstandard.ZstdError,
)
"""The exceptions raised while decompressing a damaged file."""
SizeLimit = Annotated[int, "The largest accepted size of the decompressed file in bytes."]
"""The option ``limit`` of readers, with its help."""


@contextlib.contextmanager
def _open_raw(path: Path) -> Iterator[BinaryIO]:
    try:
        raw = path.open("rb")
    except OSError as error:
        raise ReadError(f"cannot be opened: {error.strerror}", where=path) from None
    with raw:
        yield raw


def detect_compression(path: Path) -> str | None:
    """Return "gzip" or "zstd" by the first bytes of a file, or None for a plain file. Raises ReadError."""
    with _open_raw(path) as raw:
        magic = raw.read(4)
    return "gzip" if magic[:2] == GZIP else "zstd" if magic == ZSTD else None


class _DecompressedStream:
    """A readable stream of decompressed bytes; damaged data raises an error after all bytes before it were returned."""

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
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _iter_gzip(raw: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of a gzip file; damaged data raises one of `DECOMPRESSION_ERRORS` at the end."""
    compressed = b""
    while True:
        # isal's GzipFile would lose up to one read of good bytes before a damaged place.
        member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while not member.eof:
            if member.needs_input:
                compressed = compressed or raw.read(_COMPRESSED_CHUNK)
                if not compressed:
                    raise EOFError("the compressed data ends early")
            piece = member.decompress(compressed, size)
            compressed = b""
            if piece:
                yield piece
        compressed = (member.unused_data or raw.read(_COMPRESSED_CHUNK)).lstrip(
            b"\0"
        )  # tape blocks are padded with zeros
        if not compressed:
            return


def _iter_decompressed(path: Path, raw: BinaryIO, size: int = _CHUNK) -> Iterator[bytes]:
    """Yield the decompressed content of a plain, gzip or zstd file in blocks of at most ``size`` bytes."""
    kind = detect_compression(path)
    if kind == "gzip":
        yield from _iter_gzip(raw, size)
        return
    source: Any = raw
    if kind == "zstd":
        zstd = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        source = zstd.stream_reader(raw, read_across_frames=True)
    while piece := source.read(size):
        yield piece


@contextlib.contextmanager
def open_decompressed(path: Path, size: int = _CHUNK) -> Iterator[_DecompressedStream]:
    """Open a plain, gzip or zstd file as a stream of decompressed bytes, which has only ``read(size)``.

    Args:
        path: The file.
        size: Bytes that are decompressed at a time.

    Raises:
        ReadError: If the file cannot be opened. Reading a damaged file raises one of `DECOMPRESSION_ERRORS`.
    """
    with _open_raw(path) as raw:
        yield _DecompressedStream(_iter_decompressed(path, raw, size))


def read_chunks(
    path: Path, limit: int | None = None, progress: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """Yield the decompressed content of a plain, gzip or zstd file in blocks of at most 1 MiB.

    Args:
        path: The file.
        limit: The largest accepted number of decompressed bytes.
        progress: Called with the number of bytes of the file itself (compressed or not) as they are read.

    Raises:
        LimitError: Beyond ``limit`` bytes, or if the part of a compressed file that was read grew too much. So a bomb
            is refused within a second, whatever its size.
        DECOMPRESSION_ERRORS: One of them, after all bytes before a damaged place.
    """
    is_compressed = detect_compression(path) is not None
    with _open_raw(path) as raw:
        total = reported = 0
        for piece in _iter_decompressed(path, raw):
            position = raw.tell()
            if progress is not None:
                progress(position - reported)
                reported = position
            total += len(piece)
            if is_compressed:
                check_ratio(position, total, path, "its first")
            if limit is not None:
                check_bytes(total, path, limit)
            yield piece


def read_content(path: Path, limit: int) -> tuple[bytes, str | None]:
    """Return the decompressed content of a file as bytes, and the decompressor's error message or None."""
    buffer, error = read_buffer(path, limit)
    return bytes(buffer), error


def read_buffer(path: Path, limit: int) -> tuple[bytearray, str | None]:
    """Return the decompressed content of a file as a bytearray, and the decompressor's error message or None.

    Returns:
        The bytes, up to the damaged place if the compressed data is damaged or cut off; and the decompressor's error
        message, or None.

    Raises:
        ReadError: If the file cannot be opened or read.
        LimitError: Beyond ``limit`` bytes or what the memory can hold, or for a decompression bomb.
    """
    limit = max_text_bytes(limit)
    buffer = bytearray()
    try:
        for piece in read_chunks(path, limit):
            buffer += piece
    except DECOMPRESSION_ERRORS as error:
        return buffer, str(error)
    except OSError as error:
        raise ReadError(f"cannot be read: {error}", where=path) from None
    return buffer, None


@contextlib.contextmanager
def decompressed_file(path: Path, suffix: str) -> Iterator[Path]:
    """Yield the path of an uncompressed file: ``path`` itself, or a temporary copy if it is compressed.

    Raises:
        ReadError: If the compressed data is damaged, or the disk is full.
        LimitError: For a decompression bomb.
    """
    if detect_compression(path) is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        copy = Path(folder) / f"decompressed{suffix}"
        try:
            with copy.open("wb") as out:
                for piece in read_chunks(path):
                    out.write(piece)
        except DECOMPRESSION_ERRORS as error:
            raise ReadError(f"the compressed data is damaged: {error}", where=path) from None
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise ReadError(
                f"cannot be decompressed: {error}", where=path, remedy=f"{free:,} bytes are free in {folder}"
            ) from None
        yield copy
