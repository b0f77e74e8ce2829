"""Parses the text form of a RAS report (NCCL 2.24 and later): a summary, and what differs between ranks.

The text names the ranks of small groups only; those of the largest group follow if all others are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from etloom.core.communicators import (
    ASYNC_ERROR,
    DEAD,
    INIT_ERROR,
    NO_ANSWER,
    NO_COMMUNICATOR,
    STATUS,
    UNRESPONSIVE,
    CommunicatorState,
    RankGroup,
    RankPlace,
    RasReport,
    sort_communicators,
    sort_groups,
)
from etloom.core.schema import Stat
from etloom.formats.nccl_ras.json_form import MAX_RANKS

_MAX_DERIVED = 1 << 20
"""Ranks of groups without names that are derived from those of the others, over all communicators."""
_NUMBER = r"(\d{1,9})"
_VERSION = re.compile(r"[NR]CCL version (\S{1,100})")
_TABLE_ROW = re.compile(
    rf"{_NUMBER}\s+{_NUMBER}\s+\d+\s+[\d-]+\s+{_NUMBER}\s+\d+\s+(\w{{1,20}})\s+([A-Z,]{{1,40}})"
)
_COMMUNICATOR = re.compile(rf"#{_NUMBER}-{_NUMBER} \(([0-9a-f]{{1,16}})\) (INCOMPLETE|ERROR|MISMATCH)")
_PROCESS = re.compile(rf"Process {_NUMBER} on node (\S{{1,100}}) managing GPUs? (.{{1,200}})")
_PROCESS_COUNT = re.compile(
    rf"(?:Missing communicator data from {_NUMBER} job process|{_NUMBER} job process(?:es are| is) considered dead)"
)
_MISSING_COUNT = re.compile(rf"Missing communicator data from {_NUMBER} ranks?$")
_MISSING_LIST = re.compile(r"The (?:missing|unknown) ranks?: ([\d,]+)")
_PROPERTY = re.compile(
    r"Communicator ranks have different (?:(status)|(.{1,100}?) operation counts)"
    r"|(Initialization|Asynchronous) errors? on \d+ ranks?"
)
_GROUP = re.compile(
    rf"{_NUMBER} ranks (?:have status (\w{{1,20}})|have launched up to operation (\d{{1,19}})"
    r"|(have not launched any operations)|reported (.{1,100}))$"
)
_RANK = re.compile(
    rf"Rank {_NUMBER}(?: (?:has status (\w{{1,20}})|has launched up to operation (\d{{1,19}})"
    r"|(has not launched any operations)|reported (.{1,100}?)))? -- (.*)"
)
_PLACE = re.compile(
    rf"GPU {_NUMBER}(?: \(NVML -?\d+\))? managed by process (\d{{1,18}}) on node (\S{{1,100}})"
)
_UNNAMED_STATUS = "UNKNOWN"
"""Status in NCCL before 2.26 of ranks without data: not a member any more, or no answer."""


@dataclass
class _Values:
    """The ranks with one value of a property: their number as stated, and those that are named."""

    value: str | int
    count: int
    ranks: list[int] = field(default_factory=list)

    def name_ranks(self) -> RankGroup:
        ranks = tuple(sorted(set(self.ranks)))
        return RankGroup(self.value, self.count, ranks if len(ranks) == self.count else None)


@dataclass
class _Draft:
    """A communicator while it is parsed."""

    name: str
    size: int | None
    status: str | None
    missing: _Values | None = None
    properties: dict[str, list[_Values]] = field(default_factory=dict)
    places: dict[int, RankPlace] = field(default_factory=dict)


class _Parser:
    """Parses the lines of a report one after the other."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.gpus: int | None = None
        self.total = 0
        self.full_sizes = 0
        self.drafts: dict[tuple[str, str, str], _Draft] = {}
        self.processes: dict[str, list[tuple[int, str, str]]] = {"DEAD": [], "INCOMPLETE": []}
        """Section -> pid, host and devices of its processes."""
        self.process_counts = {"DEAD": 0, "INCOMPLETE": 0}
        self.has_end = False
        self.has_table = False
        self._rows: dict[str, tuple[int, str]] = {}
        self._section = ""
        self._draft: _Draft | None = None
        self._values: list[_Values] | None = None
        self._expects_totals = False

    @cached_property
    def listed(self) -> dict[str, set[tuple[int, str]]]:
        """Section -> pid and host of its processes, when all lines are parsed."""
        return {name: {(pid, host) for pid, host, _ in rows} for name, rows in self.processes.items()}

    def add(self, line: str) -> None:
        """Parse a line without its indentation."""
        if match := _COMMUNICATOR.fullmatch(line):
            self._start_communicator(match)
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT", "Errors", "Warnings"):
            self._section, self._draft, self._values = line, None, None
            self.has_end |= line == "Warnings"
        elif self._draft is not None:
            self._add_to_communicator(self._draft, line)
        elif self._section in self.processes:
            self._add_process(line)
        elif not self._section:
            self._add_summary(line)

    def _add_summary(self, line: str) -> None:
        if self.version is None and (match := _VERSION.match(line)):
            self.version = match[1]
        elif line.startswith("(total)"):
            self._expects_totals = True
        elif self._expects_totals:
            last = line.split()[-1:] or [""]
            self.gpus = int(last[0]) if last[0].isdecimal() and len(last[0]) < 10 else None
            self._expects_totals = False
        elif line.startswith(("Group ", "No communicator data")):
            self.has_table = True
        elif self.has_table and (match := _TABLE_ROW.fullmatch(line)):
            self._rows[match[1]] = int(match[3]), match[4]
            self.total += int(match[2])
            self.full_sizes += int(match[2]) if int(match[3]) == self.gpus else 0

    def _start_communicator(self, match: re.Match[str]) -> None:
        size, status = self._rows.get(match[1], (None, None))
        size = size if size is None or 0 < size <= MAX_RANKS else None
        key = match[1], match[2], match[3]
        self._draft = self.drafts.setdefault(key, _Draft(match[3].zfill(16), size, status))
        self._values = None

    def _add_process(self, line: str) -> None:
        if match := _PROCESS.fullmatch(line):
            self.processes[self._section].append((int(match[1]), match[2], match[3]))
        elif match := _PROCESS_COUNT.match(line):
            self.process_counts[self._section] = int(match[1] or match[2])

    def _add_to_communicator(self, draft: _Draft, line: str) -> None:
        """Parse a line of a communicator's section: a property, the size of a group of ranks, or a rank."""
        if match := _MISSING_COUNT.match(line):
            draft.missing = _Values(NO_ANSWER, int(match[1]))
            self._values = [draft.missing]
        elif (match := _MISSING_LIST.fullmatch(line)) and self._values:
            self._values[-1].ranks += _parse_ranks(match[1])
        elif match := _PROPERTY.match(line):
            name = (
                STATUS
                if match[1]
                else match[2] or (INIT_ERROR if match[3] == "Initialization" else ASYNC_ERROR)
            )
            self._values = draft.properties[name] = []
        elif (match := _GROUP.fullmatch(line)) and self._values is not None:
            self._values.append(_Values(_read_value(match[2], match[3], match[4], match[5]), int(match[1])))
        elif (match := _RANK.fullmatch(line)) and self._values is not None:
            self._add_rank(draft, self._values, match)

    def _add_rank(self, draft: _Draft, values: list[_Values], match: re.Match[str]) -> None:
        rank = int(match[1])
        if any(match[place] is not None for place in (2, 3, 4, 5)):
            values.append(_Values(_read_value(match[2], match[3], match[4], match[5]), 1))
        if values and rank < (draft.size or MAX_RANKS):
            values[-1].ranks.append(rank)
            if place := _PLACE.match(match[6]):
                draft.places[rank] = RankPlace(place[3], int(place[2]), int(place[1]))


def _read_value(status: str | None, count: str | None, zero: str | None, error: str | None) -> str | int:
    if count is not None:
        return int(count)
    return 0 if zero else status or error or ""


def _parse_ranks(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number and len(number) < 10]


def parse_text(text: str, stats: list[Stat]) -> RasReport | None:
    """Parse a report; None if it is not one. Damage is appended to ``stats``."""
    parser = _Parser()
    for line in text.splitlines():
        if stripped := line.strip():
            parser.add(stripped)
    if parser.version is None:
        return None
    if not parser.has_end:
        stats.append(Stat("read.truncated", "data_loss", 1, "the report ends before its warnings"))
    budget = [_MAX_DERIVED]
    states = [_finish(draft, parser, budget) for draft in parser.drafts.values()]
    return RasReport(
        "text",
        sort_communicators(states),
        max(parser.total, len(states)),
        parser.version,
        parser.gpus,
        dead_processes=_describe_processes(parser.processes["DEAD"]),
        silent_processes=_describe_processes(parser.processes["INCOMPLETE"]),
        stats=tuple(stats),
        full_sizes=parser.full_sizes,
    )


def _describe_processes(processes: Iterable[tuple[int, str, str]]) -> tuple[str, ...]:
    return tuple(f"process {pid} on {host}, GPU {devices}" for pid, host, devices in processes)


def _finish(draft: _Draft, parser: _Parser, budget: list[int]) -> CommunicatorState:
    """Return the state of a communicator, with the ranks of unnamed groups where they follow from the others."""
    missing = _split_missing(draft, parser)
    status = [
        item for item in draft.properties.get(STATUS, []) if item.value != _UNNAMED_STATUS or not missing
    ]
    for item in status:
        item.value = NO_COMMUNICATOR if item.value == _UNNAMED_STATUS else item.value
    absent = sum(group.count for group in missing)
    if not status and draft.size and draft.status and draft.size > absent:
        status = [_Values(draft.status, draft.size - absent)]
    answers = _name_all(status, draft.size, missing, budget)
    without_counts = [*missing, *(group for group in answers if group.value == NO_COMMUNICATOR)]
    groups = {STATUS: sort_groups([*answers, *missing])} if answers or missing else {}
    for name, values in draft.properties.items():
        if not values:  # the report ends after the title of the property
            continue
        if name in (INIT_ERROR, ASYNC_ERROR):
            groups[name] = sort_groups(item.name_ranks() for item in values)
        elif name != STATUS:
            groups[name] = sort_groups(_name_all(values, draft.size, without_counts, budget))
    return CommunicatorState(draft.name, draft.size, groups, draft.places, id=draft.name)


def _split_missing(draft: _Draft, parser: _Parser) -> list[RankGroup]:
    """Return the ranks that did not answer by whether their process is dead."""
    if draft.missing is None:
        return []
    named = draft.missing.name_ranks()
    if named.ranks is None:
        return [RankGroup(_judge_missing(None, parser), named.count)]
    by_status: dict[str, list[int]] = {}
    for rank in named.ranks:
        by_status.setdefault(_judge_missing(draft.places.get(rank), parser), []).append(rank)
    return [RankGroup(status, len(ranks), tuple(ranks)) for status, ranks in by_status.items()]


def _judge_missing(place: RankPlace | None, parser: _Parser) -> str:
    """Return the status of a rank that did not answer, from the lists of dead and of silent processes."""
    listed, counts = parser.listed, parser.process_counts
    if not counts["DEAD"] or not counts["INCOMPLETE"]:
        return DEAD if counts["DEAD"] else UNRESPONSIVE
    if place is None:
        return NO_ANSWER
    process = place.pid, place.host
    if process in listed["DEAD"] or len(listed["INCOMPLETE"]) == counts["INCOMPLETE"]:
        return UNRESPONSIVE if process in listed["INCOMPLETE"] else DEAD
    is_listed = process in listed["INCOMPLETE"] or len(listed["DEAD"]) == counts["DEAD"]
    return UNRESPONSIVE if is_listed else NO_ANSWER


def _name_all(
    values: list[_Values], size: int | None, absent: list[RankGroup], budget: list[int]
) -> list[RankGroup]:
    """Return groups of ranks; the only one without names gets the ranks that neither the others nor ``absent`` have."""
    groups = [item.name_ranks() for item in values]
    unnamed = [place for place, group in enumerate(groups) if group.ranks is None]
    if len(unnamed) != 1 or size is None or size > budget[0] or any(group.ranks is None for group in absent):
        return groups
    budget[0] -= size
    named = {rank for group in [*groups, *absent] for rank in group.ranks or ()}
    rest = tuple(rank for rank in range(size) if rank not in named)
    group = groups[unnamed[0]]
    if len(rest) == group.count:
        groups[unnamed[0]] = RankGroup(group.value, group.count, rest)
    return groups
