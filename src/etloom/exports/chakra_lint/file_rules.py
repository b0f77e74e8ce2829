"""Lint rules for the Chakra file of one rank: the file itself, its nodes, communication and dependencies.

What simulators require was read from ASTRA-sim 2.0 (workload/Workload.cc) and Chakra's feeder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.exports.chakra_lint.lint_codes import ABORT, HANG, NO_EFFECT, FindingCollector
from etloom.exports.chakra_lint.list_schedule import RankGraph
from etloom.exports.chakra_lint.message_ends import get_message_ends
from etloom.formats.chakra.et_files import ChakraFile, ChakraNode, strip_suffix
from etloom.formats.chakra.protobuf import COLLECTIVES, NODE_TYPES, TYPE_NUMBERS
from etloom.formats.tables.node_table import is_int

_SEND, _RECV, _COLL = (TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_METADATA, _COMP = TYPE_NUMBERS["METADATA_NODE"], TYPE_NUMBERS["COMP_NODE"]
_UNSUPPORTED_COLLECTIVES = ("reduce", "gather", "scatter", "barrier")
_MEMORY_TYPES = (TYPE_NUMBERS["MEM_LOAD_NODE"], TYPE_NUMBERS["MEM_STORE_NODE"])
_INTEGER_ATTRIBUTES = frozenset(
    {
        *("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "num_ops", "tensor_size"),
        "comm_priority",
    }
)
_TYPED_ATTRIBUTES = _INTEGER_ATTRIBUTES | {"pg_name", "is_cpu_op"}
"""Attributes that simulators read as a certain type: integer, text, boolean."""
READ_ATTRIBUTES = _TYPED_ATTRIBUTES | {"root", "replayed", "collective", "stream", "start_ns", "duration_ns"}
"""Attributes that lint reads."""
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
        if node.type in _MEMORY_TYPES:
            _check_memory(findings, rank, node)
        elif node.type in (_SEND, _RECV, _COLL):
            # Only a name like job.3.et states the rank.
            _check_communication(findings, rank, node, groups, rank_in_name="." in strip_suffix(file.path))
    for node_id, count in Counter(node.id for node in file.nodes).items():
        if count > 1:
            findings.add(rank, "duplicate-id", node_id, f"{count} nodes have the id {node_id}")


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
    computations = [node for node in nodes if node.type == _COMP]
    if computations and not any(
        node.message.duration_micros or node.attributes.get("num_ops") for node in computations
    ):
        example = f"{len(computations):,} of {len(computations):,} computations"
        findings.add(rank, "no-durations", computations[0].id, example)
    _check_replays(findings, rank, nodes)
    on_device = [node for node in nodes if not node.runs_on_host and node.type != _METADATA]
    gpu_ids = {node.id for node in on_device}
    streams = {str(node.attributes.get("stream")) for node in on_device}
    if len(streams) < len(gpu_ids) < len(nodes) and not any(
        dependency in gpu_ids for node in nodes for dependency in node.message.data_deps
    ):
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
    attributes = node.attributes
    if not node.type:
        findings.add(rank, "invalid-node", node.id, node.name)
    elif node.type not in NODE_TYPES:
        findings.add(rank, "unknown-node-type", node.id, f"{node.name}: type {node.type}")
    for name in _TYPED_ATTRIBUTES & attributes.keys():
        if not _has_type(name, attributes[name]):
            _report_type(findings, rank, node, name)
    if node.type == _METADATA:
        findings.add(rank, "metadata-node", node.id, node.name)
    elif "is_cpu_op" not in attributes:
        findings.add(rank, "missing-is-cpu-op", node.id, node.name)


def _has_type(name: str, value: Any) -> bool:
    if name == "pg_name":
        return isinstance(value, str)
    return is_int(value) or (name == "is_cpu_op" and isinstance(value, bool))


def _report_type(findings: FindingCollector, rank: int, node: ChakraNode, name: str) -> None:
    """Report an attribute of the wrong type, at which ASTRA-sim stops where it reads the attribute."""
    field = next(attribute.WhichOneof("value") for attribute in node.message.attr if attribute.name == name)
    is_read = name == "is_cpu_op" or node.type != _COMP
    findings.add(
        rank,
        "attribute-type",
        node.id,
        f"{node.name}: {name} is stored as {field or 'no value'}",
        effect=None if is_read else NO_EFFECT,
    )


def _check_memory(findings: FindingCollector, rank: int, node: ChakraNode) -> None:
    size: Any = node.attributes.get("tensor_size")
    if size is None:
        findings.add(rank, "missing-tensor-size", node.id, node.name)
        return
    findings.add(rank, "memory-node", node.id, node.name)
    if is_int(size) and size < 0:
        findings.add(rank, "negative-size", node.id, f"{node.name}: {size}", effect=ABORT)


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
    if node.runs_on_host:
        findings.add(rank, "collective-on-cpu", node.id, node.name)
    if size is None:
        findings.add(rank, "missing-comm-size", node.id, node.name)
    elif is_int(size) and size < 0:
        # A message is sent at once and its time overflows; a collective is cut into chunks that never all arrive.
        effect = HANG if node.type == _COLL else ABORT
        findings.add(rank, "negative-size", node.id, f"{node.name}: {size}", effect=effect)
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


def check_dependencies(findings: FindingCollector, rank: int, graph: RankGraph, stuck: Sequence[int]) -> None:
    """Report dependencies on missing nodes, and dependency cycles.

    Args:
        findings: Collects the findings.
        rank: Rank of the file.
        graph: Its nodes.
        stuck: Positions of the nodes that never start in a replay.
    """
    if graph.nodes and all(graph.missing):
        findings.add(rank, "no-start", graph.nodes[0].id, graph.nodes[0].name)
    if not stuck:
        return
    ids = {node.id for node in graph.nodes}
    blocked = [graph.nodes[place] for place in stuck]
    for node in blocked:
        for kind, dependencies in (("data", node.message.data_deps), ("control", node.message.ctrl_deps)):
            for missing in (dependency for dependency in dependencies if dependency not in ids):
                findings.add(rank, f"dangling-{kind}-dependency", node.id, f"{node.name}: on node {missing}")
    blocked_ids = {node.id for node in blocked}
    data = {node.id: set(node.message.data_deps) & blocked_ids for node in blocked}
    both = {node.id: node.dependencies & blocked_ids for node in blocked}
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
    if node.type != _METADATA:
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
