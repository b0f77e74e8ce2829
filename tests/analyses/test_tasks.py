"""Tasks: slow operators with attainable time, what it rests on, the saving, and columns of a report of ncu."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.analyses import tasks
from etloom.analyses.flops import measured_tables
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job
from support.planted_operators import PLANTED
from support.small_traces import OperatorTraceBuilder, complete_event

H100 = "NVIDIA H100 80GB HBM3"
FEW_TILES = [[256, 65536], [65536, 512]]
SQUARE = [[4096, 4096], [4096, 4096]]
LARGE = [[8192, 4096], [4096, 8192]]


def run_products(folder: Path, products: list[tuple[list[list[int]], float]], device: str | None) -> Job:
    """A run of products (shapes, us each): three calls of each, with a kernel that is named after its number."""
    builder = OperatorTraceBuilder()
    at = 0.0
    for number, (sizes, each) in enumerate(products):
        for _ in range(3):
            kernel = f"void gemm_{number}<float, 4>(int)"
            builder.operator("aten::mm", at, 50, sizes).kernel(kernel, at + 5, at + 10, each)
            at += each + 100
    return builder.open(folder, device)


def work(sizes: list[list[int]]) -> tuple[float, float]:
    """(FLOPs, bytes) of a product in 16 bits."""
    (m, k), (_, n) = sizes
    return 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)


def test_a_slow_product_rests_on_the_roofline(tmp_path: Path) -> None:
    (row,) = etloom.analyze(run_products(tmp_path, [(FEW_TILES, 400)], H100), "tasks").to_dicts()
    flops, size = work(FEW_TILES)
    limit = max(flops / 989.4e3, size / 3350)  # bf16 TFLOP/s and GB/s of the device
    assert (row["name"], row["calls"], row["rests_on"], row["basis"]) == ("aten::mm", 3, "roofline", "device")
    assert row["attainable_ns"] == pytest.approx(limit, rel=1e-3)
    assert row["saved_ns"] == pytest.approx(3 * (400_000 - limit), rel=1e-3)
    assert row["time_pct"] == 100
    assert "too few tiles" in row["reason"]
    assert row["event"] in (0, 3, 6)


def test_the_nearest_limit_is_a_faster_sibling(tmp_path: Path) -> None:
    products = [(SQUARE, 1000.0), (LARGE, 700.0)]
    (flops, size), (best_flops, best_size) = work(SQUARE), work(LARGE)
    expected = 700e3 * max(flops / best_flops, size / best_size)
    for folder, device in (("known", H100), ("unknown", None)):
        (tmp_path / folder).mkdir()
        table = etloom.analyze(run_products(tmp_path / folder, products, device), "tasks", min_pct=0)
        row = table.row(0, named=True)
        assert row["shapes"] == "[[4096, 4096], [4096, 4096]]"
        assert row["rests_on"] == "sibling aten::mm [[8192, 4096], [4096, 8192]]"
        assert row["attainable_ns"] == pytest.approx(expected)
        assert (table["rests_on"][1:] == "roofline").all()  # the sibling itself is at a third of the roofline


@pytest.fixture(autouse=True)
def without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of etloom[devices] are not read, whether or not they are installed."""
    monkeypatch.setattr(measured_tables, "find_tables", lambda: None)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Install tables in which an H100 takes the time for the product SQUARE, in us, and as much per FLOP around it."""

    def install(micros: float) -> None:
        folder = tmp_path / f"tables{micros}"
        path = folder / "h100_sxm" / "gemm_perf" / "vllm" / "0.1.0" / "gemm_perf.parquet"
        path.parent.mkdir(parents=True)
        rows = [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": 4096, "latency": micros / 1e3 * m * n / 4096**2}
            for m in (2048, 4096, 8192)
            for n in (2048, 4096, 8192)
        ]
        pl.DataFrame(rows).write_parquet(path)
        monkeypatch.setattr(measured_tables, "find_tables", lambda: folder)

    return install


@pytest.mark.slow
def test_times_measured_on_the_device_come_first(measured: Callable[[float], None], tmp_path: Path) -> None:
    job = run_products(tmp_path, [(SQUARE, 500.0), (LARGE, 500.0)], H100)
    measured(250.0)
    row = etloom.analyze(job, "tasks").row(0, named=True)
    assert (row["shapes"], row["rests_on"]) == ("[[4096, 4096], [4096, 4096]]", "table, 90 % within 17 %")
    assert row["attainable_ns"] == pytest.approx(250e3, rel=0.1)
    peaks = {"name": "H100 SXM", "match": "H100", "bandwidth_gbs": 1000, "matrix_tflops": {"bf16": 100}}
    (tmp_path / "peaks.json").write_text(json.dumps({"devices": [{**peaks, "vector_tflops": {"fp32": 10}}]}))
    with_peaks = etloom.analyze(job, "tasks", device_peaks=str(tmp_path / "peaks.json"))
    assert with_peaks.row(0, named=True)["attainable_ns"] == row["attainable_ns"]
    measured(
        450.0
    )  # within 20 % of what this device was measured to take, whatever siblings and the roofline say
    assert etloom.analyze(run_products(tmp_path, [(SQUARE, 500.0)], H100), "tasks").is_empty()
    assert (
        etloom.analyze(run_products(tmp_path, [(FEW_TILES, 400)], H100), "tasks")["rests_on"][0] == "roofline"
    )


@pytest.mark.parametrize("device", [H100, None])
def test_operators_near_their_limits_are_no_tasks(tmp_path: Path, device: str | None) -> None:
    products = [(SQUARE, 200.0), (LARGE, 800.0)]
    assert etloom.analyze(run_products(tmp_path, products, device), "tasks").is_empty()


def test_the_device_may_be_named(tmp_path: Path) -> None:
    job = run_products(tmp_path, [(FEW_TILES, 400)], None)
    assert etloom.analyze(job, "tasks").is_empty()
    assert etloom.analyze(job, "tasks", device="H100").height == 1
    assert etloom.analyze(job, "tasks", device="H100", min_pct=99).is_empty()
    for options, message in (
        ({"device": "H99"}, "unknown device"),
        ({"min_pct": 101.0}, "percentage from 0 to 100"),
    ):
        with pytest.raises(EtloomError, match=message):
            etloom.analyze(job, "tasks", **options)


LONG = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","{name}","Achieved Occupancy","%","20.0"
"0","1","{name}","DRAM Throughput","%","10.5"
"0","1","{name}","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","inst","3"
"0","1","{name}","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","inst","1"
"1","1","{name}","Achieved Occupancy","%","30.0"
"2","1","other","Achieved Occupancy","%","90.0"
"""
RAW = (
    '"ID","Kernel Name","sm__warps_active.avg.pct_of_peak_sustained_active",'
    '"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",'
    '"smsp__average_warp_latency_issue_stalled_long_scoreboard.ratio",'
    '"smsp__average_warp_latency_issue_stalled_wait.ratio",'
    '"smsp__average_warp_latency_issue_stalled_selected.ratio"\n'
    '"","","%","%","inst","inst","inst"\n"0","{name}","20","10.5","3","1","50"\n"1","{name}","30","10.5","3","1","50"\n'
)


@pytest.mark.parametrize("text", [LONG, RAW])
@pytest.mark.parametrize("name", ["void gemm_0<float, 4>(int)", "gemm_0"])
def test_a_report_of_ncu_is_joined_by_the_names_of_kernels(tmp_path: Path, text: str, name: str) -> None:
    report = tmp_path / "report.csv"
    report.write_text(text.format(name=name))
    job = run_products(tmp_path, [(FEW_TILES, 400), ([[256, 8192], [8192, 512]], 400)], H100)
    rows = {row["shapes"]: row for row in etloom.analyze(job, "tasks", ncu=str(report)).to_dicts()}
    row, other = rows["[[256, 65536], [65536, 512]]"], rows["[[256, 8192], [8192, 512]]"]
    assert (row["occupancy_pct"], row["dram_pct"]) == (25.0, 10.5)
    assert row["stall"] == "long scoreboard (75 %)"
    assert (other["occupancy_pct"], other["dram_pct"], other["stall"]) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the report"),
        ("nothing", "no header"),
        ('"ID","Kernel Name"\n"0","k"\n', "no occupancy"),
        (RAW.format(name="void gemm_0<double, 4>(int)"), "no kernel of the slow operators"),
    ],
)
def test_a_wrong_report_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    report = tmp_path / "report.csv"
    if text is not None:
        report.write_text(text)
    with pytest.raises(AnalysisError, match=message):
        etloom.analyze(run_products(tmp_path, [(FEW_TILES, 400)], H100), "tasks", ncu=str(report))


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_operator_is_the_first_task(name: str, data: Path) -> None:
    table = etloom.analyze(data / "kernels" / "standalone" / f"{name}.json.gz", "tasks", device="MI300X")
    assert PLANTED[name] in table["reason"][0]


@pytest.mark.parametrize("launches", [1, 2, 3, 10])
@pytest.mark.parametrize("delay", [10, 190])
def test_a_device_that_waits_for_the_host_is_stated_first(tmp_path: Path, launches: int, delay: int) -> None:
    """Each call takes 225 us on the host and 25 us on the device, which no faster kernel changes much."""
    builder = OperatorTraceBuilder()
    for call in range(launches):
        builder.operator("aten::mm", 225 * call, 225, [[1024, 1024]] * 2)
        builder.kernel("gemm", 225 * call + delay, 225 * call + delay + 6, 25)
    job = builder.open(tmp_path, "AMD Instinct MI300X")
    first = etloom.analyze(job, "findings").row(0, named=True)
    assert first["pattern"] == "launch-bound" and first["title"].startswith("host-bound: the device ")
    assert first["cost_ns"] >= 100_000 * launches
    table = etloom.analyze(job, "tasks")
    assert table["device_pct"].item() == pytest.approx(100 * 25 / 225, abs=1.5)
    assert next(tasks.remarks(table)).startswith("the device of rank 0 runs for 11 % of the recording")


def test_a_busy_device_has_no_remark_on_the_host(tmp_path: Path) -> None:
    builder = OperatorTraceBuilder()
    for call in range(3):
        builder.operator("aten::mm", 50 * call, 40, [[1024, 1024]] * 2)
        builder.kernel("gemm", 50 * call + 5, 20 + 400 * call, 400)
    job = builder.open(tmp_path, "AMD Instinct MI300X")
    table = etloom.analyze(job, "tasks")
    assert table["device_pct"].item() > 95
    assert [line for line in tasks.remarks(table) if "idle" in line] == []
    assert "launch-bound" not in etloom.analyze(job, "findings")["pattern"].to_list()


def test_operators_of_other_threads_neither_launch_nor_hide_the_idle_device(tmp_path: Path) -> None:
    builder = OperatorTraceBuilder().operator("aten::mm", 0, 10_000, [[1024, 1024]] * 2)
    builder.kernel("gemm", 500, 510, 100)
    builder.events.append(complete_event("cpu_op", "aten::relu", 0, 12_000, 10, 12))
    findings = etloom.analyze(builder.open(tmp_path, "AMD Instinct MI300X"), "findings")
    row = findings.filter(pattern="launch-bound").row(0, named=True)
    assert (row["operator"], row["cost_ns"]) == ("aten::mm", 9_900_000)
