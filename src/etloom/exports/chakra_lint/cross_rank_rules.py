"""Lint rules across ranks: process groups, order and sizes of collectives, matching sends and receives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice

from etloom.core.text import format_ranks
from etloom.exports.chakra_lint.joint_run import JointRun
from etloom.exports.chakra_lint.lint_codes import FindingCollector
from etloom.exports.chakra_lint.message_ends import get_message_ends
from etloom.formats.chakra.et_files import ChakraFile, ChakraNode
from etloom.formats.chakra.protobuf import COLLECTIVES, TYPE_NUMBERS

_SEND, _RECV, _COLL = (TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_UNEQUAL_SIZES_ALLOWED = ("broadcast", "scatter", "gather")
"""Collectives without messages in ASTRA-sim."""
_MAX_EXAMPLE_RANKS = 8

GroupsByRank = Mapping[int, Mapping[str, list[int]]]
"""Rank -> group number -> the ranks of the group."""

MessageKey = tuple[int, int, int]
"""Source, destination and tag of a message."""


def check_across_ranks(
    findings: FindingCollector, files: Mapping[int, ChakraFile], groups: GroupsByRank
) -> None:
    """Report contradictions between the files of a job: ranks, groups, collectives, messages.

    Does nothing for a single file.
    """
    if len(files) < 2:
        return
    _check_missing_ranks(findings, files)
    _check_groups(findings, groups)
    nodes_by_group: dict[str, dict[int, list[ChakraNode]]] = defaultdict(dict)
    for rank, file in files.items():
        for node in sorted(file.nodes, key=lambda node: node.id):
            if node.type == _COLL and not node.attributes.get("replayed"):
                name = str(node.attributes.get("pg_name") or "0")
                nodes_by_group[name].setdefault(rank, []).append(node)
    for name, by_rank in nodes_by_group.items():
        declared = {rank for rank_groups in groups.values() for rank in rank_groups.get(name, [])} & set(
            files
        )
        members = declared or (set(files) if name == "0" else set(by_rank))
        _check_collectives(findings, name, {rank: by_rank.get(rank, []) for rank in sorted(members)})
    _check_messages(findings, files)


def check_joint_run(findings: FindingCollector, files: Mapping[int, ChakraFile], run: JointRun) -> None:
    """Report communications that hang when all ranks are simulated, and ranks whose last node is a send or receive."""
    for blocked in run.blocked:
        findings.add(blocked.rank, "never-ends", blocked.node.id, f"{blocked.node.name}: {blocked.reason}")
    for rank, node in run.last.items():
        if node.type in (_SEND, _RECV) and any(other.runs_on_host for other in files[rank].nodes):
            findings.add(rank, "message-last", node.id, node.name)


def check_members(findings: FindingCollector, files: Mapping[int, ChakraFile], groups: GroupsByRank) -> None:
    """Report communications with ranks that have no file: an error, for a single file a warning."""
    code = "missing-member" if len(files) > 1 else "missing-rank"
    for rank, file in files.items():
        absent = {
            name: [member for member in members if member not in files]
            for name, members in groups[rank].items()
        }
        for node in file.nodes:
            if node.type == _COLL:
                name = str(node.attributes.get("pg_name"))
                if not node.attributes.get("replayed") and (ranks := absent.get(name)):
                    findings.add(rank, code, node.id, f"{node.name}: group {name}: {format_ranks(ranks)}")
            elif node.type in (_SEND, _RECV):
                peer = get_message_ends(rank, node)[node.type == _SEND]
                if peer is not None and peer != rank and peer not in files:
                    findings.add(rank, code, node.id, f"{node.name}: rank {peer}")


def _get_world_size(files: Mapping[int, ChakraFile]) -> int:
    world_sizes = [
        int(attribute.int64_val)
        for file in files.values()
        for attribute in (file.metadata.attr if file.metadata is not None else ())
        if attribute.name == "world_size"
    ]
    return max([*world_sizes, max(files) + 1])


def _check_missing_ranks(findings: FindingCollector, files: Mapping[int, ChakraFile]) -> None:
    world_size = _get_world_size(files)
    # Only the first few are listed: a damaged file may contain any world size.
    missing = list(islice((rank for rank in range(world_size) if rank not in files), _MAX_EXAMPLE_RANKS + 1))
    if missing:
        ellipsis = " ..." if len(missing) > _MAX_EXAMPLE_RANKS else ""
        ranks = ", ".join(map(str, missing[:_MAX_EXAMPLE_RANKS])) + ellipsis
        findings.add(min(files), "missing-rank", None, f"rank {ranks} of {world_size}")


def _check_groups(findings: FindingCollector, groups: GroupsByRank) -> None:
    first: dict[str, tuple[int, list[int]]] = {}
    for rank, rank_groups in groups.items():
        for name, ranks in rank_groups.items():
            other, other_ranks = first.setdefault(name, (rank, ranks))
            counts, other_counts = Counter(ranks), Counter(other_ranks)
            if counts != other_counts:
                differing = format_ranks((counts - other_counts) + (other_counts - counts))
                both = f"{format_ranks(ranks)} here and {format_ranks(other_ranks)} on rank {other}"
                findings.add(
                    rank, "groups-differ", None, f"group {name} is {both}; they differ in {differing}"
                )


def _check_collectives(findings: FindingCollector, group: str, by_rank: dict[int, list[ChakraNode]]) -> None:
    """Report collectives of a process group whose type, order, size or root differs between the group's ranks."""
    reference, *others = by_rank
    for rank in others:
        nodes, reference_nodes = by_rank[rank], by_rank[reference]
        turn = _first_difference(nodes, reference_nodes)
        if turn is not None:
            name, other_name = _name_collective(nodes, turn), _name_collective(reference_nodes, turn)
            text = f"group {group}, collective {turn + 1}: {name} here, {other_name} on rank {reference}"
            findings.add(rank, "collectives-differ", nodes[turn].id if turn < len(nodes) else None, text)
            continue
        for turn, (node, other) in enumerate(zip(nodes, reference_nodes, strict=True)):
            text = f"group {group}, collective {turn + 1}: {node.name}"
            if _name_collective(nodes, turn) not in _UNEQUAL_SIZES_ALLOWED:
                sizes = _describe_difference(node, other, "comm_size", "{} bytes here, {} on rank")
                if sizes:
                    findings.add(rank, "sizes-differ", node.id, f"{text}, {sizes} {reference}")
            if roots := _describe_difference(node, other, "root", "root {} here, {} on rank"):
                findings.add(rank, "roots-differ", node.id, f"{text}, {roots} {reference}")


def _first_difference(nodes: list[ChakraNode], others: list[ChakraNode]) -> int | None:
    """Return the first index at which two lists of collectives differ in type or a list ends; None if they agree."""
    for turn, (node, other) in enumerate(zip(nodes, others, strict=False)):
        if node.attributes.get("comm_type") != other.attributes.get("comm_type"):
            return turn
    return None if len(nodes) == len(others) else min(len(nodes), len(others))


def _describe_difference(node: ChakraNode, other: ChakraNode, name: str, text: str) -> str | None:
    """Insert the values of the attribute ``name`` of two nodes into ``text``; return None if the values are equal."""
    value, other_value = node.attributes.get(name), other.attributes.get(name)
    return None if value == other_value else text.format(value, other_value)


def _name_collective(nodes: list[ChakraNode], turn: int) -> str:
    if turn >= len(nodes):
        return "none"
    kind = nodes[turn].attributes.get("comm_type")
    return COLLECTIVES.get(kind, str(kind)) if isinstance(kind, int) else "an unset type"


def _check_messages(findings: FindingCollector, files: Mapping[int, ChakraFile]) -> None:
    """Report sends without a receive of equal source, destination and tag (and vice versa), and unequal sizes."""
    sends, receives = _messages_by_key(files, _SEND), _messages_by_key(files, _RECV)
    for key, messages in sends.items():
        if key[1] in files:
            _add_unmatched(findings, key, messages[len(receives.get(key, [])) :])
    for key, messages in receives.items():
        matching = sends.get(key, [])
        if key[0] in files:
            _add_unmatched(findings, key, messages[len(matching) :])
        for (rank, node), (_, send) in zip(messages, matching, strict=False):
            if sizes := _describe_difference(node, send, "comm_size", "{} bytes here, {} on rank"):
                findings.add(rank, "message-sizes-differ", node.id, f"{node.name}: {sizes} {key[0]}")


def _messages_by_key(
    files: Mapping[int, ChakraFile], node_type: int
) -> dict[MessageKey, list[tuple[int, ChakraNode]]]:
    """Return (source, destination, tag) -> list of (rank, node), for all sends or all receives."""
    messages: dict[MessageKey, list[tuple[int, ChakraNode]]] = {}
    nodes = ((rank, node) for rank, file in files.items() for node in file.nodes if node.type == node_type)
    for rank, node in nodes:
        source, destination, tag = get_message_ends(rank, node)
        if isinstance(source, int) and isinstance(destination, int) and isinstance(tag, int):
            messages.setdefault((source, destination, tag), []).append((rank, node))
    return messages


def _add_unmatched(
    findings: FindingCollector, key: MessageKey, messages: list[tuple[int, ChakraNode]]
) -> None:
    for rank, node in messages:
        text = f"{node.name}: {key[0]} -> {key[1]}, tag {key[2]}"
        findings.add(rank, "unmatched-message", node.id, text)
