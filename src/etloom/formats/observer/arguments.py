"""Decodes the arguments of all operators of an observer file, and builds the comms table."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from etloom import _native
from etloom.core.schema import Stat
from etloom.formats.execution_trace import communication
from etloom.formats.io.json_text import load_json
from etloom.formats.observer.argument_forms import DamagedForm, Form, Tensor, parse_form
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
