"""Live blocks of a caching allocator at one moment, with the place in the program that holds each."""

from __future__ import annotations

import polars as pl

from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.timeline.memory.program import NO_OWNER, PLACES, Program, Simulation

BEFORE, UNKNOWN = "allocated before the recording", "unknown"
"""Holders of blocks whose request, or whose stack, was not recorded."""


def describe_blocks(trace: Trace, program: Program, simulation: Simulation, by: str = "line") -> pl.DataFrame:
    """Return the blocks at the end of a simulation: addr, bytes, requested, owner, segment, place (of a free block
    null), and entry, the row of the table ``allocator`` that requested it.

    Args:
        by: A key of `PLACES`, or kind: what a request is for, as the program noted it with its metadata.
    """
    blocks = simulation.blocks
    requests = pl.DataFrame({"owner": range(len(program.entry)), "entry": program.entry})
    blocks = blocks.with_columns(pl.col("owner").cast(pl.Int64)).join(requests, on="owner", how="left")
    # A block from before that still is in use at the snapshot may have the stack of its request.
    at_end = trace.allocator.filter(pl.col("action").cast(pl.String) == "block")
    end_entries = at_end.select(pl.col("addr").cast(pl.Int64), end_entry=pl.col("id").cast(pl.Int64)).unique(
        "addr", keep="first"
    )
    before = (pl.col("owner") < 0) & (pl.col("owner") > NO_OWNER)
    blocks = blocks.join(end_entries, on="addr", how="left").with_columns(
        entry=pl.when(before).then("end_entry").otherwise("entry")
    )
    blocks = blocks.join(find_places(trace, by), on="entry", how="left", maintain_order="left")
    is_free = pl.col("owner") == NO_OWNER
    before &= pl.lit(by != "kind")  # the kind of a request is not known from its stack
    return blocks.with_columns(
        place=pl.when(~is_free).then(
            pl.coalesce("place", pl.when(before).then(pl.lit(BEFORE)).otherwise(pl.lit(UNKNOWN)))
        )
    ).drop("end_entry")


def find_places(trace: Trace, by: str) -> pl.DataFrame:
    """Return entry, the row of the table ``allocator``, and its place, null for none; ``by``: see `describe_blocks`."""
    if by == "kind":
        places = trace.allocator.select("id", place=pl.col("annotation").cast(pl.String))
    else:
        stacks = trace.allocator.select("id", "stack")
        places = parse_distinct(stacks, "stack", PLACES[by], pl.String, alias="place")
    return places.select(pl.col("id").cast(pl.Int64).alias("entry"), "place")


def sum_holders(blocks: pl.DataFrame) -> pl.DataFrame:
    """Sum the blocks of `describe_blocks` by place: blocks, requested_bytes, bytes, and split_bytes, most bytes first.

    split_bytes are free bytes in segments that the driver cannot get back because of this place's blocks; those of a
    segment are shared equally by the blocks in use in it.
    """
    is_free = pl.col("place").is_null()
    shares = blocks.group_by("segment").agg(
        free=pl.col("bytes").filter(is_free & ~pl.col("is_expandable").cast(pl.Boolean)).sum(),
        count=(~is_free).sum(),
    )
    in_use = blocks.filter(~is_free).join(shares, on="segment")
    sums = in_use.group_by("place").agg(
        blocks=pl.len().cast(pl.Int64),
        requested_bytes=pl.col("requested").sum(),
        bytes=pl.col("bytes").sum(),
        split_bytes=(pl.col("free") / pl.col("count")).sum().round().cast(pl.Int64),
    )
    return sums.sort("bytes", "place", descending=[True, False])
