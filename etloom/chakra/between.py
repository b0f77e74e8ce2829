"""Rules between the files of several ranks: groups, collectives in turn, messages with both ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any

from etloom.chakra.files import File, Node
from etloom.chakra.findings import Findings
from etloom.ranks import in_words
from etloom.readers._chakra_pb import COLLECTIVES, NODE_TYPES

_TYPES = {name: number for number, name in NODE_TYPES.items()}
_SEND, _RECV, _COLL = (_TYPES[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_OWN_SIZES = ("all_to_all", "broadcast", "scatter", "gather")
"""Collectives in which a rank may put in another amount than the rest."""

Groups = Mapping[int, Mapping[str, list[int]]]


def check_between(found: Findings, files: Mapping[int, File], groups: Groups) -> None:
    """What does not agree between the files of a job; nothing of one file alone."""
    if len(files) < 2:
        return
    _missing_ranks(found, files)
    _groups(found, groups)
    by_group: dict[str, dict[int, list[Node]]] = defaultdict(dict)
    for rank, file in files.items():
        for node in sorted(file.nodes, key=lambda one: one.id):
            if node.type == _COLL:
                name = str(node.attributes.get("pg_name") or "0")
                by_group[name].setdefault(rank, []).append(node)
    for name, turns in by_group.items():
        of_group = {rank for own in groups.values() for rank in own.get(name, [])} & set(files)
        members = of_group or (set(files) if name == "0" else set(turns))
        _collectives(found, name, {rank: turns.get(rank, []) for rank in sorted(members)})
    _messages(found, files)


def _missing_ranks(found: Findings, files: Mapping[int, File]) -> None:
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


def _groups(found: Findings, groups: Groups) -> None:
    first: dict[str, tuple[int, list[int]]] = {}
    for rank, own in groups.items():
        for name, ranks in own.items():
            other, said = first.setdefault(name, (rank, ranks))
            here, there = Counter(ranks), Counter(said)
            if here != there:
                differ = in_words((here - there) + (there - here))
                both = f"{in_words(ranks)} here and {in_words(said)} on rank {other}"
                found.add(rank, "groups-differ", None, f"group {name} is {both}; they differ in {differ}")


def _collectives(found: Findings, name: str, turns: dict[int, list[Node]]) -> None:
    """The n-th collective of a group, by id, is the same on all its ranks."""
    kinds = {rank: [node.attributes.get("comm_type") for node in nodes] for rank, nodes in turns.items()}
    first, *others = turns
    for rank in others:
        both = list(zip(turns[first], turns[rank], strict=False))
        differs = next((at for at, (a, b) in enumerate(both) if not _alike(a, b, "comm_type")), None)
        if differs is None and len(kinds[rank]) != len(kinds[first]):
            differs = min(len(kinds[rank]), len(kinds[first]))
        if differs is not None:
            here, there = (_called(turns[one], differs) for one in (rank, first))
            node = turns[rank][differs].id if differs < len(turns[rank]) else None
            text = f"group {name}, collective {differs + 1}: {here} here, {there} on rank {first}"
            found.add(rank, "collectives-differ", node, text)
            continue
        for turn, (theirs, own) in enumerate(both, 1):
            kind = _called(turns[rank], turn - 1)
            text = f"group {name}, collective {turn}: {own.name}"
            if kind not in _OWN_SIZES and not _alike(theirs, own, "comm_size"):
                sizes = (own.attributes.get("comm_size"), theirs.attributes.get("comm_size"))
                found.add(
                    rank, "sizes-differ", own.id, f"{text}, {sizes[0]} bytes here, {sizes[1]} on rank {first}"
                )
            if not _alike(theirs, own, "root"):
                roots = (own.attributes.get("root"), theirs.attributes.get("root"))
                found.add(
                    rank, "roots-differ", own.id, f"{text}, root {roots[0]} here, {roots[1]} on rank {first}"
                )


def _alike(a: Node, b: Node, name: str) -> bool:
    return bool(a.attributes.get(name) == b.attributes.get(name))


def _called(nodes: list[Node], turn: int) -> str:
    if turn >= len(nodes):
        return "none"
    kind = nodes[turn].attributes.get("comm_type")
    return COLLECTIVES.get(kind, str(kind)) if isinstance(kind, int) else "an unset type"


def _messages(found: Findings, files: Mapping[int, File]) -> None:
    """A send on one rank is a receive of the same ends and tag on the other."""
    ends: dict[int, dict[tuple[Any, ...], list[tuple[int, Node]]]] = {_SEND: {}, _RECV: {}}
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
                    if not _alike(node, sent, "comm_size"):
                        sizes = (node.attributes.get("comm_size"), sent.attributes.get("comm_size"))
                        text = f"{node.name}: {sizes[0]} bytes here, {sizes[1]} on rank {key[0]}"
                        found.add(rank, "message-sizes-differ", node.id, text)
