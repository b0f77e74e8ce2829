"""Questions about recordings of the repository, answered through the tools of `etloom mcp` alone.

    python benchmarks/agents/run.py

Each expected answer is computed from the files with the standard library (`raw`), without etloom. Prints each wrong
answer, then right/asked; the exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from etloom.cli.mcp.opened_runs import OpenedRuns
from etloom.cli.mcp.tools import RunTools

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "data"


@dataclass(frozen=True)
class Question:
    """A question, the tool call that answers it, where its answer lies, and the function that computes it."""

    text: str
    tool: str
    path: tuple[Any, ...]
    expected: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)


@cache
def load(run: str, rank: int = 0) -> dict[str, Any]:
    with gzip.open(RECORDINGS / run / f"kineto_trace_{rank}.json.gz") as file:
        document: dict[str, Any] = json.load(file)
        return document


def raw(run: str, rank: int = 0) -> list[dict[str, Any]]:
    """Return the complete events of a rank as json.load reads them."""
    return [event for event in load(run, rank)["traceEvents"] if event.get("ph") == "X"]


def list_ranks(run: str) -> list[int]:
    files = (RECORDINGS / run).glob("kineto_trace_*.json.gz")
    return sorted(int(file.name.removeprefix("kineto_trace_").partition(".")[0]) for file in files)


def count_devices(run: str) -> dict[str, int]:
    used = {event["args"]["device"] for event in raw(run) if event.get("cat") == "kernel"}
    return dict(Counter(device["name"] for device in load(run)["deviceProperties"] if device["id"] in used))


def durations(run: str, rank: int = 0, cat: str = "", name: str = "") -> list[int]:
    """Return the durations (ns) of the events of a category whose name begins as given."""
    return [
        round(event["dur"] * 1000)
        for event in raw(run, rank)
        if cat in ("", event.get("cat")) and event["name"].startswith(name)
    ]


def step_ns(run: str, rank: int, step: int) -> int:
    return durations(run, rank, "user_annotation", f"ProfilerStep#{step}")[0]


def copied_bytes(direction: str) -> int:
    copies = [event for event in raw("gpu_small") if event["name"].startswith(f"Memcpy {direction}")]
    return sum(event["args"]["bytes"] for event in copies)


def list_steps(run: str) -> list[int]:
    marks = [event for event in raw(run) if event["name"].startswith("ProfilerStep#")]
    return sorted({int(event["name"].partition("#")[2]) for event in marks})


def ask_query(text: str, run: str, sql: str, expected: Callable[[], Any]) -> Question:
    return Question(text, "query", ("rows", 0, 0), expected, {"run": run, "sql": f"select {sql}"})


def ask_operator(name: str, run: str, rank: int, column: str, expected: Callable[[], Any]) -> Question:
    arguments = {"run": run, "name": "top-ops", "rank": rank, "options": {"name": name}}
    return Question(f"{column} of {name}, rank {rank}", "analyze", ("rows", 0, column), expected, arguments)


def ask_step(run: str, rank: int, step: int, row: int) -> Question:
    text = f"How long is step {step} of rank {rank}?"
    arguments = {"run": run, "name": "steps"}
    return Question(text, "analyze", ("rows", row, "dur_ns"), lambda: step_ns(run, rank, step), arguments)


def ask_copies(name: str, column: str, expected: Callable[[], Any]) -> Question:
    row = ["Memcpy HtoD", "Memcpy DtoD", "Memcpy DtoH", "Memset"].index(name)
    arguments = {"run": "gpu_small", "name": "memory-bandwidth-summary"}
    return Question(f"{column} of {name}", "analyze", ("rows", row, column), expected, arguments)


GPU, DDP = "gpu_small", "ddp_2"
QUESTIONS = [
    Question("Which ranks?", "open_run", ("ranks",), lambda: list_ranks(DDP), {"run": DDP}),
    Question("Which steps?", "open_run", ("steps",), lambda: list_steps(DDP), {"run": DDP}),
    Question("Which steps?", "open_run", ("steps",), lambda: list_steps(GPU), {"run": GPU}),
    Question("Which device?", "open_run", ("devices",), lambda: count_devices(GPU), {"run": GPU}),
    *(
        Question(
            f"How many events of {cat}?",
            "open_run",
            ("categories", cat),
            lambda cat=cat: len(durations(GPU, 0, cat)),
            {"run": GPU},
        )
        for cat in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op")
    ),
    ask_step(DDP, 0, 1, 0),
    ask_step(DDP, 0, 2, 1),
    ask_step(DDP, 1, 1, 2),
    ask_step(DDP, 1, 2, 3),
    ask_operator("aten::mm", DDP, 0, "count", lambda: len(durations(DDP, 0, "cpu_op", "aten::mm"))),
    ask_operator("aten::addmm", DDP, 1, "total_ns", lambda: sum(durations(DDP, 1, "cpu_op", "aten::addmm"))),
    ask_operator("aten::t", DDP, 1, "count", lambda: sum(e["name"] == "aten::t" for e in raw(DDP, 1))),
    ask_operator("aten::mm", GPU, 0, "count", lambda: len(durations(GPU, 0, "cpu_op", "aten::mm"))),
    ask_copies("Memcpy HtoD", "bytes", lambda: copied_bytes("HtoD")),
    ask_copies("Memcpy DtoD", "count", lambda: len(durations(GPU, 0, "gpu_memcpy", "Memcpy DtoD"))),
    ask_copies("Memcpy DtoH", "time_ns", lambda: sum(durations(GPU, 0, "gpu_memcpy", "Memcpy DtoH"))),
    ask_copies("Memset", "count", lambda: len(durations(GPU, 0, "gpu_memset"))),
    ask_query(
        "How long do kernels run in all?",
        GPU,
        "sum(dur) from events where cat = 'kernel'",
        lambda: sum(durations(GPU, 0, "kernel")),
    ),
    ask_query(
        "How long is the longest kernel?",
        GPU,
        "max(dur) from events where cat = 'kernel'",
        lambda: max(durations(GPU, 0, "kernel")),
    ),
    ask_query(
        "How many kernels have names of their own?",
        GPU,
        "count(distinct name) from events where cat = 'kernel'",
        lambda: len({event["name"] for event in raw(GPU) if event.get("cat") == "kernel"}),
    ),
    ask_query(
        "How many launches of kernels?",
        GPU,
        "count(*) from events where name = 'cudaLaunchKernel'",
        lambda: sum(event["name"] == "cudaLaunchKernel" for event in raw(GPU)),
    ),
    ask_query(
        "How many streams run kernels?",
        GPU,
        "count(distinct stream) from events where cat = 'kernel'",
        lambda: len({event["args"]["stream"] for event in raw(GPU) if event.get("cat") == "kernel"}),
    ),
    ask_query(
        "How many operators on rank 1?",
        DDP,
        "count(*) from events where cat = 'cpu_op' and rank = 1",
        lambda: len(durations(DDP, 1, "cpu_op")),
    ),
    ask_query(
        "How long is the longest operator of rank 0?",
        DDP,
        "max(dur) from events where cat = 'cpu_op' and rank = 0",
        lambda: max(durations(DDP, 0, "cpu_op")),
    ),
    ask_query(
        "How many threads of rank 0 run operators?",
        DDP,
        "count(distinct tid) from events where cat = 'cpu_op' and rank = 0",
        lambda: len({event["tid"] for event in raw(DDP) if event.get("cat") == "cpu_op"}),
    ),
    ask_query(
        "How long do copies run in all?",
        GPU,
        "sum(dur) from events where cat = 'gpu_memcpy'",
        lambda: sum(durations(GPU, 0, "gpu_memcpy")),
    ),
]


def follow(content: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path of an answer; a table is followed by the number of a row and a column."""
    for key in path:
        if isinstance(content, dict) and "columns" in content and isinstance(key, int):
            row = content["rows"][key]
            content = dict(zip(content["columns"], row, strict=True)) | dict(enumerate(row))
        else:
            content = content[key]
    return content


def answer(tools: RunTools, question: Question) -> Any:
    """Return the answer of the tool, or the text of its error."""
    reply = getattr(tools, question.tool)(**question.arguments)
    try:
        return follow(reply.content, question.path)
    except (KeyError, IndexError, TypeError):
        return str(reply)[:200]


def is_right(value: Any, expected: Any) -> bool:
    """Compare; sums of times may differ by the rounding of each event to 1 ns."""
    if isinstance(expected, int) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol=1e-5)
    return bool(value == expected)


def main() -> int:
    tools = RunTools(OpenedRuns([RECORDINGS]))
    wrong = 0
    for question in QUESTIONS:
        value, expected = answer(tools, question), question.expected()
        if not is_right(value, expected):
            wrong += 1
            print(f"{question.text} {question.arguments}: expected {expected}, got {value}")
    print(f"{len(QUESTIONS) - wrong}/{len(QUESTIONS)} right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
