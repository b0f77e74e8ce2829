"""Arguments of nodes as JSON, against a slow reference: tensors in the places of nulls."""

from __future__ import annotations

import json
import random
from typing import Any

import polars as pl
import pytest

from etloom import _native
from etloom.core.trace import Trace
from etloom.formats.execution_trace.node_json import NodeTexts

LAST_INDEX = 2**15 - 1
NUMBERS = ("tensor_id", "storage_id", "offset", "numel", "itemsize")
VALUES = (
    "[]",
    "[null]",
    '[null, 1, [2, null, null], "a, [null]", null]',
    '[[null, [null, 3]], {"x": [null]}, true]',
    "[" + "null, " * (LAST_INDEX + 3) + "[null, null]]",
)


def build_trace(seed: int) -> Trace:
    """Nodes with each of `VALUES`, and tensors in random places: absent, out of order, two in one place."""
    choose = random.Random(seed)
    nodes = [
        {"id": row, "inputs": choose.choice((*VALUES, None)), "outputs": VALUES[row % 5]} for row in range(60)
    ]
    tensors = [
        {
            "node": choose.randrange(60),
            "io": choose.randrange(2),
            "index": choose.choice((0, 1, 2, 4, LAST_INDEX)),
            "item": choose.choice((None, None, 0, 1)),
            **{name: choose.choice((None, -1, 0, 2**62)) for name in NUMBERS[:4]},
            "itemsize": choose.choice((None, 4)),
            "device": choose.choice((None, "cuda:0", 'a "quoted" é')),
            "shape": choose.choice((None, "[]", "[2, 3]")),
            "stride": choose.choice((None, "[3, 1]")),
        }
        for _ in range(600)
    ]
    types = {"node": pl.UInt32, "io": pl.Int8, "index": pl.Int16, "item": pl.Int32, "itemsize": pl.Int32}
    return Trace(
        {
            "nodes": pl.DataFrame(nodes, schema_overrides={"id": pl.UInt32}),
            "tensors": pl.DataFrame(tensors, schema_overrides=types, infer_schema_length=None),
        }
    )


def expect(trace: Trace, node: int, io: int, values: str | None) -> list[Any]:
    """The values, shapes and strides of one side of a node."""
    tensors: dict[Any, Any] = {}
    for row in trace.tensors.filter(pl.col("node") == node, pl.col("io") == io).iter_rows(named=True):
        tensors.setdefault((row["index"], row["item"]), row)

    def fill(value: Any, part: str, index: int, items: list[int] | None) -> Any:
        if isinstance(value, list):
            counted = [] if items is None else items
            return [fill(item, part, index, counted) for item in value]
        if value is not None:
            return value if part == "value" else []
        place = min(index, LAST_INDEX), None if items is None else len(items)
        if items is not None:
            items.append(0)
        tensor = tensors.get(place)
        if part != "value":
            return json.loads((tensor or {}).get(part) or "[]")
        return tensor and [*(tensor[name] for name in NUMBERS), tensor["device"] or ""]

    parsed = json.loads(values or "[]")
    return [
        [fill(value, part, index, None) for index, value in enumerate(parsed)]
        for part in ("value", "shape", "stride")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_tensors_are_written_in_their_places(seed: int) -> None:
    trace = build_trace(seed)
    nodes = trace.nodes.sample(fraction=0.8, shuffle=True, seed=seed)
    for io, (side, texts) in enumerate(
        zip(("inputs", "outputs"), NodeTexts(trace).argument_texts(nodes), strict=True)
    ):
        columns = [[json.loads(text) for text in texts[name]] for name in ("values", "shapes", "strides")]
        for row, (node, values) in enumerate(nodes.select("id", side).iter_rows()):
            assert [column[row] for column in columns] == expect(trace, node, io, values), (node, io)


def test_arguments_without_tensors_or_nodes() -> None:
    trace = Trace({"nodes": pl.DataFrame({"id": pl.Series([0], dtype=pl.UInt32), "inputs": ["[null]"]})})
    inputs, outputs = NodeTexts(trace).argument_texts(trace.nodes)
    assert inputs.row(0) == ("[null]", "[[]]", "[]", "[[]]")
    assert outputs.row(0) == ("[]", "[]", "[]", "[]")
    assert NodeTexts(trace).argument_texts(trace.nodes.clear())[0].is_empty()


def test_wrong_numbers_of_templates_or_texts_are_refused() -> None:
    arguments = _native.ArgumentTexts()
    node = pl.Series([0], dtype=pl.UInt32).to_numpy()
    with pytest.raises(ValueError, match="a template per node"):
        _native.ArgumentSide(arguments, node, node, 0)
    with pytest.raises(ValueError, match="the tensors are incomplete"):
        _native.ArgumentSide(arguments, node[:0], node[:0], 0)
    with pytest.raises(ValueError, match="a text per place"):
        arguments.add_template("[", "[", [(0, 0)], [], [])
    with pytest.raises(ValueError, match="a text per tensor"):
        arguments.set_texts(0, pl.Series([0], dtype=pl.Int32).to_numpy(), [])
