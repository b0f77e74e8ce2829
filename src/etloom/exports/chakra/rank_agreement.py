"""Make the communication nodes of all ranks consistent: equal collective sizes, and a receive for each send.

ASTRA-sim matches the messages of a collective by tag, source, destination and size: if two ranks state different sizes
(an all-to-all with uneven splits), both wait forever. All ranks therefore state the largest size; their own is in
``in_msg_nelems``. A receive takes the size of its send. A message whose other end was not recorded would wait forever,
so it is replayed with its recorded time.
"""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from etloom.exports.chakra.communication_nodes import REPLAYED
from etloom.formats.chakra.protobuf import TYPE_NUMBERS
from etloom.formats.chakra.writing import NodeTable

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
