"""Linking an execution trace with a Kineto trace and writing ET+, each time as a process of its own.

    python benchmarks/bench_link.py --copies 1 4 16 64 --rounds 3

The files are nccl_ddp of ETLOOM_DATA and copies of it that follow each other in time with ids of their own. Beside us:
json.load of the same two files and nothing else, which is where a linker in Python would begin. A process counts
whole, imports and writing and all; the peak is its largest resident set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _measure import machine, table, warm
from make import CACHE, FILES, SOURCES, make_copies

NODES, EVENTS = 14_391, 40_573  # of one copy
ASKED_SECONDS, ASKED_BYTES = 0.7, 2e9
MOST_LOADED = 16  # copies; json.load of 64 takes 7 GB
PEER = {1: (15.4, 274e6), 4: (96.9, None)}
"""Seconds and bytes of chakra_trace_link 1.0.0 on two cores, measured once: on many copies it takes hours."""

LOAD = """
import gzip, json, sys
for name in sys.argv[1:]:
    with (gzip.open if name.endswith(".gz") else open)(name, "rb") as file:
        json.load(file)
"""


@dataclass(frozen=True)
class Cost:
    """Medians of several runs of a process."""

    seconds: float
    cpu: float
    peak: float


def run(command: Sequence[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak bytes of a process. Exits with its last words where it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {said.strip()}")
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * unit


def measure(commands: Sequence[Sequence[str]], rounds: int) -> list[Cost]:
    """The cost of each command, run in turn so that a noisy minute hurts all alike."""
    runs = [[run(command) for command in commands] for _ in range(rounds)]
    return [Cost(*map(statistics.median, zip(*of_one, strict=True))) for of_one in zip(*runs, strict=True)]


def as_a_process(rounds: int, out: Path) -> None:
    """The two commands on the files as they come, against json.load of the same files."""
    host, device = (SOURCES / FILES[kind] for kind in ("et", "kineto"))
    for file in (host, device):
        warm(file)
    etloom = [sys.executable, "-m", "etloom", "link", "--host", str(host), "--device", str(device), "--out"]
    commands = {
        "etloom link": [*etloom, str(out)],
        "etloom link, gzip": [*etloom, f"{out}.gz"],
        "chakra_trace_link (ours)": peer_command(host, device, out),
        "json.load of both files": [sys.executable, "-c", LOAD, str(host), str(device)],
    }
    costs = dict(zip(commands, measure(list(commands.values()), rounds), strict=True))
    load = costs["json.load of both files"]
    rows = [
        [
            name,
            f"{cost.seconds:.2f}",
            f"{cost.cpu:.2f}",
            f"{cost.peak / 1e6:.0f}",
            f"{cost.seconds / load.seconds:.2f}",
        ]
        for name, cost in costs.items()
    ]
    rows += [
        ["asked", f"{ASKED_SECONDS:.2f}", "", "", ""],
        ["chakra_trace_link 1.0.0 (once)", f"{PEER[1][0]:.2f}", "", f"{PEER[1][1] / 1e6:.0f}", ""],
    ]
    table(
        f"Link and export nccl_ddp: {NODES:,} nodes, {EVENTS:,} events, median of {rounds}",
        ["", "seconds", "CPU s", "peak MB", "x json.load"],
        rows,
    )


def peer_command(host: Path, device: Path, out: Path) -> list[str]:
    start = "import sys; from etloom.compat.chakra import main; sys.exit(main())"
    flags = [
        "--chakra-host-trace",
        str(host),
        "--chakra-device-trace",
        str(device),
        "--output-file",
        str(out),
    ]
    return [sys.executable, "-c", start, *flags, "--log-level", "WARNING"]


def by_copies(counts: Sequence[int], rounds: int, out: Path) -> None:
    """Time and memory against the size of the traces."""
    rows = []
    first = None
    for count in counts:
        files = [make_copies(kind, count) for kind in ("et", "kineto")]
        for file in files:
            warm(file)
        commands = [peer_command(*files, out)]
        if count <= MOST_LOADED:
            commands.append([sys.executable, "-c", LOAD, *map(str, files)])
        # Three runs of half a minute tell no more than one.
        ours, *loads = measure(commands, rounds if count < 16 else 1)
        load = loads[0] if loads else None
        each = 1e6 * ours.seconds / (count * NODES)
        first = first or each
        peer = PEER.get(count, (None, None))[0]
        rows.append(
            [
                f"{count:,}",
                f"{count * NODES:,}",
                f"{count * EVENTS:,}",
                f"{ours.seconds:.2f}",
                f"{each:.1f}",
                f"{each / first:.2f}",
                f"{ours.peak / 1e9:.2f}",
                *(
                    ("", "", "")
                    if load is None
                    else (
                        f"{load.seconds:.2f}",
                        f"{load.peak / 1e9:.2f}",
                        f"{ours.seconds / load.seconds:.2f}",
                    )
                ),
                "" if peer is None else f"{peer:.1f}",
            ]
        )
    table(
        f"The same in copies; asked: us/node does not grow, peak below {ASKED_BYTES / 1e9:.0f} GB",
        [
            *("copies", "nodes", "events", "seconds", "us/node", "of the first", "peak GB"),
            *("json.load s", "GB", "x json.load", "peer s (once)"),
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 4, 16, 64], help="default: 1 4 16 64")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: 3)")
    given = parser.parse_args()
    if not SOURCES.is_dir():
        sys.exit(f"{SOURCES}: no such folder; set ETLOOM_DATA to the one that holds nccl_ddp")
    machine()
    CACHE.mkdir(parents=True, exist_ok=True)
    out = CACHE / "linked.etplus.json"
    try:
        as_a_process(given.rounds, out)
        by_copies(given.copies, given.rounds, out)
    finally:
        for file in (out, out.with_name(f"{out.name}.gz")):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
