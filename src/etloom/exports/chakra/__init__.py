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
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated

import polars as pl

from etloom.collectives import correct_clocks, match_collectives
from etloom.core.errors import EtloomError, warn
from etloom.core.trace import Job, Trace
from etloom.core.version import __version__
from etloom.exports.chakra.group_numbering import (
    GroupNumbers,
    add_matched_groups,
    number_groups,
    number_world,
)
from etloom.exports.chakra.node_table import build_nodes
from etloom.exports.chakra.pipeline_nodes import build_pipeline_nodes, has_message_sizes
from etloom.exports.chakra.rank_agreement import apply_changes, find_changes, list_communications
from etloom.exports.chakra.rank_timing import find_start_ns
from etloom.exports.chakra_lint import lint
from etloom.exports.chakra_lint.lint_codes import ERROR
from etloom.formats.chakra.et_files import job_name, rank_path
from etloom.formats.chakra.writing import NodeTable, encode_file
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
        outcome = outcomes.get(result.verdict, "simulators misread")
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
