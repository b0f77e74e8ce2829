"""Run the benchmarks and write their tables to docs/benchmarks.md, with the machine, versions and its limits.

python benchmarks/write_page.py              # all, as `make bench`
python benchmarks/write_page.py read link    # these
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _measure import (
    COMPARISONS,
    PEERS,
    ROOT,
    Comparison,
    describe_machine,
    format_ratio,
    measure_copying,
    measure_touching,
    read_comparisons,
)
from make import DATA, SOURCES

FOLDER = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPTS = {
    "read": ["--rounds", "5"],
    "link": [],
    "chakra": ["--rounds", "5"],
    "graphs": ["--rounds", "5"],
    "analyses": ["--quick"],
    "ranks": ["--ranks", "--rounds", "5"],
    "collect": [],
    "memory": [],
    "replay": ["400"],
    "mcp": ["--millions", "0.7", "--calls", "10"],
}
"""Benchmark -> the arguments with which all together take some 15 minutes on two cores."""
HEAD = """# Benchmarks

`make bench` writes this page. Compare ratios, not seconds: all programs of a table ran in turn on one machine, and the
columns time, CPU and memory state how many times more than etloom (first row) another program takes. A row that
begins with "limit" is work that no reader can avoid, so the inverse of its ratio is the distance to that limit. The CPU
ratios hold on a busy machine, too; a load well above 0 at the start of a section means that its seconds do not. Figures
are medians of five runs. Before each, memory is used for a moment: a virtual machine may have to get it back from its
host, which takes up to 3.3 s per GB, at random.

Peers that this page does not run: AMD's TraceLens is not in the Python package index (`tracelens` there is another
project), and Perfetto's wheel downloads its trace processor when it starts. No ratio is to a time measured elsewhere.
"""


def format_figures(comparisons: Sequence[Comparison]) -> str:
    """Return the table of figures, each with all its ratios."""
    lines = ["| figure | measured | time of others | distance to the limit |", "|---|---|---|---|"]
    by_figure: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        by_figure.setdefault(comparison.name, []).append(comparison)
    for name, same in by_figure.items():
        value = f"{same[0].value:.3g}" if same[0].value < 1000 else f"{same[0].value:,.0f}"
        ratios = ", ".join(filter(None, (_format_ratio(each.baseline, each.ratio) for each in same)))
        limit = _format_ratio(same[0].limit, same[0].distance)
        lines.append(f"| {name} | {value} {same[0].unit} | {ratios} | {limit} |")
    return "\n".join(lines) + "\n"


def _format_ratio(name: str, ratio: float | None) -> str:
    if not name:
        return ""
    return f"{name}: not run" if ratio is None else f"{name}: {format_ratio(ratio)}"


def list_peers() -> str:
    """Return the packages of the peers' environment with their versions; empty if it does not exist."""
    if not PEERS.exists():
        return "none installed"
    listing = subprocess.run([PEERS, "-m", "pip", "freeze"], capture_output=True, text=True).stdout
    peers = ("holistictraceanalysis", "traceinsight", "orjson", "pandas", "numpy")
    lines = [line for line in listing.splitlines() if line.partition("==")[0].lower() in peers]
    return ", ".join(line.replace("==", " ") for line in lines)


class BenchmarkError(Exception):
    """A benchmark failed."""


def run_section(name: str) -> str:
    """Run one benchmark; return its section of the page. Raises BenchmarkError."""
    script, start = FOLDER / f"bench_{name}.py", time.monotonic()
    title = (ast.get_docstring(ast.parse(script.read_text())) or name).partition("\n")[0]
    command = [sys.executable, str(script), *SCRIPTS[name]]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise BenchmarkError(f"{name}: {' '.join(command)} ended with exit status {run.returncode}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{name}: {time.monotonic() - start:.0f} s (until now {cpu:.0f} s of CPU)", file=sys.stderr)
    return f"## {name}\n\n{title}\n\n```text\n{run.stdout.strip()}\n```\n"


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - set(SCRIPTS):
        sys.exit(f"unknown benchmark {unknown.pop()!r}; expected one of {', '.join(SCRIPTS)}")
    limits = "".join(
        f"| {label} | {rate / 1e9:.1f} GB/s |\n"
        for label, rate in (
            ("copy of memory that is in use", measure_copying()),
            ("first touch of new memory", measure_touching()),
        )
    )
    inputs = f"inputs: {SOURCES.name}" + (
        "" if SOURCES.is_relative_to(DATA) else " (of this repository; ETLOOM_DATA has others)"
    )
    facts = "\n".join(f"- {line}" for line in (*describe_machine(), f"peers: {list_peers()}", inputs))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "comparisons.jsonl")
        file.touch()
        os.environ[COMPARISONS] = str(file)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages are compiled, too
        try:
            sections = [run_section(name) for name in names or SCRIPTS]
        except BenchmarkError as error:
            sys.exit(f"{error}: {PAGE.relative_to(ROOT)} is not changed")
        figures = format_figures(read_comparisons(file))
    parts = [HEAD, f"{facts}\n", f"| limit | rate of one thread |\n|---|---|\n{limits}"]
    parts += [f"## Figures\n\n{figures}", *sections]
    PAGE.write_text("\n".join(parts))
    print(f"wrote {PAGE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
