"""State of the processes of a job, from the facts that `etloom collect --watch` adds to the dumps."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etloom.core.text import format_ranges

_SILENT_NS = 1_500_000_000
"""Time after a state should have been written after which its process counts as unresponsive."""
_LOST_PEER = re.compile(
    r"connection (reset|closed|refused)|read error|write error|broken pipe|timed out|remote process|socket",
    re.I,
)
"""Matches errors of a rank that lost another rank: it is a victim."""
_TORCH = re.compile(r"[/\\(]torch[/\\]")
_INSTALLED = re.compile(r"[/\\]lib[/\\]python3|[/\\]site-packages[/\\]|<frozen ")
_PLACES = (
    ("data loading", re.compile(r"torch[/\\]utils[/\\]data[/\\]|dataload", re.I)),
    ("a checkpoint", re.compile(r"torch[/\\]serialization\.py|checkpoint", re.I)),
    ("communication", re.compile(r"torch[/\\]distributed[/\\]", re.I)),
)


@dataclass(frozen=True)
class ProcessState:
    """The state of a rank's process (running, stopped, failed, ...), and the place in the code where it is.

    Attributes:
        condition: "running", "stopped" (by a signal), "unresponsive" (runs, but its Python threads do not), "ended"
            (without an error message), "failed" (with one), "lost peer" (with one about another rank), "finished".
        detail: the facts it is based on.
        place: "data loading", "a checkpoint" or "communication" if the main thread is there, else None.
        frame: innermost frame of the main thread outside of torch.
        unsent: addresses of other hosts that do not acknowledge data.
        addresses: addresses of this process.
    """

    condition: str
    detail: str = ""
    place: str | None = None
    frame: str | None = None
    unsent: frozenset[str] = frozenset()
    addresses: frozenset[str] = frozenset()

    @property
    def is_broken(self) -> bool:
        """Return whether the process is stopped, unresponsive, ended or failed, so that it cannot communicate."""
        return self.condition in ("stopped", "unresponsive", "ended", "failed")


def describe_processes(
    facts_by_rank: Mapping[int, Mapping[str, Any]],
    now_ns: int,
    get_system_state: Callable[[Mapping[str, Any]], str | None] = lambda facts: None,
) -> dict[int, ProcessState]:
    """Return {rank: state of its process}, from the facts in the dumps and the operating system.

    Args:
        facts_by_rank: facts of the dumps.
        now_ns: time to compare the facts with, on the clock of the dumps.
        get_system_state: returns the state of a process by the operating system ("T" stopped, "" no such process), None
            if unknown.
    """
    return {rank: _describe(facts, now_ns, get_system_state(facts)) for rank, facts in facts_by_rank.items()}


def read_system_state(facts: Mapping[str, Any]) -> str | None:
    """Return the state letter of a process of this host ("" if it does not exist); None for other hosts and systems."""
    if facts.get("host") != socket.gethostname() or not isinstance(facts.get("pid"), int):
        return None
    if not Path("/proc/self/stat").exists():
        return None
    try:
        text = Path(f"/proc/{facts['pid']}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]


def _describe(facts: Mapping[str, Any], now_ns: int, system_state: str | None) -> ProcessState:
    place, frame = find_place([frame for frame in facts.get("frames") or () if isinstance(frame, str)])
    condition, detail = _find_condition(facts, now_ns, system_state)
    unsent, addresses = (
        frozenset(map(str, facts.get(name) or ())) for name in ("unacknowledged", "addresses")
    )
    return ProcessState(condition, detail, place, frame, unsent, addresses)


def find_place(frames: Sequence[str]) -> tuple[str | None, str | None]:
    """Return where a thread is, from its frames, innermost first: a place of `ProcessState`, and the innermost frame
    outside of torch and of installed packages, if possible; None if unknown."""
    place = next((name for name, pattern in _PLACES if any(map(pattern.search, frames))), None)
    outside = [frame for frame in frames if not _TORCH.search(frame)]
    program = [frame for frame in outside if not _INSTALLED.search(frame)]
    return place, next(iter([*program, *outside]), None)


def _find_condition(facts: Mapping[str, Any], now_ns: int, system_state: str | None) -> tuple[str, str]:
    error = facts.get("error")
    if error:
        return ("lost peer" if _LOST_PEER.search(str(error)) else "failed"), str(error)[:200]
    if facts.get("finished"):
        return "finished", "the process ended normally"
    if system_state in ("", "Z"):
        return "ended", "the process ended without an error message: killed, or crashed in native code"
    if system_state in ("T", "t"):
        return "stopped", "the process is stopped (SIGSTOP or a debugger)"
    age_ns = now_ns - int(facts.get("written_ns") or 0)
    interval_ns = int(float(facts.get("interval_s") or 0) * 1e9)
    if age_ns > interval_ns + _SILENT_NS:
        state = f"; the system reports state {system_state}" if system_state else ""
        return "unresponsive", (
            f"none of its Python threads has run for {age_ns / 1e9:.1f} s: the GIL is held, or its host is down{state}"
        )
    return "running", f"written {max(age_ns, 0) / 1e9:.1f} s ago"


def find_cut_off_ranks(processes: Mapping[int, ProcessState]) -> dict[int, str]:
    """Return the ranks whose link is cut (data to and from them is not acknowledged), with the evidence.

    A rank whose link is cut has unacknowledged data to several others, and they to it only.
    """
    rank_by_address = {address: rank for rank, state in processes.items() for address in state.addresses}
    pairs = {
        frozenset((rank, rank_by_address[address]))
        for rank, state in processes.items()
        for address in state.unsent
        if address in rank_by_address and rank_by_address[address] != rank
    }
    if not pairs:
        return {}
    counts = {rank: sum(rank in pair for pair in pairs) for rank in frozenset().union(*pairs)}
    highest = max(counts.values())
    ends = [rank for rank, count in counts.items() if count == highest and (count > 1 or len(pairs) == 1)]
    return {
        rank: "no acknowledgement between it and rank "
        + format_ranges(other for pair in pairs if rank in pair for other in pair if other != rank)
        for rank in sorted(ends)
    }
