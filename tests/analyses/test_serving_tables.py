"""The recorded vLLM decode against the tables that TraceLens computed of it: every row agrees, or is explained here."""

from __future__ import annotations

import ast
import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Job


@pytest.fixture(scope="module")
def folder(data: Path) -> Path:
    return data / "serving" / "vllm_decode_full"


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    return etloom.open(folder)


def rows(folder: Path, name: str) -> Iterator[dict[str, str]]:
    with (folder / "perf_csvs" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def key(row: dict[str, str]) -> tuple[str, str]:
    """Operator and shapes, as etloom writes them."""
    return row["name"], json.dumps(ast.literal_eval(row["Input Dims"]))


def ns(text: str) -> float:
    return 1000 * float(text)


@pytest.mark.slow
def test_almost_all_of_the_graph_is_attributed(job: Job) -> None:
    trace = job[0]
    replayed = etloom.analyze(job, "device-graphs")
    assert replayed.select("graph", "kernels").rows() == [("capture_32_FULL", 421)]
    assert replayed["attributed_pct"].item() >= 99
    durations = trace.events.select("dur", device_event="id")
    launched = trace.launches.join(durations, on="device_event")
    attributed, rest = (
        launched.filter(pl.col("captured").is_not_null()),
        launched.filter(pl.col("captured").is_null()),
    )
    whole = trace.events.filter(pl.col("cat").cast(pl.String).is_in(["kernel", "gpu_memcpy", "gpu_memset"]))[
        "dur"
    ].sum()
    assert attributed["dur"].sum() + rest["dur"].sum() == whole


def test_operators_with_their_arguments(job: Job, folder: Path) -> None:
    """TraceLens has a row per strides and set of kernels; here all calls of one shape are one row."""
    expected: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows(folder, "ops_unique_args"):
        expected[key(row)][0] += int(row["operation_count"])
        expected[key(row)][1] += ns(row["total_subtree_kernel_time_sum"])
    table = etloom.analyze(job, "unique-args", top=10_000).filter(pl.col("device_ns") > 0)
    got: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, shapes, calls, time in table.select(
        "name", "shapes", pl.col("count") + pl.col("replayed"), "device_ns"
    ).rows():
        got[name, shapes][0] += calls
        got[name, shapes][1] += time
    assert expected.keys() <= got.keys()
    for name, (calls, time) in expected.items():
        assert got[name][0] == calls, name
        assert got[name][1] == pytest.approx(time, abs=2 * calls), name


def test_operators_by_name(job: Job, folder: Path) -> None:
    table = etloom.analyze(job, "top-ops", by="device", top=10_000)
    got = {
        name: (calls, time)
        for name, calls, time in table.select(
            "name", pl.col("count") + pl.col("replayed"), "device_ns"
        ).rows()
    }
    for row in rows(folder, "ops_summary"):
        calls, time = got[row["name"]]
        assert calls == int(row["Count"])
        assert time == pytest.approx(ns(row["total_subtree_kernel_time_sum"]), abs=2 * calls * 72)


def test_unified_performance(job: Job, folder: Path) -> None:
    """Pseudo operators divide the kernels of one operator; vllm::rocm_unquantized_gemm is around aten::addmm."""
    table = etloom.analyze(job, "unique-args", top=10_000)
    got: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for name, shapes, calls, time in table.select(
        "name", "shapes", pl.col("count") + pl.col("replayed"), "device_ns"
    ).rows():
        got[name, shapes][0] += calls
        got[name, shapes][1] += time
    expected: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    pseudo = defaultdict(float)
    for row in rows(folder, "unified_perf_summary"):
        name = row["name"].partition("->")[0]
        if name.startswith("pseudo_op::"):
            pseudo[key(row)[1]] += ns(row["Kernel Time (µs)_sum"])
            continue
        expected[name, key(row)[1]][0] += int(row["operation_count"])
        expected[name, key(row)[1]][1] += ns(row["Kernel Time (µs)_sum"])
    for name, (calls, time) in expected.items():
        assert got[name][0] == calls, name
        # Of aten::index, TraceLens lists only the kernel that is not in an operator inside of it.
        synthetic = name[0] == "aten::index"
        assert got[name][1] == pytest.approx(time, abs=2000 if synthetic else 2 * calls), name
    kernels = job[0].events.filter(
        pl.col("name").cast(pl.String).str.contains("^_matmul_ogs|^_finalize_matmul")
    )
    assert sum(pseudo.values()) == pytest.approx(kernels["dur"].sum(), abs=200)


def test_flops_of_products(job: Job, folder: Path) -> None:
    """TraceLens adds the additions of a bias (M x N), which etloom's definition (2 M N K) leaves out."""
    table = etloom.analyze(job, "roofline", top=1000, peak_tflops=1300.0, bandwidth_gbs=5300.0)
    got: dict[tuple[str, str], Any] = {
        (row["name"], row["shapes"]): row for row in table.iter_rows(named=True)
    }
    checked = 0
    for row in rows(folder, "GEMM"):
        if not row["name"].startswith("aten::"):
            continue  # the operator around it, whose kernel is the same
        call = got[row["name"], json.dumps(ast.literal_eval(row["Input Dims_first"]))]
        m, n = int(row["param: M"]), int(row["param: N"])
        bias = m * n if row["param: bias"] == "True" else 0
        assert call["flops"] + bias == round(1e9 * float(row["GFLOPS_first"]))
        assert call["time_ns"] == pytest.approx(ns(row["Kernel Time (µs)_sum"]), abs=2 * call["calls"])
        checked += 1
    assert checked == 4


def test_modules_that_annotations_of_graph_kernels_name(data: Path) -> None:
    trace = etloom.open(data / "cases/turn3/cudagraph_annot.json", use_cache=False)[0]
    times = {
        "layers.0.attention.wq": 300_000, "layers.0.feed_forward.w1": 600_000, "layers.1": 450_000, "norm": 60_000
    }  # fmt: skip
    modules = etloom.analyze(trace, "module-view")
    innermost = modules.filter(pl.col("self_device_ns") > 0)
    assert dict(innermost.select("path", "self_device_ns").rows()) == times
    assert modules.filter(path="layers").select("device_ns", "self_device_ns", "kernels", "count").rows() == [
        (1_350_000, 0, 9, 3)
    ]
    assert dict(etloom.analyze(trace, "annotated-kernels").select("annotation", "total_ns").rows()) == times
    assert etloom.analyze(trace, "device-graphs").select(
        "graph", "replays", "kernels", "attributed_pct", "operators", "modules"
    ).rows() == [("graph 3", 3, 12, 100.0, None, 4)]
    assert etloom.analyze(trace, "module-view", step=6).filter(path="norm")["device_ns"].item() == 20_000


def test_a_graph_without_capture_and_annotations_is_not_attributed(data: Path, tmp_path: Path) -> None:
    plain = tmp_path / "trace.json"
    plain.write_text((data / "cases/turn3/cudagraph_annot.json").read_text().replace("module_fqn", "note"))
    table = etloom.analyze(etloom.open(plain, use_cache=False), "device-graphs")
    assert table.select("graph", "attributed_pct", "modules").rows() == [("graph 3", 0.0, 0)]
