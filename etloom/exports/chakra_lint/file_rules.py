"""Checks Chakra files for what keeps a simulator from running them, or from answering what is asked.

Each rule is a function of one file or of all; what they find is explained in `findings`. What simulators ask of a file
was read from ASTRA-sim 2.0 (workload/Workload.cc) and Chakra's feeder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.exports.chakra_lint.cross_rank_rules import check_across_ranks
from etloom.exports.chakra_lint.lint_codes import FindingCollector, LintFinding
from etloom.formats.chakra.et_files import ChakraFile, ChakraNode, find_rank_files, load_file, strip_suffix
from etloom.formats.chakra.protobuf import COLLECTIVES, NODE_TYPES
from etloom.formats.tables.node_table import is_int

TYPES = {name: number for number, name in NODE_TYPES.items()}
SEND, RECV, COLL = (TYPES[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_UNSUPPORTED_COLLECTIVES = ("reduce", "gather", "scatter", "barrier")
_INTEGER_ATTRIBUTES = {
    *(
        "comm_type",
        "comm_size",
        "comm_src",
        "comm_dst",
        "comm_tag",
        "num_ops",
        "tensor_size",
        "comm_priority",
    ),
}
_VALUE_FIELDS = {"is_cpu_op": ("bool_val",), "pg_name": ("string_val",)} | {
    name: tuple(f"{sign}int{bits}_val" for sign in ("", "u", "s") for bits in (32, 64))
    for name in _INTEGER_ATTRIBUTES
}


def lint(path: Path) -> list[LintFinding]:
    """What is wrong with a file NAME.RANK.et, or with those of a folder; nothing, where a simulator can run them.

    Groups are looked up in NAME.comm_groups.json beside the files and in the nodes that describe process groups.
    Raises ReadError for what is no Chakra trace.
    """
    found = FindingCollector()
    ranks = find_rank_files(path)
    files = {rank: load_file(file) for rank, file in ranks.items()}
    groups = {rank: _read_groups(file) for rank, file in files.items()}
    for rank, file in files.items():
        _check_file(found, rank, file)
        for node in file.nodes:
            _check_node(found, rank, node)
            if node.type in (SEND, RECV, COLL):
                _check_communication(found, rank, node, groups[rank], named="." in strip_suffix(file.path))
        _check_order(found, rank, file.nodes)
    check_across_ranks(found, files, groups)
    return found.all()


def _check_file(found: FindingCollector, rank: int, file: ChakraFile) -> None:
    if file.cut:
        found.add(rank, "truncated", None, file.cut)
    for _ in range(file.damaged):
        found.add(rank, "damaged-node", None, f"{file.damaged} of {len(file.nodes) + file.damaged} messages")
    if file.metadata is None:
        found.add(rank, "no-metadata", file.nodes[0].id, file.nodes[0].name)
    elif not file.metadata.ByteSize():
        found.add(rank, "empty-metadata", None, file.path.name)
    if not file.nodes:
        found.add(rank, "no-nodes", None, file.path.name)
    computing = [node for node in file.nodes if node.type == TYPES["COMP_NODE"]]
    if computing and not any(
        node.message.duration_micros or node.attributes.get("num_ops") for node in computing
    ):
        found.add(
            rank, "no-durations", computing[0].id, f"{len(computing):,} of {len(computing):,} computations"
        )
    device = {node.id for node in file.nodes if not node.runs_on_host and node.type != TYPES["METADATA_NODE"]}
    leading = {on for node in file.nodes for on in node.message.data_deps}
    streams = {str(node.attributes.get("stream")) for node in file.nodes if node.id in device}
    if len(streams) < len(device) < len(file.nodes) and not device & leading:
        found.add(rank, "device-leads-nowhere", min(device), f"{len(device):,} nodes of the device")


def _check_node(found: FindingCollector, rank: int, node: ChakraNode) -> None:
    if node.type not in NODE_TYPES or node.type == TYPES["INVALID_NODE"]:
        found.add(rank, "unknown-node-type", node.id, f"{node.name}: type {node.type}")
    for attribute in node.message.attr:
        kind = attribute.WhichOneof("value")
        if kind not in _VALUE_FIELDS.get(attribute.name, (kind,)):
            found.add(
                rank, "attribute-type", node.id, f"{node.name}: {attribute.name} is a {kind or 'nothing'}"
            )
    if "is_cpu_op" not in node.attributes and node.type != TYPES["METADATA_NODE"]:
        found.add(rank, "missing-is-cpu-op", node.id, node.name)


def _check_communication(
    found: FindingCollector, rank: int, node: ChakraNode, groups: Mapping[str, list[int]], *, named: bool
) -> None:
    said = node.attributes
    size = said.get("comm_size")
    kind = COLLECTIVES.get(said.get("comm_type", -1)) if is_int(said.get("comm_type")) else None
    if size is None:
        found.add(rank, "missing-comm-size", node.id, node.name)
    elif not size and kind != "barrier":
        found.add(rank, "no-bytes", node.id, node.name)
    if node.type != COLL:
        ends = [said.get(name) for name in ("comm_src", "comm_dst", "comm_tag")]
        if None in ends:
            found.add(rank, "missing-ends", node.id, node.name)
        elif named and (own := ends[0] if node.type == SEND else ends[1]) != rank:
            found.add(rank, "foreign-end", node.id, f"{node.name}: of rank {own}")
        return
    if node.runs_on_host:
        found.add(rank, "collective-on-cpu", node.id, node.name)
    if "comm_type" not in said:
        found.add(rank, "missing-comm-type", node.id, node.name)
    elif kind is None:
        found.add(rank, "unknown-comm-type", node.id, f"{node.name}: {said['comm_type']}")
    elif kind in _UNSUPPORTED_COLLECTIVES:
        found.add(rank, "unsupported-collective", node.id, f"{node.name}: {kind}")
    group = str(said.get("pg_name") or "0")
    if not group.isdecimal():
        found.add(rank, "group-name", node.id, f"{node.name}: {group!r}")
    elif group != "0" and group not in groups:
        found.add(rank, "unknown-group", node.id, f"{node.name}: group {group}")
    elif named and group in groups and rank not in groups[group]:
        found.add(rank, "not-a-member", node.id, f"{node.name}: group {group} is {groups[group]}")
    if (root := said.get("root")) is not None and group in groups and root not in groups[group]:
        found.add(rank, "root-outside", node.id, f"{node.name}: root {root} of group {groups[group]}")


def _check_order(found: FindingCollector, rank: int, nodes: list[ChakraNode]) -> None:
    """Ids that are there once, dependencies that are there, no circle."""
    ids = Counter(node.id for node in nodes)
    for one, count in ids.items():
        if count > 1:
            found.add(rank, "duplicate-id", one, f"{count} nodes have the id {one}")
    for node in nodes:
        for kind, on_which in (("data", node.message.data_deps), ("control", node.message.ctrl_deps)):
            for on in on_which:
                if on not in ids:
                    found.add(rank, f"dangling-{kind}-dependency", node.id, f"{node.name}: on node {on}")
    data = {node.id: set(node.message.data_deps) & ids.keys() for node in nodes}
    both = {node.id: node.on & ids.keys() for node in nodes}
    for code, on_them in (("cycle", data), ("control-cycle", both)):
        if circle := _find_cycle(on_them):
            ends = circle if len(circle) < 9 else [*circle[:8], "..."]
            found.add(rank, code, circle[0], " -> ".join(map(str, ends)))
            break


def _find_cycle(on: dict[int, set[int]]) -> list[int]:
    """Nodes of which each depends on the next and the last is the first; none where there is no circle."""
    missing = {one: len(those) for one, those in on.items()}
    leads: dict[int, list[int]] = {}
    for one, those in on.items():
        for other in those:
            leads.setdefault(other, []).append(one)
    ready = [one for one, count in missing.items() if not count]
    while ready:
        for after in leads.get(ready.pop(), ()):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    stuck = {one for one, count in missing.items() if count}
    if not stuck:
        return []
    # Each of them depends on another of them: whoever follows that comes to where it was.
    path = [min(stuck)]
    place = {path[0]: 0}
    while (after := min(on[path[-1]] & stuck)) not in place:
        place[after] = len(path)
        path.append(after)
    return [*path[place[after] :], after]


def _read_groups(file: ChakraFile) -> dict[str, list[int]]:
    """Number -> ranks, from beside the file and from its nodes."""
    found = {name: ranks for node in file.nodes for name, ranks in _groups_of_node(node)}
    beside = [file.path.with_name(f"{name}.comm_groups.json") for name in _job_names(file.path)]
    for candidate in beside:
        if candidate.is_file():
            try:
                listed = json.loads(candidate.read_text("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ReadError(f"is no JSON: {error}", where=candidate) from None
            if not isinstance(listed, dict) or not all(map(_is_rank_list, listed.values())):
                raise ReadError('is no object {"NUMBER": [RANKS]}', where=candidate)
            return found | listed
    return found


def _job_names(path: Path) -> Iterator[str]:
    yield strip_suffix(path)
    if strip_suffix(path).rpartition(".")[2].isdecimal():
        yield strip_suffix(path).rpartition(".")[0]


def _groups_of_node(node: ChakraNode) -> Iterator[tuple[str, list[int]]]:
    """The groups that a node of metadata lists, which simulators read from its first input."""
    if node.type != TYPES["METADATA_NODE"]:
        return
    try:
        listed: Any = json.loads(node.message.inputs.values[2:-2])
    except (ValueError, RecursionError):
        return
    for group in listed if isinstance(listed, list) else []:
        if isinstance(group, dict) and _is_rank_list(group.get("ranks")):
            yield str(group.get("pg_name")), group["ranks"]


def _is_rank_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_int, value))
