"""The process in which ``etloom replay compute`` works: ``python -m etloom.cli.replay._computing JSON``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from etloom.cli._guard import INTERRUPTED, guarded, say
from etloom.cli._input import tell_loss
from etloom.cli._output import Format, emit
from etloom.cli.replay._telling import crowded, load


@guarded()
def work(asked: dict[str, Any]) -> None:
    """The command, in the process that may die of it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its profiler says that it begins and ends
    import etloom
    from etloom.errors import EtloomError
    from etloom.ranks import no_such_rank
    from etloom.replayer.nodes import nodes_of

    busy = load()
    job = etloom.open(asked["path"])
    chosen = min(job) if asked["rank"] is None else asked["rank"]
    if chosen not in job:
        raise no_such_rank(chosen, job)
    nodes_of(job[chosen], asked["step"])
    # What is wrong with the input is told before torch is imported.
    from etloom.replayer import apart, pace
    from etloom.replayer.compute import replay
    from etloom.replayer.saved import folder_of

    told, leave_out = apart.here()
    if not leave_out:  # else an earlier process has said it
        tell_loss(job, asked["path"])
    out = None if asked["out"] is None else Path(asked["out"])
    done = replay(
        job[chosen],
        asked["device"],
        namespaces=frozenset(asked["namespaces"]),
        step=asked["step"],
        repeats=asked["repeats"],
        warmup=asked["warmup"],
        max_bytes=asked["max_bytes"],
        until=asked["until"],
        progress=lambda step: told(step.node),
        note=say,
        tried=lambda: told(None),
        leave_out=leave_out,
        resources=folder_of(Path(asked["path"]), job[chosen]),
        allow_code=asked["allow_code"],
        threads=asked["threads"],
        traced=out is not None,
    )
    emit(done.coverage, None if asked["format"] is None else Format(asked["format"]), None)
    covered = done.covered() or 0.0
    of_time = done.covered("recorded_ns")
    time = "" if of_time is None else f", {of_time:.2%} of their recorded time"
    say(
        f"covered: {covered:.2%} of operators{time}; at most {done.peak_bytes / 1e6:,.1f} MB between operators"
    )
    if done.saved:
        say(f"{done.saved:,} tensors hold the values that were saved beside the trace")
    for reason, count in done.not_used.items():
        say(f"values of {count:,} tensors were saved and are not used: {reason}")
    if done.repeats_ns:
        best = min(done.repeats_ns)
        own, theirs = _threads(asked["device"])
        against = f", recorded {done.recorded_ns / 1e6:,.3f} ms{theirs}" if done.recorded_ns else ""
        say(f"took {best / 1e6:,.3f} ms at best of {len(done.repeats_ns)}{own}{against}")
        if why := crowded(busy, asked["device"], 1, "times"):
            say(why)
    if done.stopped:
        say(f"not whole: {done.stopped}")
    if out and done.trace is not None:
        etloom.export(done.trace, out)
        say(f"wrote {out}")
    if covered * 100 < (least := asked["min_coverage"]):
        raise EtloomError(f"{covered:.2%} of operators are covered, {least:g} % were asked for")
    if done.failed or done.stopped == pace.INTERRUPTED:
        raise SystemExit(1 if done.failed else INTERRUPTED)


def _threads(device: str) -> tuple[str, str]:
    """With how many threads of an operator the replay ran on a CPU, and the recording."""
    if device != "cpu":
        return "", ""
    from etloom.replayer.comms import threads_of_an_operator

    count = threads_of_an_operator()
    return (
        f" with {count} thread{'s' * (count != 1)} an operator",
        " (with how many is not recorded; torchrun sets 1: --threads)",
    )


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
