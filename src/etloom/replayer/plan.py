"""The plan of a communication replay: the calls that each rank makes.

A call is a collective or one end of a point-to-point message, with the sizes of its tensors. For each call the plan
lists the earlier calls to wait for before making it: those that had completed in the recording when this call was made.
The recorded job obeyed that order, so a replay that keeps it cannot deadlock, and it keeps as many calls in flight as
the recording did. Where no times were recorded, the recorded waits are used; without these every call is waited for at
once.
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
PLAN_COLUMNS = {
    **dict.fromkeys(("rank", "call"), pl.Int64),
    **dict.fromkeys(("collective", "group", "dtype"), pl.String),
    **dict.fromkeys(("in_nelems", "out_nelems", "bytes", "root", "peer"), pl.Int64),
    "reduce_op": pl.String,
    **dict.fromkeys(("waits_for_calls", "gap_ns", "recorded_ns"), pl.Int64),
    "name": pl.String,
    "reason": pl.String,
}


@dataclass(frozen=True)
class Call:
    """A planned collective, send or receive of a rank, with ranks numbered as in the replay, sizes in elements.

    Attributes:
        inputs, outputs: Sizes. An all-gather has one input and either one output per rank or a single output with all
            elements; a coalesced call has several pairs.
        waits_for: Earlier calls (by index) to wait for before this one.
        gap_ns: Recorded time from the previous call to this one.
        recorded_ns: Recorded time from the call to its completion; None if the recorded call had another size or group.
        node: Node of the recording, if it has an execution trace.
        wait_before_node: The call is waited for before the operator of this node, if operators are replayed too.
        shrunk: Some ranks of the group are not replayed, and sizes shrink to the remaining ones.
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
    waits_for: tuple[int, ...] = ()
    gap_ns: int | None = None
    recorded_ns: int | None = None
    seq: int | None = None
    name: str = ""
    node: int | None = None
    wait_before_node: int | None = None
    shrunk: bool = False

    @property
    def bytes(self) -> int:
        """Number of bytes in the input tensors of the call, or in its output tensors if it has no inputs."""
        size = categories.itemsize(self.dtype) or 0
        return size * (sum(self.inputs) or sum(self.outputs))


@dataclass(frozen=True)
class Skipped:
    """Recorded calls of equal rank and name that cannot be replayed: how many there are, and the reason."""

    rank: int
    name: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """The calls of every rank of the replay, and the recorded calls that are skipped.

    Attributes:
        recorded_ranks: For each rank of the replay, the recorded rank whose calls it makes.
        inferred_groups: Number of calls whose group was not recorded (although there are several) and is inferred from
            the calls of other ranks.
        recorded_world_size: Number of ranks of the recorded job, as far as it is known.
    """

    calls: tuple[tuple[Call, ...], ...]
    skipped: tuple[Skipped, ...] = ()
    recorded_ranks: tuple[int, ...] = ()
    inferred_groups: int = 0
    recorded_world_size: int = 0

    @property
    def world_size(self) -> int:
        return len(self.calls)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Rank groups of all collective calls, in the order of creation; sends and receives use the default group."""
        return sorted({call.group for calls in self.calls for call in calls if call.peer is None})


@dataclass(frozen=True)
class RankPlan:
    """The part of a plan that is sent to one rank: the calls of this rank, all rank groups, and the number of ranks."""

    calls: tuple[Call, ...]
    groups: tuple[tuple[int, ...], ...]
    world_size: int


def plan_notes(plan: Plan) -> list[str]:
    """Return one line of text per kind of skipped calls, then one line per difference between plan and recording."""
    skipped = [
        f"not replayed on rank {entry.rank}: {entry.count:,} {entry.name}: {entry.reason}"
        for entry in plan.skipped
    ]
    return skipped + plan_caveats(plan)


def plan_caveats(plan: Plan) -> list[str]:
    """Return one line per difference between plan and recording: calls on fewer ranks, calls with inferred groups."""
    caveats = []
    if shrunk := sum(call.shrunk for calls in plan.calls for call in calls):
        caveats.append(
            f"only {plan.world_size} of {plan.recorded_world_size} ranks are replayed: groups, splits and sizes of "
            f"{shrunk:,} calls shrink to them, and their times are not compared with the recorded ones"
        )
    if plan.inferred_groups:
        caveats.append(
            f"the groups of {plan.inferred_groups:,} calls were not recorded; they are inferred from the calls of "
            "other ranks, and may be other groups of the same size (etloom collect --observer native records them)"
        )
    return caveats


def plan_table(plan: Plan) -> pl.DataFrame:
    """Return the plan as a table (PLAN_COLUMNS): one row per call, then one row per kind of skipped calls."""
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
            "waits_for_calls": len(call.waits_for),
            "gap_ns": call.gap_ns,
            "recorded_ns": call.recorded_ns,
            "name": call.name,
            "reason": None,
        }
        for rank, calls in enumerate(plan.calls)
        for call in calls
    ]
    rows += [
        {"rank": entry.rank, "name": entry.name, "reason": f"{entry.reason} ({entry.count}x)"}
        for entry in plan.skipped
    ]
    return pl.DataFrame(rows, schema=PLAN_COLUMNS, orient="row", infer_schema_length=None)
