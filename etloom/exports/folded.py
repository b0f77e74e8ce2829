"""Collapsed call stacks, for flamegraph.pl, speedscope and inferno: a line a stack, and the time in its last call.

A line is the calls from the outermost in, joined by semicolons, and a number of ns; the first call is the thread (of
several ranks: the rank, then the thread). Calls of one name at one place count together, and so do all steps.

Format: https://github.com/brendangregg/FlameGraph
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Job, Trace
from etloom.formats.io.atomic_file import open_atomic
from etloom.timeline.call_tree import build_call_tree

SUFFIX = (".folded", ".folded.gz")

_TIME_COLUMNS = {"host": "self_ns", "device": "self_device_ns"}


def write(trace: Trace | Job, path: str | PathLike[str], *, time: str = "host", joined: bool = False) -> None:
    """Write the call stacks of a Trace or a Job. Raises EtloomError where there is no such time.

    time: host (in each call itself) or device (of the kernels, copies and sets, each below the calls that led to its
    launch). joined: backward operators below their forward ones.
    """
    if time not in _TIME_COLUMNS:
        raise UnknownName("time", time, _TIME_COLUMNS, option="time")
    traces = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    lines = [
        line
        for rank, one in traces.items()
        for line in _format_stacks(one, f"rank {rank};" if len(traces) > 1 else "", time, joined)
    ]
    if not lines:
        raise EtloomError(
            f"the trace holds no {time} time to draw",
            where=path,
            remedy="call stacks are of threads; write kernels alone as Chrome trace JSON",
        )
    with open_atomic(Path(path)) as file:
        file.writelines(lines)


def _format_stacks(trace: Trace, rank: str, time: str, joined: bool) -> Iterator[bytes]:
    if not trace.meta.get("linked"):
        raise EtloomError("the trace is not linked", remedy="etloom.link(trace), or etloom.open")
    tree = build_call_tree(trace, joined=joined, kernels=time == "device")
    names = {(pid, tid): name for pid, tid, name in trace.threads.select("pid", "tid", "name").iter_rows()}
    above: list[str] = []
    columns = ("pid", "tid", "depth", "name", _TIME_COLUMNS[time])
    for pid, tid, depth, name, took in tree.select(columns).iter_rows():
        if not depth:
            said = names.get((pid, tid)) or f"thread {tid}"
            above = [rank + ("" if pid is None else f"{_format_frame(said)};")]
        del above[depth + 1 :]
        above.append(f"{above[-1]}{_format_frame(name)}")
        if took:
            yield f"{above[-1]} {took}\n".encode()
        above[-1] += ";"


def _format_frame(name: str | None) -> str:
    """A name as a frame: the semicolon parts frames, and a line is a stack."""
    return " ".join((name or "(no name)").replace(";", ":").split())
