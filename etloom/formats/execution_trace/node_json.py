"""Formats the nodes of an execution trace as JSON text, column by column, from a Trace's tables."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from etloom import _native
from etloom.core import arrays, categories, text_codes
from etloom.core.errors import EtloomError
from etloom.core.trace import Trace
from etloom.formats.io.json_text import quote_texts

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

_NUMBERS = ("tensor_id", "storage_id", "offset", "numel", "itemsize")
_SIDES = ("input", "output")
EMPTY_ARGUMENTS = '{"values": [], "shapes": [], "types": [], "strides": []}'
DEFAULT_ATTRIBUTES = ", ".join(
    json.dumps({"name": name, "type": kind, "value": none}) for name, kind, none in _ATTRIBUTES[:7]
)
"""The attributes that converters expect in every node, with the values that mean none."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]|[^\[\]{},"\s]+')
_MAX_INDEX = 2**15 - 1  # the largest index in tensors.index
_NO_ITEM = -(2**31)
"""Stands for null among the indices and items of tensors."""


class NodeTexts:
    """Formats the nodes of one trace as JSON texts."""

    def __init__(self, trace: Trace) -> None:
        self._arguments = _collect_tensors(trace.tensors.sort("node", maintain_order=True))
        self._templates: dict[str, int] = {}
        self._comms = trace.comms.drop_nulls("node").unique("node", keep="first")
        # Each distinct text is quoted once; its rows share it.
        self._words = pl.DataFrame(
            {
                "id": trace.nodes["id"],
                "label": quote_texts(trace.nodes["name"]).fill_null("null"),
                **{
                    name: quote_texts(trace.nodes[name]).fill_null(json.dumps(none))
                    for name, _, none in _ATTRIBUTES
                    if isinstance(none, str)
                },
            }
        )

    def format_nodes(self, nodes: pl.DataFrame, *last: str) -> pl.Series:
        """Return rows of the nodes table as JSON objects, in the layout of the schemas 1.0.2 to 1.1.1.

        Args:
            nodes: Rows of nodes, with ``above``, the id in the file of the parent.
            last: Columns of text to insert before the closing brace, each beginning with a comma.
        """
        numbers = {
            name: nodes[name].cast(pl.Int64).fill_null(none).cast(pl.String)
            for name, _, none in _ATTRIBUTES
            if not isinstance(none, str)
        }
        inputs, outputs = self.format_arguments(nodes)
        words = nodes.select("id").join(self._words, on="id", how="left", maintain_order="left").drop("id")
        texts = words.with_columns(
            *nodes.select(last).get_columns(),
            id=nodes["et_id"].cast(pl.String),
            above=nodes["above"].cast(pl.String).fill_null("null"),
            inputs=inputs,
            outputs=outputs,
            more=self._format_more_attributes(nodes),
            **numbers,
        )
        attributes: list[pl.Expr] = []
        for name, kind, _ in _ATTRIBUTES:
            attributes += [
                pl.lit(f'{{"name": "{name}", "type": "{kind}", "value": '),
                pl.col(name),
                pl.lit("}, "),
            ]
        attributes[-1] = pl.lit("}")
        members = (("id", "id"), ("name", "label"), ("ctrl_deps", "above"), ("inputs", "inputs"))
        parts: list[pl.Expr] = [pl.lit("{")]
        for name, column in (*members, ("outputs", "outputs")):
            parts += [pl.lit(f'"{name}": '), pl.col(column), pl.lit(", ")]
        parts += [pl.lit('"attrs": ['), *attributes, pl.col("more"), pl.lit("]")]
        parts += [*(pl.col(name).fill_null("") for name in last), pl.lit("}")]
        return texts.select(pl.concat_str(parts).alias("")).to_series()

    def format_arguments(self, nodes: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
        """Return the inputs and outputs of rows of the nodes table as JSON: values, shapes, types, strides."""
        object_text = pl.concat_str(
            *(pl.lit('{"values": '), "values"),
            *(pl.lit(', "shapes": '), "shapes"),
            *(pl.lit(', "types": '), "types"),
            *(pl.lit(', "strides": '), "strides", pl.lit("}")),
        ).alias("")
        inputs, outputs = (texts.select(object_text).to_series() for texts in self.argument_texts(nodes))
        return inputs, outputs

    def argument_texts(self, nodes: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return values, shapes, types and strides of the inputs and of the outputs of these nodes as JSON lists.

        The repeating text around the tensors is parsed once per distinct text.
        """
        ids = nodes["id"].to_numpy()
        sides = []
        for io, side in enumerate(_SIDES):
            columns = self._arguments.format(ids, self._number_templates(nodes[f"{side}s"]), io)
            values, shapes, strides = (_to_series(*column) for column in columns)
            types = nodes[f"{side}_types"].cast(pl.String).fill_null("[]")
            sides.append(
                pl.DataFrame({"values": values, "shapes": shapes, "types": types, "strides": strides})
            )
        return sides[0], sides[1]

    def _number_templates(self, values: pl.Series) -> np.ndarray:
        """Return the number of the template of each text; null is an empty list."""
        column = values.cast(pl.Categorical)
        rows, positions = text_codes.find_distinct(text_codes.read_codes(column))
        texts = arrays.take_rows(column, rows).cast(pl.String).to_list()
        numbers = np.array([self._number_template(text) for text in (*texts, "[]")], np.uint32)
        return numbers[positions]  # null has the last position, -1

    def _number_template(self, text: str) -> int:
        """Return the number of the text among the templates, to which it is added if it is new."""
        number = self._templates.get(text)
        if number is None:
            number = self._templates[text] = len(self._templates)
            values, shapes, places = _split_around_nulls(text)
            slots = [(index, _NO_ITEM if item is None else item) for index, item in places]
            self._arguments.add_template(values[0], shapes[0], slots, values[1:], shapes[1:])
        return number

    def _format_more_attributes(self, nodes: pl.DataFrame) -> pl.Series:
        """Return the attributes of communication and those without a column, each beginning with a comma."""
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
        schema = {"id": pl.UInt32, "more": pl.String}
        more = pl.DataFrame({"id": list(texts), "more": list(texts.values())}, schema=schema)
        return nodes.select("id").join(more, on="id", how="left", maintain_order="left")["more"].fill_null("")


def select_host_nodes(trace: Trace) -> Trace:
    """Return the trace with host nodes only, each with an et_id; nodes without one get the next free ids.

    Formats whose nodes are also events have GPU activities among their nodes.

    Raises:
        EtloomError: If there are no free ids.
    """
    device = trace.events.filter(arrays.is_in(trace.events["cat"], categories.DEVICE_CATEGORIES)).select(
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
    """Return ids after those of the nodes. Raises EtloomError if there are not that many."""
    last: Any = trace.nodes["et_id"].max() or 0
    if last >= 2**63 - 1 - count:
        raise EtloomError(f"no free ids after the node id {last}", remedy="renumber the nodes")
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
    """Return the type to write for an attribute whose type is not recorded."""
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
    """Return a formatter of arguments that knows these tensors, which are sorted by node."""
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
        arguments.set_texts(number, positions.astype(np.int32), texts)
    return arguments


def _to_series(offsets: np.ndarray, data: np.ndarray) -> pl.Series:
    """Return a column of the texts that lie one after the other in ``data``."""
    buffers = pa.py_buffer(offsets), pa.py_buffer(data)
    return pl.Series(pa.LargeStringArray.from_buffers(len(offsets) - 1, *buffers))


def _split_around_nulls(text: str) -> tuple[list[str], list[str], list[tuple[int, int | None]]]:
    """Split a JSON list at its nulls.

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
