"""Explains a simulation in sentences: what limits the predicted time, its uncertainty, and what is not modelled."""

from __future__ import annotations

from etloom.core.text import count_noun, format_duration, format_ranks
from etloom.core.trace import Job
from etloom.graphs.graph import Int32Array, Int64Array
from etloom.simulator.changes import AnyChange, Change, Network
from etloom.simulator.edge_selection import DELAY_KINDS
from etloom.simulator.engine import Simulated
from etloom.simulator.recorded_run import sum_wait_and_transfer
from etloom.simulator.reproduction import describe_models

_NEGLIGIBLE = 0.001
"""Share of the makespan below which a delay is not mentioned."""

_MAX_COUNTED = 20
"""Changes whose calls are counted."""
_MAX_MISSING_LAUNCHES = 0.05
"""Share of GPU activities without a launch call up to which these are not mentioned."""


def explain_simulation(simulated: Simulated) -> list[str]:
    """Return sentences on what limits the predicted time, what its bounds depend on, and what is not modelled."""

    def read_lags(edges: Int32Array) -> Int64Array:
        lags = simulated.lags.read(edges)
        return lags.min_latency + lags.upper

    predicted_path = simulated.recording.describe_path(simulated.upper_times, simulated.upper_lags, read_lags)
    lines = [
        *describe_models(simulated.recording, needs_network=False),
        *simulated.recorded_job.compute_once(_explain_coverage),
        *_count_calls(simulated),
        f"the critical path was {simulated.recording.critical_path}",
        f"it becomes {predicted_path}",
    ]
    makespan = simulated.graph.makespan
    if difference := makespan(simulated.upper_times) - makespan(simulated.lower_times):
        lines.append(
            f"the bounds differ by {format_duration(abs(difference))}: delays that nothing recorded explains"
        )
    if simulated.removed_delay_ns >= _NEGLIGIBLE * simulated.recording.makespan:
        lines.append(
            f"the removed waits contain {format_duration(simulated.removed_delay_ns)} of such delays"
        )
    if simulated.residual_delay_ns >= _NEGLIGIBLE * simulated.recording.makespan:
        lines.append(
            f"{format_duration(simulated.residual_delay_ns)} of unexplained delay on the changed work stays in both "
            "bounds"
        )
    lines += _explain_peers(simulated)
    lines += simulated.network_notes
    if any(map(_changes_communication, simulated.changes)):
        lines += _explain_communication(simulated)
    return lines


def _count_calls(simulated: Simulated) -> list[str]:
    """Return a sentence per change of times on how many calls it matches."""
    lines = []
    for change in simulated.changes[:_MAX_COUNTED]:
        if isinstance(change, Change):
            count, time_ns = simulated.recording.edges.measure_calls(change)
            noun = "delay" if change.target in DELAY_KINDS else "call"
            lines.append(
                f"{change.text!r} matches {count_noun(count, noun)}, {format_duration(time_ns)} as recorded"
            )
    return lines


def _explain_coverage(job: Job) -> list[str]:
    """Return a sentence on the GPU activities without a launch call, if there are many."""
    total = sum(trace.launches.height for trace in job.values())
    missing = sum(trace.launches["launch"].null_count() for trace in job.values())
    if missing <= _MAX_MISSING_LAUNCHES * total:
        return []
    return [
        f"{missing:,} of {total:,} GPU activities have no recorded launch call: they follow their stream only, so a "
        "change of the host does not reach them"
    ]


def _explain_peers(simulated: Simulated) -> list[str]:
    """Return sentences on the share of time that ranks take from the median of peers, and on how their waits change."""
    lines = []
    for peers in simulated.peers:
        share = 100 * peers.matched_ns / peers.own_ns if peers.own_ns else 0
        lines.append(
            f"{share:.0f} % of the changed ranks' own time is replaced by the median of their peers; the rest has no "
            "counterpart on them"
        )
        if peers.alone:
            lines.append(
                f"{format_ranks(peers.alone)}: no other rank runs the same program, so nothing changes there"
            )
    if simulated.peers:
        before = simulated.recording.wait_and_transfer_ns[0]
        after = sum_wait_and_transfer(simulated.graph.graph, simulated.upper_bound)[0]
        lines.append(
            f"in communication, ranks wait {format_duration(before)} for other ranks; this becomes "
            f"{format_duration(after)}"
        )
        lines += _explain_starts(simulated)
    return lines


def _explain_starts(simulated: Simulated) -> list[str]:
    """Return a sentence on how much of the saving comes from recordings that begin later than those of peers."""
    recording, makespan = simulated.recording, simulated.graph.makespan
    with_recorded_starts = recording.contraction.compute_times(simulated.upper_lags, recording.kept_starts)
    saving = makespan(with_recorded_starts) - makespan(simulated.upper_times)
    if saving < _NEGLIGIBLE * simulated.recording.makespan:
        return []
    return [
        f"{format_duration(saving)} of the saving is due to recordings that begin later than the median of their "
        "peers: it is real only if these ranks began to work later, too"
    ]


def _changes_communication(change: AnyChange) -> bool:
    return isinstance(change, Network) or (isinstance(change, Change) and change.target == "comm")


def _explain_communication(simulated: Simulated) -> list[str]:
    """Return sentences on the time of waits and transfers in communication, and on unmatched communications."""
    lines = []
    wait_ns, transfer_ns = simulated.recording.wait_and_transfer_ns
    if wait_ns > transfer_ns:
        lines.append(
            f"in communication, ranks wait {format_duration(wait_ns)} for other ranks and transfer data for "
            f"{format_duration(transfer_ns)}: a faster network shortens only the transfers"
        )
    local = sum(counts["local_communications"] for counts in simulated.graph.counts.values())
    if local:
        lines.append(
            f"{local:,} communications were not matched with other ranks: their time may include waits, which the "
            "change scales like transfers"
        )
    job = simulated.recorded_job
    worlds = [size for trace in job.values() if isinstance(size := trace.meta.get("world_size"), int)]
    if worlds and max(worlds) > len(job):
        lines.append(
            f"{len(job)} of {max(worlds)} ranks were recorded: waits for the other ranks count as transfer"
        )
    return lines
