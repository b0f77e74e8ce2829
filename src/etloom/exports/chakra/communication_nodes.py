"""Build the columns of Chakra communication nodes: type, size, process group, source and destination.

A communication whose size or ends are unknown, or that ASTRA-sim does not implement, is replayed: it takes its recorded
time. ASTRA-sim does so for a broadcast, on the communication resource and without waiting for other ranks
(Workload.cc): such a node is a broadcast with the attribute ``replayed``. The delays of streams before communications
are written in the same way: as computations they would keep the device busy. A collective of a single rank moves
nothing, and ASTRA-sim never ends it: it is a computation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core import categories, nesting
from etloom.core.trace import Trace
from etloom.exports.chakra.activities import Activities, ActivityKind
from etloom.exports.chakra.group_numbering import GroupNumbers, list_group_keys
from etloom.formats.chakra.protobuf import COLLECTIVES, TYPE_NUMBERS
from etloom.graphs.event_arrays import rows_of_ids

_COMM_TYPE_NUMBERS = {name: number for number, name in COLLECTIVES.items()}
_COLUMNS = {
    "type": pl.Int64, "comm_type": pl.Int64, "comm_size": pl.Int64, "comm_src": pl.Int64, "comm_dst": pl.Int64,
    "comm_tag": pl.Int64, "pg_name": pl.String, "root": pl.Int64, "collective": pl.String, "dtype": pl.String,
    "in_msg_nelems": pl.Int64, "out_msg_nelems": pl.Int64, "pg_size": pl.Int64, "comm_seq": pl.Int64,
    "group": pl.String, "replayed": pl.Boolean,
}  # fmt: skip
_IN_PLACE_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "send", "recv", "barrier")
_NOT_IMPLEMENTED = ("reduce", "gather", "scatter", "barrier")
"""Collectives at which ASTRA-sim stops."""
_UNSUBSTITUTED = {"send", "recv", "barrier"}
REPLAYED: dict[str, Any] = {
    "type": TYPE_NUMBERS["COMM_COLL_NODE"],
    "comm_type": _COMM_TYPE_NUMBERS["broadcast"],
    "comm_size": 0,
    "comm_src": None,
    "comm_dst": None,
    "comm_tag": None,
    "pg_name": None,
    "replayed": True,
}
"""Columns of a node that takes its recorded time on the communication resource."""

Comm = dict[str, Any]
"""A row of the comms table."""

MessageCounts = dict[tuple[Any, ...], int]
"""(Group, source, destination) -> tag of the last message."""


def build_communication_columns(trace: Trace, activities: Activities, groups: GroupNumbers) -> pl.DataFrame:
    """Return the Chakra node type of each activity, and for communications the attributes that simulators require."""
    work = np.flatnonzero(np.isin(activities.kind, (ActivityKind.DEVICE, ActivityKind.RANGE)))
    events = trace.events
    work_events = categories.add_kernel_type(events.select("cat", "name")[activities.owner[work]])
    names = work_events["name"].cast(pl.String).fill_null("")
    is_communication = (work_events["kind"] == "communication").fill_null(False).to_numpy()
    is_communication |= activities.kind[work] == ActivityKind.RANGE
    comms = _CommLookup(trace, activities.issuer[work])
    event_ids = events["id"].to_numpy()[activities.owner[work]]
    columns: dict[str, list[Any]] = {name: [None] * len(activities) for name in _COLUMNS}
    columns["type"] = [TYPE_NUMBERS["COMP_NODE"]] * len(activities)
    counts: MessageCounts = {}
    for i in np.flatnonzero(is_communication).tolist():
        event = int(event_ids[i])
        comm = {**comms.find(i, event, names[i]), "event": event}
        row = _describe_communication(names[i], comm, int(trace.rank or 0), groups, counts)
        _set_columns(columns, int(work[i]), row)
    _replay_delays(columns, activities)
    return pl.DataFrame(columns, schema=_COLUMNS)


def _set_columns(columns: dict[str, list[Any]], index: int, row: dict[str, Any]) -> None:
    for column, value in row.items():
        columns[column][index] = value


def _replay_delays(columns: dict[str, list[Any]], activities: Activities) -> None:
    """Let the launch delays of GPU communications occupy a simulator's communication resource instead of computation.

    Delays before ranges of a host backend stay: its computations are on the host, and the delay of a receive, which
    occupies nothing, must not wait for the end of a send.
    """
    is_delay = activities.kind == ActivityKind.DELAY
    is_communication = np.array(columns["type"], np.int64) != TYPE_NUMBERS["COMP_NODE"]
    communications = activities.owner[is_communication & (activities.kind == ActivityKind.DEVICE)]
    for i in np.flatnonzero(is_delay & np.isin(activities.owner, communications)).tolist():
        _set_columns(columns, i, REPLAYED)


class _CommLookup:
    """Looks up the row of the table `comms` that describes a communication on the device.

    issuers: row of the event that issued each communication.
    """

    def __init__(self, trace: Trace, issuers: np.ndarray) -> None:
        events = trace.events
        self._events = events
        self._comms = {comm["event"]: comm for comm in _list_comms(trace)}
        parent = rows_of_ids(events, events["parent"])
        has_comm = np.zeros(events.height, bool)
        has_comm[rows_of_ids(events, trace.comms["event"].drop_nulls())] = True
        # An event without its own description is described by the call around the operator that issued it.
        self._calls = nesting.find_nearest_ancestor(parent, has_comm, issuers)

    def find(self, index: int, event: int, name: str) -> Comm:
        """Return the `comms` row of an event as a dict, else the row of its enclosing call if compatible, else {}."""
        comm = self._comms.get(event)
        if comm is not None:
            return comm
        call = int(self._calls[index])
        comm = self._comms.get(int(self._events["id"][call])) if call >= 0 else None
        if comm is None or not _is_compatible(categories.parse_collective(name), comm["collective"]):
            return {}
        return _exclude_outputs(comm) if self._events["name"][call].startswith("c10d::") else comm


def _describe_communication(
    name: str, comm: Comm, rank: int, groups: GroupNumbers, counts: MessageCounts
) -> dict[str, Any]:
    """Return the Chakra attributes of one communication: type, size, group, and source, destination and tag.

    Without a known collective and size, or source and destination, it is replayed: simulators would read an unset type
    as an all-reduce.
    """
    collective = comm.get("collective") or categories.parse_collective(name)
    if collective == "send_recv":  # the kernel of sends, receives and all-to-alls
        collective = None
    columns = {
        "collective": collective or categories.parse_collective(name),
        "dtype": comm.get("dtype"),
        "in_msg_nelems": comm.get("in_nelems"),
        "out_msg_nelems": comm.get("out_nelems"),
        "pg_size": comm.get("group_size"),
        "comm_seq": comm.get("seq"),
        "root": comm.get("root"),
        "group": comm.get("pg_name"),
    }
    group = groups.number.get((comm.get("pg_name"), comm.get("ranks")))
    if group is None:
        group = groups.event_numbers.get((rank, comm.get("event", -1)), groups.default)
    columns["pg_name"] = None if group is None else str(group)
    size = 0 if collective == "barrier" else _size_in_bytes(comm, "in_nelems")
    if 1 in (comm.get("group_size"), len(groups.ranks.get(group, ()) if group is not None else ())):
        columns["type"] = TYPE_NUMBERS["COMP_NODE"]
    elif collective in _NOT_IMPLEMENTED:
        columns |= {**REPLAYED, "comm_size": size or 0}
    elif collective in _COMM_TYPE_NUMBERS and size is not None:
        columns["type"] = TYPE_NUMBERS["COMM_COLL_NODE"]
        columns["comm_type"] = _COMM_TYPE_NUMBERS[collective]
        columns["comm_size"] = size
    elif collective in ("send", "recv") and comm.get("peer") is not None:
        source, destination = (rank, comm["peer"]) if collective == "send" else (comm["peer"], rank)
        key = (group, source, destination)
        counts[key] = counts.get(key, -1) + 1
        columns["type"] = TYPE_NUMBERS[f"COMM_{collective.upper()}_NODE"]
        columns |= {"comm_src": source, "comm_dst": destination, "comm_tag": counts[key]}
        columns["comm_size"] = _message_size_in_bytes(comm)
    else:
        columns |= REPLAYED
    return columns


def _is_compatible(executed: str | None, called: str | None) -> bool:
    """Return whether a backend may run the collective ``executed`` for a call of the collective ``called``.

    Gloo runs a reduce-scatter as an all-reduce, but no backend replaces a message or a barrier.
    """
    return executed == called or not {executed, called} & _UNSUBSTITUTED


def _exclude_outputs(comm: Comm) -> Comm:
    """Subtract output tensors from the recorded input size of a c10d call, whose arguments include its outputs."""
    inputs, outputs, size = comm["in_nelems"], comm["out_nelems"], comm["bytes"]
    if not inputs or not size or comm["collective"] in _IN_PLACE_COLLECTIVES:
        return comm
    if not outputs and comm["collective"] == "all_to_all":
        outputs = inputs // 2  # _alltoall_base returns nothing
    contributed = inputs - (outputs or 0) if inputs > (outputs or 0) else inputs
    return {**comm, "in_nelems": contributed, "bytes": size * contributed // inputs}


def _size_in_bytes(comm: Comm, elements: str) -> int | None:
    """Return a communication's recorded bytes, else its number of elements (column ``elements``) times bytes each."""
    size, count, item = comm.get("bytes"), comm.get(elements), categories.itemsize(comm.get("dtype"))
    return size if size is not None or count is None or item is None else count * item


def _message_size_in_bytes(comm: Comm) -> int | None:
    """Return the bytes of a send or receive: as recorded, else computed from its input or output elements."""
    return _size_in_bytes(comm, "in_nelems") or _size_in_bytes({**comm, "bytes": None}, "out_nelems")


def _list_comms(trace: Trace) -> list[Comm]:
    table = trace.comms.drop_nulls("event")
    rows = table.with_columns(pl.col(pl.Categorical).cast(pl.String)).to_dicts()
    keys = list_group_keys(trace)
    return [{**row, "ranks": keys[row["pg_name"], row["ranks"]][1]} for row in rows]
