"""Where the host's time goes: operators, and the calls of the device's runtime that they make."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

import etloom
from etloom import cli
from etloom.analyses.helpers import operator_times
from etloom.comparison.difference_tables import sum_operators
from etloom.core.trace import Trace
from support import small_traces

HOST = (10, 11)
CALLS = [
    small_traces.complete_event("cpu_op", "copy", 0, 100, *HOST),
    small_traces.complete_event(
        "python_function", "hook", 10, 50, *HOST
    ),  # runtime calls inside it are still the operator's
    small_traces.complete_event("cuda_runtime", "cudaMemcpyAsync", 20, 30, *HOST),
    small_traces.complete_event("cuda_driver", "cuMemcpy", 25, 20, *HOST),  # in that call: counts once
    small_traces.complete_event("cpu_op", "add", 60, 30, *HOST),
    small_traces.complete_event("cuda_runtime", "cudaLaunchKernel", 70, 5, *HOST),
    small_traces.complete_event("cpu_op", "view", 100, 40, *HOST),
    small_traces.complete_event("cuda_runtime", "cudaDeviceSynchronize", 200, 900, *HOST),  # of no operator
]


def top_ops(tmp_path: Path, *categories: str, **options: str) -> pl.DataFrame:
    path = tmp_path / "kineto_trace_0.json"
    run = small_traces.kineto() | {"traceEvents": [call for call in CALLS if call["cat"] in categories]}
    path.write_text(json.dumps(run))
    return etloom.analyze(etloom.open(path, use_cache=False)[0], "top-ops", **options)


EVERYTHING = ("cpu_op", "python_function", "cuda_runtime", "cuda_driver")


def test_runtime_calls_are_of_their_innermost_operator(tmp_path: Path) -> None:
    table = top_ops(tmp_path, *EVERYTHING)
    assert table.select("name", "exclusive_ns", "self_ns", "runtime_ns").rows() == [
        ("copy", 50_000, 20_000, 30_000),
        ("view", 40_000, 40_000, 0),
        ("add", 30_000, 25_000, 5_000),
    ]
    assert table["exclusive_pct"].to_list() == pytest.approx([100 * 50 / 120, 100 * 40 / 120, 25.0])


@pytest.mark.parametrize(
    ("by", "order"), [("self", "view add copy"), ("runtime", "copy add view"), ("exclusive", "copy view add")]
)
def test_the_order_follows_from_by(tmp_path: Path, by: str, order: str) -> None:
    assert top_ops(tmp_path, *EVERYTHING, by=by)["name"].to_list() == order.split()


def test_without_calls_their_time_is_unknown(tmp_path: Path) -> None:
    table = top_ops(tmp_path, "cpu_op")
    assert table.select("name", "exclusive_ns", "self_ns", "runtime_ns").rows() == [
        ("copy", 70_000, 70_000, None),
        ("view", 40_000, 40_000, None),
        ("add", 30_000, 30_000, None),
    ]


@pytest.mark.parametrize(
    ("ranks", "top", "names", "said"),
    [
        ((0,), "1", ["gemm"], "etloom: 1 of 2 rows; --top 2 shows all\n"),
        ((0,), "2", ["gemm", "ncclDevKernel_AllReduce_Sum"], ""),
        ((0, 1), "1", ["gemm", "gemm"], "etloom: 2 of 4 rows, 1 of each rank; --top 2 shows all\n"),
        ((0,), None, ["gemm", "ncclDevKernel_AllReduce_Sum"], ""),
    ],
)
def test_omitted_rows_are_reported(
    tmp_path: Path, ranks: tuple[int, ...], top: str | None, names: list[str], said: str
) -> None:
    folder = small_traces.write_run(tmp_path / "run", ranks)
    options = ["--no-cache", "--format", "json", *([] if top is None else ["--top", top])]
    out = CliRunner().invoke(cli.app, ["analyze", "kernel-breakdown", str(folder), *options])
    assert ([row["name"] for row in json.loads(out.stdout)], out.stderr) == (names, said)
    shares = [row["total_pct"] for row in json.loads(out.stdout)]
    assert shares[0] == pytest.approx(100 * 600 / 850)


@pytest.mark.parametrize(("max_events", "count"), [(1_000, 1), (2, 2)])
def test_operators_are_measured_once_if_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_events: int, count: int
) -> None:
    (trace,) = etloom.open(small_traces.write_run(tmp_path / "run", ranks=(0,)), use_cache=False).values()
    calls: list[Trace] = []
    measure = operator_times._measure_operators
    monkeypatch.setattr(operator_times, "MAX_KEPT_EVENTS", max_events)
    monkeypatch.setattr(
        operator_times, "_measure_operators", lambda trace: (calls.append(trace), measure(trace))[1]
    )
    assert sum_operators(trace, None).height and etloom.analyze(trace, "top-ops").height
    assert len(calls) == count
