"""Files of NCCL's own profilers, in the layout of their writers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HASH = 12276093370021447385


def write_profile(folder: Path, rank: int, delay_us: float = 0, call: str = "AllReduce") -> Path:
    """The file of the profiler plugin of one rank: three calls on two channels, in the layout of its writer."""
    lines = []

    def add(
        name: str, cat: str, number: int, start: float, end: float, args: dict[str, Any], inner: list[Any]
    ) -> None:
        head = {"name": name, "cat": cat, "ph": "b", "id": number, "pid": 77 + rank, "tid": 1, "ts": start}
        lines.append({**head, "args": args})
        for event in inner:
            add(*event)
        lines.append({**head, "ph": "e", "ts": end})

    for i in range(3):
        at = 1000.0 * i + 100
        channels = [
            ("KernelCh", "GPU", 2 * i + channel, at + 10 + delay_us, at + 110, {"Channel": channel}, [])
            for channel in (0, 1)
        ]
        args = {
            "SeqNum": i, "CommHash": HASH, "Rank": rank, "Count": 1 << 20, "Datatype": "ncclFloat32",
            "Algorithm": "RING", "Protocol": "SIMPLE", "nChannels": 2,
        }  # fmt: skip
        send = (
            "Send",
            "P2P",
            i,
            at + 150,
            at + 160,
            {"CommHash": HASH, "Rank": rank, "Peer": 1, "Count": 4},
            [],
        )
        calls = [(call, "COLL", i, at, at + 120, args, channels), send]
        add("Group", "GROUP", i, at - 1, at + 200, {"groupId": i}, calls)
    path = folder / f"nccl-{HASH}-{rank}.json"
    path.write_text("[\n" + "".join(json.dumps(line) + ",\n" for line in lines) + "{}]\n")
    return path


def inspector_line(rank: int, number: int, *, ranks: int = 8, verbose: bool = False) -> dict[str, Any]:
    """The first line is the example of the Inspector's README."""
    performance: dict[str, Any] = {
        "coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
        "coll_algobw_gbs": 277.210914, "coll_busbw_gbs": 485.119099,
    }  # fmt: skip
    if verbose:
        channels = [{"channel_id": i, "kernel_start_ts": 1748030377000100 + i} for i in range(4)]
        performance["event_trace_ts"] = {"coll_start_ts": 1748030377000000, "kernel_events": channels}
    return {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "profiler_plugin",
            "dump_timestamp_us": 1748030377748202, "hostname": "example-hostname", "pid": 1639453,
        },
        "coll_perf": performance,
    }  # fmt: skip


def write_lines(folder: Path, lines: list[Any], name: str = "host-pid1639453.log") -> Path:
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
