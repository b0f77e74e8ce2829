"""Decodes the arguments of all operators of an observer file, and builds the comms table."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from etloom import _native
from etloom.core.schema import Stat
from etloom.formats.execution_trace import communication
from etloom.formats.io.json_text import load_json
from etloom.formats.observer.records import FORM, LAYOUT, TEXT, Definitions, Records, Words
from etloom.formats.tables.building import build_rows

_TENSOR_COLUMNS = {
    "operator": pl.Int64,
    "address": pl.UInt64,
    "storage": pl.UInt64,
    "version": pl.Int64,
    "offset": pl.Int64,
}
_ARGUMENT_COLUMNS = {
    "io": pl.Int64,
    "index": pl.Int64,
    "item": pl.Int64,
    "numel": pl.Int64,
    "itemsize": pl.Int64,
    "device": pl.Categorical,
    "dtype": pl.Categorical,
    "shape": pl.Categorical,
    "stride": pl.Categorical,
}
_NOTE_FIELDS = (
    *("collective", "pg_name", "pg_desc", "dtype", "in_nelems", "out_nelems", "in_split", "out_split"),
    *("is_async", "group_size", "rank_start", "rank_stride"),
)

Rows = npt.NDArray[np.int64]


@dataclass
class OperatorArguments:
    """The decoded arguments of all operators: columns of nodes, tensors, communication calls, and the rank.

    Attributes:
        columns: inputs, input_types, outputs, output_types of the nodes table; one value per operator.
        tensors: Columns of the tensors table, with addresses in place of ids, sorted by operator and argument.
        calls: Row of an operator -> its process group and reduce operation.
        rank: Rank in the group of all ranks; None where it is unknown.
    """

    columns: dict[str, pl.Series]
    tensors: pl.DataFrame
    calls: dict[int, dict[str, Any]]
    rank: int | None


def decode_arguments(records: Records) -> OperatorArguments:
    """Decode the inputs and outputs of all operators; lists that cannot be decoded are counted in the stats."""
    forms = _parse_forms(records.definitions, records.forms)
    decoded = _native.observer_arguments(
        records.words,
        records.lists,
        [
            (key, form.words, form.pieces, [(tensor.word, tensor.has_offset) for tensor in form.tensors])
            for key, form in forms.items()
        ],
    )
    texts = pl.Series(decoded["texts"]).cast(pl.Categorical)
    types = pl.Series(["[]", *(form.types for form in forms.values())]).cast(pl.Categorical)
    columns: dict[str, pl.Series] = {}
    calls: dict[int, dict[str, Any]] = {}
    for (_, first_words, _), (form_index, text_index), name in zip(
        records.lists, decoded["sides"], ("input", "output"), strict=True
    ):
        columns |= {
            f"{name}s": texts.gather(pl.Series(text_index)),
            f"{name}_types": types.gather(pl.Series(form_index + 1)),
        }
        for number, form in enumerate(forms.values()):
            if form.groups or form.reduce_op is not None:
                operators = np.flatnonzero(form_index == number)
                _record_group_calls(form, records.words, first_words, operators, calls)
    example = "argument lists without a complete description"
    records.stats.append(Stat("read.damaged_arguments", "data_loss", decoded["damaged"], example))
    ranks = {call["rank"] for call in calls.values() if call.get("pg_name") == "0"}
    rank = ranks.pop() if len(ranks) == 1 else None
    tensors = _build_tensors(decoded, list(forms.values()))
    return OperatorArguments(columns, tensors, calls, rank if isinstance(rank, int) else None)


def _parse_forms(definitions: Definitions, keys: list[int]) -> dict[int, Form]:
    """Parse the forms (types of argument lists) with the keys ``keys``; missing and damaged forms are left out."""
    forms = {}
    for key in keys:
        stream, number = key >> 32, key & 0xFFFFFFFF
        layouts, texts = (definitions.get((kind, stream), {}) for kind in (LAYOUT, TEXT))
        code = definitions.get((FORM, stream), {}).get(number)
        if code is not None:
            with contextlib.suppress(DamagedForm):
                forms[key] = parse_form(code, layouts, texts)
    return forms


def _build_tensors(decoded: dict[str, Any], forms: list[Form]) -> pl.DataFrame:
    """Build one row per tensor argument of all operators, sorted by operator, io, index and item."""
    first_numbers = np.cumsum([0, *(len(form.tensors) for form in forms)])
    arguments: list[dict[str, Any]] = []
    rows = np.zeros(2 * first_numbers[-1], np.int64)  # the tensors of all forms as inputs, then as outputs
    for io, (form_index, _) in enumerate(decoded["sides"]):
        for number in np.flatnonzero(np.bincount(form_index + 1)[1:]).tolist():
            first = io * first_numbers[-1] + first_numbers[number]
            rows[first : first + len(forms[number].tensors)] = np.arange(len(forms[number].tensors)) + len(
                arguments
            )
            arguments += [_describe_tensor(tensor, io) for tensor in forms[number].tensors]
    if not arguments:
        return pl.DataFrame(schema={**_TENSOR_COLUMNS, **_ARGUMENT_COLUMNS})
    described, _ = build_rows(arguments, _ARGUMENT_COLUMNS)
    tensors = pl.DataFrame({name: decoded[name] for name in _TENSOR_COLUMNS}, schema=_TENSOR_COLUMNS)
    return tensors.hstack(described[rows[decoded["tensor"]]])


def _describe_tensor(tensor: Tensor, io: int) -> dict[str, Any]:
    """Return the values of `_ARGUMENT_COLUMNS` for a tensor: position, sizes, device, dtype, shape and stride."""
    layout = tensor.layout
    shape, is_defined = layout["shape"], tensor.word >= 0
    text = {key: None if layout[key] is None else json.dumps(layout[key]) for key in ("shape", "stride")}
    return {
        "io": io,
        "index": tensor.index,
        "item": tensor.item,
        "numel": math.prod(shape) if shape and is_defined else None if shape is None else int(is_defined),
        "itemsize": layout["itemsize"],
        "device": layout["device"],
        "dtype": layout["dtype"],
        **text,
    }


def _record_group_calls(
    form: Form, words: Words, first_words: Words, operators: Rows, calls: dict[int, dict[str, Any]]
) -> None:
    """Add the process group, sequence number and reduce operation of the operators ``operators`` to ``calls``."""
    call: dict[str, Any] = {} if form.reduce_op is None else {"reduce_op": form.reduce_op}
    for text, word in form.groups[:1]:
        try:
            group = load_json(text)
        except ValueError:
            continue
        call |= group if isinstance(group, dict) else {}
        sequence_numbers = words[first_words[operators] + np.uint64(word)].astype(np.int64).tolist()
        for operator, sequence_number in zip(operators.tolist(), sequence_numbers, strict=True):
            calls[operator] = {**call, "seq": None if sequence_number < 0 else sequence_number}
    if not form.groups:
        calls.update((operator, call) for operator in operators.tolist())


def build_comms_table(
    nodes: pl.DataFrame,
    tensors: pl.DataFrame,
    notes: dict[int, dict[str, Any]],
    arguments: OperatorArguments,
    stats: list[Stat],
) -> pl.DataFrame:
    """Build the comms table; process group, sequence number and reduce operation may come from operator arguments.

    Args:
        nodes: The nodes table.
        tensors: The tensors table.
        notes: Row of nodes -> note about the operator.
        arguments: From `decode_arguments`.
        stats: Receives rows about communication that cannot be read.
    """
    root_count = nodes.height - len(arguments.columns["inputs"])
    calls = {operator + root_count: call for operator, call in arguments.calls.items()}
    node_groups = {
        node: str(call["pg_name"]) for node, call in calls.items() if call.get("pg_name") is not None
    }
    comms = communication.build_comms(nodes, tensors, _note_attributes(notes), stats, node_groups)
    rows = [
        {
            "node": node,
            "call_pg_name": node_groups.get(node),
            "call_pg_desc": None if (description := call.get("pg_desc")) is None else str(description),
            "call_group_size": call.get("group_size"),
            "call_seq": call.get("seq"),
            "call_reduce_op": call.get("reduce_op"),
        }
        for node, call in calls.items()
    ]
    texts = ("pg_name", "pg_desc", "reduce_op")
    columns = ("pg_name", "pg_desc", "group_size", "seq", "reduce_op")
    types = {f"call_{name}": pl.String if name in texts else pl.Int64 for name in columns}
    call_table, _ = build_rows(rows, {"node": pl.UInt32, **types})
    return (
        comms.join(call_table, on="node", how="left", maintain_order="left")
        .with_columns(pl.coalesce(name, f"call_{name}").alias(name) for name in columns)
        .select(comms.columns)
    )


def _note_attributes(notes: dict[int, dict[str, Any]]) -> pl.DataFrame:
    """Build one row per observer note about a collective, with the columns node and `_NOTE_FIELDS`."""
    rows = []
    for node, note in notes.items():
        if "collective" in note:
            splits = {name: json.dumps(note.get(name)) for name in ("in_split", "out_split")}
            rows.append({"node": node, **{name: note.get(name) for name in _NOTE_FIELDS}, **splits})
    texts = dict.fromkeys(("collective", "pg_name", "pg_desc", "dtype", "in_split", "out_split"), pl.String)
    types = {"node": pl.Int64, **dict.fromkeys(_NOTE_FIELDS, pl.Int64), **texts, "is_async": pl.Boolean}
    return build_rows(rows, types)[0]


# Decodes operator arguments in observer files: a form (types) and 64-bit words (values) become JSON and tensors.

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
