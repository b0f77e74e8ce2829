"""Jobs on a mesh of ranks, generated for any sizes of context and expert parallelism, of which every time is known.

Messages take their bytes over a fixed rate. The host launches all kernels of a step and waits for the device. A kernel
follows the one before at a fixed distance; all ranks run the same program at the same times.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import etloom
from etloom.core.trace import Job
from support.small_traces import BASE_NS, complete_event

TOKENS, HIDDEN, HEADS = 1024, 96, 8
"""Tokens of the whole sequence; hidden size; heads."""
GAP, LAUNCH, STEPS = 2, 10, 2


@dataclass(frozen=True)
class Call:
    """An operator with its shapes and time in us, or a communication of a group with its elements."""

    name: str
    dims: list[list[int]]
    time: float
    collective: str = ""


def context_calls(cp: int, exchange: str) -> list[Call]:
    """Return the calls of a step: the exchange of attention is all_gather, all_to_all or ring."""
    local, share = TOKENS // cp, 2 / cp
    queries, heads = (TOKENS, HEADS // cp) if exchange == "all_to_all" else (local, HEADS)
    activation = [local, HIDDEN]
    hop = 160 * (cp - 1) / cp
    ring = [Call("cp", activation, hop, kind) for kind in ("send", "recv")] if exchange == "ring" else []
    gather = (
        [Call("cp", [TOKENS, HIDDEN], 160 * (cp - 1) / cp, "all_gather")] if exchange == "all_gather" else []
    )
    to_all = (
        [Call("cp", activation, 160 / cp * (cp - 1) / cp, "all_to_all")] if exchange == "all_to_all" else []
    )
    sdpa = [[1, heads, queries, 12], [1, heads, TOKENS, 12], [1, heads, TOKENS, 12]]
    return [
        Call("aten::mm", [activation, [HIDDEN, 288]], 200 * share),
        *gather,
        *to_all,
        *ring,
        Call("aten::_scaled_dot_product_flash_attention", sdpa, 400 * share),
        *to_all,
        Call("aten::mm", [[HIDDEN, local], [local, 288]], 160 * share),
        Call("aten::gelu", [[local, 384]], 40 * share),
        Call("aten::add", [[1, local, HIDDEN], [1, local, HIDDEN]], 24 * share),
        Call("dp_cp", [HIDDEN, 288], 45 * ring_factor(2 * cp), "all_reduce"),
        Call("aten::_foreach_add_", [[HIDDEN, 288]], 30),
    ]


def expert_calls(ep: int, dp: int) -> list[Call]:
    """Return the calls of a step; ep ranks hold all experts."""
    replicas = dp // ep
    exchange = Call("ep", [TOKENS, HIDDEN], 160 * (ep - 1) / ep, "all_to_all")
    return [
        Call("aten::mm", [[TOKENS, HIDDEN], [HIDDEN, 288]], 200),
        exchange,
        Call("aten::_grouped_mm", [[TOKENS, HIDDEN], [16 // ep, HIDDEN, 288]], 180),
        exchange,
        Call("expert_dp", [16 // ep, HIDDEN, 18], 45 / ep * ring_factor(replicas), "all_reduce"),
        Call("dp", [HIDDEN, 288], 45 * ring_factor(dp), "all_reduce"),
    ]


def ring_factor(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def context_groups(cp: int) -> dict[str, list[list[int]]]:
    """Return the groups of two replicas of cp ranks each."""
    return {"cp": [list(range(cp)), list(range(cp, 2 * cp))], "dp_cp": [list(range(2 * cp))]}


def expert_groups(ep: int, dp: int) -> dict[str, list[list[int]]]:
    return {
        "ep": [list(range(first, first + ep)) for first in range(0, dp, ep)],
        "expert_dp": [list(range(first, dp, ep)) for first in range(ep)],
        "dp": [list(range(dp))],
    }


def _list_events(rank: int, calls: list[Call], groups: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    events, host, clock, number = [], (10, 11), 0.0, 0
    for step in range(STEPS):
        begin, device = clock, clock + LAUNCH * len(calls) + 50
        for place, call in enumerate(calls):
            number += 1
            launch = begin + LAUNCH * place
            ids = {"Record function id": number, "External id": number}
            shapes = {"Input Dims": call.dims, "Input type": ["c10::BFloat16"] * len(call.dims)}
            label = f"kernel_{place}" if call.name not in groups else f"ncclDevKernel_{call.collective}"
            kernel = {"device": 0, "stream": 7, "correlation": number, "External id": number}
            if call.name in groups:
                kernel |= _describe_communication(rank, call, groups[call.name])
            operator = call.name if call.name not in groups else f"c10d::{call.collective}"
            events += [
                complete_event("cpu_op", operator, launch + 1, 6, *host, **ids, **shapes),
                complete_event(
                    "cuda_runtime",
                    "cudaLaunchKernel",
                    launch + 2,
                    3,
                    *host,
                    correlation=number,
                    **{"External id": number},
                ),
                complete_event("kernel", label, device, call.time, 0, 7, **kernel),
            ]
            device += call.time + GAP
        last = begin + LAUNCH * len(calls)
        number += 1
        end = device - GAP + 5
        events.append(
            complete_event(
                "cuda_runtime", "cudaDeviceSynchronize", last, end - last, *host, correlation=number
            )
        )
        clock = end + 20
        events.append(
            complete_event("user_annotation", f"ProfilerStep#{step}", begin, clock - 1 - begin, *host)
        )
    return events


def _describe_communication(rank: int, call: Call, groups: list[list[int]]) -> dict[str, Any]:
    members = next(ranks for ranks in groups if rank in ranks)
    size = 1
    for length in call.dims if isinstance(call.dims[0], int) else call.dims[0]:
        size *= length
    described = {"Collective name": call.collective, "dtype": "BFloat16", "Process Group Name": call.name}
    described |= {"Process Group Description": call.name, "Process Group Ranks": str(members)}
    described |= {"Group size": len(members), "Rank": members.index(rank), "In msg nelems": size}
    if call.collective in ("send", "recv"):  # to the next rank, from the one before
        step, name = (1, "Dst Rank") if call.collective == "send" else (-1, "Src Rank")
        described[name] = members[(members.index(rank) + step) % len(members)]
    return described | {"Out msg nelems": size}


def open_job(folder: Path, calls: list[Call], groups: dict[str, list[list[int]]]) -> Job:
    """Write and open the traces of all ranks."""
    world = 1 + max(rank for lists in groups.values() for ranks in lists for rank in ranks)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        config = [
            {
                "pg_name": name,
                "pg_desc": name,
                "backend_config": "cuda:nccl",
                "pg_size": len(ranks),
                "ranks": ranks,
            }
            for name, lists in groups.items()
            for ranks in lists
            if rank in ranks
        ]
        content = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "GPU of the test", "computeMajor": 9, "computeMinor": 0}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config},
            "host_name": "host0",
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": _list_events(rank, calls, groups),
        }
        (folder / f"kineto_rank{rank}.json").write_text(json.dumps(content))
    return etloom.open(folder)


def count_differences(predicted: Job, generated: Job) -> int:
    """Return the number of events whose start or duration differ, after the begin of the job; all ranks count."""
    assert list(predicted) == list(generated)
    begins = [min(trace.events["ts"].min() for trace in job.values()) for job in (predicted, generated)]
    count = 0
    for rank, trace in generated.items():
        events, others = trace.events, predicted[rank].events
        assert events.height == others.height
        differ = (events["ts"] - begins[1] != others["ts"] - begins[0]) | (events["dur"] != others["dur"])
        count += int(differ.sum())
    return count
