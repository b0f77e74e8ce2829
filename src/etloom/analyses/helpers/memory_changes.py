"""Predict the memory that the ranks of a job need under other settings of PyTorch's caching allocator."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.analyses.helpers.batch_shapes import double_batch
from etloom.core.errors import InvalidValue
from etloom.core.text import format_bytes
from etloom.core.trace import Job
from etloom.timeline.memory.program import Program, find_programs
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
