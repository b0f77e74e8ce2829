"""Linking an execution trace with a Kineto trace and writing ET+, as a process.

    python benchmarks/bench_link.py --copies 1 4 16 64 --rounds 5

The files are nccl_ddp of ETLOOM_DATA, else the recording of `etloom demo`, and several copies of it in sequence with
distinct ids. Compared with json.load of the same two files, the first step of a linker in Python. Times are of whole
processes, with imports and writing; the peak is the largest resident set.
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

from _measure import IMPORTS, Comparison, machine, note_comparisons, table, touch_memory, warm
from make import CACHE, FILES, SOURCES, make_copies

MAX_LOADED = 16  # copies; json.load of 64 takes 7 GB

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
    """Return seconds, CPU seconds and peak bytes of a process; exit with its message if it fails."""
    touch_memory()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {message.strip()}")
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * unit


def measure(commands: Sequence[Sequence[str]], rounds: int) -> list[Cost]:
    """Return the cost of each command; they run in turn, so that a busy minute affects all."""
    runs = [[run(command) for command in commands] for _ in range(rounds)]
    return [Cost(*map(statistics.median, zip(*costs, strict=True))) for costs in zip(*runs, strict=True)]


def compare_processes(rounds: int, out: Path) -> None:
    """Measure both commands on the original files, and json.load of the same files."""
    host, device = (SOURCES / FILES[kind] for kind in ("et", "kineto"))
    for file in (host, device):
        warm(file)
    etloom = [sys.executable, "-m", "etloom", "link", "--host", str(host), "--device", str(device), "--out"]
    commands = {
        "etloom link": [*etloom, str(out)],
        "etloom link, gzip": [*etloom, f"{out}.gz"],
        "chakra_trace_link (ours)": peer_command(host, device, out),
        "json.load of both files": [sys.executable, "-c", LOAD, str(host), str(device)],
        "limit: imports of polars and numpy": [sys.executable, "-c", IMPORTS],
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
    ours, limit = costs["etloom link"].seconds, costs["limit: imports of polars and numpy"].seconds
    note_comparisons(
        Comparison(
            f"link {SOURCES.name} to ET+, a process",
            ours,
            "s",
            baseline="json.load of both files",
            ratio=load.seconds / ours,
            limit="imports of polars and numpy",
            distance=ours / limit,
        )
    )
    nodes, events = count_rows()
    table(
        f"Link and export {SOURCES.name}: {nodes:,} nodes, {events:,} events, median of {rounds}",
        ["", "seconds", "CPU s", "peak MB", "x json.load"],
        rows,
    )


def count_rows() -> tuple[int, int]:
    """Return the number of nodes and of events of one copy."""
    import etloom

    return tuple(
        etloom.read(SOURCES / FILES[kind]).rows(name)
        for kind, name in (("et", "nodes"), ("kineto", "events"))
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


def compare_sizes(counts: Sequence[int], rounds: int, out: Path) -> None:
    """Measure time and memory for growing traces."""
    rows = []
    first = None
    nodes, events = count_rows()
    for count in counts:
        files = [make_copies(kind, count) for kind in ("et", "kineto")]
        for file in files:
            warm(file)
        commands = [peer_command(*files, out)]
        if count <= MAX_LOADED:
            commands.append([sys.executable, "-c", LOAD, *map(str, files)])
        # Runs of half a minute vary little: one is enough.
        ours, *loads = measure(commands, rounds if count < 16 else 1)
        load = loads[0] if loads else None
        each = 1e6 * ours.seconds / (count * nodes)
        first = first or each
        rows.append(
            [
                f"{count:,}",
                f"{count * nodes:,}",
                f"{count * events:,}",
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
            ]
        )
    if counts:
        note_comparisons(
            Comparison(
                f"link {counts[-1]} copies: time per node relative to one copy",
                each / (first or each),
                "",
                baseline="json.load of both files",
                ratio=None if load is None else load.seconds / ours.seconds,
                limit="linear growth",
                distance=each / (first or each),
            )
        )
    table(
        "Copies",
        [
            *("copies", "nodes", "events", "seconds", "us/node", "of the first", "peak GB"),
            *("json.load s", "GB", "x json.load"),
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 4, 16, 64], help="default: 1 4 16 64")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command (default: 5)")
    arguments = parser.parse_args()
    machine()
    CACHE.mkdir(parents=True, exist_ok=True)
    out = CACHE / "linked.etplus.json"
    try:
        compare_processes(arguments.rounds, out)
        compare_sizes(arguments.copies, arguments.rounds, out)
    finally:
        for file in (out, out.with_name(f"{out.name}.gz")):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
