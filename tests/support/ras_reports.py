"""Reports of NCCL's RAS in both forms, written from one state of a job by NCCL's rules for what the text names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
ORDER = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")
ERRORS = {2: "System error", 3: "Internal error", 6: "Remote process error"}
MISSING = ("dead", "unresponsive")


@dataclass
class Member:
    """A rank of a communicator. ``status``: one of ORDER or MISSING."""

    place: int  # number of its process; one GPU each
    counts: dict[str, int] = field(default_factory=lambda: {"AllReduce": 64})
    status: str = "RUNNING"
    async_error: int = 0

    @property
    def host(self) -> str:
        return f"10.0.0.{self.place // 8}"

    @property
    def pid(self) -> int:
        return 1000 + self.place

    @property
    def gpu(self) -> int:
        return self.place % 8

    def count(self, collective: str) -> int:
        return self.counts.get(collective, 0)


@dataclass
class Communicator:
    hash: int
    members: list[Member]


def make_world(size: int, hash: int = 0x78DB921D1C117B4A, **counts: int) -> Communicator:
    """Return a communicator of all processes, whose ranks are alike."""
    return Communicator(hash, [Member(place, dict(counts or {"AllReduce": 64})) for place in range(size)])


# The JSON form.


def write_json(
    communicators: Iterable[Communicator], *, without_comma: bool = False, version: str = "2.29.1"
) -> str:
    """Return the JSON form; ``without_comma`` like NCCL 2.28.9."""
    listed = list(communicators)
    document = {
        "nccl_version": version,
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-06-19 06:51:56",
        "communicators_count": len(listed),
        "communicators": [_communicator_json(communicator) for communicator in listed],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }
    text = json.dumps(document, indent=2) + "\n"
    if without_comma:
        lines = text.split("\n")
        for place, line in enumerate(lines):
            if '"nvml_dev"' in line and any(
                '"unresponsive"' in later for later in lines[place + 2 : place + 3]
            ):
                lines[place] = line.rstrip(",")
        text = "\n".join(lines)
    return text


def _communicator_json(communicator: Communicator) -> dict[str, Any]:
    present = [(rank, member) for rank, member in enumerate(communicator.members) if _is_present(member)]
    missing = [(rank, member) for rank, member in enumerate(communicator.members) if not _is_present(member)]
    return {
        "hash": f"{communicator.hash:#x}",
        "secondary_hash": "0x1:0x2",
        "size": len(communicator.members),
        "ranks_count": len(present),
        "missing_ranks_count": len(missing),
        "ranks": [
            _place_json(rank, member)
            | {"status": _status_json(member)}
            | {"collective_counts": {name: member.count(name) for name in COLLECTIVES}}
            for rank, member in present
        ],
        "missing_ranks": [
            _place_json(rank, member)
            | {
                "status": {
                    "unresponsive": member.status in MISSING,
                    "considered_dead": member.status == "dead",
                }
            }
            for rank, member in missing
        ],
    }


def _is_present(member: Member) -> bool:
    return member.status not in (*MISSING, "NOCOMM")


def _place_json(rank: int, member: Member) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": member.host,
        "pid": member.pid,
        "cuda_dev": member.gpu,
        "nvml_dev": member.gpu,
    }


def _status_json(member: Member) -> dict[str, Any]:
    return {
        "init_state": 7 if member.status == "INIT" else 0,
        "async_error": member.async_error,
        "finalize_called": member.status == "FINALIZE",
        "destroy_flag": False,
        "abort_flag": member.status == "ABORT",
    }


# The text form.


class _TextWriter:
    def __init__(self, communicators: list[Communicator], verbose: bool, old: bool) -> None:
        self.verbose, self.old = verbose, old
        self.lines: list[str] = []
        self.communicators = communicators
        self.processes = {member.place: member for item in communicators for member in item.members}

    def is_outlier(self, count: int, total: int | None = None) -> bool:
        if count == 1:
            return True
        if self.verbose:
            return total is None or count < total * 0.5
        return count <= 10 and (total is None or count <= total * 0.25)

    def write(self) -> str:
        version = "2.24.3+cuda12.4" if self.old else "2.28.9"
        gpus = len(self.processes)
        nodes = len({member.host for member in self.processes.values()})
        self.lines += [
            f"NCCL version {version} compiled with CUDA 12.4",
            "CUDA runtime version 12040, driver version 12080",
            "",
            "Job summary",
            "===========",
            "",
            "  Nodes  Processes         GPUs  Processes     GPUs",
            "(total)   per node  per process    (total)  (total)",
            f"{nodes:7}  {min(8, gpus):9}  {1:11}  {gpus:9}  {gpus:7}",
            "",
            "Communicators... (0.00s)",
            "=============",
            "",
        ]
        groups = self.group_communicators()
        self.write_table(groups)
        self.lines += ["", "Errors", "======", ""]
        for status, title in (("unresponsive", "INCOMPLETE"), ("dead", "DEAD")):
            self.write_processes(status, title)
        for number, group in enumerate(groups.values()):
            for place, item in enumerate(group):
                self.write_errors(f"#{number}-{place} ({item.hash:016x})", item)
        self.lines += ["Warnings", "========", ""]
        for number, group in enumerate(groups.values()):
            for place, item in enumerate(group):
                self.write_mismatch(f"#{number}-{place} ({item.hash:016x})", item)
        return "\n".join(self.lines) + "\n"

    def group_communicators(self) -> dict[tuple[Any, ...], list[Communicator]]:
        keys = {
            id(item): (len(item.members), _highest_status(item), self.find_flags(item))
            for item in self.communicators
        }
        ordered = sorted(self.communicators, key=lambda item: (-keys[id(item)][0], keys[id(item)][1:]))
        groups: dict[tuple[Any, ...], list[Communicator]] = {}
        for item in ordered:
            groups.setdefault(keys[id(item)], []).append(item)
        return groups

    def write_table(self, groups: dict[tuple[Any, ...], list[Communicator]]) -> None:
        if not groups:
            self.lines.append("No communicator data collected!")
            return
        self.lines += [
            "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
            "    #  in group  per comm  per node  per comm  in group",
        ]
        for number, ((size, status, flags), items) in enumerate(groups.items()):
            answered = len({m.place for item in items for m in item.members if _is_present(m)})
            errors = ",".join(flags) or "OK"
            self.lines.append(
                f"{number:5}  {len(items):8}  {1:8}  {'1-8':>8}  {size:8}  {answered:8}  {status:>8}  {errors:>6}"
            )

    def find_flags(self, item: Communicator) -> tuple[str, ...]:
        flags = []
        if any(member.status in MISSING for member in item.members):
            flags.append("INCOMPLETE")
        if any(member.async_error for member in item.members if _is_present(member)):
            flags.append("ERROR")
        if len(_statuses(item)) > 1 or any(len(_counts(item, name)) > 1 for name in COLLECTIVES):
            flags.append("MISMATCH")
        return tuple(flags)

    def write_processes(self, status: str, title: str) -> None:
        members = [
            member for item in self.communicators for member in item.members if member.status == status
        ]
        silent = list({member.place: member for member in members}.values())
        if not silent:
            return
        plural = len(silent) > 1
        self.lines.append(title)
        if status == "dead":
            verb = "es are" if plural else " is"
            self.lines.append(
                f"  {len(silent)} job process{verb} considered dead (unreachable via the RAS network)"
            )
        else:
            self.lines.append(f"  Missing communicator data from {len(silent)} job process{'es' * plural}")
        if self.is_outlier(len(silent)):
            self.lines += [f"  Process {m.pid} on node {m.host} managing GPU {m.gpu}" for m in silent]
        self.lines.append("")

    def write_errors(self, title: str, item: Communicator) -> None:
        missing = [rank for rank, member in enumerate(item.members) if member.status in MISSING]
        if missing:
            plural = "s" * (len(missing) > 1)
            self.lines += [
                f"{title} INCOMPLETE",
                f"  Missing communicator data from {len(missing)} rank{plural}",
            ]
            if self.is_outlier(len(missing)) and self.old:
                self.lines.append(f"  The missing rank{plural}: {','.join(map(str, missing))}")
            elif self.is_outlier(len(missing)):
                self.lines += [f"  Rank {rank} -- {_place(item.members[rank])}" for rank in missing]
            self.lines.append("")
        failed = {r: m.async_error for r, m in enumerate(item.members) if m.async_error and _is_present(m)}
        if failed:
            plural = "s" * (len(failed) > 1)
            self.lines += [f"{title} ERROR", f"  Asynchronous error{plural} on {len(failed)} rank{plural}"]
            for code, count in Counter(failed.values()).most_common():
                ranks = [rank for rank, value in failed.items() if value == code]
                text = f"reported {ERRORS[code]}"
                self.write_group(item, ranks, f"  {count} ranks {text}", text, self.is_outlier(count))
            self.lines.append("")

    def write_group(self, item: Communicator, ranks: list[int], title: str, single: str, named: bool) -> None:
        if len(ranks) > 1:
            self.lines.append(title)
        for rank in ranks if named else ():
            middle = "" if len(ranks) > 1 else f" {single}"
            self.lines.append(f"  Rank {rank}{middle} -- {_place(item.members[rank])}")

    def write_mismatch(self, title: str, item: Communicator) -> None:
        if "MISMATCH" not in self.find_flags(item):
            return
        size = len(item.members)
        self.lines.append(f"{title} MISMATCH")
        statuses = _statuses(item)
        if len(statuses) > 1:
            self.lines.append("  Communicator ranks have different status")
            for status, ranks in sorted(statuses.items(), key=lambda pair: -len(pair[1])):
                shown = "UNKNOWN" if self.old and status == "NOCOMM" else status
                text = f"has status {shown}"
                if self.old and status == "NOCOMM" and len(ranks) > 1:
                    self.lines.append(f"  {len(ranks)} ranks have status {shown}")
                    if self.is_outlier(len(ranks), size):
                        self.lines.append(f"  The unknown ranks: {','.join(map(str, ranks))}")
                    continue
                self.write_group(
                    item,
                    ranks,
                    f"  {len(ranks)} ranks have status {shown}",
                    text,
                    self.is_outlier(len(ranks), size),
                )
        for name in COLLECTIVES:
            counts = _counts(item, name)
            if len(counts) < 2:
                continue
            self.lines.append(
                f"  Communicator ranks have different {'collective' if self.old else name} operation counts"
            )
            for count, ranks in sorted(counts.items(), key=lambda pair: (-len(pair[1]), -pair[0])):
                many = (
                    f"have launched up to operation {count}"
                    if count or self.old
                    else "have not launched any operations"
                )
                self.write_group(
                    item,
                    ranks,
                    f"  {len(ranks)} ranks {many}",
                    many.replace("have", "has", 1),
                    self.is_outlier(len(ranks), size),
                )
            self.lines.append("")


def write_text(communicators: Iterable[Communicator], *, verbose: bool = False, old: bool = False) -> str:
    """Return the text form: ``old`` of NCCL 2.24, which counts all collectives together; ``verbose`` with -v."""
    return _TextWriter(list(communicators), verbose, old).write()


def _place(member: Member) -> str:
    return f"GPU {member.gpu} managed by process {member.pid} on node {member.host}"


def _statuses(item: Communicator) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, member in enumerate(item.members):
        if member.status not in MISSING:
            found.setdefault(member.status, []).append(rank)
    return found


def _counts(item: Communicator, name: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank, member in enumerate(item.members):
        if _is_present(member):
            found.setdefault(member.count(name), []).append(rank)
    return found


def _highest_status(item: Communicator) -> str:
    return max(_statuses(item) or ("INIT",), key=ORDER.index)
