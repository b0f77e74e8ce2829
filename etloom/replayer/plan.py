"""The plan of a communication replay: the calls that each rank makes.

A call is a collective or one end of a message, with the sizes of its tensors. Before it, the plan says which earlier
calls to wait for: those that had completed in the recording when this one was made. What was recorded obeyed that
order, so a replay that keeps it cannot deadlock, and keeps as much in flight as the recording did. Where no times are
known, the recorded waits say so, else every call is waited for at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import polars as pl

from etloom.core import categories

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
COLLECTIVES = ROOTED | {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
MESSAGES = frozenset({"send", "recv"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})


@dataclass(frozen=True)
class Call:
    """One call of one rank. Ranks are those of the replay. Sizes are elements of each tensor.

    inputs, outputs: of an all-gather one input and as many outputs as ranks, or one of all their elements; of a
    coalesced call several pairs. after: earlier calls (index) to wait for before this one. gap_ns: recorded from the
    call before it to this one. recorded_ns: from the call to its completion, null where the recorded call was of
    another size or group. node: of the recording, where it has an execution trace. until: the node before whose
    operator it is waited for, where operators are played too. fewer: ranks of its group are not played, and its sizes
    shrink to the others.
    """

    index: int
    collective: str
    group: tuple[int, ...]
    dtype: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_split: tuple[int, ...] = ()
    out_split: tuple[int, ...] = ()
    root: int | None = None
    peer: int | None = None
    reduce_op: str = "sum"
    is_async: bool = False
    coalesced: bool = False
    after: tuple[int, ...] = ()
    gap_ns: int | None = None
    recorded_ns: int | None = None
    seq: int | None = None
    name: str = ""
    node: int | None = None
    until: int | None = None
    fewer: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of what this rank puts in, or gets where it puts in nothing."""
        size = categories.itemsize(self.dtype) or 0
        return size * (sum(self.inputs) or sum(self.outputs))


@dataclass(frozen=True)
class Skipped:
    """A recorded call that cannot be replayed, and why."""

    rank: int
    name: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """The calls of every rank of the replay, and what is left out.

    recorded: which recorded rank each rank plays. guessed: of how many calls the group was not recorded, though there
    are several, and is told by what other ranks call. of: how many ranks the recorded job had, as far as is known.
    """

    calls: tuple[tuple[Call, ...], ...]
    skipped: tuple[Skipped, ...] = ()
    recorded: tuple[int, ...] = ()
    inferred_groups: int = 0
    of: int = 0

    @property
    def world(self) -> int:
        return len(self.calls)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups of collectives, in the order in which every rank makes them. Messages go through the world's."""
        return sorted({call.group for own in self.calls for call in own if call.peer is None})


@dataclass(frozen=True)
class RankPlan:
    """What one rank must know of a plan: its own calls, and of all ranks the groups and how many there are."""

    calls: tuple[Call, ...]
    groups: tuple[tuple[int, ...], ...]
    world: int


def plan_notes(made: Plan) -> list[str]:
    """What a reader of a replay's figures must know of its plan, a line each."""
    skipped = [
        f"not replayed on rank {one.rank}: {one.count:,} {one.name}: {one.reason}" for one in made.skipped
    ]
    return skipped + plan_caveats(made)


def plan_caveats(made: Plan) -> list[str]:
    """What of a plan is not as it was recorded."""
    found = []
    if shrunk := sum(call.fewer for own in made.calls for call in own):
        found.append(
            f"{made.world} of {made.of} ranks are there to play: groups, splits and sizes of {shrunk:,} calls shrink "
            "to them, and their times are not compared with the recorded ones"
        )
    if not made.inferred_groups:
        return found
    return [
        *found,
        f"the groups of {made.inferred_groups:,} calls were not recorded; they are told by what other ranks call, and may be "
        "others of the same size (etloom collect --observer native records them)",
    ]


def plan_table(made: Plan) -> pl.DataFrame:
    """The plan as a table: a row a call, then one a sort of skipped call with its reason."""
    rows = [
        {
            "rank": rank,
            "call": call.index,
            "collective": call.collective,
            "group": json.dumps(call.group),
            "dtype": call.dtype,
            "in_nelems": sum(call.inputs),
            "out_nelems": sum(call.outputs),
            "bytes": call.bytes,
            "root": call.root,
            "peer": call.peer,
            "reduce_op": call.reduce_op if call.collective in REDUCING else None,
            "waits_for_calls": len(call.after),
            "gap_ns": call.gap_ns,
            "recorded_ns": call.recorded_ns,
            "name": call.name,
            "reason": None,
        }
        for rank, own in enumerate(made.calls)
        for call in own
    ]
    rows += [
        {"rank": one.rank, "name": one.name, "reason": f"{one.reason} ({one.count}x)"} for one in made.skipped
    ]
    return pl.DataFrame(rows, schema=PLAN_COLUMNS, orient="row", infer_schema_length=None)


PLAN_COLUMNS = {
    **dict.fromkeys(("rank", "call"), pl.Int64),
    **dict.fromkeys(("collective", "group", "dtype"), pl.String),
    **dict.fromkeys(("in_nelems", "out_nelems", "bytes", "root", "peer"), pl.Int64),
    "reduce_op": pl.String,
    **dict.fromkeys(("waits_for_calls", "gap_ns", "recorded_ns"), pl.Int64),
    "name": pl.String,
    "reason": pl.String,
}
