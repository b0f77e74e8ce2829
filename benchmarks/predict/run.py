"""Runs all benchmarks of predictions, and prints what was asked and what was reached as the last table.

    python benchmarks/predict/run.py            # all
    python benchmarks/predict/run.py --write    # those of the page, which is written: docs/prediction-accuracy.md

The lab and the emulated pipelines are not measured again: their tables come from the stored measurements.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from requirements import PREFIX

PAGE = Path(__file__).parents[2] / "docs" / "prediction-accuracy.md"
SECTIONS = {
    "vtrain": "Training steps from sizes, one node of A100s",
    "held_out": "Intervals set without the measurements they are compared with",
    "published": "Published steps from sizes: etloom plan",
    "fake_world": "Published steps from a fake world",
    "lab": "Recorded jobs on other networks and numbers of ranks",
    "pipelines": "Recorded pipelines of other sizes",
    "devices": "Kernels and collectives on another device",
}
"""Script -> its title on the page."""
HEAD = """# Measured accuracy of predictions

`python benchmarks/predict/run.py --write` writes this page. The errors by class (`simulator/interval_classes.py`),
from which intervals follow, were set on the published steps, on vTrain, and on the lab's measurements below. So shares
of these measurements inside their intervals prove nothing. The section "held out" is different: there, a class is set
without a group of its measurements (a job, a model, a publication) and is then compared with that group.

"""
SCRIPTS = (
    "lab",
    "astra_sim",
    "vtrain",
    "held_out",
    "published",
    "fake_world",
    "devices",
    "slowdown",
    "pipelines",
    "known_answers",
    "size",
)


def run_script(path: Path) -> tuple[bool, list[list[str]], list[str]]:
    """Run a script with its output shown; return whether it succeeded, its requirements, and its other lines."""
    print(f"== {path.name}", flush=True)
    rows, lines = [], []
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            cells = line.rstrip("\n").split(" | ")
            if cells[0] == PREFIX:
                rows.append(cells[1:])
            else:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
    return process.returncode == 0, rows, lines


def write_page(results: dict[str, tuple[bool, list[list[str]], list[str]]]) -> None:
    """Write the results of the scripts as a page."""
    parts = [HEAD + "| | asked | reached | holds |\n|---|---|---|---|"]
    parts += [f"| {' | '.join(cells)} |" for _, rows, _ in results.values() for cells in rows]
    for name, (_, _, lines) in results.items():
        parts += [
            "",
            f"## {SECTIONS[name]}",
            "",
            f"`benchmarks/predict/{name}.py`",
            "",
            "```text",
            *lines,
            "```",
        ]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    is_page = sys.argv[1:] == ["--write"]
    names = tuple(SECTIONS) if is_page else SCRIPTS
    results = {name: run_script(Path(__file__).parent / f"{name}.py") for name in names}
    rows = [["", "asked", "reached", "holds"], *(row for _, found, _ in results.values() for row in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print("\n== summary")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    failed = [name for name, (succeeded, _, _) in results.items() if not succeeded]
    if is_page and not failed:
        write_page(results)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
