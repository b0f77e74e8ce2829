"""Chakra execution trace (.et): what simulators such as ASTRA-sim take, a file a rank.

Nodes are the activities of the dependency graph: parts of operators, device work, delays before it, ranges of
communication backends. A node may begin when all of ``data_deps`` have ended: what came before it on its thread or
stream, its launch, device work or another thread that it waited for. ``ctrl_deps`` names the operator around it, of
device work the part of an operator that launched it. Ids count from 1 in order of start, so that all dependencies of a
node have lower ones; nothing depends on a node that is not there.

Durations are differences of times cut to whole microseconds, so they sum; ``start_ns`` and ``duration_ns`` have what
was recorded. Types, sizes and groups of communications are as ASTRA-sim reads them: a size is what one rank puts in,
groups are numbered, 0 is all ranks, and the others are in NAME.comm_groups.json beside the files (its
--comm-group-configuration).

Format: mlcommons/chakra schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.exports.chakra.communication_nodes import TYPE_NUMBERS
from etloom.exports.chakra.group_numbering import GroupNumbers, add_matched_groups, number_groups
from etloom.exports.chakra.node_table import ChakraNodes, build_nodes
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra import wire as wire
from etloom.formats.chakra.et_files import path_of_rank, strip_suffix
from etloom.formats.io.atomic_file import open_atomic
from etloom.linker import link

SUFFIX = (".et", ".et.gz")
SCHEMA_VERSION = "0.0.4"
"""Of the schema, as ASTRA-sim's own files say it."""

_CHUNK = 1 << 16
# Fields of Node and of AttributeProto.
_ID, _NAME, _TYPE, _CTRL, _DATA, _START, _DURATION, _INPUTS, _OUTPUTS, _ATTR = range(1, 11)
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29
_ATTRIBUTES = {
    "is_cpu_op": _BOOL, "comm_type": _INT64, "comm_size": _INT64, "comm_src": _INT32, "comm_dst": _INT32,
    "comm_tag": _INT32, "pg_name": _STRING, "rf_id": _INT64, "fw_parent": _INT64, "seq_id": _INT64, "scope": _INT64,
    "tid": _INT64, "fw_tid": _INT64, "op_schema": _STRING, "kernel_backend": _STRING, "kernel_file": _STRING,
    "et_id": _INT64, "cat": _STRING, "part": _INT64, "stream": _INT64, "device": _INT64, "start_ns": _INT64,
    "duration_ns": _INT64, "inclusive_ns": _INT64, "collective": _STRING, "dtype": _STRING, "root": _INT64,
    "in_msg_nelems": _INT64, "out_msg_nelems": _INT64, "pg_size": _INT64, "comm_seq": _INT64,
    "group": _STRING,
}  # fmt: skip
"""Attributes of nodes and the fields of their values: those of Chakra's feeder and converter, then ours."""


def write(trace: Trace | Job, path: str | PathLike[str], *, delays: bool = True) -> None:
    """Write a Trace to NAME.et, or the ranks of a Job to NAME.RANK.et each; packed where the name ends in .gz.

    delays: also write the times from launch to start of device work, and between works of a stream, as nodes of the
    device; without them the nodes sum to less than the recording took. What is not linked is linked first. Raises
    EtloomError for a rank without timed events.
    """
    path = Path(path)
    ranks = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    for rank, one in ranks.items():
        check_exportable(one, path)
        ranks[rank] = one if one.meta.get("linked") else link(one)
    groups = add_matched_groups(Job(ranks), number_groups(ranks.values()))
    for rank, one in ranks.items():
        with open_atomic(path if len(ranks) == 1 else path_of_rank(path, rank)) as file:
            file.write(encode_trace(one, groups, delays=delays))
    if groups.ranks:
        beside = path.with_name(f"{strip_suffix(path)}.comm_groups.json")
        beside.write_text(json.dumps({str(number): ranks for number, ranks in groups.ranks.items()}) + "\n")


def check_exportable(trace: Trace, path: str | PathLike[str]) -> None:
    """Raise EtloomError for what has no activities, or is of this format already."""
    if "chakra" in trace.meta.get("formats", ()):
        raise EtloomError("is a Chakra trace already", where=path, remedy="copy it, or pack it with gzip")
    if not trace.events.height:
        raise EtloomError(
            f"rank {trace.rank or 0} holds no timed events",
            where=path,
            remedy="link its execution trace with a profiler trace",
        )


def encode_trace(trace: Trace, groups: GroupNumbers, *, delays: bool = True) -> bytes:
    """The file of a linked trace of one rank, unpacked. Raises EtloomError where nothing in it took part in the run."""
    found = build_nodes(trace, groups, delays=delays)
    if not (found.table["type"] != TYPE_NUMBERS["METADATA_NODE"]).any():
        raise EtloomError(
            f"rank {trace.rank or 0} holds no timed operators and no device work",
            remedy="record it with torch.profiler and its CPU activity",
        )
    parts = [_encode_metadata(trace)]
    for start in range(0, found.table.height, _CHUNK):
        parts.append(
            wire.delimit_messages(_encode_nodes(found, start, min(start + _CHUNK, found.table.height)))
        )
    return b"".join(parts)


def _encode_metadata(trace: Trace) -> bytes:
    metadata = pb.GlobalMetadata(version=SCHEMA_VERSION)
    said: dict[str, Any] = {
        "schema": trace.meta.get("schema_version"),
        "producer": f"etloom {etloom.__version__}",
        "clock": trace.meta.get("clock"),
        "rank": trace.rank,
        "world_size": trace.meta.get("world_size"),
    }
    for name, value in said.items():
        if value is not None:
            kind = "string_val" if isinstance(value, str) else "int64_val"
            setattr(metadata.attr.add(name=name), kind, value)
    content: bytes = metadata.SerializeToString()
    return wire.encode_varint(len(content)) + content


def _encode_nodes(found: ChakraNodes, start: int, end: int) -> Any:
    """The messages of the rows from start to end, fields in the order of their numbers."""
    table = found.table[start:end]
    first = found.first[start : end + 1]
    ctrl = table["ctrl"]
    fields = [
        *wire.encode_integers(_ID, table["id"].to_numpy()),
        *wire.encode_texts(_NAME, table["name"]),
        *wire.encode_integers(_TYPE, table["type"].to_numpy()),
        *wire.encode_packed(_CTRL, _count_offsets(ctrl), ctrl.drop_nulls().to_numpy()),
        *wire.encode_packed(_DATA, first - first[0], found.on[first[0] : first[-1]]),
        *wire.encode_integers(_START, table["start_time_micros"].to_numpy()),
        *wire.encode_integers(_DURATION, table["duration_micros"].to_numpy()),
    ]
    for number, side in ((_INPUTS, "in"), (_OUTPUTS, "out")):
        names = [f"{part}_{side}" for part in ("values", "shapes", "types")]
        parts = [part for at, name in enumerate(names, 1) for part in wire.encode_texts(at, table[name])]
        fields += wire.encode_messages(number, parts)
    for name, of in _ATTRIBUTES.items():
        attribute = wire.encode_text_attribute if of == _STRING else wire.encode_integer_attribute
        fields += attribute(_ATTR, name, of, table[name])
    return wire.join_fields(fields)


def _count_offsets(values: pl.Series) -> Any:
    """Where the values of each row begin among those that are not null."""
    return pl.Series([0]).append(values.is_not_null().cast(pl.Int64)).cum_sum().to_numpy()
