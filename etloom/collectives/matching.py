"""Which parts of different ranks are one communication.

By number: parts with the same group, collective and sequence number; where a rank runs several kernels for one
number, the first with the first, and so on. By order: where no number was recorded, each rank's parts of a collective
in a group in their order, as far as they overlap in time. Where more than STRANGERS of such parts meet nobody, the
ranks that were recorded are not those that met: none of them is believed.

More ranks than the group has do not meet: where a name is that of several groups, and who is in which was not
recorded, a number tells nothing, and what order tells has to fit. Nor do sends and receives meet of which the other end
is not known; nor, by order, parts with different roots, or with a root and without.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl

from etloom.collectives.participations import COLUMNS as PART

MAX_UNMATCHED_SHARE = 0.1
"""Where more of the parts of a name than this share meet nobody, the others met by chance."""

COLUMNS = {
    **PART,
    "group": pl.String,  # the same text on all ranks of a group
    "meeting": pl.Int64,  # parts of one communication share it; null for a part on its own
    "how": pl.String,  # seq | order
}
_UNPAIRED_MESSAGES = ("send", "recv")
"""Of which the other end is not known: with it they are messages."""
_P2P = (*_UNPAIRED_MESSAGES, "send_recv", "message")
"""Of which a group may be told that is larger or smaller than those who take part."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_KEY = ("where", "collective", "group", "source", "destination")


def match_participations(parts: pl.DataFrame) -> pl.DataFrame:
    """The parts of all ranks (`parts.COLUMNS`) with group, meeting and how."""
    named = add_group(parts).with_row_index("part")
    matchable = named.filter(~pl.col("collective").is_in(_UNPAIRED_MESSAGES).fill_null(False))
    by_number = _match_by_number(matchable.filter(pl.col("seq").is_not_null() & ~is_overfull()))
    by_order = _match_by_order(matchable.filter(pl.col("seq").is_null() & pl.col("collective").is_not_null()))
    by_order = by_order.with_columns(pl.col("meeting") + by_number["meeting"].n_unique())
    matches = pl.concat((by_number, by_order))
    matched = named.join(matches, on="part", how="left", maintain_order="left")
    within_group = (pl.col("rank").n_unique() <= pl.col("group_size").min()).over("meeting").fill_null(True)
    matched = matched.with_columns(
        pl.when(within_group | _is_message()).then(name).alias(name) for name in ("meeting", "how")
    )
    return matched.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items())


def is_overfull() -> pl.Expr:
    """Whether more ranks did something in the group of a part than the group has, so that the name is that of several
    groups. Messages name both ends, and need no group."""
    collective = ~pl.col("collective").is_in(_P2P).fill_null(False)
    ranks, size = (pl.col(name).filter(collective) for name in ("rank", "group_size"))
    more = (ranks.n_unique() > size.min()).over("group").fill_null(False)
    return pl.col("group").is_not_null() & ~_is_message() & more


def find_ambiguous_groups(parts: pl.DataFrame) -> pl.DataFrame:
    """Of parts (rank, collective, pg_name, ranks, group_size, start, event) those that no number matches, since more
    ranks share the name of their group, or its turn, than the group has; with ``group``."""
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
    """The parts with one name for each group on all ranks.

    Some recorders name a group by an address, another on every rank: such names are taken in the order in which each
    rank first uses them. Where nothing was recorded the group is null, and all ranks might be in it.
    """
    label = pl.concat_str(
        pl.col("pg_name").fill_null(""), pl.col("ranks").str.replace_all(" ", "").fill_null(""), separator=" "
    )
    recorded = pl.any_horizontal(pl.col("pg_name", "ranks").is_not_null())
    parts = parts.with_columns(pl.when(recorded).then(label.str.strip_chars()).alias("group"))
    if parts["rank"].n_unique() < 2:
        return _add_group_size(parts)
    is_private = pl.col("rank").n_unique().over("group") == 1
    # A group of ranks that are known needs no guess; nor does one of several.
    private = pl.col("group").is_not_null() & is_private & pl.col("ranks").is_null()
    # Of more ranks than a group has, it is not told which share it: each keeps its own name.
    is_unambiguous = (pl.len() <= pl.col("group_size").min()).over("turn").fill_null(True)
    turns = (
        parts.filter(private.fill_null(False))
        .sort("start", "event")
        .group_by("rank", "group", maintain_order=True)
        .agg(pl.col("group_size").min())
        .with_columns(pl.int_range(pl.len()).over("rank").alias("turn"))
        .filter(is_unambiguous)
        .select("rank", "group", "turn")
    )
    joined = parts.join(turns, on=("rank", "group"), how="left", maintain_order="left")
    turn = pl.concat_str(pl.lit("#"), "turn")
    return _add_group_size(joined.with_columns(pl.coalesce(turn, "group").alias("group")).drop("turn"))


def _add_group_size(parts: pl.DataFrame) -> pl.DataFrame:
    """group_size where only another part of the group states it."""
    largest = pl.col("group_size").max().over("group")
    group_size = pl.when(pl.col("group").is_not_null()).then(pl.coalesce("group_size", largest))
    return parts.with_columns(group_size.otherwise("group_size").alias("group_size"))


def _match_by_number(parts: pl.DataFrame) -> pl.DataFrame:
    """part, meeting, how of numbered parts."""
    key = (*_KEY, "seq", "turn")
    numbered = parts.sort("start", "event").with_columns(
        pl.int_range(pl.len()).over("rank", *_KEY, "seq").alias("turn")
    )
    matched = numbered.with_columns(pl.col("rank").n_unique().over(key).alias("met")).filter(
        pl.col("met") > 1
    )
    return matched.select("part", meeting=pl.struct(key).rank("dense").cast(pl.Int64) - 1, how=pl.lit("seq"))


def _match_by_order(parts: pl.DataFrame) -> pl.DataFrame:
    """part, meeting, how of parts without a number."""
    participation_ids: list[int] = []
    meetings: list[int] = []
    rooted = pl.when(pl.col("collective").is_in(_ROOTED)).then("root")
    # Of which root a part is that names none cannot be told beside those of others.
    parts = parts.with_columns(of=rooted).filter(
        pl.col("of").is_not_null() | (pl.col("of").count() == 0).over("where", "collective", "group")
    )
    for _, candidates in parts.group_by(*_KEY, "of", maintain_order=True):
        if candidates["rank"].n_unique() < 2:
            continue
        together = _match_overlapping(candidates)
        if sum(len(instance) == 1 for instance in together) > MAX_UNMATCHED_SHARE * candidates.height:
            continue
        for instance in together:
            if len(instance) > 1:
                participation_ids += instance
                meetings += [len(meetings)] * len(instance)
    return pl.DataFrame(
        {"part": participation_ids, "meeting": meetings, "how": ["order"] * len(participation_ids)},
        schema={"part": parts.schema["part"], "meeting": pl.Int64, "how": pl.String},
    )


def _match_overlapping(candidates: pl.DataFrame) -> list[list[int]]:
    """Of the next parts of all ranks, those meet that came before the first of them to leave left.

    So ranks of several groups that go by one name meet with their own.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    order = candidates.sort("start", "event", descending=True)
    latest, earliest = order["start"].to_list(), order["end"].to_list()
    for at, (part_rank, source, root, collective) in enumerate(
        order.select("rank", "source", "root", "collective").iter_rows()
    ):
        sends, receives = get_roles(part_rank, source, root, collective)
        latest[at] = latest[at] if sends else -np.inf
        earliest[at] = earliest[at] if receives else np.inf
        waiting[part_rank].append(at)
    ids = order["part"].to_list()
    meetings = []
    while waiting:
        first_end = min(earliest[queue[-1]] for queue in waiting.values())
        heads = {rank: queue[-1] for rank, queue in waiting.items() if latest[queue[-1]] <= first_end}
        if not heads:  # a sender that all others await, and that came after they left: a clock is off
            first = min(waiting, key=lambda rank: earliest[waiting[rank][-1]])
            heads = {first: waiting[first][-1]}
        meetings.append([ids[at] for at in heads.values()])
        for rank in heads:
            waiting[rank].pop()
            if not waiting[rank]:
                del waiting[rank]
    return meetings


def get_roles(rank: int, source: int | None, root: int | None, collective: str | None) -> tuple[bool, bool]:
    """Whether others wait for this rank to come, and whether it waits for others.

    A message may be gone before there is a place for it: only its receiver surely waits.
    """
    if collective == "message":
        return rank == source, rank != source
    if root is not None and collective in ("broadcast", "scatter"):
        return rank == root, rank != root
    if root is not None and collective in ("reduce", "gather"):
        return True, rank == root
    return True, True


def is_sender() -> pl.Expr:
    """`roles`, whether others wait for the rank, of columns of parts."""
    to_others = pl.col("collective").is_in(("broadcast", "scatter")) & pl.col("root").is_not_null()
    return (
        pl.when(_is_message())
        .then(pl.col("rank").eq_missing(pl.col("source")))
        .when(to_others.fill_null(False))
        .then(pl.col("rank") == pl.col("root"))
        .otherwise(True)
    )


def is_receiver() -> pl.Expr:
    """`roles`, whether the rank waits for others, of columns of parts."""
    is_root = pl.col("rank") == pl.col("root")
    rooted = pl.col("collective").is_in(_ROOTED) & pl.col("root").is_not_null()
    return (
        pl.when(_is_message())
        .then(pl.col("rank").ne_missing(pl.col("source")))
        .when(rooted.fill_null(False))
        .then(pl.when(pl.col("collective").is_in(("reduce", "gather"))).then(is_root).otherwise(~is_root))
        .otherwise(True)
    )
