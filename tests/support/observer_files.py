"""An observer's file built by hand: records, chunks, and a small whole file."""

from __future__ import annotations

import struct

import numpy as np

CHUNK = 4096
HANDLES = (10, 11, 12)


def record(kind: int, flags: int, number: int, *words: int, raw: bytes = b"") -> bytes:
    body = b"".join(struct.pack("<Q", word % (1 << 64)) for word in words) + raw
    body += bytes(-len(body) % 8)
    return struct.pack("<BBHI", kind, flags, 1 + len(body) // 8, number) + body


def define(kind: int, number: int, text: bytes) -> bytes:
    return record(3, kind, number, len(text), raw=text)


def begin(
    handle: int, ns: int, parent: int = 0, form: int = 0, words: tuple[int, ...] = (), scope: int = 0
) -> bytes:
    return record(1, 0, form, ns, handle, parent, -1, 1 | scope << 48, *words)


def chunk(kind: int, order: int, payload: bytes, closed: bool = True) -> bytes:
    words = np.frombuffer(payload, "<u8")
    weights = np.arange(1, len(words) + 1, dtype=np.uint64)
    sums = (
        (int(words.sum(dtype=np.uint64)), int((words * weights).sum(dtype=np.uint64))) if closed else (0, 0)
    )
    head = struct.pack("<4sBBHQIIQQQQQ", b"CHNK", kind, closed, 0, order, 0, len(payload), 77, 1, *sums, 1)
    return (head + payload).ljust(CHUNK, b"\0")


def whole(*chunks: bytes) -> bytes:
    head = struct.pack(
        "<8sIIIIIIQqqQQ", b"ETLOBS\r\n", 1, 4096, CHUNK, 1, 0, 5, 1 << 20, 1000, 0, len(chunks), 1
    )
    return head.ljust(4096, b"\0") + b"".join(chunks)


LAYOUT = b'{"dtype":"float","itemsize":4,"device":"cpu","shape":[2,3],"stride":[3,1]}'
DICTIONARY = b"".join(
    (
        define(1, 1, b"aten::add\0Tensor\0aten::add.Tensor(Tensor self) -> Tensor"),
        define(2, 1, LAYOUT),
        define(3, 1, b"T\1\0\0\0di"),
        define(3, 2, b"O\1\0\0\0"),
    )
)
TENSOR = (0xA0, 0xB0, 4)
HALF = struct.unpack("<Q", struct.pack("<d", 0.5))[0]
EVENTS = b"".join(
    (
        begin(10, 100, form=1, words=(*TENSOR, HALF, -3)),
        begin(11, 110, parent=10),
        record(2, 0, 2, 150, 11, 0xC0, 0xB0, 0, 6),
        record(2, 1, 0, 200, 10),
        begin(12, 210),
    )
)
FILE = whole(chunk(2, 0, DICTIONARY), chunk(1, 1, EVENTS))
