"""The codes of lint findings, each with severity, meaning and remedy.

An error makes a simulator refuse the file, wait forever or simulate something else. With a warning the simulation runs,
but its result may not be what was intended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import polars as pl

ERROR, WARNING = "error", "warning"


class LintCode(NamedTuple):
    """Severity ("error" or "warning") of a lint code, and texts that describe its meaning and remedy."""

    severity: str
    meaning: str
    remedy: str


_FILE_CODES = {
    "truncated": LintCode(ERROR, "the file ends in the middle of a message", "write or copy it again"),
    "damaged-node": LintCode(
        ERROR, "a message cannot be parsed as a node, and readers stop at it", "write the file again"
    ),
    "no-metadata": LintCode(
        ERROR,
        "the file starts with a node, which simulators read as metadata and lose",
        "put a GlobalMetadata message first",
    ),
    "empty-metadata": LintCode(
        ERROR,
        "the first message is empty, which Chakra's reader takes for the end of the file",
        "give the GlobalMetadata a version",
    ),
    "no-nodes": LintCode(ERROR, "the file contains no nodes", "convert a trace that contains operators"),
}
_NODE_CODES = {
    "duplicate-id": LintCode(
        ERROR,
        "several nodes have the same id, so dependencies on it are ambiguous and all but one node are lost",
        "give each node its own id",
    ),
    "dangling-data-dependency": LintCode(
        ERROR,
        "a data dependency refers to a missing node, at which ASTRA-sim aborts",
        "remove the dependency, or keep the node it refers to",
    ),
    "dangling-control-dependency": LintCode(
        ERROR,
        "a control dependency refers to a missing node, at which ASTRA-sim aborts",
        "remove the dependency, or keep the node it refers to",
    ),
    "cycle": LintCode(
        ERROR, "nodes depend on each other in a cycle, so none of them ever starts", "remove one dependency"
    ),
    "no-start": LintCode(
        ERROR,
        "every node depends on another one, at which ASTRA-sim aborts",
        "remove a dependency of each cycle",
    ),
    "control-cycle": LintCode(
        ERROR,
        "data and control dependencies form a cycle; ASTRA-sim follows both and never starts these nodes",
        "let control dependencies refer to nodes that end earlier, or omit them",
    ),
    "invalid-node": LintCode(
        ERROR,
        "ASTRA-sim skips a node of type 0, and nodes that depend on it start only after another node of the rank ends",
        "set its type, or remove it",
    ),
    "unknown-node-type": LintCode(
        ERROR,
        "simulators do not know the node type",
        "set it to COMP_NODE, a COMM_ or a MEM_ type, or METADATA_NODE",
    ),
    "attribute-type": LintCode(
        ERROR,
        "an attribute has a different type than simulators expect, and they stop at it",
        "write is_cpu_op as bool, pg_name as string, numbers as integers",
    ),
    "memory-node": LintCode(
        WARNING,
        "ASTRA-sim exits at a MEM_LOAD or MEM_STORE node unless its remote memory configuration has a memory expansion",
        "use --remote-memory-configuration with PER_NPU_MEMORY_EXPANSION, for example, or its replay-only mode",
    ),
    "missing-tensor-size": LintCode(
        ERROR, "a MEM_LOAD or MEM_STORE node has no tensor_size", "set tensor_size in bytes"
    ),
    "negative-size": LintCode(
        ERROR,
        "comm_size or tensor_size is negative, which simulators read as an enormous number",
        "set it to the size in bytes",
    ),
    "metadata-node": LintCode(
        ERROR,
        "ASTRA-sim aborts at a METADATA_NODE",
        "remove it; process groups belong in the file of --comm-group-configuration",
    ),
    "missing-is-cpu-op": LintCode(
        WARNING,
        "is_cpu_op is missing, so simulators run the node on the device",
        "set is_cpu_op",
    ),
    "no-durations": LintCode(
        WARNING,
        "no computation has a duration, or num_ops and tensor_size",
        "set duration_micros, or num_ops and tensor_size for a roofline",
    ),
    "device-leads-nowhere": LintCode(
        WARNING,
        "no node depends on GPU work, so collectives start before their input is computed",
        "convert with a tool that keeps the order of streams and waits: etloom export --to chakra",
    ),
}
_COMMUNICATION_CODES = {
    "collective-on-cpu": LintCode(
        ERROR, "ASTRA-sim refuses communications on the host", "set is_cpu_op to false"
    ),
    "missing-comm-type": LintCode(
        ERROR,
        "a collective has no comm_type; simulators refuse it, or run it as an all-reduce",
        "set comm_type",
    ),
    "unknown-comm-type": LintCode(
        ERROR, "comm_type is not in Chakra's enumeration of collectives", "set it to a value from 0 to 9"
    ),
    "unsupported-collective": LintCode(
        ERROR,
        "ASTRA-sim does not implement reduce, gather, scatter and barrier, and stops at them",
        "replace a reduce by an all-reduce and a barrier by an all-reduce of one byte, or remove the node",
    ),
    "missing-comm-size": LintCode(ERROR, "a communication has no comm_size", "set comm_size in bytes"),
    "no-bytes": LintCode(
        WARNING, "a communication moves 0 bytes and takes no time", "set comm_size, or remove the node"
    ),
    "empty-message": LintCode(
        ERROR,
        "ASTRA-sim aborts at a message of 0 bytes",
        "set comm_size, or remove the node",
    ),
    "empty-all-gather": LintCode(
        ERROR,
        "ASTRA-sim never ends an all-gather of 0 bytes",
        "set comm_size, or remove the node",
    ),
    "missing-ends": LintCode(
        ERROR,
        "a send lacks its destination, or a receive its source, so it cannot be matched",
        "set comm_src, comm_dst and comm_tag",
    ),
    "self-message": LintCode(
        ERROR, "ASTRA-sim aborts at a message from a rank to itself", "remove the send and the receive"
    ),
    "foreign-end": LintCode(
        ERROR,
        "the source of a send, or the destination of a receive, is not the rank of the file",
        "set comm_src of sends and comm_dst of receives to the rank",
    ),
    "group-name": LintCode(
        ERROR, "pg_name is not a number, but simulators read it as one", "number the process groups"
    ),
    "unknown-group": LintCode(
        ERROR,
        "NAME.comm_groups.json next to the file, where simulators look up the ranks, lacks the group",
        'add {"NUMBER": [RANKS]} there, or omit pg_name for all ranks',
    ),
    "missing-member": LintCode(
        ERROR,
        "a group or a message names a rank that has no file; ASTRA-sim aborts",
        "convert all ranks, or remove the rank from the group, or the message",
    ),
    "single-rank-group": LintCode(
        ERROR,
        "a collective of a group of one rank never ends in ASTRA-sim",
        "make it a COMP_NODE, or remove it",
    ),
    "not-a-member": LintCode(
        ERROR,
        "a rank takes part in a collective of a group that it does not belong to",
        "fix the group's ranks",
    ),
    "root-outside": LintCode(
        ERROR, "the root of a collective does not belong to its group", "set root to a rank of the group"
    ),
}
_CROSS_RANK_CODES = {
    "groups-differ": LintCode(
        ERROR,
        "ranks disagree on the members of a group, so they wait for different ranks",
        "give groups of different ranks different numbers",
    ),
    "collectives-differ": LintCode(
        ERROR,
        "ranks of a group run different sequences of collectives, so a simulator waits forever",
        "convert the same steps of all ranks, and give each group its number",
    ),
    "sizes-differ": LintCode(
        ERROR,
        "ranks specify different sizes for the same collective, whose messages never match in ASTRA-sim",
        "set comm_size to one value on all ranks, for an uneven all-to-all to the largest",
    ),
    "roots-differ": LintCode(
        ERROR, "ranks specify different roots for the same collective", "set root to the same rank"
    ),
    "unmatched-message": LintCode(
        ERROR,
        "a receive has no matching send on the other rank and waits forever, or a send has no receive",
        "convert the same steps of both ranks",
    ),
    "message-sizes-differ": LintCode(
        ERROR,
        "a send and its receive have different sizes and never match",
        "set comm_size to that of the send",
    ),
    "never-ends": LintCode(
        ERROR,
        "in a simulation of all ranks, a communication starts and never ends",
        "let all ranks run the communications of all groups in one order, with equal types and sizes",
    ),
    "message-last": LintCode(
        ERROR,
        "a rank with host nodes ends with a message, at which ASTRA-sim stops with an exception",
        "let a host node depend on the message",
    ),
    "replayed": LintCode(
        WARNING,
        "a communication whose size, sender or receiver is unknown, or whose type ASTRA-sim lacks, takes its "
        "recorded time",
        "record sizes: collect an execution trace, or use a profiler that describes NCCL kernels",
    ),
    "nothing-simulated": LintCode(
        ERROR,
        "all communications take their recorded time, so the simulation does not depend on the network",
        "record sizes: collect an execution trace, or use a profiler that describes NCCL kernels",
    ),
    "missing-rank": LintCode(
        WARNING,
        "a rank of the job has no file, so its communication can neither be checked nor simulated",
        "convert all ranks",
    ),
}
ABORT, RAISE, HANG, NO_EFFECT = "abort", "raise", "hang", "none"
_CODES_BY_EFFECT = {
    ABORT: (
        *(
            "metadata-node",
            "unknown-node-type",
            "unknown-group",
            "not-a-member",
            "missing-member",
            "missing-rank",
        ),
        *("self-message", "empty-message", "memory-node"),
    ),
    RAISE: (
        *(
            "collective-on-cpu",
            "missing-comm-type",
            "unknown-comm-type",
            "unsupported-collective",
            "group-name",
        ),
        *("missing-comm-size", "missing-ends", "foreign-end", "attribute-type", "missing-tensor-size"),
    ),
    HANG: ("empty-all-gather",),
}
NODE_EFFECTS = {code: effect for effect, codes in _CODES_BY_EFFECT.items() for code in codes}
"""The effect of a node on ASTRA-sim when it starts: the process ends, raises an exception, or never ends.

The event loop catches exceptions, so that the node never ends; at the start of the simulation, and after a message,
nothing catches them, and the process ends.
"""
LOAD_ABORT_CODES = frozenset(
    {
        *("damaged-node", "no-metadata", "no-nodes", "no-start", "duplicate-id"),
        *("dangling-data-dependency", "dangling-control-dependency"),
    }
)
"""Findings at which ASTRA-sim ends when it reads the files."""
REPLAY_ABORT_CODES = LOAD_ABORT_CODES | {"metadata-node", "unknown-node-type"}
"""Findings at which it ends even in its replay-only mode."""
KINETO_CODES = {
    "reading-problem": LintCode(
        ERROR,
        "a part of the file is missing, damaged or invalid, and was left out or repaired when it was read",
        "etloom info FILE lists each problem with its remedy; record again",
    ),
    "kernel-before-launch": LintCode(
        ERROR,
        "a kernel starts before the call that launched it, so clocks of host and GPU differ",
        "record again: queue times and launch delays of this trace are wrong",
    ),
    "wait-without-record": LintCode(
        WARNING,
        "a wait for an event does not state the call that recorded it, so what it waited for is unknown",
        "record with torch 2.4 or later, and start the profiler before the event is recorded",
    ),
    "kernel-beyond-sync": LintCode(
        WARNING,
        "a kernel runs when the synchronization of its stream starts on the device",
        "read the start of the synchronization as that of the host's call, not as the end of the stream's work",
    ),
    "record-after-wait": LintCode(
        ERROR,
        "a stream waits for an event whose recording is later, or is not in the trace",
        "record longer, so that the trace contains both calls; else ignore the order that these waits imply",
    ),
    "incomplete-collective": LintCode(
        WARNING,
        "a record of a collective lacks its name, type, sizes or group size",
        "record with torch 2.2 or later and backend nccl or gloo; sizes and bandwidths of these calls are unknown",
    ),
    "shared-sequence-number": LintCode(
        WARNING,
        "backward operators of several kinds have the same sequence number, so their forward operators are ambiguous",
        "record with torch 2.1 or later; for older traces join backward to forward by names",
    ),
}
LINT_CODES = _FILE_CODES | _NODE_CODES | _COMMUNICATION_CODES | _CROSS_RANK_CODES | KINETO_CODES


@dataclass(frozen=True)
class LintFinding:
    """All occurrences of a lint code in the file of a rank: their number, and the first occurrence as an example.

    Attributes:
        rank: Rank of the file.
        code: Key of `LINT_CODES`.
        count: Number of occurrences.
        node: Node id of the first occurrence; None where it concerns the whole file.
        example: Description of the first occurrence.
    """

    rank: int
    code: str
    count: int
    node: int | None
    example: str

    @property
    def severity(self) -> str:
        """The severity of the finding: error or warning."""
        return LINT_CODES[self.code].severity

    @property
    def meaning(self) -> str:
        """The problem that the code stands for, as text without full stop."""
        return LINT_CODES[self.code].meaning

    @property
    def remedy(self) -> str:
        """The instruction to fix the problem, as text without full stop."""
        return LINT_CODES[self.code].remedy


class FindingCollector:
    """Collects the occurrences of lint codes by rank and code."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], LintFinding] = {}
        self.effects: dict[int, dict[int, str]] = {}
        """Rank -> node id -> the strongest effect (see `NODE_EFFECTS`) of its findings."""

    def add(
        self,
        rank: int,
        code: str,
        node: int | None,
        example: str,
        count: int = 1,
        *,
        effect: str | None = None,
    ) -> None:
        """Record an occurrence of a lint code in a rank's file; the first occurrence becomes the example.

        Args:
            rank: Rank of the file.
            code: Key of `LINT_CODES`.
            node: Node id; None where it concerns the whole file.
            example: Description of the occurrence.
            count: Occurrences that it stands for.
            effect: What the node does to ASTRA-sim; default: `NODE_EFFECTS`.
        """
        first = self._found.setdefault((rank, code), LintFinding(rank, code, 0, node, example))
        self._found[rank, code] = replace(first, count=first.count + count)
        effect = effect or NODE_EFFECTS.get(code)
        if node is not None and effect in (ABORT, RAISE, HANG):
            effects = self.effects.setdefault(rank, {})
            effects[node] = min(effect, effects.get(node, effect), key=(ABORT, RAISE, HANG).index)

    def has_code(self, codes: Collection[str]) -> bool:
        """Return whether an occurrence of one of several lint codes was recorded."""
        return any(code in codes for _, code in self._found)

    def has_errors(self) -> bool:
        """Return whether an occurrence with the severity "error" was recorded."""
        return any(LINT_CODES[code].severity == ERROR for _, code in self._found)

    def sorted_findings(self) -> list[LintFinding]:
        """Return the findings: errors first, then by rank, then in the order of `LINT_CODES`."""
        order = list(LINT_CODES)
        return sorted(
            self._found.values(),
            key=lambda finding: (finding.severity, finding.rank, order.index(finding.code)),
        )


_COLUMNS = {
    "severity": pl.String,
    "rank": pl.Int64,
    "code": pl.String,
    "count": pl.Int64,
    "node": pl.UInt64,
    "example": pl.String,
    "meaning": pl.String,
    "remedy": pl.String,
}


@dataclass(frozen=True)
class LintResult:
    """The result of `lint`: findings, and of Chakra files how ASTRA-sim would handle them, and times in ns.

    Attributes:
        files: The file of each rank.
        findings: Errors first; one for each rank and code.
        verdict: What ASTRA-sim does with the files: ``finish``, ``hang`` or ``abort``.
        replay_verdict: The same for its replay-only mode, in which every node takes its recorded time.
        simulated_ns: Time that it takes with the recorded durations (its replay-only mode); of the longest rank.
        recorded_ns: Time that the recording took; None if the files do not state ``start_ns``.
        ideal_ns: Time on a network that takes no time, where communications of unknown size take their recorded time.
    """

    files: Mapping[int, Path]
    findings: list[LintFinding]
    verdict: str | None = None
    replay_verdict: str | None = None
    simulated_ns: int | None = None
    recorded_ns: int | None = None
    ideal_ns: int | None = None

    @property
    def has_errors(self) -> bool:
        """True if a finding is an error: with it a simulator refuses the files, hangs, or simulates something else, and
        analyses are wrong."""
        return any(finding.severity == ERROR for finding in self.findings)

    @property
    def table(self) -> pl.DataFrame:
        """The findings as a table: severity, rank, code, count, node, example, meaning, remedy."""
        rows = [{name: getattr(finding, name) for name in _COLUMNS} for finding in self.findings]
        return pl.DataFrame(rows, schema=_COLUMNS)
