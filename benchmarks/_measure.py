"""Times one piece of Python at a time, each run in a process of its own, and prints what it found as one table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / ".venv-peers" / "bin" / "python"

# The highest so far: its growth over the imports is what the work itself took. Linux tells it of the process as VmHWM;
# its ru_maxrss begins with what the parent had, and is what macOS tells, in bytes. A file that is mapped into memory
# counts, as far as it was touched.
CHILD = """
import json, resource, sys, time
def peak():
    if sys.platform == "darwin": return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
{setup}
bare, cpu, begin = peak(), time.process_time(), time.perf_counter()
{body}
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
print(json.dumps([seconds, cpu, peak() - bare, {answer}]))
"""


@dataclass(frozen=True)
class Task:
    """One contestant. ``answer`` is an expression of what it found, to be compared by eye: rows, events."""

    name: str
    setup: str
    body: str
    answer: str = "None"
    python: Path | str = sys.executable
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """The medians of a task: seconds, CPU seconds of all threads, bytes above the bare imports."""

    name: str
    seconds: float
    cpu: float
    peak: float
    answer: object


@dataclass(frozen=True)
class Failure:
    name: str
    reason: str


Outcome = Figure | Failure
Run = tuple[float, float, int, object]


def run_once(task: Task, timeout: float) -> Run | str:
    """(seconds, CPU seconds, bytes, answer), or the last line of what went wrong."""
    code = CHILD.format(setup=task.setup, body=task.body, answer=task.answer)
    try:
        done = subprocess.run(
            [str(task.python), "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **task.env},
        )
    except subprocess.TimeoutExpired:
        return f"more than {timeout:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return tuple(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(tasks: Sequence[Task], rounds: int, timeout: float = 600) -> list[Outcome]:
    """Runs every task once a round, in turn, so that a noisy minute hurts all alike; a task that fails is out."""
    runs: dict[str, list[Run]] = {task.name: [] for task in tasks}
    failed: dict[str, Failure] = {}
    for turn in range(rounds):
        for task in tasks:
            if task.name in failed:
                continue
            _progress(f"round {turn + 1} of {rounds}: {task.name}")
            outcome = run_once(task, timeout)
            if isinstance(outcome, str):
                failed[task.name] = Failure(task.name, outcome)
            else:
                runs[task.name].append(outcome)
    _progress("")
    outcomes: list[Outcome] = []
    for name, found in runs.items():
        if name in failed:
            outcomes.append(failed[name])
        else:
            seconds, cpu, peaks, answers = zip(*found, strict=True)
            outcomes.append(Figure(name, *map(statistics.median, (seconds, cpu, peaks)), answers[0]))
    return outcomes


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def warm(path: Path) -> None:
    """Brings a file into the page cache, so that the first contestant does not pay for the disk."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for index, row in enumerate(cells):
        first = row[0].ljust(widths[0])
        print(
            "  ".join([first, *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        )
        if index == 0:
            print("  ".join("-" * width for width in widths))


def compare(
    title: str, outcomes: Sequence[Outcome], size: float, unit: str = "MB", rows: str = "rows"
) -> None:
    """A table of outcomes, ``size`` in units; the first is us, and the last columns are the others' cost in ours."""
    ours = outcomes[0]
    lines = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            lines.append([outcome.name, "failed", *[""] * 6, outcome.reason[:60]])
            continue
        slower = busier = larger = ""
        if isinstance(ours, Figure) and outcome is not ours:
            slower = f"{outcome.seconds / ours.seconds:.1f}x"
            busier = f"{outcome.cpu / ours.cpu:.1f}x"
            larger = f"{outcome.peak / max(ours.peak, 1):.1f}x"
        answer = f"{outcome.answer:,}" if isinstance(outcome.answer, int) else str(outcome.answer or "")
        lines.append(
            [
                outcome.name,
                f"{outcome.seconds:.3f}",
                f"{outcome.cpu:.3f}",
                f"{size / outcome.seconds:.0f}",
                f"{outcome.peak / 1e6:.0f}",
                answer,
                slower,
                busier,
                larger,
            ]
        )
    table(title, ["", "seconds", "CPU s", f"{unit}/s", "peak MB", rows, "time", "CPU", "memory"], lines)


def machine(packages: Sequence[str] = ("etloom", "polars", "pyarrow")) -> None:
    """Prints what the figures were taken on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{model}, {os.cpu_count()} logical CPUs, {platform.system()} {platform.release()}; load {load}")
    print(f"Python {platform.python_version()}; " + ", ".join(f"{name} {version(name)}" for name in packages))


def peer_version(package: str) -> str | None:
    """The version in the peers' environment; None where that is not set up."""
    if not PEERS.exists():
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(PEERS), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def arguments(doc: str, sizes: Sequence[float] = (50, 300)) -> argparse.Namespace:
    """--sizes in MB (10^6 bytes; ETLOOM_BENCH_SIZES), --rounds, --peer-limit: what every bench_*.py understands."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = os.environ.get("ETLOOM_BENCH_SIZES")
    default = [float(size) for size in given.replace(",", " ").split()] if given else list(sizes)
    parser.add_argument("--sizes", type=float, nargs="+", default=default, help=f"in MB (default: {default})")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default: 3)")
    parser.add_argument(
        "--peer-limit",
        type=float,
        default=400,
        help="leave the peers out above this size in MB (default: 400)",
    )
    return parser.parse_args()
