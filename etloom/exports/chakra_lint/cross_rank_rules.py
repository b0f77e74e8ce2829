"""Rules between the files of several ranks: groups, collectives in turn, messages with both ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any

from etloom.core.text import format_ranks
from etloom.exports.chakra_lint.lint_codes import FindingCollector
from etloom.formats.chakra.et_files import ChakraFile, ChakraNode
from etloom.formats.chakra.protobuf import COLLECTIVES, NODE_TYPES

_TYPES = {name: number for number, name in NODE_TYPES.items()}
_SEND, _RECV, _COLL = (_TYPES[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_UNEQUAL_SIZES_ALLOWED = ("all_to_all", "broadcast", "scatter", "gather")
"""Collectives in which a rank may put in another amount than the rest."""

GroupsByRank = Mapping[int, Mapping[str, list[int]]]


def check_across_ranks(
    found: FindingCollector, files: Mapping[int, ChakraFile], groups: GroupsByRank
) -> None:
    """What does not agree between the files of a job; nothing of one file alone."""
    if len(files) < 2:
        return
    _check_missing_ranks(found, files)
    _check_groups(found, groups)
    by_group: dict[str, dict[int, list[ChakraNode]]] = defaultdict(dict)
    for rank, file in files.items():
        for node in sorted(file.nodes, key=lambda one: one.id):
            if node.type == _COLL:
                name = str(node.attributes.get("pg_name") or "0")
                by_group[name].setdefault(rank, []).append(node)
    for name, turns in by_group.items():
        of_group = {rank for own in groups.values() for rank in own.get(name, [])} & set(files)
        members = of_group or (set(files) if name == "0" else set(turns))
        _check_collectives(found, name, {rank: turns.get(rank, []) for rank in sorted(members)})
    _check_messages(found, files)


def _check_missing_ranks(found: FindingCollector, files: Mapping[int, ChakraFile]) -> None:
    said = [
        attribute.int64_val
        for file in files.values()
        for attribute in (file.metadata.attr if file.metadata is not None else ())
        if attribute.name == "world_size"
    ]
    world = max([*said, max(files) + 1])
    # Not all of them: a damaged file may say any number.
    if absent := list(islice((rank for rank in range(world) if rank not in files), 9)):
        listed = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
        found.add(min(files), "missing-rank", None, f"rank {listed} of {world}")


def _check_groups(found: FindingCollector, groups: GroupsByRank) -> None:
    first: dict[str, tuple[int, list[int]]] = {}
    for rank, own in groups.items():
        for name, ranks in own.items():
            other, said = first.setdefault(name, (rank, ranks))
            here, there = Counter(ranks), Counter(said)
            if here != there:
                differ = format_ranks((here - there) + (there - here))
                both = f"{format_ranks(ranks)} here and {format_ranks(said)} on rank {other}"
                found.add(rank, "groups-differ", None, f"group {name} is {both}; they differ in {differ}")


def _check_collectives(found: FindingCollector, name: str, turns: dict[int, list[ChakraNode]]) -> None:
    """The n-th collective of a group, by id, is the same on all its ranks."""
    kinds = {rank: [node.attributes.get("comm_type") for node in nodes] for rank, nodes in turns.items()}
    first, *others = turns
    for rank in others:
        both = list(zip(turns[first], turns[rank], strict=False))
        differs = next(
            (at for at, (a, b) in enumerate(both) if not _has_same_attribute(a, b, "comm_type")), None
        )
        if differs is None and len(kinds[rank]) != len(kinds[first]):
            differs = min(len(kinds[rank]), len(kinds[first]))
        if differs is not None:
            here, there = (_name_collective(turns[one], differs) for one in (rank, first))
            node = turns[rank][differs].id if differs < len(turns[rank]) else None
            text = f"group {name}, collective {differs + 1}: {here} here, {there} on rank {first}"
            found.add(rank, "collectives-differ", node, text)
            continue
        for turn, (theirs, own) in enumerate(both, 1):
            kind = _name_collective(turns[rank], turn - 1)
            text = f"group {name}, collective {turn}: {own.name}"
            if kind not in _UNEQUAL_SIZES_ALLOWED and not _has_same_attribute(theirs, own, "comm_size"):
                sizes = (own.attributes.get("comm_size"), theirs.attributes.get("comm_size"))
                found.add(
                    rank, "sizes-differ", own.id, f"{text}, {sizes[0]} bytes here, {sizes[1]} on rank {first}"
                )
            if not _has_same_attribute(theirs, own, "root"):
                roots = (own.attributes.get("root"), theirs.attributes.get("root"))
                found.add(
                    rank, "roots-differ", own.id, f"{text}, root {roots[0]} here, {roots[1]} on rank {first}"
                )


def _has_same_attribute(a: ChakraNode, b: ChakraNode, name: str) -> bool:
    return bool(a.attributes.get(name) == b.attributes.get(name))


def _name_collective(nodes: list[ChakraNode], turn: int) -> str:
    if turn >= len(nodes):
        return "none"
    kind = nodes[turn].attributes.get("comm_type")
    return COLLECTIVES.get(kind, str(kind)) if isinstance(kind, int) else "an unset type"


def _check_messages(found: FindingCollector, files: Mapping[int, ChakraFile]) -> None:
    """A send on one rank is a receive of the same ends and tag on the other."""
    ends: dict[int, dict[tuple[Any, ...], list[tuple[int, ChakraNode]]]] = {_SEND: {}, _RECV: {}}
    for rank, file in files.items():
        for node in file.nodes:
            if node.type in ends:
                said = node.attributes
                key = tuple(said.get(name) for name in ("comm_src", "comm_dst", "comm_tag"))
                if all(isinstance(end, int) for end in key):
                    ends[node.type].setdefault(key, []).append((rank, node))
    for kind, other in ((_SEND, _RECV), (_RECV, _SEND)):
        for key, own in ends[kind].items():
            theirs = ends[other].get(key, [])
            partner = key[1] if kind == _SEND else key[0]
            if partner in files:
                for rank, node in own[len(theirs) :]:
                    found.add(
                        rank, "unmatched-message", node.id, f"{node.name}: {key[0]} -> {key[1]}, tag {key[2]}"
                    )
            if kind == _RECV:
                for (rank, node), (_, sent) in zip(own, theirs, strict=False):
                    if not _has_same_attribute(node, sent, "comm_size"):
                        sizes = (node.attributes.get("comm_size"), sent.attributes.get("comm_size"))
                        text = f"{node.name}: {sizes[0]} bytes here, {sizes[1]} on rank {key[0]}"
                        found.add(rank, "message-sizes-differ", node.id, text)
