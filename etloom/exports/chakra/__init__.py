"""Chakra execution trace (.et) for simulators such as ASTRA-sim, one file per rank.

Nodes are the activities of the dependency graph: parts of operators, GPU work, delays before it, ranges of
communication backends. A node may start when all its ``data_deps`` have ended: the previous work of its thread or
stream, its launch, GPU work or another thread that it waited for. ``ctrl_deps`` names the enclosing operator, and for
GPU work the part of an operator that launched it. Ids count from 1 in order of start, so all dependencies of a node
have lower ids; every node that a dependency names exists.

Durations are differences of times rounded down to whole microseconds, so they add up; ``start_ns`` and ``duration_ns``
are exact. Types, sizes and groups of communications follow ASTRA-sim: a size is what one rank contributes; groups are
numbered, 0 is all ranks, and the others are written to NAME.comm_groups.json next to the files (ASTRA-sim's
--comm-group-configuration).

Format: mlcommons/chakra schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.core.version import __version__
from etloom.exports.chakra.group_numbering import GroupNumbers, add_matched_groups, number_groups
from etloom.exports.chakra.node_table import build_nodes
from etloom.formats.chakra.et_files import rank_path, strip_suffix
from etloom.formats.chakra.protobuf import TYPE_NUMBERS
from etloom.formats.chakra.writing import encode_file
from etloom.formats.io.atomic_file import open_atomic
from etloom.linker import linked

SUFFIX = (".et", ".et.gz")


def write(trace: Trace | Job, path: str | PathLike[str], *, delays: bool = True) -> None:
    """Write a Trace to NAME.et, or each rank of a Job to NAME.RANK.et; compressed if the name ends in .gz.

    A trace that is not linked is linked first.

    delays: write the time from launch to start of GPU work, and between two works of a stream, as nodes that run on the
    device; without them the nodes add up to less than the recorded time.

    Raises:
        EtloomError: A rank has no timed events.
    """
    path = Path(path)
    ranks = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    for rank, rank_trace in ranks.items():
        check_exportable(rank_trace, path)
        ranks[rank] = linked(rank_trace)
    groups = add_matched_groups(Job(ranks), number_groups(ranks.values()))
    for rank, rank_trace in ranks.items():
        with open_atomic(path if len(ranks) == 1 else rank_path(path, rank)) as file:
            file.write(encode_trace(rank_trace, groups, delays=delays))
    if groups.ranks:
        group_file = path.with_name(f"{strip_suffix(path)}.comm_groups.json")
        content = {str(number): members for number, members in groups.ranks.items()}
        group_file.write_text(json.dumps(content) + "\n")


def check_exportable(trace: Trace, path: str | PathLike[str]) -> None:
    """Raise EtloomError for a trace without timed events, or one that was read from a Chakra file."""
    if "chakra" in trace.meta.get("formats", ()):
        raise EtloomError(
            "the trace is already a Chakra trace",
            where=path,
            remedy="copy the file, or compress it with gzip",
        )
    if not trace.events.height:
        raise EtloomError(
            f"rank {trace.rank or 0} has no timed events",
            where=path,
            remedy="link its execution trace with a profiler trace",
        )


def encode_trace(trace: Trace, groups: GroupNumbers, *, delays: bool = True) -> bytes:
    """Encode the file of a linked trace of one rank, uncompressed; see `write`.

    Raises:
        EtloomError: The trace has neither timed operators nor GPU work.
    """
    nodes = build_nodes(trace, groups, delays=delays)
    if not (nodes.table["type"] != TYPE_NUMBERS["METADATA_NODE"]).any():
        raise EtloomError(
            f"rank {trace.rank or 0} has no timed operators and no GPU work",
            remedy="record it with torch.profiler and its CPU activity",
        )
    metadata = {
        "schema": trace.meta.get("schema_version"),
        "producer": f"etloom {__version__}",
        "clock": trace.meta.get("clock"),
        "rank": trace.rank,
        "world_size": trace.meta.get("world_size"),
    }
    return encode_file(nodes, metadata)
