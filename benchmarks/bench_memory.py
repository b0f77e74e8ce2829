"""The simulated allocator on a million requests and frees, and the reader on a generated memory snapshot.

    python benchmarks/bench_memory.py --gigabytes 2

The snapshot repeats the history of a training loop with stacks of 80 frames, as pickle writes shared frames. The peak
memory of the reader includes its tables.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
from pathlib import Path

import numpy as np
from _measure import Comparison, Figure, Task, machine, measure, note_comparisons, table

SIMULATE = """
import numpy as np
count = 1_000_000
draw = np.random.default_rng(1)
action, value = np.zeros(count, np.uint8), draw.choice([512, 70_000, 3 << 20, 25 << 20], count)
live = []
for at in range(count):
    if len(live) > 2000 or (live and draw.random() < 0.49):
        action[at], value[at] = 1, live.pop(int(draw.integers(len(live))))
    else:
        live.append(at)
zeros, none = np.zeros(count, np.int64), np.zeros(0, np.int64)
from etloom._native import run_allocator
"""
RUN = """
after, _, _ = run_allocator(
    action, value, zeros, np.zeros(count, np.int32), (none,) * 6, (none,) * 3, (none,) * 2,
    (0, 1 << 62, 20 << 20, 20 << 20, EXPANDABLE), 0.0, (0,) * 16, count,
)
"""
FRAMES, FRAMES_IN_ALL, STACKS = 80, 3000, 400


def make_snapshot(size: int, path: Path) -> int:
    """Write a snapshot of about ``size`` bytes, opcode by opcode as Python's pickler does; return its entries."""
    draw = np.random.default_rng(1)
    memo = 0

    def remember(text: bytes) -> bytes:
        nonlocal memo
        memo += 1
        return text + b"\x94"

    def text(value: str) -> bytes:
        return remember(b"\x8c" + bytes([len(value)]) + value.encode())

    def again(place: int) -> bytes:
        return b"h" + bytes([place]) if place < 256 else b"j" + struct.pack("<I", place)

    keys = (
        "segments",
        "device_traces",
        "action",
        "addr",
        "size",
        "stream",
        "time_us",
        "frames",
        "name",
        "filename",
        "line",
    )
    actions = ("alloc", "free_requested", "free_completed")
    places, head = {}, [b"\x80\x04"]
    for value in (*keys, *actions):
        places[value] = memo
        head += [text(value), b"0"]
    key = {name: again(place) for name, place in places.items()}
    frames = []
    for number in range(FRAMES_IN_ALL):
        frames.append(memo)
        opening = remember(b"}")
        name, file = text(f"function_{number}"), text(f"/home/user/package/module_{number % 50}.py")
        fields = (key["name"], name, key["filename"], file, key["line"], b"M", struct.pack("<H", number))
        head += [opening, b"(", *fields, b"u0"]
    stacks = [
        b"".join(again(frames[j]) for j in draw.integers(0, len(frames), FRAMES)) for _ in range(STACKS)
    ]
    head += [b"}(", key["segments"], b"]", key["device_traces"], b"](]("]
    entries, written = 0, sum(map(len, head))
    with path.open("wb") as file:
        file.writelines(head)
        while written < size:
            request, address = (
                int(draw.integers(1 << 16, 1 << 24)),
                140_000_000_000_000 + entries % 5000 * (1 << 25),
            )
            for action in actions:
                time = b"\x8a\x07" + struct.pack("<Q", 1_795_235_217_000_000 + entries)[:7]
                fields = (
                    key["action"], key[action], key["addr"], b"\x8a\x06", struct.pack("<Q", address)[:6],
                    key["size"], b"J", struct.pack("<i", request), key["stream"], b"K\x00", key["time_us"], time,
                    key["frames"], b"]\x94(", stacks[entries // 3 % STACKS], b"e",
                )  # fmt: skip
                piece = b"}\x94(" + b"".join(fields) + b"u"
                file.write(piece)
                written += len(piece)
                entries += 1
        file.write(b"eeu.")
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    options = parser.parse_args()
    machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        entries = make_snapshot(int(options.gigabytes * 1e9), path)
        tasks = [
            Task("1 M requests and frees", SIMULATE, RUN.replace("EXPANDABLE", "0"), "len(after[0])"),
            Task(
                "1 M requests and frees, expandable",
                SIMULATE,
                RUN.replace("EXPANDABLE", "1"),
                "len(after[0])",
            ),
            Task(
                f"snapshot of {path.stat().st_size / 1e9:.2f} GB, {entries:,} entries",
                "from pathlib import Path\nfrom etloom.formats import memory_snapshot",
                f"trace = memory_snapshot.read(Path({str(path)!r}))",
                "trace.allocator.height",
            ),
        ]
        figures = [figure for figure in measure(tasks, 1) if isinstance(figure, Figure)]
    rows = [
        (f.name, f"{f.seconds:.2f} s", f"{f.cpu:.2f} s", f"{f.peak / 1e9:.2f} GB", f.answer) for f in figures
    ]
    table("memory", ("task", "time", "CPU", "memory", "rows"), rows)
    note_comparisons(
        Comparison("memory: 1 M requests and frees", figures[0].seconds, "s"),
        Comparison("memory: a generated snapshot of 2 GB", figures[2].seconds, "s"),
        Comparison("memory: peak memory of reading it", figures[2].peak / 1e9, "GB"),
    )


if __name__ == "__main__":
    main()
