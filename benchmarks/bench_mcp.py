"""The server for agents (`etloom mcp`) on an opened run: time of a call by tool, every call with other arguments.

    python benchmarks/bench_mcp.py --millions 2.7
    python benchmarks/bench_mcp.py --answers answers.json    # to compare the answers of two versions

The server prepares an opened run in the background, here before the calls; a table shows what questions take during
preparation. The first call of a tool, which may compute what later calls reuse, is a column of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _measure import Comparison, machine, note_comparisons, table
from make import FILES, SOURCES, make_ranks

from etloom.cli.mcp.opened_runs import OpenedRuns
from etloom.cli.mcp.preparation import prepare_run
from etloom.cli.mcp.tools import RunTools
from etloom.core import registry
from etloom.core.schema import TABLES

EVENTS_PER_RANK = 26_935
PAUSE_S = 1.0
"""Between questions that are asked during preparation."""
Call = tuple[str, dict[str, Any]]


def list_calls(tools: RunTools, count: int) -> Iterator[Call]:
    """Yield (tool, arguments): up to ``count`` of each tool, all different."""
    job = tools.runs.get_job("")
    by_name = "select name, sum(dur) as total from events where rank = {} group by name order by total desc"
    factors = [round(0.9 - 0.8 * index / count, 3) for index in range(count)]
    targets = ("kernel:*gemm*", "comm", "op:aten::copy_", "launch", "kernel", "host", "copy", "op:aten::*")
    yield "open_run", {}
    yield "summary", {}
    yield from (("findings", {"top": top + 1}) for top in range(count))
    yield from (("explain", {"number": number + 1}) for number in range(min(count, 8)))
    for index, factor in enumerate(factors):
        yield "what_if", {"changes": [f"{targets[index % len(targets)]} x{factor}"]}
    yield from (("predict", {"network": f"x{factor}"}) for factor in factors)
    yield from (("predict", {"network": f"{rate}Gbit/s"}) for rate in range(10, 10 + count))
    for by in ("category", "family", "operator", "kernel", "collective", "step"):
        yield "compare", {"before": "", "after": "", "by": by}
    yield from (("analyze", {"name": name}) for name in registry.list_plugins("analyses"))
    for rank in list(job)[:count]:
        yield "query", {"sql": by_name.format(rank)}
        yield (
            "query",
            {"sql": f"select id, ts, dur from events where cat = 'kernel' and dur > {1000 * rank} limit 20"},
        )
        yield (
            "query",
            {
                "sql": f"select rank, count(*) from events where dur > {1000 * rank} group by rank order by rank"
            },
        )
        first = job[rank].events["ts"].drop_nulls()
        start = int(first[len(first) // 2])
        yield "timeline", {"rank": rank, "start_ns": start, "end_ns": start + 1_000_000}
        yield "timeline", {"rank": rank, "start_ns": start, "end_ns": start + 10**12, "min_dur_ns": 10**5}
    yield from (("schema", {"table": name}) for name in TABLES)


def measure_calls(tools: RunTools, count: int) -> tuple[list[list[str]], dict[str, str]]:
    """Return a row of times by tool, and the answers by call."""
    times: dict[str, list[tuple[float, float]]] = {}
    answers = {}
    for name, arguments in list_calls(tools, count):
        begin, cpu = time.perf_counter(), time.process_time()
        answers[f"{name} {json.dumps(arguments)}"] = getattr(tools, name)(**arguments)
        times.setdefault(name, []).append((time.perf_counter() - begin, time.process_time() - cpu))
    rows = []
    for name, pairs in times.items():
        milliseconds = 1e3 * np.array(pairs)
        later = milliseconds[1:] if len(pairs) > 1 else milliseconds
        figures = [
            *milliseconds[0],
            *np.percentile(later[:, 0], [50, 95]),
            *np.percentile(later[:, 1], [50, 95]),
        ]
        note_comparisons(
            Comparison(
                f"mcp {name}, 95 % of the calls",
                float(figures[3]),
                "ms",
                baseline="its first call",
                ratio=float(figures[0] / max(figures[3], 1e-3)),
            )
        )
        rows.append([name, str(len(pairs)), *(f"{figure:,.0f}" for figure in figures)])
    return rows, answers


def measure_preparation(tools: RunTools, run: Path) -> list[list[str]]:
    """Prepare the run, and return the time of questions that are asked meanwhile, one by one, by tool."""
    thread = threading.Thread(target=prepare_run, args=(tools.runs, run.resolve()))
    job = tools.runs.get_job("")
    ranks, start = list(job), int(job[next(iter(job))].events["ts"].min())  # type: ignore[arg-type]
    times: dict[str, list[float]] = {}
    thread.start()
    for number in itertools.count():
        rank, count = ranks[number % len(ranks)], f"count(*) from events where dur > {1000 + number}"
        calls: list[Call] = [
            ("query", {"sql": f"select name, {count} and rank = {rank} group by name order by name"}),
            ("query", {"sql": f"select rank, {count} group by rank order by rank"}),
            ("timeline", {"rank": rank, "start_ns": start, "end_ns": start + 1_000_000 + number}),
        ]
        name, arguments = calls[number % len(calls)]
        begin = time.perf_counter()
        getattr(tools, name)(**arguments)
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
        thread.join(PAUSE_S)
        if not thread.is_alive():
            break
    return [
        [name, str(len(values)), *(f"{value:,.0f}" for value in np.percentile(values, [50, 95, 100]))]
        for name, values in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=float, default=10, help="events of the run (default: 10)")
    parser.add_argument("--calls", type=int, default=20, help="calls of most tools (default: 20)")
    parser.add_argument("--run", type=Path, help="a run to open instead of copies of a trace")
    parser.add_argument("--answers", type=Path, help="write the answers to this JSON file")
    options = parser.parse_args()
    machine()
    run = options.run or make_ranks(
        max(2, round(options.millions * 1e6 / EVENTS_PER_RANK)), SOURCES / FILES["kineto"]
    )
    tools = RunTools(OpenedRuns([run]))
    begin, cpu = time.perf_counter(), time.process_time()
    job = tools.runs.get_job("")
    events = sum(trace.rows("events") for trace in job.values())
    print(f"opened in {time.perf_counter() - begin:.1f} s ({time.process_time() - cpu:.1f} s of CPU)")
    begin, cpu = time.perf_counter(), time.process_time()
    waits = measure_preparation(tools, run)
    print(f"prepared in {time.perf_counter() - begin:.1f} s ({time.process_time() - cpu:.1f} s of CPU)")
    table("questions during preparation", ["", "calls", "p50 ms", "p95 ms", "longest ms"], waits)
    rows, answers = measure_calls(tools, options.calls)
    header = ["", "calls", "first ms", "first CPU", "p50 ms", "p95 ms", "p50 CPU", "p95 CPU"]
    table(f"{events:,} events: time of a call", header, rows)
    if options.answers:
        options.answers.write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
