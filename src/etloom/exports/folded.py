"""Write folded call stacks (flamegraph.pl, speedscope, inferno): one line per stack, with the time in its last call.

A line contains the calls from the outermost to the innermost, separated by semicolons, and the time in ns. The first
call is the thread; for several ranks, the rank and then the thread. Calls with the same name and the same callers are
added up, also across steps.

Format: https://github.com/brendangregg/FlameGraph
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Annotated

from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Job, Trace
from etloom.formats.io.atomic_file import open_atomic
from etloom.linker import check_linked
from etloom.timeline.call_tree import build_call_tree

SUFFIX = (".folded", ".folded.gz")

_TIME_COLUMNS = {"host": "self_ns", "device": "self_device_ns"}


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    time: Annotated[
        str,
        "host (exclusive time of each call) or device (time of kernels, memcpys and memsets, each below "
        "the calls that launched it).",
    ] = "host",
    joined: Annotated[bool, "Put backward operators below their forward operators."] = False,
) -> None:
    """Write the call stacks of a Trace or a Job as folded text; compressed if the name ends in .gz.

    Raises:
        EtloomError: There is no such time, or the trace is not linked.
    """
    if time not in _TIME_COLUMNS:
        raise UnknownName("time", time, _TIME_COLUMNS, option="time")
    traces = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    lines = [
        line
        for rank, rank_trace in traces.items()
        for line in format_stacks(rank_trace, f"rank {rank};" if len(traces) > 1 else "", time, joined)
    ]
    if not lines:
        raise EtloomError(
            f"the trace contains no events of threads with {time} time, from which call stacks are drawn",
            where=path,
            remedy="export a trace of kernels only as Chrome trace JSON",
        )
    with open_atomic(Path(path)) as file:
        file.writelines(lines)


def format_stacks(trace: Trace, prefix: str, time: str, joined: bool) -> Iterator[bytes]:
    """Yield a line per call that has exclusive time: ``prefix``, thread, callers, function name, and the time in ns."""
    check_linked(trace)
    tree = build_call_tree(trace, joined=joined, kernels=time == "device")
    names = {(pid, tid): name for pid, tid, name in trace.threads.select("pid", "tid", "name").iter_rows()}
    stack: list[str] = []  # text of the callers at each depth
    columns = ("pid", "tid", "depth", "name", _TIME_COLUMNS[time])
    for pid, tid, depth, name, duration in tree.select(columns).iter_rows():
        if not depth:
            thread = names.get((pid, tid)) or (None if tid is None or tid < 0 else f"thread {tid}")
            stack = [prefix + ("" if thread is None else f"{_format_frame(thread)};")]
        del stack[depth + 1 :]
        stack.append(f"{stack[-1]}{_format_frame(name)}")
        if duration:
            yield f"{stack[-1]} {duration}\n".encode()
        stack[-1] += ";"


def _format_frame(name: str | None) -> str:
    """Return a function name without semicolons and line breaks, which separate frames and stacks."""
    return " ".join((name or "(no name)").replace(";", ":").split())
