"""State of a job's NCCL communicators at one time, as NCCL's RAS reports it: who answered, who launched how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etloom.core.schema import Stat

STATUS = "status"
INIT_ERROR = "initialization error"
ASYNC_ERROR = "asynchronous error"
DEAD, UNRESPONSIVE, NO_ANSWER = "dead", "unresponsive", "no answer"
"""Status of ranks that did not answer; "no answer" if it is unknown whether the process is dead."""
NO_COMMUNICATOR = "NOCOMM"
"""Status of a rank whose process answered, without being a member of the communicator any more, or yet."""


@dataclass(frozen=True)
class RankPlace:
    """The process and device of a rank; two ranks of different communicators with equal places are the same rank."""

    host: str
    pid: int
    device: int

    @property
    def text(self) -> str:
        """Return the place for a message."""
        return f"process {self.pid} on {self.host}, GPU {self.device}"


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a communicator for which a property has one value.

    Attributes:
        value: the status, the error, or the number of launched operations.
        count: the number of ranks.
        ranks: their ranks in the communicator, sorted; None if the report does not name them.
    """

    value: str | int
    count: int
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CommunicatorState:
    """The state of one communicator.

    Attributes:
        name: its hash, 16 hexadecimal digits.
        size: number of ranks; None if the report does not state it.
        groups: property -> its values: `STATUS`, `INIT_ERROR`, `ASYNC_ERROR`, and the name of each collective, with
            the number of launched operations. A text report contains only the properties in which ranks differ.
        places: rank in the communicator -> its process and device, where the report states them.
        unread: ranks that the file, which ends early, does not contain.
        id: the hash with NCCL's secondary hash, which distinguishes communicators with equal hashes.
    """

    name: str
    size: int | None
    groups: Mapping[str, tuple[RankGroup, ...]]
    places: Mapping[int, RankPlace] = field(default_factory=dict)
    unread: int = 0
    id: str = ""

    @property
    def counts(self) -> dict[str, tuple[RankGroup, ...]]:
        """The launched operations by collective, where ranks differ."""
        special = (STATUS, INIT_ERROR, ASYNC_ERROR)
        return {
            name: groups for name, groups in self.groups.items() if name not in special and len(groups) > 1
        }

    def find_status(self, *statuses: str) -> tuple[RankGroup, ...]:
        """Return the groups of ranks that have one of the statuses."""
        return tuple(group for group in self.groups.get(STATUS, ()) if group.value in statuses)


@dataclass(frozen=True)
class RasReport:
    """A report of NCCL's RAS (``ncclras``): the state of all communicators of a job.

    Attributes:
        form: "json" or "text".
        communicators: the communicators, the largest first; of a text report those in which something is wrong.
        total: the number of communicators of the job.
        version: of NCCL.
        gpus: number of GPUs of the job; None if unknown.
        timestamp: when it was made, local time without a zone; None in a text report.
        dead_processes: processes that RAS considers dead, as text.
        silent_processes: processes that did not answer, as text.
        stats: rows of stats about damage.
        full_sizes: number of communicators that have as many ranks as the job has GPUs.
    """

    form: str
    communicators: tuple[CommunicatorState, ...]
    total: int
    version: str | None = None
    gpus: int | None = None
    timestamp: str | None = None
    dead_processes: tuple[str, ...] = ()
    silent_processes: tuple[str, ...] = ()
    stats: tuple[Stat, ...] = ()
    full_sizes: int = 0


def group_ranks(values: Mapping[int, str | int]) -> tuple[RankGroup, ...]:
    """Return the ranks by value, the most common value first, then the highest one."""
    by_value: dict[str | int, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return sort_groups(
        RankGroup(value, len(ranks), tuple(sorted(ranks))) for value, ranks in by_value.items()
    )


def sort_groups(groups: Iterable[RankGroup]) -> tuple[RankGroup, ...]:
    """Return groups of ranks by number of ranks, the largest first; of equal ones the highest value first."""
    return tuple(
        sorted(
            groups,
            key=lambda group: (
                -group.count,
                -group.value if isinstance(group.value, int) else 0,
                str(group.value),
            ),
        )
    )


def sort_communicators(communicators: Iterable[CommunicatorState]) -> tuple[CommunicatorState, ...]:
    """Return communicators by size, the largest first, then by name."""
    return tuple(sorted(communicators, key=lambda item: (-(item.size or 0), item.name, item.id)))
