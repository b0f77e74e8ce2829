"""Arguments of all operators of an observer's file, form by form, and what those of communication say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from etloom.core.schema import Stat
from etloom.formats.execution_trace import communication as _et_comms
from etloom.formats.observer import argument_forms
from etloom.formats.observer.argument_forms import DamagedForm, Form, parse_form
from etloom.formats.observer.records import FORM, HEAD_WORDS, LAYOUT, TEXT, Records

_TENSOR_COLUMNS = {
    "operator": pl.Int64,
    "io": pl.Int64,
    "index": pl.Int64,
    "item": pl.Int64,
    "address": pl.UInt64,
    "storage": pl.UInt64,
    "version": pl.Int64,
    "offset": pl.Int64,
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


@dataclass
class OperatorArguments:
    """`columns`: the four text columns of nodes, a value an operator; `tensors`: with addresses in place of ids."""

    columns: dict[str, pl.Series]
    tensors: pl.DataFrame
    calls: dict[
        int, dict[str, Any]
    ]  # place of an operator -> what its process group and reduce operation say
    rank: int | None


def decode_arguments(
    records: Records, known: Any, operators: pl.DataFrame, stats: list[Stat]
) -> OperatorArguments:
    """What went into the operators and came out of them."""
    columns: dict[str, pl.Series] = {}
    tensors: list[pl.DataFrame] = []
    calls: dict[int, dict[str, Any]] = {}
    by_stream: dict[int, Form | None] = {}
    damaged = 0
    for io, (name, types, at, kind) in enumerate(
        (("inputs", "input_types", "begin", 1), ("outputs", "output_types", "ended", 2))
    ):
        place = np.flatnonzero(operators[at].is_not_null().to_numpy())
        record = operators[at].drop_nulls().to_numpy()
        stated = np.flatnonzero(records.id[record] > 0)
        place, record = place[stated], record[stated]
        keys = (records.stream[record] << 32) | records.id[record]
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.diff(keys[order])) + 1
        texts, sorts = ["[]"], ["[]"]
        value_of = np.zeros(operators.height, np.int64)
        type_of = np.zeros(operators.height, np.int64)
        for group in np.split(order, cuts) if len(order) else ():
            key = int(keys[group[0]])
            if key not in by_stream:
                by_stream[key] = _parse_form_of(known, key >> 32, key & 0xFFFFFFFF)
            form = by_stream[key]
            head = HEAD_WORDS[kind]
            size = records.size[record[group]] - head
            fine = np.flatnonzero(size == form.words) if form else np.empty(0, np.int64)
            damaged += len(group) - len(fine)
            if form is None or not len(fine):
                continue
            group = group[fine]
            first = records.at[record[group]] + head
            words = records.words[first[:, None] + np.arange(form.words)]
            said, which = argument_forms.format_values(form, words)
            value_of[place[group]] = which + len(texts)
            type_of[place[group]] = len(sorts)
            texts += said
            sorts.append(form.types)
            tensors += _build_tensors(form, words, place[group], io)
            _record_group_calls(form, words, place[group], calls)
        columns[name] = pl.Series(texts).cast(pl.Categorical).gather(pl.Series(value_of))
        columns[types] = pl.Series(sorts).cast(pl.Categorical).gather(pl.Series(type_of))
    stats.append(
        Stat("read.damaged_arguments", "data_loss", damaged, "argument lists without a whole description")
    )
    ranks = {call["rank"] for call in calls.values() if call.get("pg_name") == "0"}
    found = pl.concat(tensors) if tensors else pl.DataFrame(schema=_TENSOR_COLUMNS)
    rank = ranks.pop() if len(ranks) == 1 else None
    return OperatorArguments(columns, found, calls, rank if isinstance(rank, int) else None)


def _parse_form_of(known: Any, stream: int, number: int) -> Form | None:
    code = known.get((FORM, stream), {}).get(number)
    if code is None:
        return None
    try:
        return parse_form(code, known.get((LAYOUT, stream), {}), known.get((TEXT, stream), {}))
    except DamagedForm:
        return None


def _build_tensors(
    form: Form, words: npt.NDArray[np.uint64], place: npt.NDArray[np.int64], io: int
) -> list[pl.DataFrame]:
    frames = []
    for tensor in form.tensors:
        layout, word = tensor.layout, tensor.word
        shape = layout["shape"]
        zeros = np.zeros(len(place), np.uint64)
        known = tensor.word >= 0
        text = {key: None if layout[key] is None else json.dumps(layout[key]) for key in ("shape", "stride")}
        constants = {
            "io": io,
            "index": tensor.index,
            "item": tensor.item,
            "numel": math.prod(shape) if shape and known else None if shape is None else int(known),
            "itemsize": layout["itemsize"],
            "device": layout["device"],
            "dtype": layout["dtype"],
            **text,
        }
        frames.append(
            pl.DataFrame(
                {
                    "operator": place,
                    "address": words[:, word] if known else zeros,
                    "storage": words[:, word + 1] if known else zeros,
                    "version": (words[:, word + 2] if known else zeros).astype(np.int64),
                    "offset": (words[:, word + 3] if tensor.has_offset else zeros).astype(np.int64),
                }
            )
            .with_columns(
                pl.lit(value, _TENSOR_COLUMNS[name]).alias(name) for name, value in constants.items()
            )
            .select(*_TENSOR_COLUMNS)
        )
    return frames


def _record_group_calls(
    form: Form, words: npt.NDArray[np.uint64], place: npt.NDArray[np.int64], calls: dict[int, dict[str, Any]]
) -> None:
    if not form.groups and form.reduce_op is None:
        return
    said: dict[str, Any] = {} if form.reduce_op is None else {"reduce_op": form.reduce_op}
    for text, word in form.groups[:1]:
        try:
            group = json.loads(text)
        except ValueError:
            continue
        said |= group if isinstance(group, dict) else {}
        for row, sequence in zip(place.tolist(), words[:, word].astype(np.int64).tolist(), strict=True):
            calls[row] = {**said, "seq": None if sequence < 0 else sequence}
    if not form.groups:
        calls.update((row, said) for row in place.tolist())


def build_comms_table(
    nodes: pl.DataFrame,
    tensors: pl.DataFrame,
    notes: dict[int, dict[str, Any]],
    sides: OperatorArguments,
    stats: list[Stat],
) -> pl.DataFrame:
    """The comms table: as from any execution trace, with the process group that each operator was given."""
    named = [
        {"node": row, **{name: said.get(name) for name in _NOTE_FIELDS}}
        for row, said in notes.items()
        if "collective" in said
    ]
    for row in named:
        row |= {name: json.dumps(row[name]) for name in ("in_split", "out_split")}
    text = dict.fromkeys(("collective", "pg_name", "pg_desc", "dtype", "in_split", "out_split"), pl.String)
    schema = {"node": pl.Int64, **dict.fromkeys(_NOTE_FIELDS, pl.Int64), **text, "is_async": pl.Boolean}
    roots = nodes.height - len(sides.columns["inputs"])
    in_groups = {
        place + roots: str(call["pg_name"])
        for place, call in sides.calls.items()
        if call.get("pg_name") is not None
    }
    attributes = pl.DataFrame(named, schema=schema, strict=False)
    comms = _et_comms.build_comms(nodes, tensors, attributes, stats, in_groups)
    rows = [
        {
            "node": place + roots,
            "group": in_groups.get(place + roots),
            "desc": None if (desc := call.get("pg_desc")) is None else str(desc),
            "size": call.get("group_size"),
            "number": call.get("seq"),
            "operation": call.get("reduce_op"),
        }
        for place, call in sides.calls.items()
    ]
    kinds = {"node": pl.UInt32, "group": pl.String, "desc": pl.String, "size": pl.Int64, "number": pl.Int64}
    told = pl.DataFrame(rows, schema={**kinds, "operation": pl.String}, strict=False)
    return (
        comms.join(told, on="node", how="left", maintain_order="left")
        .with_columns(
            pl.coalesce("pg_name", "group").alias("pg_name"),
            pl.coalesce("pg_desc", "desc").alias("pg_desc"),
            pl.coalesce("group_size", "size").alias("group_size"),
            pl.coalesce("seq", "number").alias("seq"),
            pl.coalesce("reduce_op", "operation").alias("reduce_op"),
        )
        .select(comms.columns)
    )
