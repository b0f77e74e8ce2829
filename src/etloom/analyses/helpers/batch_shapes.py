"""Infer from recorded shapes which requests of a program grow with its batch."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import numpy as np
import polars as pl

from etloom.core.errors import AnalysisError
from etloom.core.text import format_bytes
from etloom.core.trace import Trace
from etloom.timeline.memory.program import ALLOC, Program

_CONSTANT = ("parameters", "optimizer", "buffers", "workspaces")
"""Kinds of memory that do not depend on the batch."""
_PARAMETERS = "parameters"
_MIN_BATCH = 2
_MAX_UNKNOWN = 0.01
"""Largest share of the requested bytes whose dependence on the batch may be unknown."""
_REMEDY = "record the program with another batch, too, and name that snapshot with --other-batch"


def double_batch(trace: Trace, program: Program) -> Program:
    """Return the program with twice the batch: requests for tensors of the batch are twice as large.

    The execution trace of the same steps has the shapes of tensors. The batch is the first dimension of the first
    tensor of integers, such as tokens or labels; tensors of the batch begin with it, or with its product with
    dimensions that follow it in such a tensor (flattened tokens, heads). A shape of a parameter is none of these.

    Raises:
        AnalysisError: The trace has no shapes, or kinds of memory, or they leave more than 1 % of the bytes undecided.
    """
    requests = _list_requests(trace, program)
    tensors = _list_tensors(trace)
    if not tensors.height or requests["kind"].null_count() == requests.height:
        raise AnalysisError(
            "the snapshot does not state which sizes grow with the batch, and no forecast next to it "
            "(etloom collect --fake-world) states shapes",
            remedy=_REMEDY,
        )
    parameters = requests.filter(kind=_PARAMETERS).join(tensors, on=("operator", "bytes"))
    growing, doubtful = _find_batch_shapes(tensors, set(parameters["shape"]))
    is_batch = pl.col("shape").is_in(growing)
    shapes = tensors.with_columns(is_batch=pl.when(~pl.col("shape").is_in(doubtful)).then(is_batch))
    facts = shapes.group_by("operator", "bytes").agg(
        grows=pl.col("is_batch").all(),
        is_mixed=pl.col("is_batch").n_unique() + pl.col("is_batch").has_nulls() > 1,
    )
    requests = requests.join(facts, on=("operator", "bytes"), how="left", maintain_order="left")
    is_constant = pl.col("kind").is_in(_CONSTANT)
    requests = requests.with_columns(
        grows=~is_constant & pl.col("grows").fill_null(False),
        is_unknown=~is_constant & pl.col("is_mixed").fill_null(True),
    )
    unknown = int(requests.filter("is_unknown")["bytes"].sum())
    if unknown > _MAX_UNKNOWN * int(requests["bytes"].sum()) or not requests["grows"].any():
        raise AnalysisError(
            "the shapes do not show which sizes grow with the batch: "
            f"{format_bytes(unknown)} of requests are undecided",
            remedy=_REMEDY,
        )
    value = program.value.copy()
    value[requests.filter("grows")["operation"].to_numpy()] *= 2
    return replace(program, value=value)


def _list_requests(trace: Trace, program: Program) -> pl.DataFrame:
    """Return operation, bytes, kind and operator of each request."""
    places = np.flatnonzero(program.action == ALLOC)
    requests = pl.DataFrame(
        {"operation": places, "entry": program.entry[places], "bytes": program.value[places]}
    )
    facts = trace.allocator.select(
        entry=pl.col("id").cast(pl.Int64),
        kind=pl.col("annotation").cast(pl.String),
        operator=pl.col("stack").cast(pl.String).str.extract(r"at::_ops::([\w.]+?)::"),
    )
    return requests.join(facts, on="entry", how="left", maintain_order="left")


def _list_tensors(trace: Trace) -> pl.DataFrame:
    """Return operator, bytes, shape (JSON) and dtype of the tensors that operators returned, in their order."""
    names = trace.nodes.select(node="id", operator=pl.col("name").cast(pl.String).str.strip_prefix("aten::"))
    outputs = trace.tensors.filter((pl.col("io") == 1) & (pl.col("device").cast(pl.String) != "cpu"))
    return outputs.join(names, on="node", maintain_order="left").select(
        "operator",
        pl.col("shape").cast(pl.String),
        pl.col("dtype").cast(pl.String),
        bytes=pl.col("numel").cast(pl.Int64) * pl.col("itemsize").cast(pl.Int64),
    )


def _find_batch_shapes(tensors: pl.DataFrame, parameters: set[str]) -> tuple[list[str], list[str]]:
    """Return the shapes that begin with the batch, and those that may: they begin with a product with it that is also a
    dimension of its own.

    Raises:
        AnalysisError: No tensor of integers states the batch, or it is 1.
    """
    inputs = tensors.filter(pl.col("dtype").is_in(["long int", "int"]) & (pl.col("shape") != "[]"))
    batch = json.loads(inputs["shape"][0])[0] if inputs.height else 0
    if batch < _MIN_BATCH:
        reason = (
            f"is {batch}, which other dimensions are, too"
            if batch
            else "is not in the shape of a tensor of integers"
        )
        raise AnalysisError(f"which sizes grow with the batch is unknown: the batch {reason}", remedy=_REMEDY)
    shapes = {text: json.loads(text) for text in set(tensors["shape"].drop_nulls()) - parameters}
    batch_led = [shape for shape in shapes.values() if shape and shape[0] == batch]
    leading = {prod(shape[:end]) for shape in batch_led for end in range(1, len(shape) + 1)}
    of_parameters = {size for shape in map(json.loads, parameters) for size in shape}
    inner = {size for shape in batch_led for size in shape[1:]} - {batch}
    doubtful = leading & (of_parameters | inner)
    return (
        [text for text, shape in shapes.items() if shape and shape[0] in leading],
        [text for text, shape in shapes.items() if shape and shape[0] in doubtful],
    )
