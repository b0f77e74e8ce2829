"""Link the traces of one rank: operators to events, GPU activity to launches, threads to each other.

Each step takes a Trace and returns one with its results, and counts in stats what it could not link:

    merging              the tables of an execution trace and of a profiler trace in one Trace
    placement            enclosing event, depth and step of host events
    launches             GPU activity to launch call and operator, and to its communication
    device_graphs        kernels of graph replays to the operators that the capture recorded
    pairing              nodes to events: by ids, else by aligning their order
    group_axes           axis of parallelism of each process group
    thread_dependencies  backward to forward operators, work after a pause to what another thread finished
    sync_dependencies    calls and streams to the GPU activity they waited for
    quality              the share of events that the other steps linked, and why the rest is not linked

`linked` is the one place that decides whether a trace still has to be linked.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.core.errors import LinkError
from etloom.core.machine import MIN_ARRAY_ROWS, run_both
from etloom.core.trace import Job, Trace
from etloom.linker.device_graphs import add_captures, attribute_graphs, split_captured_events
from etloom.linker.group_axes import add_group_axes
from etloom.linker.launches import join_comms, join_launches
from etloom.linker.merging import check_processes, flag_missing_gpu_events, merge_traces
from etloom.linker.pairing import pair_operators
from etloom.linker.placement import place_events
from etloom.linker.quality import count_links, count_unscoped_work
from etloom.linker.sync_dependencies import add_sync_dependencies
from etloom.linker.thread_dependencies import add_thread_dependencies

__all__ = ["check_linked", "is_linked", "link", "linked"]


def link(
    *traces: Trace,
    inter_thread_threshold_us: float = 1000,
    iterations: str = "best",
    captures: Sequence[Trace] = (),
    step_name: str | None = None,
) -> Trace:
    """Link the traces of one rank: join operators with profiler events, and GPU activity with its launch calls.

    Args:
        traces: An execution trace and a profiler trace (Kineto, Nsight) of one rank, in either order; one of them
            alone; or one Trace that holds both.
        inter_thread_threshold_us: Pause of a thread, in microseconds, after which its next operator is assumed to
            depend on another thread.
        iterations: The iteration of the profile to which the execution trace is linked if ids are missing: "best",
            "all", or a number from "0".
        step_name: Regular expression over the names of the host events that are the steps; its first group is the
            number. Default: ProfilerStep#N, else the iterations of an inference engine.
        captures: Profiler traces of the captures of device graphs that the trace replays.

    Returns:
        A Trace whose ``events`` have parent, depth and step, with the tables ``launches``, ``links``,
        ``thread_dependencies`` and ``sync_dependencies``; rows of ``comms`` have their node and event, and kernels of
        a communication have a row. Rows of ``stats`` named ``link.*`` count what could not be linked or contradicts,
        ``meta["linked"]`` is True and ``meta["link"]`` holds the figures of `quality.count_links`.

    Raises:
        LinkError: The traces are not of one program.
    """
    trace, earlier = split_captured_events(merge_traces(traces))
    trace = place_events(trace if step_name is None else trace.replace(meta={"step_name": step_name}))
    trace = add_captures(trace, earlier, captures)
    trace = join_launches(trace)
    trace = attribute_graphs(trace)
    trace = pair_operators(trace, iterations=iterations)
    trace = count_unscoped_work(trace)
    trace = join_comms(trace)
    trace = add_group_axes(trace)
    trace = _add_dependencies(trace, inter_thread_threshold_us)
    trace = trace.replace(meta={"linked": True, "link": count_links(trace)})
    return flag_missing_gpu_events(trace).with_stats(check_processes(traces))


def _add_dependencies(trace: Trace, threshold_us: float) -> Trace:
    """Add the dependencies between threads and those on GPU activity; in two threads if the trace is large."""
    rows = trace.table("stats").height
    with_threads, with_syncs = run_both(
        lambda: add_thread_dependencies(trace, threshold_us=threshold_us),
        lambda: add_sync_dependencies(trace),
        trace.rows("events"),
        MIN_ARRAY_ROWS,
    )
    trace = with_threads.replace(sync_dependencies=with_syncs.table("sync_dependencies"))
    added = with_syncs.table("stats")[rows:]
    return trace.replace(stats=pl.concat([trace.table("stats"), added])) if added.height else trace


def is_linked(trace: Trace) -> bool:
    """Return whether a trace has been linked."""
    return bool(trace.meta.get("linked"))


def linked(trace: Trace) -> Trace:
    """Return the trace unchanged if it has been linked, else link it with the default options.

    Raises:
        LinkError: The tables of the trace are not of one program.
    """
    return trace if is_linked(trace) else link(trace)


def linked_ranks(job: Job) -> Job:
    """Return the job with linked traces; a job from a store is returned unchanged, because its ranks are linked.

    Raises:
        LinkError: The tables of a trace are not of one program.
    """
    return job.map(linked) if job.stored is None else job


def check_linked(trace: Trace, rank: int | None = None) -> None:
    """Raise LinkError if a trace has not been linked.

    For code that does not link traces itself. ``rank``: the rank that the error names (default: that of the trace).
    """
    if not is_linked(trace):
        rank = trace.rank if rank is None else rank
        raise LinkError(
            "the trace is not linked",
            where=None if rank is None else f"rank {rank}",
            remedy="open it with etloom.open, or call etloom.link(trace)",
        )
