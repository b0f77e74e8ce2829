"""Prints the figures on which verdicts rest, from a raw Kineto or Chrome file, without etloom.

    python benchmarks/natural/raw.py trace.json.gz ...

Span, device busy time, gaps between device activities and where the host is in the longest of them, the times before
the first and after the last device activity, communication that runs alone, the heaviest kernels, copies and operators.
"""

from __future__ import annotations

import argparse
import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "driver")
COMMUNICATION = ("nccl", "rccl", "multimem", "all_reduce", "allreduce", "cross_device_reduce", "oneccl")
LEAST_GAP_US = 1.0


def read(path: Path) -> list[Event]:
    """Return the complete events of a file."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    trace = json.loads(data.decode("utf-8", "replace"), strict=False)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    for event in complete:
        event["ts"], event["dur"] = float(event["ts"]), float(event["dur"])
    return complete


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def measure(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def subtract(intervals: list[Interval], others: list[Interval]) -> float:
    """Return how long the intervals last outside of the others; both are united."""
    both = measure(unite([*intervals, *others]))
    return both - measure(others)


def place(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def is_communication(event: Event) -> bool:
    return event.get("cat") == "kernel" and any(part in event["name"].lower() for part in COMMUNICATION)


class Host:
    """What a host does at a time: the innermost operator and call of each thread."""

    def __init__(self, events: list[Event]) -> None:
        kinds = ("cpu_op", "user_annotation", "python_function", "Operator", *CALLS)
        self.threads: dict[Any, list[Event]] = defaultdict(list)
        for event in events:
            if event.get("cat") in kinds and not event["name"].startswith("ProfilerStep"):
                self.threads[event.get("tid")].append(event)
        for thread in self.threads.values():
            thread.sort(key=lambda event: (event["ts"], -event["dur"]))

    def describe(self, begin: float, end: float, depth: int = 400) -> str:
        """Return what takes the time from begin to end: shares of calls, of operators, of no operator."""
        calls: Counter[str] = Counter()
        operators: Counter[str] = Counter()
        covered: list[Interval] = []
        for thread in self.threads.values():
            for event in thread:
                if event["ts"] >= end:
                    break
                overlap = min(end, event["ts"] + event["dur"]) - max(begin, event["ts"])
                if overlap <= 0 or event.get("cat") == "python_function":
                    continue
                if event.get("cat") in CALLS:
                    calls[event["name"]] += overlap
                else:
                    operators[event["name"]] += overlap
                if event.get("cat") != "user_annotation":
                    covered.append((max(begin, event["ts"]), min(end, event["ts"] + event["dur"])))
        total = end - begin
        bare = total - measure(unite(covered))
        parts = [f"no operator {100 * bare / total:.0f} %"]
        parts += [f"{name[:34]} {100 * us / total:.0f} %" for name, us in calls.most_common(3)]
        parts.append("|")
        parts += [f"{name[:44]} {100 * us / total:.0f} %" for name, us in operators.most_common(6)]
        return ", ".join(parts)


def print_gaps(events: list[Event], device: list[Event], top: int) -> None:
    """Print the gaps between device activities, by where the call that ends them is, and the longest."""
    host = Host(events)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in CALLS and "correlation" in event.get("args", {})
    }
    busy = unite(place(event) for event in device)
    starts = sorted(device, key=lambda event: event["ts"])
    times = [event["ts"] for event in starts]
    gaps = [(a[1], b[0]) for a, b in pairwise(busy) if b[0] - a[1] > LEAST_GAP_US]
    shares: Counter[str] = Counter()
    for begin, end in gaps:
        following = starts[bisect_right(times, end) - 1]
        call = launches.get(following.get("args", {}).get("correlation"))
        if call is None:
            shares["launch unknown"] += end - begin
            continue
        called, returned = place(call)
        before = max(0.0, min(end, called) - begin)
        inside = max(0.0, min(end, returned) - max(begin, called))
        shares["before the launch call"] += before
        shares["inside the launch call"] += inside
        shares["after its return"] += end - begin - before - inside
    sizes = sorted((end - begin for begin, end in gaps), reverse=True)
    print(
        f"  gaps over 1 us: {len(gaps)}, {sum(sizes):,.0f} us; five longest hold {sum(sizes[:5]):,.0f} us;"
        f" over 50 us {sum(s for s in sizes if s > 50):,.0f} us"
    )
    print("  of the gaps, us:", {name: round(us) for name, us in shares.most_common()})
    for begin, end in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:top]:
        print(f"    {begin - events[0]['t0']:>12,.0f} {end - begin:>10,.0f} us: {host.describe(begin, end)}")
    own: Counter[str] = Counter()
    for begin, end in gaps:
        if end - begin > 50:
            for thread in host.threads.values():
                for event in thread:
                    if event["ts"] >= end:
                        break
                    overlap = min(end, event["ts"] + event["dur"]) - max(begin, event["ts"])
                    if overlap > 0 and event.get("cat") != "python_function":
                        own[event["name"][:50]] += overlap
    print("  host in gaps over 50 us:", {name: round(us) for name, us in own.most_common(14)})


def describe(path: Path, top: int) -> None:
    """Print the figures of one file."""
    events = read(path)
    begin = min(event["ts"] for event in events if event.get("cat") not in (None, "Trace"))
    end = max(event["ts"] + event["dur"] for event in events if event.get("cat") not in (None, "Trace"))
    events[0]["t0"] = begin
    device = [event for event in events if event.get("cat") in DEVICE]
    print(
        f"\n=== {path}: {len(events)} events, span {end - begin:,.0f} us,"
        f" {dict(Counter(event.get('cat') for event in events))}"
    )
    steps = [
        event
        for event in events
        if event["name"].startswith("ProfilerStep") and event.get("cat") != "gpu_user_annotation"
    ]
    print("  steps:", [(step["name"], round(step["ts"] - begin), round(step["dur"])) for step in steps][:8])
    if device:
        busy = unite(place(event) for event in device)
        computation = unite(place(event) for event in device if not is_communication(event))
        communication = unite(place(event) for event in device if is_communication(event))
        copies, kernels = (
            unite(place(event) for event in device if event["cat"] == kind)
            for kind in ("gpu_memcpy", "kernel")
        )
        print(
            f"  device {busy[0][0] - begin:,.0f} .. {busy[-1][1] - begin:,.0f} us, busy {measure(busy):,.0f} us"
            f" ({100 * measure(busy) / (busy[-1][1] - busy[0][0]):.1f} % of this);"
            f" communication {measure(communication):,.0f}, alone {subtract(communication, computation):,.0f} us;"
            f" copies alone {subtract(copies, kernels):,.0f} us;"
            f" streams {len({e.get('tid') for e in device})}, devices {len({e.get('pid') for e in device})}"
        )
        sums: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in device:
            sums[event["name"]] += event["dur"]
            counts[event["name"]] += 1
        for name, us in sums.most_common(top):
            print(f"    {us:>10,.0f} us {counts[name]:>6} x {name[:110]}")
        print_gaps(events, device, top)
    for kind in ("cpu_op", "Operator", *CALLS, "user_annotation"):
        sums = Counter()
        counts = Counter()
        for event in events:
            if event.get("cat") == kind and not event["name"].startswith("ProfilerStep"):
                sums[event["name"]] += event["dur"]
                counts[event["name"]] += 1
        if sums:
            print(
                f"  {kind}:",
                ", ".join(f"{name[:40]} {us:,.0f} ({counts[name]})" for name, us in sums.most_common(top)),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the figures of raw traces on which verdicts rest")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--top", type=int, default=8, help="rows of each list")
    options = parser.parse_args()
    for path in options.traces:
        describe(path, options.top)


if __name__ == "__main__":
    main()
