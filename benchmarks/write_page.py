"""Run the benchmarks and write their tables to docs/benchmarks.md, with the machine, versions and its limits.

python benchmarks/write_page.py              # all, as `make bench`
python benchmarks/write_page.py read link    # these
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from _measure import PEERS, ROOT, describe_machine

FOLDER = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPTS = ("read", "link", "chakra", "graphs", "analyses", "ranks", "collect", "replay", "gate", "mcp")
HEAD = """# Benchmarks

`make bench` writes this page. Compare ratios, not seconds: all programs of a table ran in turn on one machine, and the
columns time, CPU and memory state how many times more than etloom (first row) another program takes. A row that
begins with "limit" is work that no reader can avoid, so the inverse of its ratio is the distance to that limit. The CPU
ratios hold on a busy machine, too; a load well above 0 at the start of a section means that its seconds do not.
"""


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of five runs."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure_limits(size: int = 1 << 28) -> list[tuple[str, float]]:
    """Return the memory rates that bound every program here, in GB of ``size`` bytes per CPU second."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    copied = measure_seconds(lambda: np.copyto(target, source))
    touched = measure_seconds(lambda: np.ones(size, np.uint8))
    return [
        ("copy of memory that is in use", size / 1e9 / copied),
        ("first touch of new memory", size / 1e9 / touched),
    ]


def list_peers() -> str:
    """Return the packages of the peers' environment with their versions; empty if it does not exist."""
    if not PEERS.exists():
        return "none installed"
    listing = subprocess.run([PEERS, "-m", "pip", "freeze"], capture_output=True, text=True).stdout
    peers = ("holistictraceanalysis", "traceinsight", "orjson", "pandas", "numpy")
    lines = [line for line in listing.splitlines() if line.partition("==")[0].lower() in peers]
    return ", ".join(line.replace("==", " ") for line in lines)


def run_section(name: str) -> str:
    """Run one benchmark; return its section of the page."""
    script = FOLDER / f"bench_{name}.py"
    title = (ast.get_docstring(ast.parse(script.read_text())) or name).partition("\n")[0]
    run = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    note = "" if run.returncode == 0 else f"\nIt ended early, with exit status {run.returncode}.\n"
    return f"## {name}\n\n{title}\n{note}\n```text\n{run.stdout.strip()}\n```\n"


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - set(SCRIPTS):
        sys.exit(f"unknown benchmark {unknown.pop()!r}; expected one of {', '.join(SCRIPTS)}")
    limits = "".join(f"| {label} | {rate:.1f} GB/s |\n" for label, rate in measure_limits())
    facts = "\n".join(f"- {line}" for line in (*describe_machine(), f"peers: {list_peers()}"))
    parts = [HEAD, f"{facts}\n", f"| limit | rate of one thread |\n|---|---|\n{limits}"]
    parts += [run_section(name) for name in names or SCRIPTS]
    PAGE.write_text("\n".join(parts))
    print(f"wrote {PAGE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
