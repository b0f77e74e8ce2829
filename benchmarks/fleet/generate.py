"""Generate a run of many ranks from one real rank, with known stragglers.

    python benchmarks/fleet/generate.py 1000 out/ --slow-rank 17 --slow-host 3

A step of the real trace is cut at its collectives. Each rank repeats the work between two collectives with jitter, a
slow one takes longer; nobody leaves a collective before the last has arrived. All times of a rank follow the same
piecewise linear map, so that events nest as in the original. Each host has its own clock. OUT.truth.json names what was
planted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from isal import igzip

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
SOURCE = DATA / "nccl_ddp" / "kineto_trace_0.json.gz"
STEP = "ProfilerStep#5"
RANKS_PER_HOST, HOSTS_PER_RACK = 8, 16
JITTER, SLOW, MAX_OFFSET_US = 0.01, 1.25, 3_000.0
NUMBER = "\x00"


@dataclass(frozen=True)
class Template:
    """The text of a rank with a hole for each time, the times in us, and the arrivals and ends of its collectives."""

    parts: list[str]
    times: np.ndarray
    collectives: np.ndarray
    span: tuple[float, float]


@cache
def load_template() -> Template:
    trace = json.loads(gzip.decompress(SOURCE.read_bytes()))
    events = trace["traceEvents"]
    step = next(
        event for event in events if event.get("name") == STEP and event.get("cat") == "user_annotation"
    )
    start, end = step["ts"], step["ts"] + step["dur"]
    kept = [
        event
        for event in events
        if event["ph"] == "M" or (start <= event["ts"] and event["ts"] + event.get("dur", 0) <= end)
    ]
    nccl = sorted(
        (event for event in kept if event.get("cat") == "kernel" and "nccl" in event["name"].lower()),
        key=lambda event: event["ts"],
    )
    for number, event in enumerate(nccl):
        event["args"]["Seq"] = number
    for event in kept:
        args = event.get("args", {})
        if args.pop("Process Group Ranks", None) is not None:
            args["Group size"] = "@WORLD@"
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in nccl]
    times = []
    for event in kept:
        if event["ph"] != "M":
            times.append((event["ts"], event.get("dur", 0.0)))
            event["ts"] = NUMBER
            if "dur" in event:
                event["dur"] = NUMBER
    header = {
        "schemaVersion": 1,
        "deviceProperties": trace["deviceProperties"][:1],
        "distributedInfo": {"backend": "nccl", "rank": "@RANK@", "world_size": "@WORLD@"},
        "host_name": "@HOST@",
        "baseTimeNanoseconds": trace["baseTimeNanoseconds"],
        "traceEvents": kept,
    }
    text = json.dumps(header).replace(json.dumps(NUMBER), NUMBER)
    pairs = np.array(times)
    ends = np.column_stack((pairs[:, 0], pairs.sum(axis=1)))
    has_dur = [event["ph"] != "M" and "dur" in event for event in kept if event["ph"] != "M"]
    return Template(text.split(NUMBER), np.column_stack((ends, has_dur)), np.array(spans), (start, end))


def truth_file(folder: Path) -> Path:
    """Return the file next to a run that names what was planted."""
    return folder.with_name(f"{folder.name}.truth.json")


def host_of(rank: int) -> str:
    host = rank // RANKS_PER_HOST
    return f"rack{host // HOSTS_PER_RACK:02d}-node{host:04d}"


def schedule(ranks: int, slow_ranks: list[int], slow_hosts: list[int], seed: int) -> np.ndarray:
    """Return arrival and departure in us (rank, collective, 2) and the end of each rank, in a last column."""
    template = load_template()
    dice = np.random.default_rng(seed)
    (start, end), spans = template.span, template.collectives
    work = np.diff(np.concatenate(([start], spans.ravel(), [end])))[
        ::2
    ]  # before each collective, and after the last
    transfer = spans[:, 1] - spans[:, 0]
    factors = 1 + JITTER * np.abs(dice.standard_normal((ranks, len(work))))
    members = [
        rank for host in slow_hosts for rank in range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST)
    ]
    units = [slow_ranks] * bool(slow_ranks) + [members] * bool(members)
    for turn, unit in enumerate(units):  # the planted ones take turns, so that none hides another
        factors[unit, turn :: len(units)] *= SLOW
    result = np.empty((ranks, len(spans) + 1, 2))
    left = np.full(ranks, start)
    for number in range(len(spans)):
        arrival = left + work[number] * factors[:, number]
        left = arrival.max() + transfer[number] + dice.uniform(0, 2, ranks)
        result[:, number] = np.column_stack((arrival, left))
    result[:, -1] = (left + work[-1] * factors[:, -1])[:, None]
    return result


def write_rank(folder: Path, ranks: int, times: np.ndarray, offsets: np.ndarray, rank: int) -> None:
    template = load_template()
    (start, end), spans = template.span, template.collectives
    before = np.concatenate(([start], spans.ravel(), [end]))
    after = np.concatenate(([start], times[rank, :-1].ravel(), [times[rank, -1, 0]]))
    clock = offsets[rank // RANKS_PER_HOST]
    mapped = np.interp(template.times[:, :2], before, after)
    starts, lengths = np.round(mapped[:, 0] + clock, 3), np.round(mapped[:, 1] - mapped[:, 0], 3)
    numbers: list[str] = []
    for at, length, has_length in zip(starts, lengths, template.times[:, 2], strict=True):
        numbers.append(f"{at:.3f}")
        if has_length:
            numbers.append(f"{length:.3f}")
    pieces = [text for pair in zip(template.parts, [*numbers, ""], strict=True) for text in pair]
    text = "".join(pieces).replace('"@RANK@"', str(rank)).replace('"@WORLD@"', str(ranks))
    text = text.replace("@HOST@", host_of(rank))
    (folder / f"kineto_trace_{rank}.json.gz").write_bytes(igzip.compress(text.encode(), 1))


def generate(
    folder: Path, ranks: int, slow_ranks: list[int], slow_hosts: list[int], seed: int = 0, jobs: int = 2
) -> Path:
    """Write the traces of all ranks, and next to the folder what was planted."""
    part = folder.with_name(f".{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    times = schedule(ranks, slow_ranks, slow_hosts, seed)
    dice = np.random.default_rng(seed + 1)
    offsets = dice.uniform(-MAX_OFFSET_US, MAX_OFFSET_US, ranks // RANKS_PER_HOST + 1)
    with ProcessPoolExecutor(jobs) as pool:
        list(pool.map(partial(write_rank, part, ranks, times, offsets), range(ranks), chunksize=16))
    truth = {
        "slow_ranks": slow_ranks,
        "slow_hosts": [host_of(host * RANKS_PER_HOST) for host in slow_hosts],
    }
    truth_file(folder).write_text(json.dumps(truth))
    part.rename(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow-rank", type=int, action="append", default=[])
    parser.add_argument("--slow-host", type=int, action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generate(arguments.folder, arguments.ranks, arguments.slow_rank, arguments.slow_host, arguments.seed)
