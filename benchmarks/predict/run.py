"""Runs all benchmarks of predictions, and prints what was asked and what was reached as the last table.

    python benchmarks/predict/run.py

The lab and the emulated pipelines are not measured again: their tables come from the stored measurements.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from requirements import PREFIX

SCRIPTS = (
    "lab",
    "astra_sim",
    "vtrain",
    "published",
    "devices",
    "slowdown",
    "pipelines",
    "known_answers",
    "size",
)


def run_script(path: Path) -> tuple[bool, list[list[str]]]:
    """Run a script with its output shown; return whether it succeeded, and its requirements."""
    print(f"== {path.name}", flush=True)
    rows = []
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            cells = line.rstrip("\n").split(" | ")
            if cells[0] == PREFIX:
                rows.append(cells[1:])
            else:
                print(line, end="", flush=True)
    return process.returncode == 0, rows


def main() -> int:
    results = {name: run_script(Path(__file__).parent / f"{name}.py") for name in SCRIPTS}
    rows = [["", "asked", "reached", "holds"], *(row for _, found in results.values() for row in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print("\n== summary")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    failed = [name for name, (succeeded, _) in results.items() if not succeeded]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
