"""The schedule of a pipeline operation trace: which operations each operation waits for, and simulated step times.

An operation starts as soon as all that it waits for has ended; launch delays are left out. The rules reproduce the
published results of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025):

- A rank runs its computation in the recorded order, its collectives in the recorded order, and the messages of each
  type (forward-send, forward-recv, backward-send, backward-recv) in their order, each on a track of its own.
- A computation waits for the message that it receives, and a message is sent after its computation. A receive starts
  after the previous computation of the same direction.
- The first forward-compute waits for params-all-gather. Other collectives wait for the last backward-compute, and
  what a rank computes after its last backward-compute waits for the collectives that began before it.
- A transfer begins when all its ranks have started it, and ends on each after its transfer time: the recorded end minus
  the recorded start of the last rank.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.categories import PIPELINE_OPERATION
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

_DIRECTIONS = ("forward", "backward")
_MAX_CELLS = 4_000_000
"""Times (operations x columns) that are simulated at once."""
_ARGS = pl.Struct({"step": pl.Int64, "sequence": pl.Int64, "micro_batch": pl.Int64, "chunk": pl.Int64})


def has_operations(job: Job) -> bool:
    """Return whether the job was read from pipeline operation traces (times of forward and backward operations, no
    operators)."""
    return all("pipeline_operations" in trace.meta.get("formats", ()) for trace in job.values())


@dataclass(frozen=True, eq=False)
class StepPattern:
    """Steps that run the same operations in the same order, with their durations and dependencies.

    Attributes:
        operations: One row per operation: rank, stage, data_rank, type, and whether it is a ``transfer``.
        steps: The steps.
        recorded_ns: Duration of each operation (of transfers: the transfer time) in each step.
        span_ns: Recorded time of each step, from the first start to the last end.
        order: Operations that start together, after all that they wait for: (members, waits for).
    """

    operations: pl.DataFrame
    steps: tuple[int, ...]
    recorded_ns: FloatArray
    span_ns: FloatArray
    order: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    def simulate(self, keep: Mask, ideal_ns: FloatArray) -> FloatArray:
        """Return the simulated time of each step, ns, for each scenario (row of ``keep``).

        Args:
            keep: (scenarios x operations) whether an operation takes its recorded time instead of the ideal one.
            ideal_ns: Ideal duration of each operation.

        Returns:
            (scenarios x steps)
        """
        chunk = max(1, _MAX_CELLS // max(self.recorded_ns.size, 1))
        parts = [self._simulate(keep[i : i + chunk], ideal_ns) for i in range(0, len(keep), chunk)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.steps)))

    def _simulate(self, keep: Mask, ideal_ns: FloatArray) -> FloatArray:
        kept = keep.T[:, :, None]
        durations = np.where(kept, self.recorded_ns[:, None, :], ideal_ns[:, None, None])
        end = durations.copy()
        for members, group, waits, first in self._waves:
            start = np.maximum.reduceat(end[waits], first, axis=0)
            end[members] += start[group]
        return np.asarray(end.max(axis=0))

    @cached_property
    def _waves(self) -> list[tuple[NDArray[np.int64], ...]]:
        """Groups of operations by depth: each waits only for groups of lower depth. Those that wait for nothing are
        left out.

        Of each wave: its operations, the group of each, the operations that the groups wait for, one group after
        the other, and the place of the first one of each group.
        """
        depth = np.zeros(self.operations.height, np.int64)
        waves: defaultdict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = defaultdict(list)
        for members, waits in self.order:
            if len(waits):
                depth[members] = depth[waits].max() + 1
                waves[int(depth[members[0]])].append((members, waits))
        arrays: list[tuple[NDArray[np.int64], ...]] = []
        for _, groups in sorted(waves.items()):
            sizes, counts = ([len(pair[place]) for pair in groups] for place in (0, 1))
            members, waits = (np.concatenate([pair[place] for pair in groups]) for place in (0, 1))
            group = np.repeat(np.arange(len(groups)), sizes)
            arrays.append((members, group, waits, np.concatenate([[0], np.cumsum(counts)[:-1]])))
        return arrays


def build_patterns(job: Job) -> list[StepPattern]:
    """Build the schedule of the steps: which operations each operation waits for.

    Raises:
        AnalysisError: A rank has several model chunks, or the operations of a step wait for each other.
    """
    operations = _list_operations(job)
    if (operations["chunk"].fill_null(0) > 0).any():
        raise AnalysisError(
            "interleaved pipelines (several model chunks per rank) are not supported",
            remedy="use a trace with vpp_size 1",
        )
    keys = operations.select("rank", "track", "type", "sequence")
    steps: defaultdict[Any, list[pl.DataFrame]] = defaultdict(list)
    for frame in operations.with_columns(key=keys.hash_rows()).partition_by("step", maintain_order=True):
        steps[frame["key"].to_numpy().tobytes()].append(frame)
    return [_build_pattern(frames) for frames in steps.values()]


def _list_operations(job: Job) -> pl.DataFrame:
    """Return all pipeline operations of a job, sorted by step, rank, track and start."""
    frames = []
    for rank, trace in job.items():
        events = trace.events.drop("step").filter(pl.col("cat").cast(pl.String) == PIPELINE_OPERATION)
        comms = trace.comms.select("event", "collective", "pg_name", "peer", "is_p2p")
        frames.append(
            events.join(comms, left_on="id", right_on="event", how="left", maintain_order="left")
            .with_columns(pl.col("args").cast(pl.String).str.json_decode(_ARGS))
            .unnest("args")
            .select(
                pl.col("ts").cast(pl.Float64).alias("start"),
                (pl.col("ts") + pl.col("dur")).cast(pl.Float64).alias("end"),
                rank=pl.lit(rank, pl.Int64),
                stage=pl.lit(trace.meta.get("stage"), pl.Int64),
                data_rank=pl.lit(trace.meta.get("data_parallel_rank"), pl.Int64),
                type=pl.col("name").cast(pl.String),
                track="tid",
                step="step",
                sequence=pl.col("sequence").fill_null(-1),
                chunk="chunk",
                peer=pl.col("peer").cast(pl.Int64),
                group=pl.col("pg_name").cast(pl.String),
                transfer=pl.col("collective").is_not_null(),
                is_message=pl.col("is_p2p").fill_null(False),
            )
        )
    return pl.concat(frames).sort("step", "rank", "track", "start", "sequence")


def _build_pattern(frames: list[pl.DataFrame]) -> StepPattern:
    first = frames[0]
    groups = _match_transfers(first)
    start = np.stack([frame["start"].to_numpy() for frame in frames], axis=1)
    end = np.stack([frame["end"].to_numpy() for frame in frames], axis=1)
    recorded = end - start
    for members in groups:
        if len(members) > 1 or first["transfer"][int(members[0])]:
            recorded[members] = np.maximum(end[members] - start[members].max(axis=0), 0)
    return StepPattern(
        first.select("rank", "stage", "data_rank", "type", "transfer"),
        tuple(int(frame["step"][0]) for frame in frames),
        recorded,
        end.max(axis=0) - start.min(axis=0),
        tuple(_order_groups(groups, _list_waits(first), int(first["step"][0]))),
    )


def _match_transfers(operations: pl.DataFrame) -> list[NDArray[np.int64]]:
    """Return groups of operations that start together: all of a collective, both ends of a message, or a single
    operation."""
    direction = pl.col("type").str.splitn("-", 2).struct.field("field_0")
    ends = (pl.min_horizontal("rank", "peer"), pl.max_horizontal("rank", "peer").alias("last"))
    key = (
        pl.when("is_message")
        .then(pl.struct(direction, *ends, "sequence").hash())
        .when("transfer")
        .then(pl.struct("type", "group", "sequence").hash())
        .otherwise(pl.int_range(pl.len(), dtype=pl.UInt64))
    )
    rows = operations.select(row=pl.int_range(pl.len()), key=key)
    members = rows.group_by("key", maintain_order=True).agg("row")["row"]
    return [np.array(group, np.int64) for group in members.to_list()]


def _list_waits(operations: pl.DataFrame) -> list[list[int]]:
    """Return, for each operation, the operations of the same rank (row numbers) that must end before it starts."""
    waits: list[list[int]] = [[] for _ in range(operations.height)]
    columns = operations.select("rank", "track", "type", "sequence", "start", "transfer").rows()
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for row, (rank, *_) in enumerate(columns):
        by_rank[rank].append(row)
    for rows in by_rank.values():
        for previous, row in itertools.pairwise(rows):
            if columns[previous][1] == columns[row][1]:
                waits[row].append(previous)
        _add_message_waits({columns[row][2:4]: row for row in rows}, waits)
        _add_collective_waits([(row, *columns[row][2:]) for row in rows], waits)
    return waits


def _add_message_waits(row_at: Mapping[tuple[str, int], int], waits: list[list[int]]) -> None:
    """Add the dependencies between a rank's messages and computation to ``waits``; ``row_at``: (type, sequence) ->
    row."""
    for (type, sequence), row in row_at.items():
        direction, _, action = type.partition("-")
        if direction not in _DIRECTIONS:
            continue
        before = {
            "compute": (f"{direction}-recv", sequence),
            "send": (f"{direction}-compute", sequence),
            "recv": (f"{direction}-compute", sequence - 1),
        }.get(action)
        if before is not None and before in row_at:
            waits[row].append(row_at[before])


def _add_collective_waits(
    operations: list[tuple[int, str, int, float, bool]], waits: list[list[int]]
) -> None:
    """Add the dependencies between a rank's collectives and computation to ``waits``, by row number."""
    forward: list[tuple[float, int]] = []
    backward: list[tuple[float, int]] = []
    collectives: list[tuple[float, int, str]] = []
    others: list[tuple[float, int, str]] = []
    for row, type, _, start, transfer in operations:
        if type == "forward-compute":
            forward.append((start, row))
        elif type == "backward-compute":
            backward.append((start, row))
        elif type.partition("-")[0] not in _DIRECTIONS:
            (collectives if transfer else others).append((start, row, type))
    last_backward = max(backward, default=None)
    for _, row, type in collectives:
        if type == "params-all-gather":
            if forward:
                waits[min(forward)[1]].append(row)
        elif last_backward is not None:
            waits[row].append(last_backward[1])
    for start, row, _ in others:
        if last_backward is not None and start > last_backward[0]:
            earlier = [(at, other) for at, other, _ in collectives if at < start and at > last_backward[0]]
            waits[row] += [max(earlier)[1]] if earlier else []


def _order_groups(
    groups: list[NDArray[np.int64]], waits: list[list[int]], step: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield each group of operations and the operations it waits for, ordered so that a group follows all it waits
    for."""
    group_of = np.zeros(len(waits), np.int64)
    for number, members in enumerate(groups):
        group_of[members] = number
    awaited = [sorted({w for member in members for w in waits[member]}) for members in groups]
    open_waits = [len({int(group_of[row]) for row in rows}) for rows in awaited]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for number, rows in enumerate(awaited):
        for other in {int(group_of[row]) for row in rows}:
            followers[other].append(number)
    ready = [number for number, count in enumerate(open_waits) if not count]
    done = 0
    while ready:
        number = ready.pop()
        done += 1
        yield groups[number], np.array(awaited[number], np.int64)
        for follower in followers[number]:
            open_waits[follower] -= 1
            if not open_waits[follower]:
                ready.append(follower)
    if done < len(groups):
        raise AnalysisError(
            f"operations of step {step} wait for each other in a cycle", remedy="the trace is inconsistent"
        )
