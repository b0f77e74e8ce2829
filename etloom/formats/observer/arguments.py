"""Decodes the arguments of all operators of an observer file, one form at a time, and their communication."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from etloom.core.schema import Stat
from etloom.formats.execution_trace import communication
from etloom.formats.io.json_text import load_json
from etloom.formats.observer.argument_forms import DamagedForm, Form, format_values, parse_form
from etloom.formats.observer.records import (
    BEGIN,
    END,
    FORM,
    HEAD_WORDS,
    LAYOUT,
    TEXT,
    Definitions,
    Records,
    Words,
)

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
    """The arguments of all operators.

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


def decode_arguments(
    records: Records, definitions: Definitions, operators: pl.DataFrame, stats: list[Stat]
) -> OperatorArguments:
    """Decode inputs and outputs of all operators.

    Args:
        records: All records of the file.
        definitions: Its forms, layouts and texts.
        operators: Columns begin and ended: row of the records where an operator begins and ends, or null.
        stats: Receives a row for arguments that cannot be decoded.
    """
    decoder = _Decoder(records, definitions)
    columns: dict[str, pl.Series] = {}
    for io, (name, record_column, record_type) in enumerate(
        (("input", "begin", BEGIN), ("output", "ended", END))
    ):
        texts, types = decoder.decode(operators[record_column], record_type, io)
        columns |= {f"{name}s": texts, f"{name}_types": types}
    stats.append(
        Stat(
            "read.damaged_arguments",
            "data_loss",
            decoder.damaged,
            "argument lists without a complete description",
        )
    )
    tensors = _join_tensors(decoder.tensors)
    ranks = {call["rank"] for call in decoder.calls.values() if call.get("pg_name") == "0"}
    rank = ranks.pop() if len(ranks) == 1 else None
    return OperatorArguments(columns, tensors, decoder.calls, rank if isinstance(rank, int) else None)


class _Decoder:
    """Decodes argument lists; collects tensors, process groups and the number of damaged lists."""

    def __init__(self, records: Records, definitions: Definitions) -> None:
        self._records = records
        self._definitions = definitions
        self._forms: dict[int, Form | None] = {}
        self.tensors: list[_TensorRows] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.damaged = 0

    def decode(self, record_rows: pl.Series, record_type: int, io: int) -> tuple[pl.Series, pl.Series]:
        """Return values and types as JSON, one per operator; [] where there is no record."""
        records = self._records
        operators = np.flatnonzero(record_rows.is_not_null().to_numpy())
        rows = record_rows.drop_nulls().to_numpy()
        has_form = np.flatnonzero(records.id[rows] > 0)
        operators, rows = operators[has_form], rows[has_form]
        keys = (records.stream[rows] << 32) | records.id[rows]
        order = np.argsort(keys, kind="stable")
        texts, types = ["[]"], ["[]"]
        text_index = np.zeros(len(record_rows), np.int64)
        type_index = np.zeros(len(record_rows), np.int64)
        for group in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else ():
            form = self._get_form(int(keys[group[0]]))
            head_words = HEAD_WORDS[record_type]
            sizes = records.size[rows[group]] - head_words
            complete = np.flatnonzero(sizes == form.words) if form else np.empty(0, np.int64)
            self.damaged += len(group) - len(complete)
            if form is None or not len(complete):
                continue
            group = group[complete]
            first = records.at[rows[group]] + head_words
            words = records.words[first[:, None] + np.arange(form.words)]
            form_texts, indices = format_values(form, words)
            text_index[operators[group]] = indices + len(texts)
            type_index[operators[group]] = len(types)
            texts += form_texts
            types.append(form.types)
            self.tensors += _build_tensors(form, words, operators[group], io)
            _record_group_calls(form, words, operators[group], self.calls)
        return (
            pl.Series(texts).cast(pl.Categorical).gather(pl.Series(text_index)),
            pl.Series(types).cast(pl.Categorical).gather(pl.Series(type_index)),
        )

    def _get_form(self, key: int) -> Form | None:
        """Return the form of a key (stream and number); None where it is missing or damaged."""
        if key not in self._forms:
            stream, number = key >> 32, key & 0xFFFFFFFF
            layouts, texts = (self._definitions.get((kind, stream), {}) for kind in (LAYOUT, TEXT))
            code = self._definitions.get((FORM, stream), {}).get(number)
            try:
                self._forms[key] = None if code is None else parse_form(code, layouts, texts)
            except DamagedForm:
                self._forms[key] = None
        return self._forms[key]


@dataclass
class _TensorRows:
    """The rows of one tensor of a form.

    Attributes:
        argument: Values of `_ARGUMENT_COLUMNS`, which all rows share.
        columns: Values of `_TENSOR_COLUMNS`, one per row.
    """

    argument: dict[str, Any]
    columns: dict[str, npt.NDArray[Any]]


def _build_tensors(form: Form, words: Words, operators: Rows, io: int) -> list[_TensorRows]:
    """Build the rows of each tensor of a form."""
    rows = []
    zeros = np.zeros(len(operators), np.uint64)
    for tensor in form.tensors:
        layout, word = tensor.layout, tensor.word
        shape = layout["shape"]
        is_defined = word >= 0
        text = {key: None if layout[key] is None else json.dumps(layout[key]) for key in ("shape", "stride")}
        numel = math.prod(shape) if shape and is_defined else None if shape is None else int(is_defined)
        argument = {
            "io": io,
            "index": tensor.index,
            "item": tensor.item,
            "numel": numel,
            "itemsize": layout["itemsize"],
            "device": layout["device"],
            "dtype": layout["dtype"],
            **text,
        }
        columns = {
            "operator": operators,
            "address": words[:, word] if is_defined else zeros,
            "storage": words[:, word + 1] if is_defined else zeros,
            "version": (words[:, word + 2] if is_defined else zeros).astype(np.int64),
            "offset": (words[:, word + 3] if tensor.has_offset else zeros).astype(np.int64),
        }
        rows.append(_TensorRows(argument, columns))
    return rows


def _join_tensors(tensors: list[_TensorRows]) -> pl.DataFrame:
    """Build one table of the tensors of all forms, sorted by operator, io, index and item."""
    if not tensors:
        return pl.DataFrame(schema={**_TENSOR_COLUMNS, **_ARGUMENT_COLUMNS})
    place = ("io", "index", "item")
    arguments = pl.DataFrame(
        [rows.argument for rows in tensors], schema=_ARGUMENT_COLUMNS, strict=False, infer_schema_length=None
    )
    rank = arguments.select(pl.struct(pl.col(place).fill_null(-1)).rank("dense")).to_series().to_numpy()
    number = np.repeat(np.arange(len(tensors)), [len(rows.columns["operator"]) for rows in tensors])
    columns = {name: np.concatenate([rows.columns[name] for rows in tensors]) for name in _TENSOR_COLUMNS}
    # One number to sort by, since there are few places: operators times places stays far below 2^63.
    order = np.argsort(columns["operator"] * (int(rank.max()) + 1) + rank[number], kind="stable")
    return pl.DataFrame(
        {name: values[order] for name, values in columns.items()}, schema=_TENSOR_COLUMNS
    ).hstack(arguments[number[order]])


def _record_group_calls(form: Form, words: Words, operators: Rows, calls: dict[int, dict[str, Any]]) -> None:
    """Add process group, sequence number and reduce operation of the operators to ``calls``."""
    if not form.groups and form.reduce_op is None:
        return
    call: dict[str, Any] = {} if form.reduce_op is None else {"reduce_op": form.reduce_op}
    for text, word in form.groups[:1]:
        try:
            group = load_json(text)
        except ValueError:
            continue
        call |= group if isinstance(group, dict) else {}
        sequence_numbers = words[:, word].astype(np.int64).tolist()
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
    """Build the comms table as for any execution trace, plus the process group passed to each operator.

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
    call_table = pl.DataFrame(rows, schema={"node": pl.UInt32, **types}, strict=False)
    return (
        comms.join(call_table, on="node", how="left", maintain_order="left")
        .with_columns(pl.coalesce(name, f"call_{name}").alias(name) for name in columns)
        .select(comms.columns)
    )


def _note_attributes(notes: dict[int, dict[str, Any]]) -> pl.DataFrame:
    """Build the attributes of communication that notes contain: node and `_NOTE_FIELDS`."""
    rows = []
    for node, note in notes.items():
        if "collective" in note:
            splits = {name: json.dumps(note.get(name)) for name in ("in_split", "out_split")}
            rows.append({"node": node, **{name: note.get(name) for name in _NOTE_FIELDS}, **splits})
    texts = dict.fromkeys(("collective", "pg_name", "pg_desc", "dtype", "in_split", "out_split"), pl.String)
    types = {"node": pl.Int64, **dict.fromkeys(_NOTE_FIELDS, pl.Int64), **texts, "is_async": pl.Boolean}
    return pl.DataFrame(rows, schema=types, strict=False)
