"""Ring buffers: counters of lost operators, and the complete steps they hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.collector.launcher.collection import collect
from etloom.collector.options import CollectOptions
from support.paths import ROOT
from support.script_runs import Server, jobs_in_forks

pytestmark = [pytest.mark.torch, pytest.mark.slow]
pytest.importorskip("torch")

from etloom.collector.observer import BuildError, build_library  # noqa: E402

SCRIPTS = ROOT / "tests" / "collector" / "scripts"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the observer cannot be built here: {error}")


STEPS = """
import json, sys, time, torch
from concurrent.futures import ThreadPoolExecutor
from torch.profiler import record_function
from etloom.collector.observer import ExecutionTraceObserver
x = torch.ones(2)
def beside():
    for _ in range(5): x.neg()
pool = ThreadPoolExecutor(1)
observer = ExecutionTraceObserver(max_bytes=1 << 20, ring=True).register_callback(sys.argv[1])
assert observer.overwritten_ns() is None
observer.start()
for step in range(400):
    with record_function(f"ProfilerStep#{step}"):
        for _ in range(100): x.neg()
        pool.submit(beside).result()
observer.stop()
print(json.dumps([observer.counters(), observer.overwritten_ns(), time.monotonic_ns()]))
observer.unregister_callback()
"""
OF_A_STEP = 106  # operators, itself among them


def test_ring_counters(tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    path = tmp_path / "ring.etob"
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(path)], capture_output=True, text=True, check=True
    )
    counters, until_ns, now_ns = json.loads(done.stdout)
    assert counters["operators"] == 400 * OF_A_STEP
    lost = counters["overwritten_operators"]
    trace = etloom.read(path)
    operators = trace.nodes.filter(pl.col("rf_id").is_not_null())
    assert operators.height == 400 * OF_A_STEP - lost and lost > 50 * OF_A_STEP
    ring = trace.meta["header"]["observer"]["overwritten"]
    assert ring["overwritten_operators"] == lost and 0 < ring["overwritten_ns"] < until_ns < now_ns
    # The steps that are named whole are: each operator of theirs is there, on both threads. Those before are not named.
    events = trace.events.with_columns(pl.col("name").cast(pl.String), end=pl.col("ts") + pl.col("dur"))
    steps = events.filter(pl.col("name").str.starts_with("ProfilerStep#"))
    numbers = [int(name.partition("#")[2]) for name in steps["name"]]
    assert ring["whole_steps"] == numbers == list(range(numbers[0], 400)) and len(numbers) > 3
    for start, end in steps.select("ts", "end").iter_rows():
        assert events.filter(pl.col("ts").is_between(start, end)).height == OF_A_STEP
        assert start > ring["whole_since_ns"]
    partly = events.filter(pl.col("name").str.starts_with("etloom:overwritten step "))["name"].to_list()
    assert partly in ([], [f"etloom:overwritten step {numbers[0] - 1}"])
    (row,) = trace.stats.filter(pl.col("name") == "read.overwritten_operators").to_dicts()
    assert (
        row["count"] == lost
        and f"holds {len(numbers)} complete steps ({numbers[0]} to 399)" in row["example"]
    )
    shown = " ".join(call("info", path, "--no-cache")[1].split())
    assert f"holds {len(numbers)} whole steps ({numbers[0]}-399) of the last" in shown
    assert f"overwritten: {lost:,} operators of the" in shown
    (told,) = json.loads(call("info", path, "--no-cache", "--format", "json")[1])["rings"]
    assert told == {"rank": 0, **ring}


TRAINING = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import light, torch
net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(60):
    for _ in range(100): net(torch.ones(1, 2))
    net(torch.ones(1, 2)).sum().backward(); optimizer.step()
"""


def test_ring_of_a_job(tmp_path: Path, script_server: Server) -> None:
    out = tmp_path / "run"
    options = CollectOptions("2:500", sources="et", ring=True, max_bytes=1 << 20)
    with jobs_in_forks(script_server, tmp_path / "fork"):
        collected = collect([sys.executable, "-c", TRAINING], out, options)
    (line,) = collected.warnings
    facts = json.loads((out / "rank_0.json").read_text())
    steps = facts["steps"]
    assert steps == list(range(steps[0], 60)) and 5 < steps[0] < 59
    assert line.startswith(f"{out}: the ring holds {len(steps)} complete steps ({steps[0]}-59) of the last ")
    assert f"{facts['ring']['overwritten_operators']:,} operators of the " in line
    trace = etloom.open(out)[0]
    assert sorted(trace.events["step"].drop_nulls().unique()) == steps
    # Two records of the collector's own are no operators: each step's, and that of the one that was open.
    kept = trace.nodes.filter(pl.col("rf_id").is_not_null()).height
    assert facts["operators"] == kept - len(steps) - 1
    assert "60 whole steps" not in (tmp_path / "fork" / "stderr").read_text()
