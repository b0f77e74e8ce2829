"""The command ``chakra_timeline_visualizer`` of mlcommons/chakra: converts a simulator's log to a Chrome trace.

A line of the log: ``issue,npu=0,cycle=100,node_id=5,name=aten::mm``, and the same with ``callback`` when it is done.
Any name will do, and times are microseconds, as Chrome and Perfetto take them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from etloom.compat._command import run_command
from etloom.core import categories
from etloom.core.errors import EtloomError, ReadError
from etloom.core.paths import expand_home
from etloom.formats.io.atomic_file import write_atomically

_LINE = re.compile(r"(issue|callback),[^=,]*=(\d{1,18}),[^=,]*=(\d{1,18}),[^=,]*=(\d{1,20}),[^=,]*=(.*)$")
_TRACKS = {1: "local memory", 2: "remote memory", 3: "computation", 4: "communication"}


def draw(log: Path, target: Path, npus: int, megahertz: float) -> None:
    """Convert a simulator's log to a Chrome trace of the first ``npus`` NPUs, whose clocks run at ``megahertz``.

    Raises ReadError, EtloomError.
    """
    if not megahertz >= 1:
        raise EtloomError("expected a clock frequency of at least 1 MHz", where="--npu_frequency")
    begun: dict[tuple[int, int], int] = {}
    events: list[dict[str, object]] = []
    for line in log.read_text(errors="replace").splitlines():
        if (match := _LINE.search(line.strip())) is None:
            continue
        event_type, (npu, cycle, node), name = match[1], map(int, match.group(2, 3, 4)), match[5]
        if npu >= npus:
            continue
        if event_type == "issue":
            begun[npu, node] = cycle
        elif (npu, node) in begun:
            start = begun.pop((npu, node))
            times = {"ts": start / megahertz, "dur": (cycle - start) / megahertz}
            events.append(
                {
                    "ph": "X",
                    "pid": npu,
                    "tid": _find_track(name),
                    "name": name,
                    **times,
                    "args": {"node_id": node},
                }
            )
    if not events:
        raise ReadError("the log contains no node with both lines, issue and callback", where=log)
    names: list[dict[str, object]] = [
        {"ph": "M", "pid": npu, "tid": track, "name": "thread_name", "args": {"name": track_name}}
        for npu in sorted({int(str(event["pid"])) for event in events})
        for track, track_name in _TRACKS.items()
    ]
    write_atomically(target, json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *events]}) + "\n")


def _find_track(name: str) -> int:
    if "MEM_" in name:
        return 2 if "REMOTE" in name.upper() else 1
    return 4 if "COMM_" in name or categories.parse_collective(name) else 3


def parse_megahertz(text: str) -> float:
    """Convert a frequency such as "1500" (MHz) or "1.5GHz" to MHz. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmg]?hz)?", text.strip().lower())
    if match is None:
        raise ValueError(f"expected a frequency such as 1500 or 1.5GHz, got {text!r}")
    return float(match[1]) * {"hz": 1e-6, "khz": 1e-3, "mhz": 1.0, "ghz": 1e3}[match[2] or "mhz"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_timeline_visualizer``: exit status 0, 1 for an error in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="chakra_timeline_visualizer", description="Draw a simulator's log.")
    parser.add_argument("--input_filename", required=True, help="the log")
    parser.add_argument("--output_filename", required=True, help="the Chrome trace to write")
    parser.add_argument("--num_npus", type=int, required=True)
    parser.add_argument(
        "--npu_frequency", type=parse_megahertz, required=True, help="MHz, or with a unit: 1.5GHz"
    )
    parser.add_argument("--log_filename", help="accepted and ignored: messages go to stderr")
    args = parser.parse_args(arguments)
    paths = expand_home(args.input_filename), expand_home(args.output_filename)
    return run_command("chakra_timeline_visualizer", lambda: draw(*paths, args.num_npus, args.npu_frequency))
