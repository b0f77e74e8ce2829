"""Formats the nodes of an execution trace as JSON text, column by column, from a Trace's tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from etloom import _native
from etloom.core import arrays, categories, text_codes
from etloom.core.errors import EtloomError
from etloom.core.machine import run_ahead
from etloom.core.trace import Trace
from etloom.formats.execution_trace.writer import SEPARATOR

_ATTRIBUTES = (
    ("rf_id", "uint64", 0),
    ("fw_parent", "uint64", 0),
    ("seq_id", "int64", -1),
    ("scope", "uint64", 0),
    ("tid", "uint64", 0),
    ("fw_tid", "uint64", 0),
    ("op_schema", "string", ""),
    ("kernel_backend", "string", ""),
    ("kernel_file", "string", ""),
)
"""Name, type and the value that means none, in PyTorch's order."""

_COMM_ATTRIBUTES = (
    ("collective_name", "string", "collective"),
    ("dtype", "string", "dtype"),
    ("in_msg_nelems", "uint64", "in_nelems"),
    ("out_msg_nelems", "uint64", "out_nelems"),
    ("in_split_size", "string", "in_split"),
    ("out_split_size", "string", "out_split"),
    ("pg_name", "string", "pg_name"),
    ("pg_desc", "string", "pg_desc"),
    ("pg_size", "uint64", "group_size"),
)

_Column: TypeAlias = "str | np.ndarray | tuple[np.ndarray | None, np.ndarray, np.ndarray]"
Part: TypeAlias = "_Column | tuple[_native.ArgumentSide, int]"
"""A part of every row of a text: a constant, numbers, texts as codes, offsets and bytes, or a list of arguments."""

_NUMBERS = ("tensor_id", "storage_id", "offset", "numel", "itemsize")
_SIDES = ("input", "output")
EMPTY_ARGUMENTS = '{"values": [], "shapes": [], "types": [], "strides": []}'
DEFAULT_ATTRIBUTES = ", ".join(
    json.dumps({"name": name, "type": kind, "value": none}) for name, kind, none in _ATTRIBUTES[:7]
)
"""The attributes that converters expect in every node, with the values that mean none."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]|[^\[\]{},"\s]+')
_CHUNK_NODES = 1 << 13  # about 8 MB of text
_MAX_INDEX = 2**15 - 1  # the largest index in tensors.index
_VALUES, _SHAPES, _STRIDES = range(3)
_NO_ITEM = -(2**31)
"""Stands for null among the indices and items of tensors."""


class NodeTexts:
    """Formats the nodes of one trace as JSON texts."""

    def __init__(self, trace: Trace) -> None:
        tensors = trace.tensors
        is_sorted = tensors["node"].is_sorted()  # as after reading
        self._arguments = _collect_tensors(
            tensors if is_sorted else tensors.sort("node", maintain_order=True)
        )
        self._templates: dict[str, int] = {}
        self._comms = trace.comms.drop_nulls("node").unique("node", keep="first")

    def format_nodes(self, nodes: pl.DataFrame, *last: str) -> Iterator[np.ndarray]:
        """Yield the bytes of the nodes' JSON objects, in the layout of execution trace schemas 1.0.2 to 1.1.1.

        Args:
            nodes: Rows of nodes, with ``above``, the id in the file of the parent.
            last: Columns of text to insert before the closing brace, each beginning with a comma.

        Yields:
            The bytes of the objects, each after `SEPARATOR`.
        """
        head: list[_Column] = [f'{SEPARATOR}{{"id": ', _number_part(nodes["et_id"], "null")]
        head += [', "name": ', _quoted_part(nodes["name"], "null")]
        head += [', "ctrl_deps": ', _number_part(nodes["above"], "null")]
        ids, templates = (
            nodes["id"].to_numpy(),
            [self._number_templates(nodes[f"{side}s"]) for side in _SIDES],
        )
        types = [_repeated_part(nodes[f"{side}_types"], "[]") for side in _SIDES]
        attributes: list[_Column] = []
        for name, kind, none in _ATTRIBUTES:
            start = "}, " if attributes else ', "attrs": ['
            attributes.append(f'{start}{{"name": "{name}", "type": "{kind}", "value": ')
            is_text = isinstance(none, str)
            attributes.append(
                _quoted_part(nodes[name], json.dumps(none)) if is_text else _number_part(nodes[name], none)
            )

        def format_chunk(begin: int) -> np.ndarray:
            rows = slice(begin, min(begin + _CHUNK_NODES, nodes.height))
            parts = _slice_parts(head, rows)
            for io, side in enumerate(_SIDES):
                texts = _native.ArgumentSide(self._arguments, ids[rows], templates[io][rows], io)
                parts += [f', "{side}s": ', *_argument_parts(texts, *_slice_parts([types[io]], rows))]
            parts += [*_slice_parts(attributes, rows), "}", *self._format_more_attributes(nodes[rows]), "]"]
            parts += [*(_text_part(nodes[name][rows].fill_null("")) for name in last), "}"]
            text: np.ndarray = _native.row_texts(parts, rows.stop - begin)[1]
            return text

        chunks = range(0, nodes.height, _CHUNK_NODES)
        yield from run_ahead(format_chunk, chunks, nodes.height, _CHUNK_NODES)

    def format_arguments(self, nodes: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
        """Return all nodes' inputs and all nodes' outputs as columns of JSON (values, shapes, types, strides)."""
        sides = []
        for io, side in enumerate(_SIDES):
            types = _repeated_part(nodes[f"{side}_types"], "[]")
            parts = _argument_parts(self._select_side(nodes, io), types)
            sides.append(_to_series(*_native.row_texts(parts, nodes.height)))
        return sides[0], sides[1]

    def argument_texts(self, nodes: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return a frame of inputs and a frame of outputs: per node, values, shapes, types and strides as JSON lists.

        The repeating text around the tensors is parsed once per distinct text.
        """
        sides = []
        for io, side in enumerate(_SIDES):
            texts = self._select_side(nodes, io)
            values, shapes, strides = (
                _to_series(*_native.row_texts([(texts, part)], nodes.height))
                for part in (_VALUES, _SHAPES, _STRIDES)
            )
            types = nodes[f"{side}_types"].cast(pl.String).fill_null("[]")
            sides.append(
                pl.DataFrame({"values": values, "shapes": shapes, "types": types, "strides": strides})
            )
        return sides[0], sides[1]

    def _select_side(self, nodes: pl.DataFrame, io: int) -> _native.ArgumentSide:
        """Return the inputs (io 0) or outputs (io 1) of nodes, as a part of texts."""
        templates = self._number_templates(nodes[f"{_SIDES[io]}s"])
        return _native.ArgumentSide(self._arguments, nodes["id"].to_numpy(), templates, io)

    def _number_templates(self, values: pl.Series) -> np.ndarray:
        """Return the number of each argument list's template: its JSON with null for tensors; null counts as ``[]``."""
        texts, positions = _number_texts(values)
        templates = [self._number_template(text) for text in (*texts, "[]")]
        return np.take(np.array(templates, np.uint32), positions)

    def _number_template(self, text: str) -> int:
        """Return the number of an argument list's template (its JSON with null for tensors); add a new template."""
        number = self._templates.get(text)
        if number is None:
            number = self._templates[text] = len(self._templates)
            values, shapes, places = _split_around_nulls(text)
            slots = [(index, _NO_ITEM if item is None else item) for index, item in places]
            self._arguments.add_template(values[0], shapes[0], slots, values[1:], shapes[1:])
        return number

    def _format_more_attributes(self, nodes: pl.DataFrame) -> list[Part]:
        """Format, per node, communication attributes and attributes without a column as JSON, each after a comma."""
        if self._comms.is_empty() and nodes["attrs"].null_count() == nodes.height:
            return []
        comms = self._comms.join(nodes.select(node="id"), on="node", how="semi")
        by_node = {row["node"]: row for row in _decategorize(comms).iter_rows(named=True)}
        rest = _decategorize(nodes.select("id", "attrs").drop_nulls())
        extra = dict(rest.iter_rows())
        texts = {
            node: "".join(
                f", {json.dumps(attribute)}"
                for attribute in _list_attributes(extra.get(node), by_node.get(node))
            )
            for node in {*by_node, *extra}
        }
        if not texts:
            return []
        schema = {"id": pl.UInt32, "more": pl.String}
        more = pl.DataFrame({"id": list(texts), "more": list(texts.values())}, schema=schema)
        column = nodes.select("id").join(more, on="id", how="left", maintain_order="left")["more"]
        return [_text_part(column.fill_null(""))]


def _number_part(column: pl.Series, none: int | str) -> _Column:
    """Convert a column of integers to a `Part` (a piece of each row's text), with ``none`` in place of null."""
    numbers = column.cast(pl.Int64)
    if isinstance(none, int):
        numbers = numbers.fill_null(none)
    if numbers.null_count():
        return _text_part(numbers.cast(pl.String).fill_null(none))
    return numbers.to_numpy()


def _quoted_part(column: pl.Series, none: str) -> _Column:
    """Convert a column of texts to a `Part` (a piece of each row's text) of JSON strings; null becomes ``none``."""
    return _repeated_part(column, none, lambda text: json.dumps(text, ensure_ascii=False))


def _repeated_part(column: pl.Series, none: str, convert: Callable[[str], str] = str) -> _Column:
    """Convert repeated texts to a `Part` (piece of each row's text), each distinct text once; null becomes ``none``."""
    texts, positions = _number_texts(column)
    _, offsets, data = _text_part(pl.Series([*map(convert, texts), none]))
    return positions, offsets, data


def _number_texts(column: pl.Series) -> tuple[list[str], np.ndarray]:
    """Return a column's distinct texts and, per row, the index of its text; null gets the number of distinct texts."""
    categories = column.cast(pl.Categorical)
    rows, positions = text_codes.find_distinct(text_codes.read_codes(categories))
    positions[positions < 0] = len(rows)
    return arrays.take_rows(categories, rows).cast(pl.String).to_list(), positions


def _text_part(column: pl.Series) -> tuple[None, np.ndarray, np.ndarray]:
    """Convert a column of texts without nulls to a `Part` (a piece of each row's text) that stores a text per row."""
    return None, *arrays.encode_utf8(column)


def _argument_parts(texts: _native.ArgumentSide, types: Part) -> list[Part]:
    """Return the pieces of each row's JSON object of values, shapes, types and strides."""
    parts: list[Part] = ['{"values": ', (texts, _VALUES), ', "shapes": ', (texts, _SHAPES)]
    return [*parts, ', "types": ', types, ', "strides": ', (texts, _STRIDES), "}"]


def _slice_parts(parts: Sequence[_Column], rows: slice) -> list[Part]:
    """Restrict each `Part` (a piece of every row's text) but arguments to a range of rows."""
    sliced: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            sliced.append(part)
        elif isinstance(part, np.ndarray):
            sliced.append(part[rows])
        elif part[0] is None:  # a text per row
            sliced.append((None, part[1][rows.start : rows.stop + 1], part[2]))
        else:
            sliced.append((part[0][rows], *part[1:]))
    return sliced


def select_host_nodes(trace: Trace) -> Trace:
    """Return the trace without nodes of GPU activities; host nodes without an et_id get the next free ids.

    Formats whose nodes are also events have GPU activities among their nodes.

    Raises:
        EtloomError: If there are no free ids.
    """
    device = trace.events.filter(categories.mask_events(trace.events, categories.DEVICE_CATEGORIES)).select(
        event="id"
    )
    links = trace.links.join(device, on="event", how="anti")
    if links.height < trace.links.height:
        device_nodes = trace.links.join(device, on="event", how="semi")["node"]
        host = trace.nodes.filter(~pl.col("id").is_in(device_nodes.implode()))
        trace = trace.replace(links=links, nodes=host)
    missing = trace.nodes["et_id"].is_null()
    if not missing.any():
        return trace
    new_ids = allocate_ids(trace, int(missing.sum()))
    ids = trace.nodes["et_id"].scatter(missing.arg_true(), new_ids)
    return trace.replace(nodes=trace.nodes.with_columns(ids))


def allocate_ids(trace: Trace, count: int) -> pl.Series:
    """Return ``count`` ids above the highest et_id of the nodes. Raises EtloomError if they exceed int64."""
    last: Any = trace.nodes["et_id"].max() or 0
    if last >= 2**63 - 1 - count:
        raise EtloomError(
            f"new nodes cannot be numbered: the largest node id is {last}, and ids have 64 bits",
            remedy="renumber the nodes of the file",
        )
    return pl.int_range(last + 1, last + 1 + count, eager=True)


def make_attribute(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "value": value}


def _list_attributes(rest: str | None, comm: dict[str, Any] | None) -> list[dict[str, Any]]:
    attributes = (
        []
        if comm is None
        else [
            make_attribute(name, kind, comm[column])
            for name, kind, column in _COMM_ATTRIBUTES
            if comm[column] is not None
        ]
    )
    return attributes + [
        make_attribute(name, _infer_attribute_type(value), value)
        for name, value in json.loads(rest or "{}").items()
    ]


def _infer_attribute_type(value: Any) -> str:
    """Return the type name to write for an attribute, inferred from its Python value."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if value < 1 << 63 else "uint64"
    if isinstance(value, float):
        return "double"
    return "string" if value is None or isinstance(value, str) else "array"


def _decategorize(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


def _collect_tensors(tensors: pl.DataFrame) -> _native.ArgumentTexts:
    """Build the native formatter of argument texts from rows of the tensors table, sorted by node."""
    arguments = _native.ArgumentTexts()
    places = (tensors[name].cast(pl.Int32).fill_null(_NO_ITEM).to_numpy() for name in ("io", "index", "item"))
    arguments.set_places(tensors["node"].to_numpy(), *places)
    for number, name in enumerate(_NUMBERS):
        column = tensors[name].cast(pl.Int64)
        arguments.set_numbers(number, column.fill_null(0).to_numpy(), column.is_not_null().to_numpy())
    for number, name in enumerate(("device", "shape", "stride")):
        column = tensors[name].cast(pl.Categorical)
        rows, positions = text_codes.find_distinct(text_codes.read_codes(column))
        texts = arrays.take_rows(column, rows).cast(pl.String).to_list()
        if name == "device":
            texts = [json.dumps(text, ensure_ascii=False) for text in texts]
        arguments.set_texts(number, positions, texts)
    return arguments


def _to_series(offsets: np.ndarray, data: np.ndarray) -> pl.Series:
    """Build a text column from the concatenated UTF-8 bytes of its texts and their start offsets."""
    return pl.Series(_native.text_column(offsets, data))


def _split_around_nulls(text: str) -> tuple[list[str], list[str], list[tuple[int, int | None]]]:
    """Split the JSON text of an argument list at its nulls, which stand for tensors.

    Returns:
        The texts of values and of shapes before, between and after the nulls; and the place of each null: its index in
        the list, and its number in the list inside it, or None.
    """
    values: list[str] = []
    shapes: list[str] = []
    places: list[tuple[int, int | None]] = []
    shape, begin, depth, index, number, objects = "", 0, 0, 0, 0, 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "{}":
            objects += 1 if mark == "{" else -1
            shape += "" if objects else "[]"
        elif objects:
            continue  # there are no tensors in an object
        elif mark == "null":
            places.append((min(index, _MAX_INDEX), None if depth == 1 else number))
            number += 1
            values.append(text[begin : token.start()])
            shapes.append(shape)
            shape, begin = "", token.end()
        elif mark == ",":
            shape += ", "
            if depth == 1:
                index, number = index + 1, 0
        elif mark in "[]":
            shape += mark
            depth += 1 if mark == "[" else -1
        else:
            shape += "[]"
    return [*values, text[begin:]], [*shapes, shape], places
