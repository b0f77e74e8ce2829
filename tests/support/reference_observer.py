"""The native decoder of observer files in slow, obvious Python: the same functions, record by record."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

BEGIN, END, DEFINE, WINDOW, NOTE = 1, 2, 3, 4, 5
HEAD_WORDS = {BEGIN: 6, END: 3, DEFINE: 2, WINDOW: 3, NOTE: 2}
CHUNK_WORDS = 8
LOW = 0xFFFFFFFF
NEVER = 2**63 - 1


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def is_valid(chunk: list[int]) -> bool:
    head, used = chunk[0], chunk[2] >> 32
    kind, closed = (head >> 32) & 0xFF, (head >> 40) & 0xFF
    if head & LOW != 0x4B4E4843 or kind not in (1, 2) or used % 8 or used > (len(chunk) - CHUNK_WORDS) * 8:
        return False
    words = chunk[CHUNK_WORDS : CHUNK_WORDS + used // 8]
    sums = (sum(words) % 2**64, sum(word * (i + 1) for i, word in enumerate(words)) % 2**64)
    return closed != 1 or sums == (chunk[5], chunk[6])


class Reader:
    """Walks the valid chunks of a file in the order of their allocation."""

    def __init__(self, words: np.ndarray, chunk_words: int, declared: int) -> None:
        self.words = [int(word) for word in words]
        self.damaged_chunks: list[int] = []
        self.damaged_records = self.damaged_definitions = 0
        self.begins: dict[int, dict[str, Any]] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self.duplicates = 0
        self.definitions: dict[tuple[int, int, int], bytes] = {}
        self.incomplete: dict[tuple[int, int, int], bytes] = {}
        self.notes: list[tuple[int, int, int]] = []
        self.windows: list[tuple[bool, int]] = []
        chunks = []
        for number in range(len(words) // chunk_words):
            chunk = self.words[number * chunk_words : (number + 1) * chunk_words]
            if is_valid(chunk):
                chunks.append((chunk[1], number))
            elif chunk[0] or number < declared:
                self.damaged_chunks.append(number)
        for _, number in sorted(chunks):
            self.walk(number * chunk_words)

    def walk(self, begin: int) -> None:
        _, _, packed, os_tid, rf_tid = self.words[begin : begin + 5]
        at, stream = begin + CHUNK_WORDS, packed & LOW
        end = at + (packed >> 32) // 8
        while at < end:
            kind, size = self.words[at] & 0xFF, (self.words[at] >> 16) & 0xFFFF
            if kind not in HEAD_WORDS or size < HEAD_WORDS[kind] or at + size > end:
                self.damaged_records += 1
                return
            record = self.words[at : at + size]
            flags, number = (record[0] >> 8) & 0xFF, record[0] >> 32
            listed = (
                (stream << 32 | number, at + HEAD_WORDS[kind], size - HEAD_WORDS[kind])
                if number
                else (0, 0, 0)
            )
            found = {
                "record": record,
                "flags": flags,
                "list": listed,
                "stream": stream,
                "tids": (os_tid, rf_tid),
            }
            if kind == BEGIN:
                self.duplicates += record[2] in self.begins
                self.begins.setdefault(record[2], found)
            elif kind == END:
                self.ends.setdefault(record[2], found)
            elif kind == DEFINE:
                self.define((flags, stream, number), record)
            elif kind == WINDOW:
                self.windows.append((flags == 1, signed(record[1])))
            else:
                self.notes.append((stream, number, record[1]))
            at += size

    def define(self, key: tuple[int, int, int], record: list[int]) -> None:
        length, continues = record[1] & LOW, record[1] >> 32
        content = b"".join(struct.pack("<Q", word) for word in record[2:])
        if length > len(content):
            self.damaged_definitions += 1
            return
        content = self.incomplete.pop(key, b"") + content[:length]
        if continues:
            self.incomplete[key] = content
        else:
            self.definitions.setdefault(key, content)


def observer_records(words: np.ndarray, chunk_words: int, declared: int) -> dict[str, Any]:
    reader = Reader(words, chunk_words, declared)
    handles = sorted(reader.begins)
    row_by_handle = {handle: row for row, handle in enumerate(handles)}
    rows, missing_parents = [], 0
    for handle in handles:
        begin, end = reader.begins[handle], reader.ends.get(handle)
        _, start, _, enclosing, seq, packed = begin["record"][:6]
        parent = row_by_handle.get(enclosing, -1) if enclosing < handle else -1
        missing_parents += parent < 0 and enclosing != 0
        rows.append(
            {
                "handle": handle,
                "name": begin["stream"] << 32 | packed & LOW,
                "start": signed(start),
                "end": 0 if end is None else signed(end["record"][1]),
                "seq_id": signed(seq),
                "rf_tid": signed(begin["tids"][1]),
                "os_tid": signed(begin["tids"][0]),
                "parent": parent,
                "fw_tid": (packed >> 32) & 0xFFFF,
                "scope": (packed >> 48) & 0xFF,
                "has_end": end is not None,
                "raised": end is not None and end["flags"] & 1,
                "lists": (begin["list"], (0, 0, 0) if end is None else end["list"]),
            }
        )
    types = {"handle": "u8", "name": "u8", "fw_tid": "u2", "scope": "u1", "has_end": "u1", "raised": "u1"}
    names = ("handle", "name", "start", "end", "seq_id", "rf_tid", "os_tid", "parent", "fw_tid", "scope")
    lists = [
        tuple(
            np.array([row["lists"][io][i] for row in rows], dtype)
            for i, dtype in enumerate(("u8", "u8", "i8"))
        )
        for io in range(2)
    ]
    return {
        "damaged_chunks": (len(reader.damaged_chunks), (reader.damaged_chunks or [0])[0]),
        "damaged_records": reader.damaged_records,
        "damaged_definitions": reader.damaged_definitions,
        "duplicates": reader.duplicates,
        "ends_without_begin": len(reader.ends.keys() - reader.begins.keys()),
        "missing_parents": missing_parents,
        "forms": sorted({row["lists"][io][0] for row in rows for io in range(2)} - {0}),
        "definitions": [(*key, content) for key, content in reader.definitions.items()],
        "notes": reader.notes,
        "windows": reader.windows,
        "lists": lists,
        "operators": {
            name: np.array([row[name] for row in rows], types.get(name, "i8"))
            for name in (*names, "has_end", "raised")
        },
    }


def format_number(tag: str, words: list[int]) -> str:
    if tag == "i":
        return str(signed(words[0]))
    numbers = struct.unpack(f"<{len(words)}d", struct.pack(f"<{len(words)}Q", *words))
    if tag == "c":
        return f'"{complex(*numbers)}"'
    return repr(numbers[0]) if math.isfinite(numbers[0]) else f'"{numbers[0]}"'


def observer_arguments(words: np.ndarray, lists: list[Any], forms: list[Any]) -> dict[str, Any]:
    by_key = {form[0]: number for number, form in enumerate(forms)}
    first_tensors = np.cumsum([0, *(len(form[3]) for form in forms)]).tolist()
    texts = ["[]"]
    sides: list[tuple[list[int], list[int]]] = [([], []), ([], [])]
    tensors: list[tuple[int, ...]] = []
    damaged = 0
    for operator in range(len(lists[0][0])):
        for io in range(2):
            key, first, size = (int(column[operator]) for column in lists[io])
            number = by_key.get(key, -1)
            if number >= 0 and forms[number][1] != size:
                number = -1
            damaged += key != 0 and number < 0
            sides[io][0].append(number)
            sides[io][1].append(0 if number < 0 else len(texts))
            if number < 0:
                continue
            values = [int(word) for word in words[first : first + size]]
            _, _, pieces, places = forms[number]
            texts.append(
                "".join(
                    piece
                    if isinstance(piece, str)
                    else format_number(piece[0], values[piece[1] :][: 2 if piece[0] == "c" else 1])
                    for piece in pieces
                )
            )
            for i, (word, has_offset) in enumerate(places):
                address, storage, version = (0, 0, 0) if word < 0 else values[word : word + 3]
                offset = values[word + 3] if has_offset else 0
                tensor = first_tensors[number] + i + io * first_tensors[-1]
                tensors.append((operator, tensor, address, storage, signed(version), signed(offset)))
    columns = {
        "operator": "i8",
        "tensor": "i4",
        "address": "u8",
        "storage": "u8",
        "version": "i8",
        "offset": "i8",
    }
    return {
        "damaged": damaged,
        "texts": texts,
        "sides": [tuple(np.array(column, np.int32) for column in side) for side in sides],
        **{
            name: np.array([tensor[i] for tensor in tensors], dtype)
            for i, (name, dtype) in enumerate(columns.items())
        },
    }


def observer_incarnations(
    address: np.ndarray,
    time: np.ndarray,
    begin: np.ndarray,
    is_created: np.ndarray,
    version: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    order = sorted(range(len(address)), key=lambda row: (address[row], time[row]))
    is_new, numbers = np.zeros(len(order), np.uint8), np.zeros(len(order), np.int64)
    for place, row in enumerate(order):
        before = order[place - 1]
        new = place == 0 or address[before] != address[row] or (is_created[row] and time[before] < begin[row])
        if not new and version is not None:
            new = version[row] < version[before] != NEVER
        is_new[row] = new
        numbers[row] = (numbers[before] if place else 0) + new
    return is_new, numbers
