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

from etloom.linker.comms import join_comms
from etloom.linker.lanes import place
from etloom.linker.launches import launch
from etloom.linker.merge import merge
from etloom.linker.pairs import pair
from etloom.linker.quality import figures
from etloom.linker.scope import count_beyond
from etloom.linker.syncs import wait
from etloom.linker.threads import hand_off
from etloom.trace import Trace

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
    trace = merge(traces)
    trace = count_beyond(pair(launch(place(trace)), iterations=iterations))
    trace = wait(hand_off(join_comms(trace), threshold_us=inter_thread_threshold_us))
    return trace.replace(meta={"linked": True, "link": figures(trace)})
