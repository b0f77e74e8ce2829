"""Join what one rank recorded: operators to events, device work to launches, threads to each other.

A chain of functions that take a Trace and return one, each adding what it found and counting what it did not:

    merge     the tables of an execution trace and of a profiler trace in one Trace
    lanes     enclosing event, depth, step of host events
    launches  device work to launch call and operator
    pairs     nodes to events: by ids, else by aligning their order
    scope     device work of other iterations than the execution trace
    comms     a communication's record, node, event and kernels
    threads   backward to forward operators, work after a pause to what another thread finished
    syncs     calls and streams to the device work they waited for
    quality   how far all that reached
"""

from __future__ import annotations

from etloom.core.trace import Trace
from etloom.linker.communication import join_comms
from etloom.linker.launches import join_launches
from etloom.linker.merging import merge_traces
from etloom.linker.pairing import pair_operators
from etloom.linker.placement import place_events
from etloom.linker.quality import count_links
from etloom.linker.recorded_scope import count_work_out_of_scope
from etloom.linker.sync_dependencies import add_sync_dependencies
from etloom.linker.thread_dependencies import add_thread_dependencies

__all__ = ["link"]


def link(*traces: Trace, inter_thread_threshold_us: float = 1000, iterations: str = "best") -> Trace:
    """The Trace of one rank in which everything that belongs together is joined.

    traces: an execution trace and a profiler trace (Kineto, Nsight) of one rank, in either order; either
    alone; or one Trace that is already both. ``events`` get parent, depth and step; ``launches``, ``links``
    are new; ``comms`` rows get their node and event, and kernels of a communication a row; ``stats`` rows
    named ``link.*`` count what did not fit; ``meta["linked"]`` is True and ``meta["link"]`` holds the figures
    of `quality`.

    Raises LinkError where the traces are not of one program.
    """
    trace = merge_traces(traces)
    trace = count_work_out_of_scope(pair_operators(join_launches(place_events(trace)), iterations=iterations))
    trace = add_sync_dependencies(
        add_thread_dependencies(join_comms(trace), threshold_us=inter_thread_threshold_us)
    )
    return trace.replace(meta={"linked": True, "link": count_links(trace)})
