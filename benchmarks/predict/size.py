"""Time and memory of a prediction for 512 ranks.

python benchmarks/predict/size.py [RUN]      default: tests/data/ddp_2, data-parallel on 2 ranks
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from requirements import state

import etloom

RANKS = 512
MAX_SECONDS, MAX_BYTES = 10, 2e9


def main(arguments: list[str]) -> None:
    run = arguments[0] if arguments else str(Path(__file__).parents[2] / "tests" / "data" / "ddp_2")
    job = etloom.open(run)
    begin, cpu = time.perf_counter(), time.process_time()
    prediction = etloom.predict(job, ranks=RANKS)
    rows = prediction.table.height
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    points = len(prediction.scenario.graph)
    print(
        f"{RANKS} ranks, {points:,} points, {rows:,} rows: {wall:.1f} s ({cpu:.1f} s of CPU), {peak / 1e6:,.0f} MB"
    )
    holds = wall < MAX_SECONDS and peak < MAX_BYTES
    name = Path(run).name
    state(f"{RANKS} ranks from {name}", "10 s and 2 GB", f"{wall:.1f} s and {peak / 1e9:.2f} GB", holds)


if __name__ == "__main__":
    main(sys.argv[1:])
