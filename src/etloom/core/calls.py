"""Communication calls (collectives, sends, receives) of a rank, compared across ranks to find the cause of a hang."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.core.schema import Stat

CALL_COLUMNS: dict[str, Any] = {
    "group": pl.String,
    "seq": pl.Int64,
    "is_p2p": pl.Boolean,
    "collective": pl.String,
    "dtype": pl.String,
    "in_nelems": pl.Int64,
    "out_nelems": pl.Int64,
    "peer": pl.Int64,
    "state": pl.String,
    "created_ns": pl.Int64,
    "called_at": pl.String,
}
"""group: name and description; state: of an unfinished call, "completed", or null if the
backend records none; called_at: the innermost frame outside of torch."""
Call = tuple[Any, ...]
"""The values of `CALL_COLUMNS` of one call."""
_TORCH_FRAME = re.compile(r"[/\\]torch[/\\]")


@dataclass(frozen=True)
class DumpedCalls:
    """The communication calls (collectives, sends, receives) of a rank, from its Flight Recorder dump.

    Attributes:
        rows: the values of `CALL_COLUMNS` of each call, in the order of the dump.
        members: group -> its ranks; groups whose ranks are unknown are missing.
        process: facts of the process that `etloom collect --watch` adds to a dump.
        stats: rows of stats about damage.
    """

    rows: list[Call]
    members: dict[str, tuple[int, ...]]
    process: dict[str, Any] = field(default_factory=dict)
    stats: list[Stat] = field(default_factory=list)


@dataclass(frozen=True)
class RankStacks:
    """The Python stacks of all ranks at one time.

    Attributes:
        name: of the file.
        time: when it was written, local time as YYYYMMDD_HHMMSS.
        frames: rank -> frames of its main thread, innermost first, as ``function (file:line)``.
        errors: rank -> HTTP status of the server's request, of ranks that did not answer.
        cut_rank: the rank in whose stack the file ends early, if it does; it and those after it are unknown.
    """

    name: str
    time: str
    frames: dict[int, tuple[str, ...]] = field(default_factory=dict)
    errors: dict[int, int] = field(default_factory=dict)
    cut_rank: int | None = None


def find_call_site(frames: list[str]) -> str | None:
    """Return the innermost frame outside of torch; if all frames are inside torch, the innermost frame."""
    return next((frame for frame in frames if not _TORCH_FRAME.search(frame)), frames[0] if frames else None)


def get_state(name: str, state: Any, retired: Any) -> str | None:
    """Return the state of a communication call (scheduled, started, completed); a retired gloo call is completed.

    gloo records no progress of its calls.
    """
    if retired and name.startswith("gloo:"):
        return "completed"
    return state if isinstance(state, str) else None


def name_group(name: str | None, description: str | None) -> str:
    """Return the name of a process group for reports: its name and description, "?" if neither is known."""
    return " ".join(filter(None, (name, description))) or "?"
