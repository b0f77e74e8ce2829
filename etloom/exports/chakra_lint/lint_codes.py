"""What `lint` can find: for each code how bad it is, what it means and how to mend it.

error: a simulator refuses the file, waits for ever, or simulates something else. warning: it runs, and what it answers
may not be meant.
"""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING = "error", "warning"

LINT_CODES: dict[str, tuple[str, str, str]] = {
    # The file
    "truncated": (ERROR, "the file ends in the middle of a message", "write or copy it again"),
    "damaged-node": (ERROR, "a message is no node, and readers stop at it", "write the file again"),
    "no-metadata": (
        ERROR,
        "the file begins with a node, which simulators read as metadata and lose",
        "put a GlobalMetadata message first",
    ),
    "empty-metadata": (
        ERROR,
        "the first message has no bytes, which Chakra's reader takes for the end of the file",
        "give the GlobalMetadata a version",
    ),
    "no-nodes": (ERROR, "there is no node to run", "convert a trace that holds operators"),
    # Nodes
    "duplicate-id": (
        ERROR,
        "several nodes have one id, so dependencies on it are ambiguous and all but one are lost",
        "number the nodes anew",
    ),
    "dangling-data-dependency": (
        ERROR,
        "a data dependency names a node that is not there, so the node never starts",
        "drop the dependency, or keep the node it names",
    ),
    "dangling-control-dependency": (
        ERROR,
        "a control dependency names a node that is not there; newer simulators stop at it",
        "drop the dependency, or keep the node it names",
    ),
    "cycle": (
        ERROR,
        "nodes depend on each other in a circle, so none of them ever starts",
        "drop one of them",
    ),
    "control-cycle": (
        WARNING,
        "data and control dependencies together run in a circle; a simulator that follows both never starts them",
        "let control dependencies name a node that ends before, or leave them out",
    ),
    "unknown-node-type": (
        ERROR,
        "the type is none that simulators run",
        "set it to COMP_NODE, a COMM_ or a MEM_ type, or METADATA_NODE",
    ),
    "attribute-type": (
        ERROR,
        "an attribute has another type than simulators read it as, at which they stop",
        "write is_cpu_op as bool, pg_name as string, numbers as integers",
    ),
    "missing-is-cpu-op": (
        WARNING,
        "nothing says whether the node runs on the host, so it is taken for device work",
        "set is_cpu_op",
    ),
    "no-durations": (
        WARNING,
        "no computation takes any time, nor says its num_ops and tensor_size",
        "set duration_micros, or num_ops and tensor_size for a roofline",
    ),
    "device-leads-nowhere": (
        WARNING,
        "nothing depends on device work, so collectives start before what they send is computed",
        "convert with a tool that keeps the order of streams and waits: etloom export --to chakra",
    ),
    # Communication
    "collective-on-cpu": (ERROR, "ASTRA-sim refuses collectives on the host", "set is_cpu_op to false"),
    "missing-comm-type": (
        ERROR,
        "a collective does not say which, and would run as whatever the reader has: 0 is all-reduce",
        "set comm_type",
    ),
    "unknown-comm-type": (ERROR, "comm_type is no collective of Chakra's enumeration", "set it to 0 to 9"),
    "unsupported-collective": (
        ERROR,
        "ASTRA-sim implements no reduce, gather, scatter or barrier and stops at it",
        "replace it: a reduce by an all-reduce, a barrier by one of a byte, or leave it out",
    ),
    "missing-comm-size": (ERROR, "a communication does not say how much it moves", "set comm_size in bytes"),
    "no-bytes": (
        WARNING,
        "a communication moves nothing and takes no time",
        "set comm_size, or leave it out",
    ),
    "missing-ends": (
        ERROR,
        "a send or receive does not say between whom, so it cannot be matched",
        "set comm_src, comm_dst and comm_tag",
    ),
    "foreign-end": (
        ERROR,
        "a send does not come from the rank of its file, or a receive does not go there",
        "set comm_src of sends and comm_dst of receives to the rank",
    ),
    "group-name": (ERROR, "pg_name is no number, and simulators read it as one", "number the groups"),
    "unknown-group": (
        ERROR,
        "a group is in no NAME.comm_groups.json beside the file, where simulators look up its ranks",
        'write {"NUMBER": [RANKS]} there, or leave pg_name out for all ranks',
    ),
    "not-a-member": (
        ERROR,
        "a rank takes part in a collective of a group it is not in",
        "mend the group's ranks",
    ),
    # Between ranks
    "groups-differ": (
        ERROR,
        "ranks say different members of one group, so they wait for different ranks",
        "give groups of different ranks different numbers",
    ),
    "collectives-differ": (
        ERROR,
        "ranks of a group do different collectives in turn, so a simulator waits for ever",
        "convert the same steps of all ranks, and give each group its number",
    ),
    "sizes-differ": (
        WARNING,
        "ranks move different amounts in one collective, of which simulators take one",
        "check comm_size; of all-to-alls it may be meant",
    ),
    "roots-differ": (ERROR, "ranks name different roots of one collective", "set root to the same rank"),
    "root-outside": (
        ERROR,
        "the root of a collective is not in its group",
        "set root to a rank of the group",
    ),
    "unmatched-message": (
        ERROR,
        "a send has no receive of its ends and tag on the other rank, or the reverse, and waits for ever",
        "convert the same steps of both ranks",
    ),
    "message-sizes-differ": (WARNING, "a send and its receive move different amounts", "check comm_size"),
    "missing-rank": (
        WARNING,
        "a rank of the job has no file, so what others do with it cannot be checked, nor run",
        "convert all ranks",
    ),
}


@dataclass(frozen=True)
class LintFinding:
    """Of one code in the file of a rank: how often, and one of them. ``node``: its id, None where it is of the file."""

    rank: int
    code: str
    count: int
    node: int | None
    example: str

    @property
    def severity(self) -> str:
        return LINT_CODES[self.code][0]

    @property
    def meaning(self) -> str:
        return LINT_CODES[self.code][1]

    @property
    def remedy(self) -> str:
        return LINT_CODES[self.code][2]


class FindingCollector:
    """Gathers what is found, by rank and code."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], list[tuple[int | None, str]]] = {}

    def add(self, rank: int, code: str, node: int | None, example: str) -> None:
        self._found.setdefault((rank, code), []).append((node, example))

    def all(self) -> list[LintFinding]:
        """Errors first, then in the order of ranks and `CODES`."""
        order = list(LINT_CODES)
        found = [
            LintFinding(rank, code, len(those), *those[0]) for (rank, code), those in self._found.items()
        ]
        return sorted(found, key=lambda one: (one.severity, one.rank, order.index(one.code)))
