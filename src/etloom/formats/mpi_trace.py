"""JSON of MPI calls, the input of Chakra's mpi_converter: a Chrome trace whose processes are the ranks.

An event is a call (MPI_Allreduce, MPI_Send, ...) with its communicator, count, type (a number of Open MPI), root, peer
and tag as arguments. Calls become operators with rows of comms; other events of a rank stay as they are. Processes
without a call of MPI are left out. Counts are elements, of one rank where each rank has a part (MPI_Allgather); the
whole is known if the file has several ranks with the communicator. Types have their size in bytes.

Format: src/converter/mpi_converter.py of mlcommons/chakra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import TABLES, Stat, parse_distinct
from etloom.core.trace import Job, Trace
from etloom.formats import kineto
from etloom.formats.tables.comms_table import P2P, normalize_comms
from etloom.formats.tables.meta_checks import is_rank

_COLLECTIVES = {
    "Allreduce": "all_reduce",
    "Alltoall": "all_to_all",
    "Alltoallv": "all_to_all",
    "Allgather": "all_gather",
    "Allgatherv": "all_gather",
    "Reduce_scatter": "reduce_scatter",
    "Reduce_scatter_block": "reduce_scatter",
    "Bcast": "broadcast",
    "Reduce": "reduce",
    "Barrier": "barrier",
    "Gather": "gather",
    "Gatherv": "gather",
    "Scatter": "scatter",
    "Scatterv": "scatter",
    "Recv": "recv",
    "Irecv": "recv",
    **dict.fromkeys(("Send", "Isend", "Ssend", "Bsend", "Rsend"), "send"),
}
"""A call without its prefix (MPI_, and MPI_I where it does not block) -> the collective or message."""
_TYPES = {
    1: "int8",
    2: "uint8",
    3: "int16",
    4: "uint16",
    5: "int",
    6: "uint32",
    7: "long",
    8: "uint64",
    9: "float",
    10: "double",
    12: "complexhalf",
    13: "complexfloat",
    14: "complexdouble",
    18: "bool",
    20: "int8",
    21: "int",
    22: "float",
    23: "double",
    24: "complexfloat",
    25: "complexdouble",
    38: "long",
    39: "long",
    40: "bool",
}
"""Open MPI's number of a type -> a type of the same size."""
_WHOLE_INPUTS, _WHOLE_OUTPUTS = (
    ("all_to_all", "reduce_scatter", "scatter"),
    ("all_to_all", "all_gather", "gather"),
)
"""Collectives whose count is that of a rank's part of the input, or of the output."""
_MAX_NUMBER = 1 << 48
_ARGUMENTS = dict.fromkeys(("comm", "count", "datatype", "root", "dest", "source", "tag"), pl.Int64)
_MAX_TEXT = 20


def sniff(head: bytes) -> bool:
    """Return whether a file is a Chrome trace of MPI calls, judging from its first bytes."""
    return kineto.is_chrome_trace(head) and kineto.is_mpi_trace(head)


def read(path: Path) -> Trace | Job:
    """Read a Trace if the file has one rank, or a Job.

    Raises:
        ReadError: The file has no call of MPI.
        LimitError: For a decompression bomb.
    """
    source = kineto.read(path)
    name = pl.col("name").cast(pl.String)
    events = source.events.with_columns(is_call=name.str.starts_with("MPI_").fill_null(False))
    pids = events.filter("is_call")["pid"].drop_nulls().unique().sort().to_list()
    if not pids:
        raise ReadError(
            "contains no call of MPI", where=path, remedy="record MPI_* calls with their arguments"
        )
    ignored = events.filter(~pl.col("pid").is_in(pids).fill_null(False)).height
    stats = [
        Stat("read.mpi_other_process", "data_loss", ignored, "events of processes without a call of MPI")
    ]
    events = events.with_columns(
        cat=pl.when(pl.col("is_call") & pl.col("dur").is_not_null())
        .then(pl.lit("cpu_op"))
        .otherwise(pl.col("cat").cast(pl.String))
    )
    are_ranks = len(pids) > 1 and all(is_rank(pid) for pid in pids) and pids[-1] < 2 * len(pids)
    ranks = pids if are_ranks else range(len(pids))
    events = events.filter(pl.col("pid").is_in(pids)).with_columns(id=pl.int_range(pl.len()).over("pid"))
    comms = _read_calls(events)
    traces = {
        rank: _build_rank(
            source,
            events.filter(pl.col("pid") == pid),
            comms.filter(pl.col("pid") == pid),
            stats if not place else [],
        )
        for place, (rank, pid) in enumerate(zip(ranks, pids, strict=True))
    }
    meta = {"formats": ["mpi-trace"], "files": [str(path)]}
    if len(traces) == 1:
        return next(iter(traces.values())).replace(meta)
    return Job({rank: trace.replace({**meta, "rank": rank}) for rank, trace in traces.items()}, meta)


def _read_calls(events: pl.DataFrame) -> pl.DataFrame:
    """Return the communications of all ranks (``pid``), with the ``count`` that the call states."""
    calls = parse_distinct(
        events.filter("is_call").select("id", "pid", "name", "args"), "args", _parse, pl.Struct(_ARGUMENTS)
    ).unnest("args")
    stem = pl.col("name").cast(pl.String).str.strip_prefix("MPI_")
    blocking = stem.replace_strict(_COLLECTIVES, default=None, return_dtype=pl.String)
    # MPI_Iallreduce does not block.
    capital = stem.str.strip_prefix("I").str.head(1).str.to_uppercase() + stem.str.strip_prefix(
        "I"
    ).str.slice(1)
    nonblocking = capital.replace_strict(_COLLECTIVES, default=None, return_dtype=pl.String)
    rows = calls.with_columns(collective=pl.coalesce(blocking, nonblocking)).drop_nulls("collective")
    is_message = pl.col("collective").is_in(P2P)
    members = pl.col("pid").filter(~is_message).n_unique().over("comm")
    # A file of one rank does not tell; parts of MPI_Allgatherv differ.
    is_known = (members > 1) & pl.col("comm").is_not_null() & ~is_message
    rows = rows.with_columns(group_size=pl.when(is_known).then(members).cast(pl.Int64))
    fits = ~pl.col("name").cast(pl.String).str.ends_with("v") & (
        pl.col("count") < _MAX_NUMBER // pl.col("group_size")
    )
    has_parts = pl.col("collective").is_in([*_WHOLE_INPUTS, *_WHOLE_OUTPUTS])
    part = pl.when(~has_parts | fits).then("count")

    def count(wholes: tuple[str, ...]) -> pl.Expr:
        return pl.when(pl.col("collective").is_in(wholes)).then(part * pl.col("group_size")).otherwise(part)

    return rows.select(
        "pid",
        "count",
        "group_size",
        event="id",
        collective="collective",
        pg_name=pl.col("comm").cast(pl.String),
        ranks=pl.lit(None, pl.String),
        dtype=pl.col("datatype").replace_strict(_TYPES, default=None, return_dtype=pl.String),
        in_nelems=count(_WHOLE_INPUTS),
        out_nelems=count(_WHOLE_OUTPUTS),
        root="root",
        peer=pl.coalesce("dest", "source"),
    )


def _build_rank(source: Trace, events: pl.DataFrame, comms: pl.DataFrame, stats: list[Stat]) -> Trace:
    unknown = comms.filter(pl.col("count").is_not_null() & pl.col("in_nelems").is_null())
    problems = [
        *stats,
        Stat("read.mpi_part", "data_loss", unknown.height, "collectives that state the size of a part"),
    ]
    table = normalize_comms(comms.drop("pid", "count"), problems).with_row_index("id")
    threads = source.threads.filter(pl.col("pid").is_in(events["pid"].unique().implode()))
    tables = {"events": TABLES["events"].conform(events.drop("is_call")), "threads": threads}
    return Trace({**tables, "comms": TABLES["comms"].conform(table)}, source.meta).with_stats(problems)


def _parse(args: Any) -> dict[str, int | None]:
    if not isinstance(args, dict):
        raise ValueError
    return {name: _to_number(args.get(name)) for name in _ARGUMENTS}


def _to_number(value: Any) -> int | None:
    """Return a number below 2**48, also from text such as 0x0A; None for other values."""
    try:
        number = int(value, 0) if isinstance(value, str) and len(value) < _MAX_TEXT else value
    except ValueError:
        return None
    return number if type(number) is int and 0 <= number < _MAX_NUMBER else None
