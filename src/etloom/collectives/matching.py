"""Matches participations of different ranks to collective instances, by sequence number or by order in time.

- By number: participations with the same group, collective and sequence number match. If a rank runs several kernels
  for one number, the first kernels of the ranks match, then the second ones, and so on.
- By order, if numbers are not recorded or also count messages: the n-th participations of the ranks in a collective of
  a group match if they overlap in time. If a rank's participations stay unmatched or do not end together with their
  matches, `end_alignment` aligns the rank's clock, and matching is repeated. If more than MAX_UNMATCHED_SHARE of the
  participations stay unmatched, the recorded ranks did not communicate with each other, and no match is used.

An instance never has more ranks than its group. If several groups share a name and their members are unknown, sequence
numbers are ambiguous and are not used. Sends and receives with an unknown peer never match. By order, participations
with different roots do not match, and a participation with a root does not match one without.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl

from etloom.collectives.end_alignment import align_ends
from etloom.collectives.participations import COLUMNS as PART

MAX_UNMATCHED_SHARE = 0.1
"""If a larger share of the participations of a name stays unmatched, the other matches are coincidences."""

COLUMNS = {
    **PART,
    "group": pl.String,  # the same text on all ranks of a group
    "instance": pl.Int64,  # shared by the participations of one instance; null if unmatched
    "how": pl.String,  # seq | order
}
_UNPAIRED_MESSAGES = ("send", "recv")
"""Point-to-point calls with an unknown peer; with a known peer they are messages."""
_P2P = (*_UNPAIRED_MESSAGES, "send_recv", "message")
"""Calls whose stated group may be larger or smaller than the ranks that take part."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_KEY = ("where", "collective", "group", "source", "destination")


def match_participations(parts: pl.DataFrame) -> pl.DataFrame:
    """Match participations (one rank's call of a communication) across ranks: add `group`, `instance` and `how`.

    ``parts``: the participations of all ranks (`participations.COLUMNS`).
    """
    named = _drop_shared_numbers(add_group(parts)).with_row_index("part")
    matchable = named.filter(~pl.col("collective").is_in(_UNPAIRED_MESSAGES).fill_null(False))
    by_number = _match_by_number(matchable.filter(pl.col("seq").is_not_null() & ~is_overfull()))
    unnumbered = matchable.filter(pl.col("seq").is_null() & pl.col("collective").is_not_null())
    by_order = _match_by_order(unnumbered)
    if (aligned := align_ends(unnumbered, by_order)) is not unnumbered:
        by_order = _match_by_order(aligned)
    by_order = by_order.with_columns(pl.col("instance") + by_number["instance"].n_unique())
    instances = pl.concat((by_number, by_order))
    matched = named.join(instances, on="part", how="left", maintain_order="left")
    within_group = (pl.col("rank").n_unique() <= pl.col("group_size").min()).over("instance").fill_null(True)
    matched = matched.with_columns(
        pl.when(within_group | _is_message()).then(name).alias(name) for name in ("instance", "how")
    )
    return matched.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items())


def _drop_shared_numbers(parts: pl.DataFrame) -> pl.DataFrame:
    """Remove sequence numbers of groups whose host backend also counts sends and receives: they differ between ranks.

    Backends on the host (gloo) count the messages of a rank and the collectives of its group with one counter, so the
    same collective has another number on a rank that sent more messages, and a message another number at each end.
    """
    is_shared = (pl.col("where") == "host") & pl.col("collective").is_in(_P2P).any().over("where", "group")
    return parts.with_columns(seq=pl.when(is_shared.fill_null(False)).then(None).otherwise("seq"))


def is_overfull() -> pl.Expr:
    """Return an expression that is true if more ranks use a group name than the group has members.

    Several groups then share the name.

    Messages name both ends and need no group.
    """
    collective = ~pl.col("collective").is_in(_P2P).fill_null(False)
    ranks, size = (pl.col(name).filter(collective) for name in ("rank", "group_size"))
    more = (ranks.n_unique() > size.min()).over("group").fill_null(False)
    return pl.col("group").is_not_null() & ~_is_message() & more


def find_ambiguous_groups(parts: pl.DataFrame) -> pl.DataFrame:
    """Return the participations that sequence numbers cannot match, as their group is ambiguous on other ranks.

    Args:
        parts: Columns rank, collective, pg_name, ranks, group_size, start, event.

    Returns:
        The selected rows with ``group``.
    """
    named = add_group(parts)
    alone = (
        (pl.col("rank").n_unique() == 1).over("group")
        & pl.col("ranks").is_null()
        & (pl.col("group_size") > 1)
    )
    unplaced = alone & ~pl.col("group").str.starts_with("#") & (parts["rank"].n_unique() > 1)
    return named.filter(is_overfull() | (unplaced & ~_is_message()))


def _is_message() -> pl.Expr:
    return (pl.col("collective") == "message").fill_null(False)


def add_group(parts: pl.DataFrame) -> pl.DataFrame:
    """Add the column `group`: the name of the process group, the same on all of its ranks.

    Some recorders name a group by an address, which differs on every rank: such names are matched in the order in which
    each rank first uses them. Without any recorded name the group is null, and may contain all ranks.
    """
    label = pl.concat_str(
        pl.col("pg_name").fill_null(""), pl.col("ranks").str.replace_all(" ", "").fill_null(""), separator=" "
    )
    recorded = pl.any_horizontal(pl.col("pg_name", "ranks").is_not_null())
    parts = parts.with_columns(pl.when(recorded).then(label.str.strip_chars()).alias("group"))
    if parts["rank"].n_unique() < 2:
        return _add_group_size(parts)
    is_private = pl.col("rank").n_unique().over("group") == 1
    # A group with known members needs no inference; neither does one whose name several ranks share.
    private = pl.col("group").is_not_null() & is_private & pl.col("ranks").is_null()
    # If more ranks use a turn than the group has, their membership is unknown: each keeps its own name.
    within_group = (pl.len() <= pl.col("group_size").min()).over("turn").fill_null(True)
    turns = (
        parts.filter(private.fill_null(False))
        .sort("start", "event")
        .group_by("rank", "group", maintain_order=True)
        .agg(pl.col("group_size").min())
        .with_columns(pl.int_range(pl.len()).over("rank").alias("turn"))
        .filter(within_group)
        .select("rank", "group", "turn")
    )
    joined = parts.join(turns, on=("rank", "group"), how="left", maintain_order="left")
    turn = pl.concat_str(pl.lit("#"), "turn")
    return _add_group_size(joined.with_columns(pl.coalesce(turn, "group").alias("group")).drop("turn"))


def _add_group_size(parts: pl.DataFrame) -> pl.DataFrame:
    """Fill in missing values of ``group_size`` from other participations of the same process group."""
    largest = pl.col("group_size").max().over("group")
    size = pl.when(pl.col("group").is_not_null()).then(pl.coalesce("group_size", largest))
    return parts.with_columns(size.otherwise("group_size").alias("group_size"))


def _match_by_number(parts: pl.DataFrame) -> pl.DataFrame:
    """Match participations by sequence number; return the columns `part`, `instance` and `how`."""
    key = (*_KEY, "seq", "turn")
    numbered = parts.sort("start", "event").with_columns(
        pl.int_range(pl.len()).over("rank", *_KEY, "seq").alias("turn")
    )
    matched = numbered.with_columns(pl.col("rank").n_unique().over(key).alias("rank_count")).filter(
        pl.col("rank_count") > 1
    )
    return matched.select("part", instance=pl.struct(key).rank("dense").cast(pl.Int64) - 1, how=pl.lit("seq"))


def _match_by_order(parts: pl.DataFrame) -> pl.DataFrame:
    """Match participations without a sequence number by time; return the columns `part`, `instance` and `how`."""
    matched_ids: list[int] = []
    numbers: list[int] = []
    rooted = pl.when(pl.col("collective").is_in(_ROOTED)).then("root")
    # A participation without a root cannot be assigned if others of the group name one.
    parts = parts.with_columns(root_key=rooted).filter(
        pl.col("root_key").is_not_null()
        | (pl.col("root_key").count() == 0).over("where", "collective", "group")
    )
    for _, rows in parts.group_by(*_KEY, "root_key", maintain_order=True):
        if rows["rank"].n_unique() < 2:
            continue
        instances = _match_overlapping(rows)
        if sum(len(members) == 1 for members in instances) > MAX_UNMATCHED_SHARE * rows.height:
            continue
        for members in instances:
            if len(members) > 1:
                matched_ids += members
                numbers += [len(numbers)] * len(members)
    return pl.DataFrame(
        {"part": matched_ids, "instance": numbers, "how": ["order"] * len(matched_ids)},
        schema={"part": parts.schema["part"], "instance": pl.Int64, "how": pl.String},
    )


def _match_overlapping(rows: pl.DataFrame) -> list[list[int]]:
    """Match in order of time: each instance has the ranks' next participations that started before any of them ended.

    So ranks of several groups with the same name match within their group.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    order = rows.sort("start", "event", descending=True)
    latest, earliest = order["start"].to_list(), order["end"].cast(pl.Float64).fill_null(np.inf).to_list()
    for at, (part_rank, source, root, collective) in enumerate(
        order.select("rank", "source", "root", "collective").iter_rows()
    ):
        sends, receives = get_roles(part_rank, source, root, collective)
        latest[at] = latest[at] if sends else -np.inf
        earliest[at] = earliest[at] if receives else np.inf
        waiting[part_rank].append(at)
    ids = order["part"].to_list()
    instances = []
    while waiting:
        first_departure = min(earliest[queue[-1]] for queue in waiting.values())
        heads = {rank: queue[-1] for rank, queue in waiting.items() if latest[queue[-1]] <= first_departure}
        if not heads:  # all others wait for a sender that arrived after they departed: a clock is wrong
            first = min(waiting, key=lambda rank: earliest[waiting[rank][-1]])
            heads = {first: waiting[first][-1]}
        instances.append([ids[at] for at in heads.values()])
        for rank in heads:
            waiting[rank].pop()
            if not waiting[rank]:
                del waiting[rank]
    return instances


def get_roles(rank: int, source: int | None, root: int | None, collective: str | None) -> tuple[bool, bool]:
    """Return whether other ranks wait for this rank in a collective, and whether this rank waits for others.

    A message may be sent before its receiver is ready: only the receiver certainly waits.
    """
    if collective == "message":
        return rank == source, rank != source
    if root is not None and collective in ("broadcast", "scatter"):
        return rank == root, rank != root
    if root is not None and collective in ("reduce", "gather"):
        return True, rank == root
    return True, True


def is_sender() -> pl.Expr:
    """Return an expression that is true if others wait for the rank in a collective (first value of `get_roles`)."""
    to_others = pl.col("collective").is_in(("broadcast", "scatter")) & pl.col("root").is_not_null()
    return (
        pl.when(_is_message())
        .then(pl.col("rank").eq_missing(pl.col("source")))
        .when(to_others.fill_null(False))
        .then(pl.col("rank") == pl.col("root"))
        .otherwise(True)
    )


def is_receiver() -> pl.Expr:
    """Return an expression that is true if the rank waits for others in a collective (second value of `get_roles`)."""
    is_root = pl.col("rank") == pl.col("root")
    rooted = pl.col("collective").is_in(_ROOTED) & pl.col("root").is_not_null()
    return (
        pl.when(_is_message())
        .then(pl.col("rank").ne_missing(pl.col("source")))
        .when(rooted.fill_null(False))
        .then(pl.when(pl.col("collective").is_in(("reduce", "gather"))).then(is_root).otherwise(~is_root))
        .otherwise(True)
    )
