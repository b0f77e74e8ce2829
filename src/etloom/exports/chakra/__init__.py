"""Write Chakra execution traces (.et) for simulators such as ASTRA-sim, one file per rank.

Nodes are the activities of the dependency graph: parts of operators, GPU work, delays before it, ranges of
communication backends. A node may start when all its ``data_deps`` have ended: the previous work of its thread or
stream, its launch, GPU work or another thread that it waited for. ``ctrl_deps`` names the enclosing operator, and for
GPU work the part of an operator that launched it. Ids count from 1 in order of start, so all dependencies of a node
have lower ids; every node that a dependency names exists.

Durations are differences of times rounded down to whole microseconds, so they add up; ``start_ns`` and ``duration_ns``
are exact. Work that overlaps on one resource of a simulator counts once (``-O serialize=no`` keeps recorded durations).
A rank that starts later than the first one begins with a node ``start``.

Types, sizes and groups of communications follow ASTRA-sim: a size is what one rank contributes, the same on all ranks;
groups are numbered, and their ranks are written to NAME.comm_groups.json next to the files (ASTRA-sim's
--comm-group-configuration). In a job with a single group it is 0, all ranks, and there is no such file.

Format: mlcommons/chakra schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl

from etloom.collectives import correct_clocks, match_collectives
from etloom.core.errors import EtloomError, warn
from etloom.core.trace import Job, Trace
from etloom.core.version import __version__
from etloom.exports.chakra.communication_nodes import REPLAYED
from etloom.exports.chakra.group_numbering import (
    GroupNumbers,
    add_matched_groups,
    number_groups,
    number_world,
)
from etloom.exports.chakra.node_table import build_nodes
from etloom.exports.chakra.rank_timing import find_start_ns
from etloom.exports.chakra_lint import lint
from etloom.exports.chakra_lint.lint_codes import ERROR
from etloom.formats.chakra.et_files import job_name, rank_path
from etloom.formats.chakra.protobuf import TYPE_NUMBERS
from etloom.formats.chakra.writing import NODE_SCHEMA, NodeTable, encode_file
from etloom.formats.io.atomic_file import open_atomic, write_atomically
from etloom.linker import linked

SUFFIX = (".et", ".et.gz")


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    delays: Annotated[
        bool,
        "Write the time from launch to start of GPU work, and between two works of a stream, as nodes "
        "that run on the device; without them the nodes add up to less than the recorded time.",
    ] = True,
    serialize: Annotated[
        bool,
        "Count time once during which several operators, computations or communications overlap, since "
        "simulators run them one after the other.",
    ] = True,
    memory: Annotated[
        bool,
        "Write copies between host and device as MEM_LOAD and MEM_STORE nodes with their bytes; "
        "ASTRA-sim exits at them if its memory configuration has no expansion.",
    ] = False,
) -> None:
    """Write each rank to a Chakra file NAME.RANK.et; compressed if the name ends in .gz.

    A trace that is not linked is linked first.

    Raises:
        EtloomError: A rank has no timed events, or `lint` finds an error in the files that were written.
    """
    path = Path(path)
    ranks = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    paths = {rank: rank_path(path, rank) for rank in ranks}
    write_ranks(ranks, paths, delays=delays, serialize=serialize, memory=memory)
    _check_files(list(paths.values()))


def _check_files(paths: list[Path]) -> None:
    """Raise EtloomError if a simulator cannot run the files.

    That no communication has a size is a warning of the export, not a fault of it.
    """
    result = lint(*paths)
    errors = [
        finding
        for finding in result.findings
        if finding.severity == ERROR and finding.code != "nothing-simulated"
    ]
    if errors:
        outcomes = {"abort": "ASTRA-sim aborts with", "hang": "ASTRA-sim hangs with"}
        outcome = outcomes.get(result.verdict or "", "simulators misread")
        raise EtloomError(
            f"{outcome} the written files: rank {errors[0].rank}: {errors[0].example}: {errors[0].meaning}",
            where=paths[0],
            remedy=f"{errors[0].remedy}; etloom lint shows all {len(errors)} errors"
            if len(errors) > 1
            else errors[0].remedy,
        )


def list_files(trace: Trace | Job, path: Path) -> list[Path]:
    """Return the paths of the files that `write` creates, one per rank, lowest rank first."""
    ranks = trace.ranks if isinstance(trace, Job) else [trace.rank or 0]
    return [rank_path(path, rank) for rank in ranks]


def write_ranks(
    ranks: Mapping[int, Trace],
    paths: Mapping[int, Path],
    *,
    delays: bool = True,
    serialize: bool = True,
    memory: bool = False,
) -> None:
    """Write each rank to a Chakra file at its path (rank -> path); all paths are in one folder. See `write`."""
    for rank, rank_trace in ranks.items():
        check_exportable(rank_trace, paths[rank])
    ranks = {rank: linked(rank_trace) for rank, rank_trace in ranks.items()}
    groups, starts = _number_job_groups(ranks), _find_starts(ranks)
    first = min(starts.values())

    def build(rank: int) -> NodeTable:
        if is_pipeline(ranks[rank]):
            return build_pipeline_nodes(ranks[rank])
        offset_ns = starts[rank] - first
        options = {"delays": delays, "serialize": serialize, "memory": memory}
        return build_nodes(ranks[rank], groups, **options, offset_ns=offset_ns)

    communications, replayed = [], 0
    for rank in ranks:
        nodes = build(rank)
        _write_file(paths[rank], ranks[rank], nodes)
        communications.append(list_communications(rank, nodes))
        replayed += nodes.table.filter(pl.col("replayed") & pl.col("name").ne("delay")).height
    if replayed:
        message = (
            f"communications that take their recorded time: {replayed:,} (size or ends unknown, or a type that "
            "ASTRA-sim does not have)"
        )
        simulated = sum(table.height for table in communications)
        consequence = "" if simulated else "; a simulation does not depend on the network"
        warn(message + consequence)
    # Ranks that agree, which most do, are written once; so only one rank is in memory at a time.
    changes = find_changes(pl.concat(communications), list(ranks))
    for (rank,), rank_changes in changes.group_by("rank", maintain_order=True):
        _write_file(paths[rank], ranks[rank], apply_changes(build(rank), rank_changes))  # type: ignore[index,arg-type]
    if groups.ranks:
        path = next(iter(paths.values()))
        group_file = path.with_name(f"{job_name(path)}.comm_groups.json")
        content = {str(number): members for number, members in groups.ranks.items()}
        write_atomically(group_file, json.dumps(content) + "\n")


def is_pipeline(trace: Trace) -> bool:
    """Return whether a trace was read from a pipeline operation trace (forward and backward times, no operators)."""
    return "pipeline_operations" in trace.meta.get("formats", ())


def _number_job_groups(ranks: Mapping[int, Trace]) -> GroupNumbers:
    groups = number_groups(ranks.values())
    if len(ranks) > 1:
        job = Job(ranks)
        groups = add_matched_groups(job, groups, match_collectives(job).parts)
    world_sizes = [int(trace.meta.get("world_size") or 0) for trace in ranks.values()]
    return number_world(groups, max(*world_sizes, max(ranks) + 1))


def _find_starts(ranks: Mapping[int, Trace]) -> dict[int, int]:
    """Return rank -> time of its first event on a common clock, ns; 0 for all ranks if clocks cannot be compared."""
    if any(trace.meta.get("clock") != "epoch" for trace in ranks.values()) or len(ranks) < 2:
        return dict.fromkeys(ranks, 0)
    starts = pl.DataFrame({"rank": list(ranks), "start": [find_start_ns(trace) for trace in ranks.values()]})
    table = starts.with_columns(end="start").cast(pl.Int64)
    corrected = correct_clocks(table, match_collectives(Job(ranks)).clocks)
    return dict(corrected.select("rank", "start").iter_rows())


def _write_file(path: Path, trace: Trace, nodes: NodeTable) -> None:
    with open_atomic(path) as file:
        file.write(encode_nodes(trace, nodes))


def check_exportable(trace: Trace, path: str | PathLike[str]) -> None:
    """Raise EtloomError if a trace cannot be exported as Chakra: no timed events, or read from a Chakra file.

    Also for a pipeline operation trace without message sizes.
    """
    if "chakra" in trace.meta.get("formats", ()):
        raise EtloomError(
            "the trace is already a Chakra trace",
            where=path,
            remedy="copy the file, or compress it with gzip",
        )
    if is_pipeline(trace) and not has_message_sizes(trace):
        raise EtloomError(
            "a pipeline operation trace cannot be written as Chakra, because it does not contain the sizes of messages",
            where=path,
            remedy="write .parquet, or predict from linked traces",
        )
    if not trace.events.height:
        raise EtloomError(
            f"rank {trace.rank or 0} has no timed events",
            where=path,
            remedy="link its execution trace with a profiler trace",
        )


def encode_trace(trace: Trace, groups: GroupNumbers) -> bytes:
    """Encode a linked trace of one rank as the bytes of a Chakra file, uncompressed; see `write`.

    Raises:
        EtloomError: The trace has neither timed operators nor GPU work.
    """
    nodes = build_pipeline_nodes(trace) if is_pipeline(trace) else build_nodes(trace, groups, delays=True)
    return encode_nodes(trace, nodes)


def encode_nodes(trace: Trace, nodes: NodeTable) -> bytes:
    """Encode the nodes of one rank as the bytes of a Chakra file, uncompressed.

    Raises:
        EtloomError: There are no nodes.
    """
    if not nodes.table.height:
        raise EtloomError(
            f"rank {trace.rank or 0} has no timed operators and no GPU work",
            remedy="record it with torch.profiler and its CPU activity",
        )
    metadata = {
        "schema": None if (schema := trace.meta.get("schema_version")) is None else str(schema),
        "producer": f"etloom {__version__}",
        "clock": trace.meta.get("clock"),
        "rank": trace.rank,
        "world_size": trace.meta.get("world_size"),
    }
    return encode_file(nodes, metadata)


# Build Chakra nodes from a trace of pipeline operations (forward, backward, send, receive) with message sizes.
#
# Operations of a rank run one after the other. An operation waits for the message of its micro-batch, a message is
# sent after the operation that it comes from, and a receive is posted after the operation that runs before it: it
# takes the time until the message arrives, so that a replay without a network waits as the recording did. The time
# between the end of what an operation waits for and its start is added to the operation; a simulator replaces the time
# of messages by that of its network. The rest of a step, with its collectives, is a computation.

_TYPES = {"send": TYPE_NUMBERS["COMM_SEND_NODE"], "recv": TYPE_NUMBERS["COMM_RECV_NODE"]}
_PLACE = pl.Struct({"step": pl.Int64, "micro_batch": pl.Int64, "chunk": pl.Int64})


def has_message_sizes(trace: Trace) -> bool:
    """Return whether all sends and receives of a pipeline operation trace have a known size and peer rank."""
    comms = trace.comms.filter(pl.col("collective").is_not_null())
    return comms.select(pl.col("bytes", "peer").is_not_null().all()).transpose().to_series().all()


def build_pipeline_nodes(trace: Trace) -> NodeTable:
    """Build the Chakra nodes of one rank from its pipeline operations: forward, backward, send and receive."""
    rank = int(trace.rank or 0)
    described = trace.comms.select(pl.col("event").alias("id"), "peer", "bytes")
    rows = trace.events.join(described, on="id", how="left", maintain_order="left")
    rows = rows.with_columns(
        pl.col("name").cast(pl.String), pl.col("args").cast(pl.String).str.json_decode(_PLACE)
    )
    # A message is sent after an operation that ends at the same moment, and arrives before the one that waits for it.
    order = pl.col("name").str.extract(r"-(\w+)$").replace_strict({"recv": 0, "send": 2}, default=1)
    rows = rows.sort("ts", order, "id")
    origin = min(0, int(rows["ts"].min() or 0))  # type: ignore[arg-type]
    nodes: list[dict[str, object]] = []
    dependencies: list[list[int]] = []
    computed: dict[tuple[object, ...], tuple[int, int]] = {}  # operation -> its node and end
    arrived: dict[tuple[object, ...], tuple[int, int]] = {}
    previous: tuple[int, int] | None = None
    tags: dict[tuple[int, int], int] = {}
    for number, row in enumerate(rows.iter_rows(named=True), 1):
        direction, _, action = row["name"].partition("-")
        key = (direction, *(row["args"] or {}).values())
        start, end, after = row["ts"], row["ts"] + row["dur"], []
        node: dict[str, object] = {"type": TYPE_NUMBERS["COMP_NODE"]}
        if action in _TYPES:
            ends = (rank, row["peer"]) if action == "send" else (row["peer"], rank)
            tags[ends] = tags.get(ends, -1) + 1
            node = {"type": _TYPES[action], "comm_src": ends[0], "comm_dst": ends[1], "comm_tag": tags[ends]}
            node |= {"comm_size": row["bytes"], "collective": action}
            if action == "send":
                after = [computed[key]] if key in computed else []
            else:
                after = [] if previous is None else [previous]
                start = previous[1] if previous is not None else origin
                end = max(start, end)
                arrived[key] = (number, end)
        else:
            after = [item for item in (previous, arrived.get(key)) if item is not None]
            start = max((moment for _, moment in after), default=origin)
            previous = computed[key] = (number, end)
        node |= {"id": number, "name": row["name"], "cat": row["cat"], "is_cpu_op": False}
        node |= {"start_ns": row["ts"], "duration_ns": row["dur"]}
        first_us, last_us = ((moment - origin) // 1000 for moment in (start, end))
        node |= {"start_time_micros": first_us, "duration_micros": last_us - first_us}
        nodes.append(node)
        dependencies.append(sorted(item for item, _ in after))
    first = np.cumsum([0, *map(len, dependencies)], dtype=np.int64)
    flat = np.array([item for items in dependencies for item in items], np.int64)
    return NodeTable(pl.DataFrame(nodes, schema=NODE_SCHEMA), first, flat)


# Make the communication nodes of all ranks consistent: equal collective sizes, and a receive for each send.
#
# ASTRA-sim matches the messages of a collective by tag, source, destination and size: if two ranks state different
# sizes (an all-to-all with uneven splits), both wait forever. All ranks therefore state the largest size; their own is
# in ``in_msg_nelems``. A receive takes the size of its send. A message whose other end was not recorded would wait
# forever, so it is replayed with its recorded time.

_COLUMNS = ("id", "type", "comm_type", "comm_size", "pg_name", "comm_src", "comm_dst", "comm_tag")
_MESSAGE_KEY = ("comm_src", "comm_dst", "comm_tag", "pg_name")
_SEND, _RECV, _COLL = (TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))


def list_communications(rank: int, nodes: NodeTable) -> pl.DataFrame:
    """Return the simulated communication nodes of a rank: node id, type, size, group and message ends (`_COLUMNS`).

    Nodes replayed at their recorded time are left out.
    """
    is_simulated = pl.col("type").is_in((_SEND, _RECV, _COLL)) & pl.col("replayed").is_null()
    rows = nodes.table.filter(is_simulated).select(*_COLUMNS)
    return rows.select(pl.lit(rank, pl.Int64).alias("rank"), pl.all())


def find_changes(communications: pl.DataFrame, ranks: Collection[int]) -> pl.DataFrame:
    """Return changes that make communication sizes equal on all ranks: columns rank, id, comm_size, is_replayed.

    Messages without a counterpart on the other rank are replayed at their recorded time.

    Args:
        communications: Rows of `list_communications` of all ranks, in the order of ids.
        ranks: Ranks of the job that have a file.
    """
    collectives = communications.filter(pl.col("type") == _COLL).with_columns(
        turn=pl.int_range(pl.len()).over("rank", "pg_name")
    )
    same = ("pg_name", "turn", "comm_type")
    sizes = collectives.with_columns(agreed=pl.col("comm_size").max().over(same), is_replayed=pl.lit(False))
    sends, receives = (
        communications.filter(pl.col("type") == kind).unique(_MESSAGE_KEY, keep="first", maintain_order=True)
        for kind in (_SEND, _RECV)
    )
    known_peer = pl.col("comm_src").is_in(ranks) & pl.col("comm_dst").is_in(ranks)
    messages = [
        own.join(
            other.select(*_MESSAGE_KEY, other_size="comm_size"), on=_MESSAGE_KEY, how="left", nulls_equal=True
        ).with_columns(
            agreed=pl.coalesce("other_size", "comm_size") if own is receives else pl.col("comm_size"),
            is_replayed=pl.col("other_size").is_null() & known_peer,
        )
        for own, other in ((sends, receives), (receives, sends))
    ]
    rows = pl.concat([sizes, *messages], how="diagonal_relaxed")
    changed = rows.filter((pl.col("agreed") != pl.col("comm_size")) | pl.col("is_replayed"))
    return changed.select("rank", "id", "is_replayed", comm_size="agreed")


def apply_changes(nodes: NodeTable, changes: pl.DataFrame) -> NodeTable:
    """Apply the changes of `find_changes` to one rank's nodes: new sizes, and nodes replayed at their recorded time."""
    marked = nodes.table.join(
        changes.select("id", "is_replayed", agreed="comm_size"), on="id", how="left", maintain_order="left"
    )
    table = marked.with_columns(comm_size=pl.coalesce("agreed", "comm_size")).with_columns(
        pl.when(pl.col("is_replayed")).then(pl.lit(value)).otherwise(pl.col(name)).alias(name)
        for name, value in REPLAYED.items()
    )
    return NodeTable(table.select(nodes.table.columns), nodes.first, nodes.dependencies)
