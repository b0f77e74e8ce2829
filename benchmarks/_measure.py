"""Time pieces of Python, each run in its own process, and print the results as a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / ".venv-peers" / "bin" / "python"

# Peak memory; its growth after the imports is that of the work itself. Linux reports it as VmHWM (ru_maxrss starts
# at the parent's value there), macOS as ru_maxrss in bytes. The touched part of a memory-mapped file counts.
CHILD = """
import json, resource, sys, time
def peak():
    if sys.platform == "darwin": return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
{setup}
time.sleep(0.2)  # until the threads that imports have started (those of numpy's linear algebra) have ended their work
bare, cpu, begin = peak(), time.process_time(), time.perf_counter()
{body}
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
print(json.dumps([seconds, cpu, peak() - bare, {answer}]))
"""


@dataclass(frozen=True)
class Task:
    """One program to measure. ``answer`` is an expression shown in the table, to compare results: a row count."""

    name: str
    setup: str
    body: str
    answer: str = "None"
    python: Path | str = sys.executable
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """Medians of a task: seconds, CPU seconds of all threads, bytes above those after the imports."""

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


@dataclass(frozen=True)
class Comparison:
    """A figure with the ratio to a peer and the distance to a limit.

    Attributes:
        name: what was measured.
        value: the figure.
        unit: its unit.
        baseline: the peer, or the simplest program of the same task; empty without one.
        ratio: how many times as long as etloom the baseline takes.
        limit: work that no program of this task can avoid.
        distance: how many times as long as the limit etloom takes.
    """

    name: str
    value: float
    unit: str
    baseline: str = ""
    ratio: float | None = None
    limit: str = ""
    distance: float | None = None


COMPARISONS = "ETLOOM_BENCH_COMPARISONS"
"""The environment variable with the file that receives the comparisons of a run of benchmarks."""
SLOW_SECONDS = 10
"""Programs that take longer run once: they vary little."""
IMPORTS = "import polars, numpy"
"""The imports of every process that uses tables."""


def note_comparisons(*comparisons: Comparison) -> None:
    """Append figures to the file that `write_page` reads; without it do nothing."""
    if path := os.environ.get(COMPARISONS):
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.writelines(json.dumps(asdict(comparison)) + "\n" for comparison in comparisons)


def read_comparisons(path: Path) -> list[Comparison]:
    """Return the figures that `note_comparisons` wrote."""
    return [Comparison(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of five runs."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure_copying(size: int = 1 << 28) -> float:
    """Return the rate at which one thread copies memory that is in use, in bytes per second."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return size / measure_seconds(lambda: np.copyto(target, source))


def measure_touching(size: int = 1 << 28) -> float:
    """Return the rate at which one thread writes new memory, in bytes per second."""
    return size / measure_seconds(lambda: np.ones(size, np.uint8))


def touch_memory(size: int = 1 << 30) -> None:
    """Use memory for a moment, so that the next process gets memory that the system has at hand.

    A virtual machine gives free memory back to its host after seconds; to get it again took up to 3.3 s per GB, at
    random, which is neither etloom's time nor a peer's.
    """
    subprocess.run(
        [sys.executable, "-c", f"b'x' * {size}"], check=True
    )  # this process would count as its child's peak


def run_once(task: Task, timeout: float) -> Run | str:
    """Return (seconds, CPU seconds, bytes, answer), or the last line of the error."""
    code = CHILD.format(setup=task.setup, body=task.body, answer=task.answer)
    touch_memory()
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
    """Run all tasks in turn, once per round, so that a busy minute affects all.

    A peer that failed, and a task that takes more than `SLOW_SECONDS`, is not repeated. A task of this Python must not
    fail: it ends the benchmark.
    """
    runs: dict[str, list[Run]] = {task.name: [] for task in tasks}
    failed: dict[str, Failure] = {}
    for turn in range(rounds):
        for task in tasks:
            if task.name in failed or (runs[task.name] and runs[task.name][0][0] > SLOW_SECONDS):
                continue
            _progress(f"round {turn + 1} of {rounds}: {task.name}")
            outcome = run_once(task, timeout)
            if isinstance(outcome, str):
                if task.python == sys.executable:
                    sys.exit(f"{task.name}: {outcome}")
                failed[task.name] = Failure(task.name, outcome)
            else:
                runs[task.name].append(outcome)
    _progress("")
    outcomes: list[Outcome] = []
    for name, results in runs.items():
        if name in failed:
            outcomes.append(failed[name])
        else:
            seconds, cpu, peaks, answers = zip(*results, strict=True)
            outcomes.append(Figure(name, *map(statistics.median, (seconds, cpu, peaks)), answers[0]))
    return outcomes


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def warm(path: Path) -> None:
    """Read a file into the page cache, so that the first program does not wait for the disk."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def print_markdown(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows with the same keys as a table in Markdown."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a plain table: the first column left-aligned, the others right-aligned."""
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


def format_ratio(ratio: float) -> str:
    """Return 2.3x, or 0.04x."""
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"


def compare(
    title: str, outcomes: Sequence[Outcome], size: float, unit: str = "MB", rows: str = "rows"
) -> None:
    """Print a table of outcomes, ``size`` in units. The first is etloom; the last columns are costs relative to it."""
    ours = outcomes[0]
    lines = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            lines.append([outcome.name, "failed", *[""] * 6, outcome.reason[:60]])
            continue
        slower = busier = larger = ""
        if isinstance(ours, Figure) and outcome is not ours:
            slower = format_ratio(outcome.seconds / ours.seconds)
            busier = format_ratio(outcome.cpu / ours.cpu)
            larger = format_ratio(outcome.peak / max(ours.peak, 1))
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


def machine() -> None:
    """Print the machine and the versions."""
    print("\n".join(describe_machine()))


def describe_machine(packages: Sequence[str] = ("etloom", "polars", "pyarrow")) -> tuple[str, str]:
    """Return a line about the machine and a line of versions."""
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
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{model}, {os.cpu_count()} logical CPUs, {platform.system()} {platform.release()}; load {load}",
        f"Python {platform.python_version()}; {versions}",
    )


def peer_version(package: str) -> str | None:
    """Return the version in the environment of the peers; None if it does not exist."""
    if not PEERS.exists():
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(PEERS), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def arguments(doc: str, sizes: Sequence[float] = (50, 300)) -> argparse.Namespace:
    """Parse the options of all benchmarks: --sizes in MB (10^6 bytes; ETLOOM_BENCH_SIZES), --rounds, --peer-limit."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes_text = os.environ.get("ETLOOM_BENCH_SIZES")
    default = [float(size) for size in sizes_text.replace(",", " ").split()] if sizes_text else list(sizes)
    parser.add_argument("--sizes", type=float, nargs="+", default=default, help=f"in MB (default: {default})")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default: 3)")
    parser.add_argument(
        "--peer-limit",
        type=float,
        default=400,
        help="do not run the peers above this size in MB (default: 400)",
    )
    return parser.parse_args()
