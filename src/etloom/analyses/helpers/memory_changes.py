"""Predict the memory that the ranks of a job need under other settings of PyTorch's caching allocator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import polars as pl

from etloom.core.errors import AnalysisError, InvalidValue
from etloom.core.text import format_bytes
from etloom.core.trace import Job, Trace
from etloom.timeline.memory.program import ALLOC, Program, find_programs
from etloom.timeline.memory.what_if import compare_changes, find_help, parse_change


def check_changes(changes: Sequence[str], *, has_other_batch: bool = False) -> None:
    """Raise InvalidValue if a change names an unknown setting, has an invalid value, or none uses the other batch."""
    batches = [parse_change(change).batch for change in changes]
    if has_other_batch and not any(batches):
        raise InvalidValue("no change has a batch, such as batch=x2, which uses it", option="other_batch")


def simulate_memory(job: Job, changes: Sequence[str], other_batch: Job | None = None) -> pl.DataFrame:
    """Return the rows of `compare_changes` of each rank and device with a history of its allocator, after its rank.

    Args:
        job: Ranks with memory snapshots.
        changes: As `etloom.timeline.memory.what_if.parse_change` expects them.
        other_batch: The same program, recorded with another batch; for ``batch``. Of several ranks, the same are used.
            Without it, the shapes of a forecast show which sizes grow.

    Raises:
        InvalidValue: A change names an unknown setting or module, or has an invalid value.
        AnalysisError: No rank has such a history, or it does not contain what a change needs.
    """
    check_changes(changes, has_other_batch=other_batch is not None)
    ranks = [rank for rank, trace in job.items() if trace.allocator.height] or list(job)[:1]
    tables = []
    needs_batch = any(parse_change(change).batch is not None for change in changes)
    for rank in ranks:
        others = {program.device: program for program in _find_programs(other_batch, rank)}
        if needs_batch and other_batch is None:
            others = {
                program.device: double_batch(job[rank], program) for program in find_programs(job[rank])
            }
        tables += [
            compare_changes(program, changes, others.get(program.device)).insert_column(
                0, pl.lit(rank, pl.Int64).alias("rank")
            )
            for program in find_programs(job[rank])
        ]
    return pl.concat(tables)


def describe_fit(job: Job, changes: Sequence[str], table: pl.DataFrame) -> list[str]:
    """Return a sentence for each change with a capacity: whether the program fits, and if not, what would help; and one
    for each device whose recording the simulation does not repeat.

    Args:
        job: The ranks.
        changes: As for `simulate_memory`.
        table: Its result. Of the ranks that do not fit, else of all, the one that needs most memory decides.
    """
    programs = {rank: find_programs(job[rank]) for rank in table["rank"].unique(maintain_order=True)}
    doubts = [(rank, program.describe_doubt()) for rank in programs for program in programs[rank]]
    sentences = [f"rank {rank}, {doubt}" for rank, doubt in doubts if doubt is not None]
    for change in changes:
        parsed = parse_change(change)
        if not parsed.settings.capacity:
            continue
        rows = table.filter(pl.col("change") == change)
        failing = rows.filter(
            ~pl.col("fits")
        )  # their peaks end at the failure: no measure against the others
        needs = (failing if failing.height else rows).with_columns(
            bytes=pl.coalesce("needed_bytes", "peak_reserved_bytes")
        )
        row = needs.sort("bytes", descending=True).row(0, named=True)
        subject = f"{change}, rank {row['rank']}" if rows["rank"].n_unique() > 1 else change
        if not failing.height:
            spare = 1 - row["bytes"] / parsed.settings.capacity
            sentences.append(f"{subject}: fits with {100 * spare:.0f} % to spare")
            continue
        program = next(each for each in programs[row["rank"]] if each.device == row["device"])
        before = int(program.blocks.size.sum())
        if before > parsed.settings.capacity:
            subject += f" ({format_bytes(before)} are in use from before the recording)"
        needed = "more" if row["needed_bytes"] is None else format_bytes(row["needed_bytes"])
        helps, tried = ([], []) if parsed.batch is not None else find_help(program, change)
        others = "".join(f"; with {text} {format_bytes(size)}" for text, size in helps)
        if tried and not helps:
            others = f"; {' or '.join(tried)} saves less than 1 %"
        sentences.append(f"{subject}: does not fit, it needs {needed}{others}")
    return sentences


def _find_programs(job: Job | None, rank: int) -> list[Program]:
    if job is None:
        return []
    return find_programs(job[rank if rank in job else next(iter(job))])


# Infer from recorded shapes which requests of a program grow with its batch.

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
