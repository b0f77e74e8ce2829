"""Times of single collectives next to those of ASTRA-sim's analytical network (folder astra_sim of ETLOOM_DATA).

    python benchmarks/predict/astra_sim.py [DIFFERENCES]      prints the shares, and so many rows that differ

Nothing is fitted; a row counts as equal within 1 %.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import polars as pl
from requirements import DATA, state

from etloom.simulator.network.astra_sim import Dimension, Settings, collective_time, message_time

TOLERANCE = 0.01


def compute_row(row: dict[str, Any]) -> int | None:
    """Return the modelled time of a row, ns."""
    fields = (row[name].split("x") for name in ("topology", "npus", "bandwidth_GBps", "latency_ns"))
    sizes = list(zip(*fields, strict=True))
    algorithms = row["algorithm"].split("x")
    dimensions = [
        Dimension(kind, int(n), float(rate), float(latency), algorithm)
        for (kind, n, rate, latency), algorithm in zip(sizes, algorithms, strict=True)
    ]
    settings = Settings(
        aware=row["backend"] == "aware",
        endpoint_delay=row["endpoint_delay_ns"],
        local_mem_bw=row["local_mem_bw_GBps"],
        optimization=row["optimization"],
        splits=row["splits"],
        policy=row["policy"],
        active_chunks=row["active_chunks"],
        queues=row["queues_per_dim"],
    )
    size = row["size_bytes"]
    if row["collective"] == "send":
        (dimension,) = dimensions
        first, last = map(int, row["members"].split("-"))
        distance = abs(first - last)
        ring = min(distance, dimension.size - distance)
        hops = {"Ring": ring, "Switch": 2}.get(dimension.kind, 1)
        return message_time(size, hops, dimension, settings.aware)
    members = None
    if row["members"]:
        members = [int(rank) for rank in re.findall(r"\d+", row["members"])]
    name, relation = re.match(r"(\w+)(?: (after|beside) .*)?$", row["collective"]).groups()
    late = re.findall(r"(\d+):([\d.]+)", str(row["late_us"] or ""))
    begins = {int(rank): round(1e3 * float(us)) for rank, us in late}
    time = collective_time(name, size, dimensions, settings, members, begins)
    if relation is None or time is None:
        return time
    if "compute" in row["collective"]:  # beside 50 us of computation, then 7 us of computation
        return max(time, 50_000) + 7_000
    return 2 * time


def main(arguments: list[str]) -> None:
    file = DATA / "astra_sim" / "collectives.csv.gz"
    if not file.exists():
        print(f"{file}: not there; set ETLOOM_DATA")
        return
    rows = pl.read_csv(file, infer_schema_length=None)
    total, equal, exact = Counter(), Counter(), Counter()
    differences = []
    for row in rows.iter_rows(named=True):
        name = row["collective"].split(" ")[0] if row["set"] != "p2p" else "message"
        key = (row["set"], row["backend"], name)
        total[key] += 1
        time = compute_row(row)
        if time is not None and abs(time - row["cycles"]) <= TOLERANCE * row["cycles"]:
            equal[key] += 1
            exact[key] += time == row["cycles"]
        else:
            differences.append((row, time))
    print("set      backend  collective      rows  within 1 %  to the ns")
    for key in sorted(total):
        print(f"{key[0]:8} {key[1]:8} {key[2]:14} {total[key]:5}  {equal[key]:10}  {exact[key]:9}")
    print(f"{equal.total():,} of {total.total():,} rows within 1 %, {exact.total():,} to the ns")
    within = f"{equal.total():,} of {total.total():,}"
    state("ASTRA-sim, values within 1 %", "all", within, equal.total() == total.total())
    names = (
        "backend",
        "topology",
        "npus",
        "latency_ns",
        "collective",
        "algorithm",
        "splits",
        "optimization",
        "size_bytes",
    )
    for row, time in differences[: int(arguments[0]) if arguments else 0]:
        print(*(row[name] for name in names), row["cycles"], time)


if __name__ == "__main__":
    main(sys.argv[1:])
