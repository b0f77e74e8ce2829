"""What patterns say of odd and of ambiguous cases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.analyses import findings
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.rank_findings import find_in_rank
from etloom.analyses.findings.rank_view import RankView
from etloom.core import registry
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from support.small_traces import RankBuilder, find_costs, find_rows

BACK = "Memcpy DtoH (Device -> Pageable)"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy HtoD (Pinned -> Device)"


def measure_rank(view: RankView) -> pl.DataFrame:
    """A table of another pattern, whose function has the name of a function of etloom."""
    return pl.DataFrame({"kernels": [view.kernels.height]})


def test_stored_tables_of_functions_with_equal_names_are_distinct(tmp_path: Path) -> None:
    trace = RankBuilder().op("aten::mm", 0, 50).kernel(1, 5, 90).trace(tmp_path)
    trace.compute_once(find_in_rank)
    view = JobView(Job({0: trace}))[0]
    assert view.compute_once(measure_rank).columns == ["kernels"]


def test_a_stored_table_of_a_nested_function_is_not_that_of_its_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that one function makes share module and qualified name; `functools.partial` has neither."""
    pattern = registry.get("patterns", "expert-imbalance")
    tables = tuple(partial(_make_column, name) for name in ("first", "second"))
    nested = tuple(_make_table(name) for name in ("third", "fourth"))
    monkeypatch.setattr(pattern, "RANK_TABLES", (*tables, *nested, *pattern.RANK_TABLES))
    trace = RankBuilder().op("aten::mm", 0, 50).kernel(1, 5, 90).trace(tmp_path)
    trace.compute_once(find_in_rank)
    view = JobView(Job({0: trace}))[0]
    columns = [view.compute_once(table).columns for table in (*tables, *nested)]
    assert columns == [["first"], ["second"], ["third"], ["fourth"]]


def test_patterns_declare_whether_they_need_other_ranks(tmp_path: Path) -> None:
    """Those that do are not run on a single rank; the others never ask for times of other ranks."""
    declared = {
        name
        for name in registry.list_plugins("patterns")
        if getattr(registry.get("patterns", name), "NEEDS_OTHER_RANKS", False)
    }
    folder = Path(findings.__file__).parent
    asking = {
        file.stem.replace("_", "-")
        for file in folder.rglob("*.py")
        if re.search(r"\.(?:waiting_for|delaying)_ranks\b", file.read_text())
    }
    assert declared == asking == {"exposed-communication", "idle-host", "small-collectives"}
    trace = RankBuilder().op("aten::mm", 0, 50).kernel(1, 5, 90).trace(tmp_path)
    kept = find_in_rank(trace).findings
    rank_patterns = {
        name for name in registry.list_plugins("patterns") if registry.get("patterns", name).SCOPE == "rank"
    }
    assert set(kept) == rank_patterns - declared


def test_a_pattern_that_does_not_declare_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(registry.get("patterns", "exposed-communication"), "NEEDS_OTHER_RANKS")
    trace = RankBuilder().op("aten::mm", 0, 50).kernel(1, 5, 90).trace(tmp_path)
    with pytest.raises(EtloomError, match="NEEDS_OTHER_RANKS = True"):
        find_in_rank(trace)


def _make_column(column: str, view: RankView) -> pl.DataFrame:
    return pl.DataFrame({column: [view.span_ns]})


def _make_table(column: str) -> Callable[[RankView], pl.DataFrame]:
    def build(view: RankView) -> pl.DataFrame:
        return _make_column(column, view)

    return build


def test_results_copied_back_to_pageable_memory_are_exposed(tmp_path: Path) -> None:
    run = RankBuilder()
    for at in (0, 100, 200):
        run.op("aten::mm", at, 5).kernel(at + 1, at + 5, 45)
        run.op("aten::to", at + 10, 90).kernel(at + 11, at + 50, 50, BACK, "gpu_memcpy", call_us=88)
    (row,) = find_rows(run.trace(tmp_path), "copies")
    assert (row["cost_ns"], row["count"], row["operator"]) == (150_000, 3, "aten::to")
    assert "copy back less" in row["advice"]


def test_copies_of_two_kinds_are_one_finding(tmp_path: Path) -> None:
    run = RankBuilder().op("my::load", 0, 1_000).kernel(1, 5, 90, PAGEABLE, "gpu_memcpy", call_us=100)
    for at in range(20):
        run.kernel(110 + 10 * at, 112 + 10 * at, 4, PINNED, "gpu_memcpy", bytes=1000)
    (row,) = find_rows(run.trace(tmp_path), "copies")
    assert row["title"] == "21 copies of tensors and buffers, of 2 kinds"
    assert (row["cost_ns"], row["operator"]) == (100_000 + 20 * 4_000, "my::load")
    parts = [(part["place"], part["cost_ns"], part["count"]) for part in json.loads(row["parts"])]
    assert parts == [("pageable my::load", 100_000, 1), ("small my::load", 80_000, 20)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", ["dlrm", "nsys/h100_2gpu_1s.sqlite.gz", "hta_misc/negative_queue_a100.json.gz"]
)
def test_a_pattern_names_a_place_of_a_rank_once(data: Path, run: str) -> None:
    """Findings of one pattern and kind on several ranks are told as one, so on one rank there may not be two."""
    views = JobView(etloom.open(data / run))
    for name in registry.list_plugins("patterns"):
        pattern = registry.get("patterns", name)
        if pattern.SCOPE == "rank":
            for view in views.values():
                seen = [finding.kind for finding in pattern.find(view)]
                assert len(seen) == len(set(seen)), name


def test_a_row_of_small_collectives_ends_with_a_step(tmp_path: Path) -> None:
    run, rowed = RankBuilder(), RankBuilder()
    for at in range(10):
        run.step(at, 100 * at, 100).all_reduce(100 * at + 1, 100 * at + 10, 5, at)
        rowed.step(at, 100 * at, 100)
    assert find_costs(run.trace(tmp_path), "small-collectives") == []
    for at in range(10):
        rowed.all_reduce(301 + 2 * at, 310 + 8 * at, 5, at)
    (row,) = find_rows(rowed.trace(tmp_path), "small-collectives")
    assert (row["cost_ns"], row["count"], row["step"]) == (45_000, 10, 3)


@pytest.mark.parametrize(
    ("dur", "start", "cost"), [(1, 7, 90_000), (4, 6, None), (12, 5, None), (200, 0, 4_500)]
)
def test_a_row_of_small_collectives_ends_with_other_work(
    tmp_path: Path, dur: int, start: int, cost: int | None
) -> None:
    """Collectives of 10 us every 20, and a kernel in each gap (short, long, longer than the gap), or one that runs on
    while they do and hides all but the first 5 us."""
    run = RankBuilder()
    for at in range(10):
        run.all_reduce(1 + at, 100 + 20 * at, 10, at)
        if dur < 200 or not at:
            run.kernel(20 + at, 105 + 20 * at + start, dur, stream=20)
    rows = find_costs(run.trace(tmp_path), "small-collectives")
    assert rows == ([] if cost is None else [(cost, 10, None)])


def test_a_load_is_counted_once_with_recorded_stacks(tmp_path: Path) -> None:
    """The first counts too: no kernel is before it."""
    run = RankBuilder()
    for at in (0, 1_000, 2_000):
        frame = "torch/utils/data/dataloader.py(700): __next__"
        run.op(frame, at, 400, "python_function")
        run.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 390, "user_annotation")
        run.op("aten::mm", at + 410, 100).kernel(at + 420, at + 430, 500)
    (row,) = find_rows(run.trace(tmp_path), "data-loading")
    assert row["title"] == "nothing else runs while the host waits for the data loader (3 loads)"
    assert (row["cost_ns"], row["count"], row["name"]) == (1_200_000, 3, frame)


def compiling(steps: int, *at: float) -> RankBuilder:
    run = RankBuilder()
    for step in range(steps):
        run.step(step, 100 * step, 80)
    for start in at:
        run.op("compile_fx (dynamo_timed)", start, 10).op("inner (dynamo_timed)", start + 1, 5)
    return run


@pytest.mark.slow
def test_the_first_compilation_is_not_one_again(tmp_path: Path) -> None:
    """What began in the first of several steps may be warm-up, what came after it, between steps too, is not."""
    (row,) = find_rows(compiling(3, 20, 85, 210).trace(tmp_path), "recompilation")
    assert row["title"] == "torch.compile compiles after the first step, too (2 times)"
    assert (row["cost_ns"], row["confidence"]) == (20_000, "high")
    (row,) = find_rows(compiling(1, 20, 85).trace(tmp_path), "recompilation")
    said = "torch.compile compiles 2 times (only one step is annotated: may be the first time)"
    assert (row["title"], row["confidence"]) == (said, "low")
    (row,) = find_rows(compiling(0, 20).trace(tmp_path), "recompilation")
    assert row["title"] == "torch.compile compiles once (no step is annotated: may be the first time)"
    # One that is under way when the first step ends has begun in it.
    assert find_costs(compiling(2, 75).trace(tmp_path), "recompilation") == []


def test_threads_of_two_processes_are_distinguished(tmp_path: Path) -> None:
    run = compiling(3, 210)
    run.events.append(run.events[-2] | {"pid": 101, "ts": 212})
    assert find_costs(run.trace(tmp_path), "recompilation") == [(12_000, 2, "compile_fx (dynamo_timed)")]


def test_an_allocation_between_steps_is_in_steady_state(tmp_path: Path) -> None:
    run = RankBuilder()
    for step in range(3):
        at = 1_000 * step
        run.step(step, at, 800).op("aten::mm", at + 10, 700).kernel(at + 20, at + 30, 500)
        run.op("cudaMalloc", at + 820, 100, "cuda_runtime")
    (row,) = find_rows(run.trace(tmp_path), "allocator")
    assert (row["cost_ns"], row["count"], row["confidence"]) == (300_000, 3, "medium")
    assert row["title"] == "cudaMalloc is called 3 times and blocks the host"


def test_one_annotated_step_does_not_show_where_warm_up_ends(tmp_path: Path) -> None:
    run = RankBuilder().step(5, 0, 1_000)
    for at in range(20):
        run.kernel(10 + at, 50 + 10 * at, 5)
    (row,) = find_rows(run.op("cudaMalloc", 500, 40, "cuda_runtime").trace(tmp_path), "allocator")
    assert row["title"].endswith(" (only one step is annotated: may be warm-up)")
    assert (row["cost_ns"], row["confidence"]) == (40_000, "low")


SB = "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0_AFC1"
S_B = "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1"
BBS = "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1_SN_LDSB1_AFC1"


@pytest.mark.parametrize(
    ("kernel", "minor", "tf32"),
    [
        (SB, 0, ": this device has no TF32"),
        (S_B, 4, "; this device has TF32 too (xf32), but"),
        (S_B, 5, ": this device has no TF32 in hardware"),
        (BBS, 4, None),
        (SB.replace("_MI16x16x1", "_TT4x4"), 0, None),  # which no matrix core does
        ("ampere_sgemm_128x64_tn", 0, None),
    ],
)
def test_fp32_on_matrix_cores_of_amd(tmp_path: Path, kernel: str, minor: int, tf32: str | None) -> None:
    run = RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10, kernel)
    device = {"id": 0, "name": "AMD Radeon Graphics", "computeMajor": 9, "computeMinor": minor}
    rows = find_rows(run.trace(tmp_path, deviceProperties=[device]), "fp32-gemm")
    if tf32 is None:
        assert rows == []
        return
    (row,) = rows
    assert row["cost_ns"] == 5_000
    assert row["title"].endswith("aten::mm in fp32, at a quarter or less of the matrix cores' 16-bit speed")
    assert row["advice"].startswith(f"use autocast with bfloat16{tf32}")


def test_an_unknown_amd_device_gets_no_tf32_finding(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10, SB)
    (row,) = find_rows(run.trace(tmp_path, deviceProperties=[]), "fp32-gemm")
    assert row["advice"] == "use autocast with bfloat16; the cost assumes that bf16 shortens them by 50 %"


def test_products_with_a_vector_are_bound_by_memory(tmp_path: Path) -> None:
    name = "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false, cublasGemvParams>"
    assert (
        find_costs(RankBuilder().op("aten::mv", 0, 10).kernel(1, 5, 10, name).trace(tmp_path), "fp32-gemm")
        == []
    )
    tall = "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 2, 2, true, cublasGemvTensorStridedBatched<float const> >"
    assert (
        find_costs(RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10, tall).trace(tmp_path), "fp32-gemm")
        == []
    )
