"""The process in which ``etloom replay compute`` works: ``python -m etloom.cli.replay.compute_worker JSON``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from etloom.cli.error_handling import EXIT_INTERRUPTED, handle_errors, print_message
from etloom.cli.output import Format, write_table
from etloom.cli.replay.printing import contention_warning, load_average
from etloom.cli.run_arguments import report_loss


@handle_errors()
def work(asked: dict[str, Any]) -> None:
    """The command, in the process that may die of it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its profiler says that it begins and ends
    import etloom
    from etloom.core.errors import EtloomError
    from etloom.core.text import unknown_rank_error
    from etloom.replayer.compute.node_selection import select_nodes

    busy = load_average()
    job = etloom.open(asked["path"])
    chosen = min(job) if asked["rank"] is None else asked["rank"]
    if chosen not in job:
        raise unknown_rank_error(chosen, job)
    select_nodes(job[chosen], asked["step"])
    # What is wrong with the input is told before torch is imported.
    from etloom.replayer.compute import isolation, progress
    from etloom.replayer.compute.operator_replay import replay_operators
    from etloom.replayer.compute.saved_tensors import resources_folder

    told, leave_out = isolation.connect_to_parent()
    if not leave_out:  # else an earlier process has said it
        report_loss(job, asked["path"])
    out = None if asked["out"] is None else Path(asked["out"])
    done = replay_operators(
        job[chosen],
        asked["device"],
        namespaces=frozenset(asked["namespaces"]),
        step=asked["step"],
        repeats=asked["repeats"],
        warmup=asked["warmup"],
        max_bytes=asked["max_bytes"],
        until=asked["until"],
        progress=lambda step: told(step.node),
        note=print_message,
        tried=lambda: told(None),
        leave_out=leave_out,
        resources=resources_folder(Path(asked["path"]), job[chosen]),
        threads=asked["threads"],
        traced=out is not None,
    )
    write_table(done.coverage, None if asked["format"] is None else Format(asked["format"]), None)
    covered = done.covered() or 0.0
    of_time = done.covered("recorded_ns")
    time = "" if of_time is None else f", {of_time:.2%} of their recorded time"
    print_message(
        f"covered: {covered:.2%} of operators{time}; at most {done.peak_bytes / 1e6:,.1f} MB between operators"
    )
    if done.saved:
        print_message(f"{done.saved:,} tensors hold the values that were saved beside the trace")
    for reason, count in done.not_used.items():
        print_message(f"values of {count:,} tensors were saved and are not used: {reason}")
    if done.repeats_ns:
        best = min(done.repeats_ns)
        own, theirs = _thread_notes(asked["device"])
        against = f", recorded {done.recorded_ns / 1e6:,.3f} ms{theirs}" if done.recorded_ns else ""
        print_message(f"took {best / 1e6:,.3f} ms at best of {len(done.repeats_ns)}{own}{against}")
        if why := contention_warning(busy, asked["device"], 1, "times"):
            print_message(why)
    if done.stopped:
        print_message(f"not whole: {done.stopped}")
    if out and done.trace is not None:
        etloom.export(done.trace, out)
        print_message(f"wrote {out}")
    if covered * 100 < (least := asked["min_coverage"]):
        raise EtloomError(f"{covered:.2%} of operators are covered, {least:g} % were asked for")
    if done.failed or done.stopped == progress.INTERRUPTED:
        raise SystemExit(1 if done.failed else EXIT_INTERRUPTED)


def _thread_notes(device: str) -> tuple[str, str]:
    """With how many threads of an operator the replay ran on a CPU, and the recording."""
    if device != "cpu":
        return "", ""
    from etloom.replayer.comms.runner import torch_thread_count

    count = torch_thread_count()
    return (
        f" with {count} thread{'s' * (count != 1)} an operator",
        " (with how many is not recorded; torchrun sets 1: --threads)",
    )


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
