"""Arguments of operators in an observer's file: forms (structure) and words (values) to JSON and tensors."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_MAX_ITEMS = 1 << 16
_MAX_DEPTH = 32
_WORDS_PER_TAG = {
    "T": 3,
    "O": 4,
    "U": 0,
    "i": 1,
    "d": 1,
    "c": 2,
    "t": 0,
    "f": 0,
    "N": 0,
    "s": 0,
    "v": 0,
    "o": 0,
    "G": 1,
    "R": 0,
}
_NUMBERED = "TOsvoGRIDL("
_CONSTANTS = {"t": ("true", "Bool"), "f": ("false", "Bool"), "N": ('"<None>"', "None"), "U": ("null", "")}
UNDEFINED_LAYOUT = {
    "dtype": "nullptr (uninitialized)",
    "itemsize": 0,
    "device": "",
    "shape": [],
    "stride": [],
}
UNKNOWN_LAYOUT = {"dtype": None, "itemsize": None, "device": None, "shape": None, "stride": None}


class DamagedForm(ValueError):
    """A form that cannot be."""


@dataclass
class Tensor:
    word: int  # place of its first word; -1 for an undefined one
    layout: dict[str, Any]
    has_offset: bool
    index: int
    item: int | None


@dataclass
class Form:
    """What the arguments of an operator look like: `pieces` is their JSON text with the places of words between."""

    words: int = 0
    pieces: list[str | tuple[str, int]] = field(default_factory=list)
    types: str = "[]"
    tensors: list[Tensor] = field(default_factory=list)
    groups: list[tuple[str, int]] = field(default_factory=list)  # JSON of a process group, word of its number
    reduce_op: str | None = None


def parse_form(code: bytes, layouts: dict[int, bytes], texts: dict[int, bytes]) -> Form:
    """The form that `code` describes; ids that are not defined give what is unknown. Raises Damaged."""
    return _Parser(code, layouts, texts).parse()


class _Parser:
    def __init__(self, code: bytes, layouts: dict[int, bytes], texts: dict[int, bytes]) -> None:
        self.code, self.layouts, self.texts = code, layouts, texts
        self.at = 0
        self.items = 0
        self.form = Form()
        self.index = 0
        self.item: int | None = None

    def parse(self) -> Form:
        types: list[str] = []
        while self.at < len(self.code):
            self.item = None
            self._put(", " if types else "[")
            types.append(self._value(0))
            self.index += 1
        self._put("]" if types else "[]")
        self.form.types = json.dumps(types)
        return self.form

    def _put(self, piece: str | tuple[str, int]) -> None:
        pieces = self.form.pieces
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)

    def _take(self) -> tuple[str, int]:
        tag = chr(self.code[self.at])
        self.at += 1
        if tag not in _NUMBERED:
            return tag, 0
        if self.at + 4 > len(self.code):
            raise DamagedForm("a form ends early")
        (number,) = struct.unpack_from("<I", self.code, self.at)
        self.at += 4
        return tag, number

    def _word(self, count: int) -> int:
        place = self.form.words
        self.form.words += count
        return place

    def _text(self, number: int) -> str:
        return self.texts.get(number, b"").decode("utf-8", "replace")

    def _value(self, depth: int) -> str:
        """Appends the JSON of the next value and gives its type, in PyTorch's words."""
        self.items += 1
        if self.items > _MAX_ITEMS or depth > _MAX_DEPTH or self.at >= len(self.code):
            raise DamagedForm("a form goes on too long")
        tag, number = self._take()
        if tag in "TOU":
            return self._tensor(tag, number)
        if tag in _CONSTANTS:
            self._put(_CONSTANTS[tag][0])
            return _CONSTANTS[tag][1]
        if tag in "idc":
            self._put((tag, self._word(_WORDS_PER_TAG[tag])))
            return {"i": "Int", "d": "Double", "c": "ComplexDouble"}[tag]
        if tag in "sv":
            self._put(json.dumps(self._text(number), ensure_ascii=False))
            return "String" if tag == "s" else "Device"
        if tag in "ID":
            return self._numbers(tag, number)
        if tag in "L(":
            return self._list(tag, number, depth)
        return self._object(tag, number)

    def _tensor(self, tag: str, number: int) -> str:
        layout = UNDEFINED_LAYOUT if tag == "U" else _parse_layout(self.layouts.get(number))
        word = self._word(_WORDS_PER_TAG[tag]) if tag != "U" else -1
        self.form.tensors.append(Tensor(word, layout, tag == "O", self.index, self.item))
        if self.item is not None:
            self.item += 1
        self._put("null")
        return f"Tensor({layout['dtype'] or 'unknown'})"

    def _numbers(self, tag: str, number: int) -> str:
        if number > _MAX_ITEMS:
            raise DamagedForm("a list too long")
        kind = "Int" if tag == "I" else "Double"
        self._put("[")
        for i in range(number):
            if i:
                self._put(", ")
            self._put((tag.lower(), self._word(1)))
        self._put("]")
        return f"GenericList[{','.join([kind] * number)}]"

    def _list(self, tag: str, number: int, depth: int) -> str:
        if depth == 0:
            self.item = 0
        self._put("[")
        types = []
        for i in range(number):
            if i:
                self._put(", ")
            types.append(self._value(depth + 1))
        self._put("]")
        return f"{'GenericList' if tag == 'L' else 'Tuple'}[{','.join(types)}]"

    def _object(self, tag: str, number: int) -> str:
        text = self._text(number)
        kind = text if tag == "o" else "Object"
        if tag == "G":
            self.form.groups.append((text, self._word(1)))
        elif tag == "R":
            self.form.reduce_op = text
        elif tag != "o":
            raise DamagedForm(f"no such tag: {tag!r}")
        self._put(json.dumps(f"<{kind}>"))
        return kind


def _parse_layout(text: bytes | None) -> dict[str, Any]:
    try:
        layout = json.loads(text or b"null")
    except ValueError:
        return UNKNOWN_LAYOUT
    return layout if isinstance(layout, dict) and layout.keys() >= UNKNOWN_LAYOUT.keys() else UNKNOWN_LAYOUT


def format_values(form: Form, words: Words) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The distinct JSON texts of calls of this form, and which of them each row of `words` is."""
    places = [(kind, place) for kind, place in (p for p in form.pieces if not isinstance(p, str))]
    if not places:
        return ["".join(map(str, form.pieces))], np.zeros(len(words), np.int64)
    columns = sorted({place + i for kind, place in places for i in range(2 if kind == "c" else 1)})
    distinct, which = np.unique(words[:, columns], axis=0, return_inverse=True)
    spread = np.zeros((len(distinct), form.words), np.uint64)
    spread[:, columns] = distinct
    integers, doubles = spread.view(np.int64).tolist(), spread.view(np.float64).tolist()
    texts = [
        "".join(
            piece if isinstance(piece, str) else _format_number(*piece, integers[row], doubles[row])
            for piece in form.pieces
        )
        for row in range(len(distinct))
    ]
    return texts, which.reshape(-1)


def _format_number(kind: str, place: int, integers: list[int], doubles: list[float]) -> str:
    if kind == "i":
        return str(integers[place])
    if kind == "d":
        return _format_double(doubles[place])
    # As complex() takes it; PyTorch's observer says only that there is one.
    return f'"{complex(doubles[place], doubles[place + 1])}"'


def _format_double(value: float) -> str:
    """Exact; what JSON has no number for is a string, as PyTorch writes it."""
    return repr(value) if math.isfinite(value) else f'"{value}"'
