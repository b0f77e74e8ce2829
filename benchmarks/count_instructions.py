"""Count the instructions of etloom's commands on small runs, which do not depend on the load of the machine.

    python benchmarks/count_instructions.py

Seconds of small runs vary by a factor of two to four on a machine that others use; instructions vary by less than one
percent, so a change of a few percent shows. Needs Linux, `perf`, and counters that the kernel lets a user read
(kernel.perf_event_paranoid at most 2). The cache is empty at each start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _measure import table
from make import make_small_ranks

COMMANDS = (("info", 2), ("info", 8), ("report", 2), ("report", 8))


def count(command: list[str], folder: Path) -> int:
    """Return the instructions in user mode of a process and its threads."""
    result = folder / "perf"
    perf = ["perf", "stat", "-x", ",", "-e", "instructions:u", "-o", str(result), *command]
    environment = {**os.environ, "ETLOOM_CACHE": str(folder / "cache")}
    completed = subprocess.run(perf, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        sys.exit(f"{' '.join(command)}: {completed.stderr.strip()}")
    for line in result.read_text().splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2].startswith("instructions") and fields[0].isdecimal():
            return int(fields[0])
    sys.exit("perf cannot count instructions here; see kernel.perf_event_paranoid")


def main() -> None:
    if shutil.which("perf") is None:
        sys.exit("perf is not installed (Debian: linux-perf)")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        imports = count([sys.executable, "-c", "import numpy, polars"], Path(folder))
        rows.append(["imports of numpy and polars", f"{imports / 1e6:,.0f}", "1.0"])
        for verb, ranks in COMMANDS:
            command = [sys.executable, "-m", "etloom", verb, str(make_small_ranks(ranks))]
            if verb == "report":
                command += ["--out", f"{folder}/report.html"]
            number = count(command, Path(folder))
            shutil.rmtree(Path(folder, "cache"), ignore_errors=True)
            rows.append([f"{verb}, {ranks} ranks", f"{number / 1e6:,.0f}", f"{number / imports:.1f}"])
    table("Instructions in millions", ["", "instructions", "times the imports"], rows)


if __name__ == "__main__":
    main()
