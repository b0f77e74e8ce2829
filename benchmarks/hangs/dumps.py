"""Generator of Flight Recorder dumps with known faults, as NCCL jobs leave them.

python benchmarks/hangs/dumps.py      10,000 ranks of one job, then 10,000 dumps of small jobs: time and accuracy
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("not arrived", "crashed", "other collective", "other size", "other dtype", "device", "healthy")
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
_START_NS = 1_795_387_726_306_984_067


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, which every rank of its groups and then of the job waits for."""

    kind: str
    rank: int


def make_job(folder: Path, rank_count: int, calls: int, fault: Fault, seed: int, group_size: int = 8) -> None:
    """Write the dumps of a job whose ranks alternate between groups of neighbours and the group of all.

    The fault is in the last call of the group of neighbours; the others of it wait there, all other ranks in the
    following call of the group of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    plan = [(generator.choice(_COLLECTIVES), generator.choice((1000, 4096, 12345))) for _ in range(calls)]
    everyone = json.dumps(list(range(rank_count)))
    for rank in range(rank_count):
        if fault.kind == "crashed" and rank == fault.rank:
            continue
        block = rank // group_size
        near = [*range(block * group_size, min((block + 1) * group_size, rank_count))]
        names = {f"{block + 1}": ("TENSOR", json.dumps(near)), "0": ("default_pg", everyone)}
        entries = _list_entries(rank, plan, fault, str(block + 1), fault.rank in near)
        dump = {
            "version": "2.10",
            "entries": entries,
            "pg_config": {
                name: {"name": name, "desc": text, "ranks": ranks} for name, (text, ranks) in names.items()
            },
            "pg_status": {},
        }
        (folder / f"_dump_{rank}").write_text(json.dumps(dump))


def _list_entries(
    rank: int, plan: list[tuple[str, int]], fault: Fault, near: str, is_near: bool
) -> list[dict[str, Any]]:
    entries = []
    numbers = {near: 0, "0": 0}
    last_near = len(plan) - 2 + len(plan) % 2  # even calls are of the neighbours
    for position, (collective, size) in enumerate(plan):
        group = near if position % 2 == 0 else "0"
        numbers[group] += 1
        is_fault = position == last_near and fault.kind != "healthy"
        is_culprit = rank == fault.rank
        if is_fault and is_near and is_culprit:
            if fault.kind == "not arrived":
                break
            if fault.kind == "other collective":
                collective = "all_to_all"
            size += 7 * (fault.kind == "other size")
        is_stuck = is_fault and is_near and (fault.kind != "device" or is_culprit)
        dtype = "Double" if is_fault and is_culprit and fault.kind == "other dtype" else "Float"
        waits = is_stuck or (fault.kind != "healthy" and position > last_near)
        entries.append(_make_entry(group, numbers[group], collective, size, dtype, position, waits))
        if is_stuck:
            break  # the host waits for the result
    return entries


def _make_entry(
    group: str, seq: int, collective: str, size: int, dtype: str, position: int, is_unfinished: bool
) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "record_id": position,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "TENSOR"],
        "profiling_name": f"nccl:{collective}",
        "input_dtypes": [dtype],
        "input_sizes": [[size]],
        "output_dtypes": [dtype],
        "output_sizes": [[size]],
        "is_p2p": False,
        "retired": not is_unfinished,
        "state": "started" if is_unfinished else "completed",
        "time_created_ns": _START_NS + position * 1_000_000,
        "time_discovered_started_ns": _START_NS + position * 1_000_000 + 1000,
        "time_discovered_completed_ns": 0 if is_unfinished else _START_NS + position * 1_000_000 + 5000,
        "timeout_ms": 600_000,
        "frames": [{"name": "forward", "filename": "train.py", "line": 10 + position}],
    }


def is_right(fault: Fault, kind: str | None, ranks: tuple[int, ...]) -> bool:
    """Return whether a cause names the fault."""
    return (kind is None) if fault.kind == "healthy" else (kind == fault.kind and ranks == (fault.rank,))


def judge(folder: Path, fault: Fault) -> tuple[float, bool, str]:
    """Return seconds, whether the answer is right, and the answer."""
    import etloom

    begin = time.perf_counter()
    report = etloom.hangs(folder)
    seconds = time.perf_counter() - begin
    cause = report.cause
    right = is_right(fault, cause.kind if cause else None, cause.ranks if cause else ())
    return seconds, right, report.sentence


def main() -> None:
    """Print time and accuracy for one large job and for many small ones."""
    with tempfile.TemporaryDirectory() as name:
        fault = Fault("not arrived", 4321)
        make_job(Path(name, "large"), 10_000, 50, fault, seed=1)
        seconds, right, sentence = judge(Path(name, "large"), fault)
        print(f"10,000 ranks, 50 calls each: {seconds:.1f} s, {'right' if right else 'WRONG'}: {sentence}")
        total, wrong, jobs = 0.0, [], 625
        for seed in range(jobs):
            fault = Fault(KINDS[seed % len(KINDS)], random.Random(seed).randrange(16))
            make_job(Path(name, str(seed)), 16, 40 + seed % 7, fault, seed)
            seconds, right, sentence = judge(Path(name, str(seed)), fault)
            total += seconds
            wrong += [] if right else [f"{fault}: {sentence}"]
        print(f"{jobs} jobs of 16 ranks: {total:.1f} s, {jobs - len(wrong)} right")
        print(*wrong[:10], sep="\n")


if __name__ == "__main__":
    main()
