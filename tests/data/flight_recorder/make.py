"""Makes the Flight Recorder dumps beside it: what rank 1 of 4 on NCCL would leave behind, invented.

    python tests/data/flight_recorder/make.py

The same dump as JSON, and as the pickle of protocol 2 that torch's own pickler writes.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

START = 1_795_235_217_000_000_000


def entry(record: int, name: str, seq: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": record + 1,
        "profiling_name": name,
        "time_created_ns": START + record * 1_000_000,
        "input_sizes": [[4, 3]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 3]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": START + record * 1_000_000 + 500,
        "time_discovered_completed_ns": START + record * 1_000_000 + 2500,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        "thread_id": "140000000000001",
        "thread_name": "pt_main_thread",
        "frames": [{"name": "all_reduce", "filename": "train.py", "line": 7}],
        **more,
    }


def dump() -> dict[str, Any]:
    undone = {
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
    }
    tensor = {"process_group": ("1", "tp"), "pg_id": 1}
    return {
        "version": "2.10",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
            "1": {"name": "1", "desc": "tp", "ranks": "[0, 1]"},
        },
        "pg_status": {
            "0": {
                "last_enqueued_collective": 2,
                "last_started_collective": 1,
                "last_completed_collective": 1,
            },
            "1": {
                "last_enqueued_collective": 1,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            },
        },
        "entries": [
            entry(0, "nccl:all_reduce", 1),
            entry(1, "nccl:_all_gather_base", 1, **tensor, output_sizes=[[8, 3]]),
            entry(2, "nccl:send 1->3", 1, is_p2p=True, p2p_seq_id=5),
            entry(3, "nccl:recv 1<-0", 1, is_p2p=True, p2p_seq_id=6),
            entry(
                4, "nccl:all_to_all", 2, **undone, input_sizes=[[2, 2], [3]], input_dtypes=["Float", "Float"]
            ),
        ],
    }


if __name__ == "__main__":
    folder = Path(__file__).parent
    with (folder / "nccl_trace_rank_1.json").open("w") as file:
        json.dump(dump(), file, separators=(",", ":"), sort_keys=True)
    with (folder / "nccl_trace_rank_1").open("wb") as file:
        pickle.dump(dump(), file, protocol=2)
