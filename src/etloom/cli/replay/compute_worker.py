"""The child process of ``etloom replay compute``: ``python -m etloom.cli.replay.compute_worker JSON``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etloom.cli.error_handling import EXIT_INTERRUPTED, handle_errors, print_message
from etloom.cli.output import Format, write_table
from etloom.cli.output_files import write_run
from etloom.cli.replay.printing import contention_warning, load_average
from etloom.cli.run_arguments import report_loss
from etloom.core.errors import EtloomError
from etloom.core.text import count_noun

if TYPE_CHECKING:
    from etloom.core.trace import Job, Trace
    from etloom.replayer.compute.operator_replay import ComputeReplay


@handle_errors()
def work(request: Mapping[str, Any]) -> None:
    """Replay the operators that ``request`` selects, in a child process that a crashing operator may end."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its profiler prints when it starts and stops
    import etloom

    load = load_average()
    job = etloom.open(request["path"])
    trace = _select_trace(job, request)
    # A wrong input is reported before torch is imported.
    from etloom.replayer.compute.compute_options import ComputeHooks, ComputeOptions
    from etloom.replayer.compute.isolation import connect_to_parent
    from etloom.replayer.compute.operator_replay import replay_operators
    from etloom.replayer.compute.progress import INTERRUPTED as STOPPED_BY_USER
    from etloom.replayer.compute.saved_tensors import resources_folder

    report, skip = connect_to_parent()
    if not skip:  # otherwise an earlier process has printed it
        report_loss(job, request["path"])
    out = None if request["out"] is None else Path(request["out"])
    replay = replay_operators(
        trace,
        ComputeOptions(
            request["device"],
            namespaces=frozenset(request["namespaces"]),
            step=request["step"],
            subgraph=request["subgraph"],
            repeats=request["repeats"],
            warmup=request["warmup"],
            threads=request["threads"],
            max_bytes=request["max_bytes"],
            deadline=request["deadline"],
            trace=out is not None,
        ),
        ComputeHooks(
            on_step=lambda step: report(step.node), on_all_tried=lambda: report(None), notify=print_message
        ),
        skip=skip,
        resources=resources_folder(Path(request["path"]), trace),
    )
    write_table(replay.coverage, None if request["format"] is None else Format(request["format"]), None)
    _print_replay(replay, request["device"], load)
    if out and replay.trace is not None:
        write_run(replay.trace, out)
    covered = replay.covered() or 0.0
    if covered * 100 < (minimum := request["min_coverage"]):
        raise EtloomError(
            f"{covered:.2%} of the recorded operators were replayed; --min-coverage requires {minimum:g} %"
        )
    if replay.failed or replay.stopped == STOPPED_BY_USER:
        raise SystemExit(1 if replay.failed else EXIT_INTERRUPTED)


def _select_trace(job: Job, request: Mapping[str, Any]) -> Trace:
    from etloom.core.text import unknown_rank_error
    from etloom.replayer.compute.node_selection import select_nodes

    rank = min(job) if request["rank"] is None else request["rank"]
    if rank not in job:
        raise unknown_rank_error(rank, job)
    select_nodes(job[rank], request["step"], request["subgraph"])
    return job[rank]


def _print_replay(replay: ComputeReplay, device: str, load: float | None) -> None:
    covered = replay.covered() or 0.0
    covered_time = replay.covered("recorded_ns")
    time = "" if covered_time is None else f", {covered_time:.2%} of their recorded time"
    print_message(
        f"covered: {covered:.2%} of operators{time}; peak memory between operators {replay.peak_bytes / 1e6:,.1f} MB"
    )
    if replay.saved_tensors:
        print_message(f"{replay.saved_tensors:,} tensors have values that were saved next to the trace")
    for reason, count in replay.unused_tensors.items():
        print_message(f"saved values of {count:,} tensors are not used: {reason}")
    if replay.repeats_ns:
        best = min(replay.repeats_ns)
        replay_threads, recorded_threads = _thread_notes(device, replay)
        recorded = ""
        if replay.recorded_ns:
            recorded = f", recorded {replay.recorded_ns / 1e6:,.3f} ms{recorded_threads}"
        repeats = count_noun(len(replay.repeats_ns), "repeat")
        print_message(f"best of {repeats}: {best / 1e6:,.3f} ms{replay_threads}{recorded}")
        if warning := contention_warning(load, device, 1, "times"):
            print_message(warning)
    if replay.stopped:
        print_message(f"incomplete: {replay.stopped}")


def _thread_notes(device: str, replay: ComputeReplay) -> tuple[str, str]:
    """Return two notes for a CPU replay: threads per operator, and threads of the recording; else two empty texts."""
    if device != "cpu":
        return "", ""
    recorded = "the recording does not state its number of threads; torchrun sets 1, --threads changes it"
    if replay.is_of_gpu:
        recorded = "with a GPU, so the two times are not comparable; --device cuda replays on a GPU"
    return f" with {count_noun(replay.threads, 'thread')} per operator", f" ({recorded})"


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
