"""Lint rules for the Chakra file of one rank: the file itself, its nodes, communication and dependencies.

What simulators require was read from ASTRA-sim 2.0 (workload/Workload.cc) and Chakra's feeder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.exports.chakra_lint.lint_codes import FindingCollector
from etloom.exports.chakra_lint.message_ends import get_message_ends
from etloom.formats.chakra.et_files import ChakraFile, ChakraNode, strip_suffix
from etloom.formats.chakra.protobuf import COLLECTIVES, NODE_TYPES, TYPE_NUMBERS
from etloom.formats.tables.node_table import is_int

_SEND, _RECV, _COLL = (TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_UNSUPPORTED_COLLECTIVES = ("reduce", "gather", "scatter", "barrier")
_INTEGER_ATTRIBUTES = (
    *("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "num_ops", "tensor_size"),
    "comm_priority",
)
_VALUE_FIELDS = {"pg_name": ("string_val",)} | {
    name: tuple(f"{sign}int{bits}_val" for sign in ("", "u", "s") for bits in (32, 64))
    for name in _INTEGER_ATTRIBUTES
}
_VALUE_FIELDS["is_cpu_op"] = ("bool_val", *_VALUE_FIELDS["comm_type"])
"""Attributes that simulators read as a certain type, and the fields of AttributeProto that hold this type."""
_MAX_EXAMPLE_NODES = 8


def check_file(
    findings: FindingCollector, rank: int, file: ChakraFile, groups: Mapping[str, list[int]]
) -> None:
    """Apply all lint rules for the file of one rank.

    ``groups``: number of each process group -> its ranks.
    """
    _check_messages(findings, rank, file)
    _check_work(findings, rank, file.nodes)
    for node in file.nodes:
        _check_node(findings, rank, node)
        if node.type in (_SEND, _RECV, _COLL):
            # Only a name like job.3.et states the rank.
            _check_communication(findings, rank, node, groups, rank_in_name="." in strip_suffix(file.path))
    _check_dependencies(findings, rank, file.nodes)


def _check_messages(findings: FindingCollector, rank: int, file: ChakraFile) -> None:
    if file.truncation:
        findings.add(rank, "truncated", None, file.truncation)
    for _ in range(file.damaged):
        total = len(file.nodes) + file.damaged
        findings.add(rank, "damaged-node", None, f"{file.damaged} of {total} messages")
    if file.metadata is None:
        findings.add(rank, "no-metadata", file.nodes[0].id, file.nodes[0].name)
    elif not file.metadata.ByteSize():
        findings.add(rank, "empty-metadata", None, file.path.name)
    if not file.nodes:
        findings.add(rank, "no-nodes", None, file.path.name)


def _check_work(findings: FindingCollector, rank: int, nodes: list[ChakraNode]) -> None:
    """Report computations without durations, GPU work on which no node depends, and replayed communications."""
    computations = [node for node in nodes if node.type == TYPE_NUMBERS["COMP_NODE"]]
    if computations and not any(
        node.message.duration_micros or node.attributes.get("num_ops") for node in computations
    ):
        example = f"{len(computations):,} of {len(computations):,} computations"
        findings.add(rank, "no-durations", computations[0].id, example)
    metadata_type = TYPE_NUMBERS["METADATA_NODE"]
    _check_replays(findings, rank, nodes)
    gpu_ids = {node.id for node in nodes if not node.runs_on_host and node.type != metadata_type}
    required_ids = {dependency for node in nodes for dependency in node.message.data_deps}
    streams = {str(node.attributes.get("stream")) for node in nodes if node.id in gpu_ids}
    if len(streams) < len(gpu_ids) < len(nodes) and not gpu_ids & required_ids:
        findings.add(rank, "device-leads-nowhere", min(gpu_ids), f"{len(gpu_ids):,} GPU nodes")


def _check_replays(findings: FindingCollector, rank: int, nodes: list[ChakraNode]) -> None:
    """Report communication nodes that a simulator only replays at their recorded time; delay nodes are not reported."""
    communications = [node for node in nodes if node.type in (_SEND, _RECV, _COLL)]
    replayed = [node for node in communications if node.attributes.get("replayed")]
    code = "nothing-simulated" if len(replayed) == len(communications) else "replayed"
    for node in replayed:
        if "collective" in node.attributes or node.name != "delay":
            findings.add(rank, code, node.id, node.name)


def _check_node(findings: FindingCollector, rank: int, node: ChakraNode) -> None:
    if node.type not in NODE_TYPES or node.type == TYPE_NUMBERS["INVALID_NODE"]:
        findings.add(rank, "unknown-node-type", node.id, f"{node.name}: type {node.type}")
    for attribute in node.message.attr:
        field = attribute.WhichOneof("value")
        if field not in _VALUE_FIELDS.get(attribute.name, (field,)):
            example = f"{node.name}: {attribute.name} is stored as {field or 'no value'}"
            findings.add(rank, "attribute-type", node.id, example)
    if node.type == TYPE_NUMBERS["METADATA_NODE"]:
        findings.add(rank, "metadata-node", node.id, node.name)
    if "is_cpu_op" not in node.attributes and node.type != TYPE_NUMBERS["METADATA_NODE"]:
        findings.add(rank, "missing-is-cpu-op", node.id, node.name)


def _check_communication(
    findings: FindingCollector,
    rank: int,
    node: ChakraNode,
    groups: Mapping[str, list[int]],
    *,
    rank_in_name: bool,
) -> None:
    attributes = node.attributes
    size: Any = attributes.get("comm_size")
    comm_type: Any = attributes.get("comm_type")
    collective = COLLECTIVES.get(comm_type) if is_int(comm_type) else None
    if size is None:
        findings.add(rank, "missing-comm-size", node.id, node.name)
    elif not size and not attributes.get("replayed"):
        if node.type != _COLL:
            findings.add(rank, "empty-message", node.id, node.name)
        elif collective == "all_gather":
            findings.add(rank, "empty-all-gather", node.id, node.name)
        elif collective != "barrier":
            findings.add(rank, "no-bytes", node.id, node.name)
    if node.type != _COLL:
        _check_message(findings, rank, node, rank_in_name=rank_in_name)
        return
    if node.runs_on_host:
        findings.add(rank, "collective-on-cpu", node.id, node.name)
    if "comm_type" not in attributes:
        findings.add(rank, "missing-comm-type", node.id, node.name)
    elif collective is None:
        findings.add(rank, "unknown-comm-type", node.id, f"{node.name}: {comm_type}")
    elif collective in _UNSUPPORTED_COLLECTIVES:
        findings.add(rank, "unsupported-collective", node.id, f"{node.name}: {collective}")
    _check_group(findings, rank, node, groups, rank_in_name=rank_in_name)


def _check_message(findings: FindingCollector, rank: int, node: ChakraNode, *, rank_in_name: bool) -> None:
    source, destination, _ = get_message_ends(rank, node)
    local_end = source if node.type == _SEND else destination
    if None in (source, destination):
        findings.add(rank, "missing-ends", node.id, node.name)
    elif source == destination:
        findings.add(rank, "self-message", node.id, node.name)
    elif rank_in_name and local_end != rank:
        findings.add(rank, "foreign-end", node.id, f"{node.name}: of rank {local_end}")


def _check_group(
    findings: FindingCollector,
    rank: int,
    node: ChakraNode,
    groups: Mapping[str, list[int]],
    *,
    rank_in_name: bool,
) -> None:
    group = str(node.attributes.get("pg_name") or "0")
    if not group.isdecimal():
        findings.add(rank, "group-name", node.id, f"{node.name}: {group!r}")
    elif group != "0" and group not in groups:
        findings.add(rank, "unknown-group", node.id, f"{node.name}: group {group}")
    elif rank_in_name and group in groups and rank not in groups[group]:
        findings.add(rank, "not-a-member", node.id, f"{node.name}: group {group} is {groups[group]}")
    elif len(groups.get(group, (0, 1))) == 1:
        findings.add(rank, "single-rank-group", node.id, f"{node.name}: group {group}")
    root = node.attributes.get("root")
    if root is not None and group in groups and root not in groups[group]:
        findings.add(rank, "root-outside", node.id, f"{node.name}: root {root} of group {groups[group]}")


def _check_dependencies(findings: FindingCollector, rank: int, nodes: list[ChakraNode]) -> None:
    """Report duplicate node ids, dependencies on missing nodes, and dependency cycles."""
    ids = Counter(node.id for node in nodes)
    for node_id, count in ids.items():
        if count > 1:
            findings.add(rank, "duplicate-id", node_id, f"{count} nodes have the id {node_id}")
    for node in nodes:
        for kind, dependencies in (("data", node.message.data_deps), ("control", node.message.ctrl_deps)):
            for missing in (dependency for dependency in dependencies if dependency not in ids):
                findings.add(rank, f"dangling-{kind}-dependency", node.id, f"{node.name}: on node {missing}")
    data = {node.id: set(node.message.data_deps) & ids.keys() for node in nodes}
    both = {node.id: node.dependencies & ids.keys() for node in nodes}
    for code, dependency_map in (("cycle", data), ("control-cycle", both)):
        if cycle := _find_cycle(dependency_map):
            example = cycle if len(cycle) <= _MAX_EXAMPLE_NODES else [*cycle[:_MAX_EXAMPLE_NODES], "..."]
            findings.add(rank, code, cycle[0], " -> ".join(map(str, example)))
            break


def _find_cycle(dependency_map: dict[int, set[int]]) -> list[int]:
    """Return a dependency cycle as a list of node ids, in which the first id is repeated at the end; empty for none."""
    missing = {node: len(dependencies) for node, dependencies in dependency_map.items()}
    dependents: dict[int, list[int]] = {}
    for node, dependencies in dependency_map.items():
        for dependency in dependencies:
            dependents.setdefault(dependency, []).append(node)
    ready = [node for node, count in missing.items() if not count]
    while ready:
        for dependent in dependents.get(ready.pop(), ()):
            missing[dependent] -= 1
            if not missing[dependent]:
                ready.append(dependent)
    blocked = {node for node, count in missing.items() if count}
    if not blocked:
        return []
    # Each blocked node depends on another blocked one, so following them must return to a visited node.
    path = [min(blocked)]
    position = {path[0]: 0}
    while (following := min(dependency_map[path[-1]] & blocked)) not in position:
        position[following] = len(path)
        path.append(following)
    return [*path[position[following] :], following]


def read_groups(file: ChakraFile, group_file: Path | None = None) -> dict[str, list[int]]:
    """Return group number -> ranks of the process groups, read from a comm_groups.json file and metadata nodes.

    Args:
        file: The file of one rank.
        group_file: File of the groups; default: NAME.comm_groups.json next to the file, if there is one.

    Raises:
        ReadError: The file of groups is not an object of lists of ranks.
    """
    groups = {number: ranks for node in file.nodes for number, ranks in _list_node_groups(node)}
    for candidate in _group_file_candidates(file.path) if group_file is None else [group_file]:
        if group_file is not None or candidate.is_file():
            return groups | _load_groups(candidate)
    return groups


def _load_groups(path: Path) -> dict[str, list[int]]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ReadError(f"cannot be opened: {error.strerror}", where=path) from None
    except (ValueError, RecursionError) as error:
        raise ReadError(f"not valid JSON: {error}", where=path) from None
    if not isinstance(content, dict) or not all(map(_is_rank_list, content.values())):
        raise ReadError('expected an object {"NUMBER": [RANKS]}', where=path)
    return content


def _group_file_candidates(path: Path) -> Iterator[Path]:
    """Yield the paths where simulators look for groups: NAME.RANK.comm_groups.json, then NAME.comm_groups.json."""
    name = strip_suffix(path)
    yield path.with_name(f"{name}.comm_groups.json")
    job_name, _, rank = name.rpartition(".")
    if rank.isdecimal():
        yield path.with_name(f"{job_name}.comm_groups.json")


def _list_node_groups(node: ChakraNode) -> Iterator[tuple[str, list[int]]]:
    """Yield (group number, ranks) of the process groups in the first input of a metadata node."""
    if node.type != TYPE_NUMBERS["METADATA_NODE"]:
        return
    try:
        content: Any = json.loads(node.message.inputs.values[2:-2])
    except (ValueError, RecursionError):
        return
    for group in content if isinstance(content, list) else []:
        if isinstance(group, dict) and _is_rank_list(group.get("ranks")):
            yield str(group.get("pg_name")), group["ranks"]


def _is_rank_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_int, value))
