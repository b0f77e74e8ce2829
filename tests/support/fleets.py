"""Runs of several ranks on named hosts, of which some compute longer than the others in every step."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from support.small_traces import BASE_NS, H100, RankBuilder

STEP_US = 1000
LATE_US = 300


def write_fleet(
    folder: Path, ranks: int = 4, *, slow: Collection[int] = (2,), steps: int = 3, hosts: bool = True
) -> Path:
    """Write a Kineto trace of each rank; two ranks share a host, two hosts a rack; without ``hosts`` none is named.

    The kernel of each step takes 200 us, on slow ranks LATE_US more; an all-reduce of all ranks follows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        compute = 200 + (LATE_US if rank in slow else 0)
        builder = RankBuilder()
        for step in range(steps):
            at = step * STEP_US
            builder.step(step, at, STEP_US - 10)
            builder.op("aten::mm", at + 10, 20, **{"Input Dims": [[8, 8], [8, 8]]})
            builder.kernel(at + 15, at + 40, compute)
            start = at + 40 + compute + rank
            builder.all_reduce(at + 50, start, at + 800 - start, seq=step)
            builder.events[-1]["args"]["Group size"] = ranks
        content = {
            "schemaVersion": 1,
            "baseTimeNanoseconds": BASE_NS,
            "deviceProperties": H100,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
            "host_name": f"rack{rank // 4}-node{rank // 2}" if hosts else None,
            "traceEvents": builder.events,
        }
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(content))
    return folder
