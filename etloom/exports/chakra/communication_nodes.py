"""Communications as Chakra nodes say them: kind, size, group, ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core import arrays, categories
from etloom.core.trace import Trace
from etloom.exports.chakra.activities import Activities, ActivityKind
from etloom.exports.chakra.group_numbering import GroupNumbers
from etloom.formats.chakra.protobuf import COLLECTIVES, TYPE_NUMBERS
from etloom.graphs.event_arrays import rows_of_ids

_COMM_TYPE_NUMBERS = {name: number for number, name in COLLECTIVES.items()}
_COLUMNS = {
    "type": pl.Int64, "comm_type": pl.Int64, "comm_size": pl.Int64, "comm_src": pl.Int64, "comm_dst": pl.Int64,
    "comm_tag": pl.Int64, "pg_name": pl.String, "root": pl.Int64, "collective": pl.String, "dtype": pl.String,
    "in_msg_nelems": pl.Int64, "out_msg_nelems": pl.Int64, "pg_size": pl.Int64, "comm_seq": pl.Int64,
    "group": pl.String,
}  # fmt: skip


def build_communication_columns(trace: Trace, found: Activities, groups: GroupNumbers) -> pl.DataFrame:
    """type, and of communications what simulators ask for."""
    lasting = np.flatnonzero(np.isin(found.kind, (ActivityKind.DEVICE, ActivityKind.RANGE)))
    events = trace.events
    told = categories.add_kernel_type(events.select("cat", "name")[found.owner[lasting]])
    names = told["name"].cast(pl.String)
    is_range = found.kind[lasting] == ActivityKind.RANGE
    comm = (told["kind"] == "communication").fill_null(False).to_numpy() | is_range
    facts = {row["event"]: row for row in _list_comms(trace)}
    ids = events["id"].to_numpy()
    parent = rows_of_ids(events, events["parent"])
    known = np.zeros(events.height, bool)
    known[rows_of_ids(events, trace.comms["event"].drop_nulls())] = True
    # What describes no event of its own is told by the call around the operator that issued it.
    around = arrays.find_nearest_ancestor(parent, known, found.issuer[lasting])
    columns: dict[str, list[Any]] = {name: [None] * len(found) for name in _COLUMNS}
    columns["type"] = [TYPE_NUMBERS["COMP_NODE"]] * len(found)
    turns: dict[tuple[Any, ...], int] = {}
    for at in np.flatnonzero(comm).tolist():
        place = int(lasting[at])
        fact = facts.get(int(ids[found.owner[place]]))
        if fact is None and around[at] >= 0:
            fact = facts.get(int(ids[around[at]]))
            if fact and not _is_compatible(categories.parse_collective(names[at]), fact["collective"]):
                fact = None
            elif fact and events["name"][int(around[at])].startswith("c10d::"):
                fact = _exclude_outputs(fact)
        fact = {**(fact or {}), "event": int(ids[found.owner[place]])}
        row = _describe_communication(names[at], fact, int(trace.rank or 0), groups, turns)
        for name, value in row.items():
            columns[name][place] = value
    return pl.DataFrame(columns, schema=_COLUMNS)


def _describe_communication(
    name: str, fact: dict[str, Any], rank: int, groups: GroupNumbers, turns: dict[tuple[Any, ...], int]
) -> dict[str, Any]:
    """The columns of one communication.

    Where its kind, size or ends are not known it stays work of the device that takes what it took: simulators would
    read an unset type as an all-reduce.
    """
    collective = fact.get("collective") or categories.parse_collective(name)
    if collective == "send_recv":  # the kernel of sends, receives and all-to-alls
        collective = None
    said = {
        "collective": collective or categories.parse_collective(name),
        "dtype": fact.get("dtype"),
        "in_msg_nelems": fact.get("in_nelems"),
        "out_msg_nelems": fact.get("out_nelems"),
        "pg_size": fact.get("group_size"),
        "comm_seq": fact.get("seq"),
        "root": fact.get("root"),
        "group": fact.get("pg_name"),
    }
    known = groups.number.get((fact.get("pg_name"), fact.get("ranks")))
    group = groups.met.get((rank, fact.get("event", -1))) if known is None else known
    said["pg_name"] = None if group is None else str(group)
    size = 0 if collective == "barrier" else _size_in_bytes(fact, "in_nelems")
    if collective in _COMM_TYPE_NUMBERS and size is not None:
        said |= {
            "type": TYPE_NUMBERS["COMM_COLL_NODE"],
            "comm_type": _COMM_TYPE_NUMBERS[collective],
            "comm_size": size,
        }
    elif collective in ("send", "recv") and fact.get("peer") is not None:
        ends = (rank, fact["peer"]) if collective == "send" else (fact["peer"], rank)
        turn = turns[(group, *ends)] = turns.get((group, *ends), -1) + 1
        said |= {
            "type": TYPE_NUMBERS[f"COMM_{collective.upper()}_NODE"],
            "comm_src": ends[0],
            "comm_dst": ends[1],
        }
        said |= {"comm_tag": turn, "comm_size": _message_size_in_bytes(fact)}
    return said


def _is_compatible(ran: str | None, called: str | None) -> bool:
    """Whether a backend may run a call so: gloo runs a reduce-scatter as an all-reduce, but no message or barrier as
    anything else."""
    return ran == called or not {ran, called} & {"send", "recv", "barrier"}


_IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv", "barrier")


def _exclude_outputs(fact: dict[str, Any]) -> dict[str, Any]:
    """c10d's operators take their outputs as arguments too: only what a rank puts in is the size."""
    into, out, size = fact["in_nelems"], fact["out_nelems"], fact["bytes"]
    if not into or not size or fact["collective"] in _IN_PLACE:
        return fact
    if not out and fact["collective"] == "all_to_all":
        out = into // 2  # _alltoall_base returns nothing
    own = into - (out or 0) if into > (out or 0) else into
    return {**fact, "in_nelems": own, "bytes": size * own // into}


def _size_in_bytes(fact: dict[str, Any], elements: str) -> int | None:
    """Bytes as recorded, else of these elements."""
    size, count, item = fact.get("bytes"), fact.get(elements), categories.itemsize(fact.get("dtype"))
    return size if size is not None or count is None or item is None else count * item


def _message_size_in_bytes(fact: dict[str, Any]) -> int | None:
    """Of a receive only what comes out may be known."""
    return _size_in_bytes(fact, "in_nelems") or _size_in_bytes({**fact, "bytes": None}, "out_nelems")


def _list_comms(trace: Trace) -> list[dict[str, Any]]:
    table = trace.comms.drop_nulls("event")
    return table.with_columns(pl.col(pl.Categorical).cast(pl.String)).to_dicts()
