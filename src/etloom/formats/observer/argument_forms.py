"""Decodes operator arguments in observer files: a form (types) and 64-bit words (values) become JSON and tensors."""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from etloom.formats.io.json_text import load_json

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
    """Raised if the encoded types of an operator's argument list (its form) are invalid."""


@dataclass
class Tensor:
    """A tensor among the arguments of an operator: its layout, its position, and the index of its first value word.

    Attributes:
        word: Index of its first word; -1 for an undefined tensor.
        layout: dtype, itemsize, device, shape, stride.
        has_offset: Whether its words include an offset.
        index: Index of the argument.
        item: Index within the argument if that is a list, else None.
    """

    word: int
    layout: dict[str, Any]
    has_offset: bool
    index: int
    item: int | None


@dataclass
class Form:
    """The parsed form of an operator's argument list: types, tensors, groups, and JSON with placeholders for numbers.

    Attributes:
        words: Number of words of the values.
        pieces: JSON text of the arguments; a pair (tag, index of its first word) stands for a number.
        types: JSON list of the types, in PyTorch's notation.
        tensors: The tensors.
        groups: JSON text of a process group, and the index of the word with its sequence number.
        reduce_op: Name of the reduce operation, if any.
    """

    words: int = 0
    pieces: list[str | tuple[str, int]] = field(default_factory=list)
    types: str = "[]"
    tensors: list[Tensor] = field(default_factory=list)
    groups: list[tuple[str, int]] = field(default_factory=list)
    reduce_op: str | None = None


def parse_form(code: bytes, layouts: dict[int, bytes], texts: dict[int, bytes]) -> Form:
    """Parse the encoded types of an argument list (its form); missing layouts become unknown, missing texts empty.

    Raises:
        DamagedForm: The bytes do not describe a valid form.
    """
    return _Parser(code, layouts, texts).parse()


class _Parser:
    def __init__(self, code: bytes, layouts: dict[int, bytes], texts: dict[int, bytes]) -> None:
        self.code, self.layouts, self.texts = code, layouts, texts
        self.offset = 0
        self.value_count = 0
        self.form = Form()
        self.index = 0
        self.item: int | None = None

    def parse(self) -> Form:
        types: list[str] = []
        while self.offset < len(self.code):
            self.item = None
            self._append(", " if types else "[")
            types.append(self._parse_value(0))
            self.index += 1
        self._append("]" if types else "[]")
        self.form.types = json.dumps(types)
        return self.form

    def _append(self, piece: str | tuple[str, int]) -> None:
        pieces = self.form.pieces
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)

    def _read_tag(self) -> tuple[str, int]:
        """Read the next type tag of the form and the u32 that follows it; 0 for a tag without a number."""
        tag = chr(self.code[self.offset])
        self.offset += 1
        if tag not in _NUMBERED:
            return tag, 0
        if self.offset + 4 > len(self.code):
            raise DamagedForm("a form ends early")
        (number,) = struct.unpack_from("<I", self.code, self.offset)
        self.offset += 4
        return tag, number

    def _reserve_words(self, count: int) -> int:
        """Reserve ``count`` 64-bit words for the value of an argument; return the index of the first word."""
        first = self.form.words
        self.form.words += count
        return first

    def _get_text(self, number: int) -> str:
        return self.texts.get(number, b"").decode("utf-8", "replace")

    def _parse_value(self, depth: int) -> str:
        """Parse the next value: append its JSON text to the form, return its type in PyTorch's notation."""
        self.value_count += 1
        if self.value_count > _MAX_ITEMS or depth > _MAX_DEPTH or self.offset >= len(self.code):
            raise DamagedForm("a form is too long or incomplete")
        tag, number = self._read_tag()
        if tag in "TOU":
            return self._parse_tensor(tag, number)
        if tag in _CONSTANTS:
            self._append(_CONSTANTS[tag][0])
            return _CONSTANTS[tag][1]
        if tag in "idc":
            self._append((tag, self._reserve_words(_WORDS_PER_TAG[tag])))
            return {"i": "Int", "d": "Double", "c": "ComplexDouble"}[tag]
        if tag in "sv":
            self._append(json.dumps(self._get_text(number), ensure_ascii=False))
            return "String" if tag == "s" else "Device"
        if tag in "ID":
            return self._parse_numbers(tag, number)
        if tag in "L(":
            return self._parse_list(tag, number, depth)
        return self._parse_object(tag, number)

    def _parse_tensor(self, tag: str, number: int) -> str:
        layout = UNDEFINED_LAYOUT if tag == "U" else _parse_layout(self.layouts.get(number))
        word = self._reserve_words(_WORDS_PER_TAG[tag]) if tag != "U" else -1
        self.form.tensors.append(Tensor(word, layout, tag == "O", self.index, self.item))
        if self.item is not None:
            self.item += 1
        self._append("null")
        return f"Tensor({layout['dtype'] or 'unknown'})"

    def _parse_numbers(self, tag: str, number: int) -> str:
        if number > _MAX_ITEMS:
            raise DamagedForm("a list is too long")
        kind = "Int" if tag == "I" else "Double"
        self._append("[")
        for i in range(number):
            if i:
                self._append(", ")
            self._append((tag.lower(), self._reserve_words(1)))
        self._append("]")
        return f"GenericList[{','.join([kind] * number)}]"

    def _parse_list(self, tag: str, number: int, depth: int) -> str:
        if depth == 0:
            self.item = 0
        self._append("[")
        types = []
        for i in range(number):
            if i:
                self._append(", ")
            types.append(self._parse_value(depth + 1))
        self._append("]")
        return f"{'GenericList' if tag == 'L' else 'Tuple'}[{','.join(types)}]"

    def _parse_object(self, tag: str, number: int) -> str:
        text = self._get_text(number)
        kind = text if tag == "o" else "Object"
        if tag == "G":
            self.form.groups.append((text, self._reserve_words(1)))
        elif tag == "R":
            self.form.reduce_op = text
        elif tag != "o":
            raise DamagedForm(f"unknown tag {tag!r}")
        self._append(json.dumps(f"<{kind}>"))
        return kind


@functools.lru_cache(maxsize=4096)
def _parse_layout(text: bytes | None) -> dict[str, Any]:
    try:
        layout = load_json(text or b"null")
    except ValueError:
        return UNKNOWN_LAYOUT
    return layout if isinstance(layout, dict) and layout.keys() >= UNKNOWN_LAYOUT.keys() else UNKNOWN_LAYOUT
