"""Explains a prediction: what bounds it, what it depends on, what it leaves out."""

from __future__ import annotations

import numpy as np

from etloom.graphs import critical_paths, quality
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.simulator.changes import AnyChange, Change, Network, NoStraggler
from etloom.simulator.engine import Simulated

_NEGLIGIBLE = 0.001
"""Share of the makespan below which a delay is not mentioned."""


def explain_simulation(simulated: Simulated) -> list[str]:
    """Return sentences on what bounds the prediction, what it depends on and what it leaves out."""
    graph = simulated.graph.graph
    recorded_path = _describe_path(simulated, graph.time, graph.lag)
    predicted_path = _describe_path(simulated, simulated.upper_bound, simulated.lag)
    lines = [
        *_explain_misfit(simulated),
        f"the critical path was {recorded_path}",
        f"it becomes {predicted_path}",
    ]
    makespan = simulated.graph.makespan
    if difference := makespan(simulated.upper_bound) - makespan(simulated.lower_bound):
        lines.append(
            f"the bounds differ by {_format_time(abs(difference))}: delays that nothing recorded explains"
        )
    if simulated.removed_delay_ns >= _NEGLIGIBLE * makespan():
        lines.append(f"the removed waits contain {_format_time(simulated.removed_delay_ns)} of such delays")
    if simulated.residual_delay_ns >= _NEGLIGIBLE * makespan():
        lines.append(
            f"{_format_time(simulated.residual_delay_ns)} of unexplained delay on the changed work stays in both bounds"
        )
    if any(map(_changes_communication, simulated.changes)):
        lines += _explain_communication(simulated)
    return lines


def _explain_misfit(simulated: Simulated) -> list[str]:
    """Return a warning if the graph does not explain the recording of some rank."""
    reasons = quality.find_unexplained_ranks(simulated.graph.graph, simulated.recorded_job)
    if not reasons:
        return []
    rank, reason = next(iter(reasons.items()))
    more = f"; {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return [f"do not rely on this: the graph does not explain the recording (rank {rank}, {reason}{more})"]


def _changes_communication(change: AnyChange) -> bool:
    return isinstance(change, (Network, NoStraggler)) or (
        isinstance(change, Change) and change.target == "comm"
    )


def _explain_communication(simulated: Simulated) -> list[str]:
    """Return sentences on wait and transfer, and on communication that could not be matched."""
    lines = []
    wait_ns, transfer_ns = _sum_wait_and_transfer(simulated)
    changes = [change for change in simulated.changes if _changes_communication(change)]
    without_stragglers = [isinstance(change, NoStraggler) for change in changes]
    if all(without_stragglers):
        effect = "without stragglers the waits disappear, the transfers stay"
    elif not any(without_stragglers):
        effect = "a faster network shortens only the transfers"
    else:
        effect = "without stragglers the waits disappear, a faster network shortens the transfers"
    if wait_ns > transfer_ns:
        lines.append(
            f"in communication, ranks wait {_format_time(wait_ns)} for other ranks and transfer data for "
            f"{_format_time(transfer_ns)}: {effect}"
        )
    local = sum(counts["local_communications"] for counts in simulated.graph.counts.values())
    if local:
        lines.append(
            f"{local:,} communications were not matched with other ranks: their time may include waits, so the saving "
            "is an upper bound"
        )
    job = simulated.recorded_job
    worlds = [size for trace in job.values() if isinstance(size := trace.meta.get("world_size"), int)]
    if worlds and max(worlds) > len(job):
        lines.append(
            f"{len(job)} of {max(worlds)} ranks were recorded: waits for the other ranks count as transfer"
        )
    return lines


def _format_time(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms" if ns >= 1_000_000 else f"{ns / 1e3:,.1f} us"


def _describe_path(simulated: Simulated, time: Int64Array, lag: Int64Array) -> str:
    """Describe the critical path at these times in the words of a report."""
    table = critical_paths.summarize_path_at(simulated.graph.graph, simulated.recorded_job, time, lag)
    return ", ".join(critical_paths.format_path_shares(table, digits=0, most=4, least_pct=0.5))


def _sum_wait_and_transfer(simulated: Simulated) -> tuple[int, int]:
    """Return the ns from start to arrival of the last rank, and from there on, over all matched communications."""
    graph = simulated.graph.graph
    target = graph.target
    is_arrival = graph.kind == EdgeKind.ARRIVAL
    is_transfer = np.isin(graph.kind, (EdgeKind.TRANSFER, EdgeKind.MESSAGE))
    time = graph.time
    return (
        int((time[target] - time[graph.source])[is_arrival].sum()),
        int((time[target] - time[graph.source])[is_transfer].sum()),
    )
