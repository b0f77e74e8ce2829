"""Analyses of launches, queues, idle time, copies, annotations and sequences: HTA's figures, and slow references."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from support.real_runs import open_run
from support.small_traces import RankBuilder

US = 1000
FOLDERS = {"sampled_all_steps": "hta_multirank", "simple_add_cp": "critical_path/simple_add.json.gz"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_bandwidths_equal_those_of_hta_if_one_memcpy_is_one_point(
    data: Path, golden: Path, folder: str
) -> None:
    job = open_run(data / FOLDERS[folder])
    ours = etloom.analyze(job, "memory-bandwidth-summary").sort("rank", "name")
    lines = (golden / "hta" / folder / "get_memory_bw_summary.csv").read_text().splitlines()[3:]
    theirs = sorted(
        (int(rank), name, *map(float, rest)) for rank, name, *rest in (line.split(",") for line in lines)
    )
    assert ours.select("rank", "name", "count").rows() == [row[:3] for row in theirs]
    for our, place in (("median_gb_per_s", 7), ("min_gb_per_s", 5), ("max_gb_per_s", 9)):
        assert ours[our].to_list() == pytest.approx([row[place] for row in theirs])
    series = etloom.analyze(job, "memory-bandwidth")
    for (rank, name), own in series.group_by("rank", "name"):
        assert own.sort("ts_ns")["gb_per_s"][-1] == 0.0, (rank, name)
    assert series["gb_per_s"].min() == 0.0


def below(trace: Trace, operator: str) -> dict[tuple[str, ...], int]:
    """Of each outermost call whose name contains ``operator`` the kernels launched below it: pattern -> calls."""
    events = {row["id"]: row for row in trace.events.iter_rows(named=True)}

    def outermost(event: int | None) -> int | None:
        found = None
        while event is not None:
            row = events[event]
            if operator in row["name"] and row["cat"] in ("cpu_op", "user_annotation", "python_function"):
                found = event
            event = row["parent"]
        return found

    kernels: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for launch, device in trace.launches.select("launch", "device_event").iter_rows():
        if launch is not None and (call := outermost(launch)) is not None:
            kernels[call].append((events[device]["ts"], device))
    patterns: dict[tuple[str, ...], int] = defaultdict(int)
    for call, work in kernels.items():
        if len(work) >= 3:
            patterns[(events[call]["name"], *(events[device]["name"] for _, device in sorted(work)))] += 1
    return patterns


@pytest.mark.parametrize(
    ("name", "operator"),
    [("nccl_ddp", "aten::cudnn_convolution"), ("nccl_ddp", "autograd::engine"), ("dlrm", "## forward")],
)
def test_sequences_against_a_walk(data: Path, name: str, operator: str) -> None:
    trace = open_run(data / name)[0]
    ours = etloom.analyze(trace, "kernel-sequences", operator=operator, top=10_000)
    expected = below(trace, operator)
    assert {tuple(pattern): count for pattern, count in ours.select("pattern", "count").rows()} == expected


def test_delays_of_operators(tmp_path: Path) -> None:
    run = RankBuilder()
    for at in (0, 100):
        run.op("aten::softmax", at, 30).kernel(at + 4, at + 10, 5, "max").kernel(at + 8, at + 15, 5, "sum")
    run.op("aten::softmax", 200, 30).kernel(206, 210, 5, "max")
    rows = etloom.analyze(run.trace(tmp_path), "operator-delays")
    assert rows.select(
        "operator", "kernels", "count", "launch_delay_ns", "runtime_delay_ns", "device_ns"
    ).rows() == [
        ("aten::softmax", "max -> sum", 2, 4_000.0, 6_000.0, 20_000),
        ("aten::softmax", "max", 1, 6_000.0, 4_000.0, 5_000),
    ]


def test_a_launch_outside_of_operators_belongs_to_its_annotation(tmp_path: Path) -> None:
    run = RankBuilder().op("ProfilerStep#1", 0, 90, "user_annotation")
    run.op("Optimizer.step", 10, 30, "user_annotation").kernel(14, 20, 5, "fill")
    run.op("aten::add", 20, 5).kernel(22, 26, 5, "add").kernel(60, 65, 5, "copy")
    rows = etloom.analyze(run.trace(tmp_path), "operator-delays")
    assert sorted(rows.select("operator", "kernels", "launch_delay_ns").rows()) == [
        ("Optimizer.step", "fill", 4_000.0),
        ("aten::add", "add", 2_000.0),
    ]


def test_annotations_of_host_and_device(tmp_path: Path) -> None:
    run = RankBuilder().op("forward", 0, 50, "user_annotation").op("block", 10, 20, "user_annotation")
    run.op("aten::mm", 2, 6).kernel(3, 8, 4, "mm").op("aten::add", 12, 6).kernel(13, 20, 7, "add")
    run.op("aten::mul", 60, 6).kernel(61, 65, 3, "mul").op("forward", 70, 10, "user_annotation")
    trace = run.trace(tmp_path)
    marks = etloom.analyze(trace, "annotations")
    assert marks.select("where", "name", "count", "total_ns", "max_ns").rows() == [
        # What the block launched is the block's own.
        ("device", "block", 1, 7_000, 7_000),
        ("device", "forward", 1, 4_000, 4_000),
        ("host", "forward", 2, 60_000, 50_000),
        ("host", "block", 1, 20_000, 20_000),
    ]
    # From 8 to 27 us; 60 us of 80 and 20 us of 80: from the first to the last.
    assert marks["pct"].to_list() == pytest.approx([700 / 19, 400 / 19, 75.0, 25.0])
    rows = etloom.analyze(trace, "annotated-kernels")
    assert rows.select("annotation", "name", "total_ns").rows() == [
        ("block", "add", 7_000),
        ("forward", "mm", 4_000),
        (None, "mul", 3_000),
    ]
    assert etloom.analyze(trace, "annotated-kernels", by="annotation", annotation="block")[
        "total_ns"
    ].to_list() == [7_000]


def test_the_share_of_an_annotation_counts_time_once(tmp_path: Path) -> None:
    run = RankBuilder().op("step", 0, 100, "user_annotation").op("step", 20, 60, "user_annotation")
    (row,) = etloom.analyze(run.trace(tmp_path), "annotations").rows(named=True)
    assert (row["total_ns"], row["pct"]) == (160_000, 100.0)


def test_short_kernels(tmp_path: Path) -> None:
    run = (
        RankBuilder()
        .op("aten::add", 0, 50)
        .kernel(1, 10, 2, "tiny")
        .kernel(2, 15, 2, "tiny")
        .kernel(3, 20, 50, "long")
    )
    (row,) = etloom.analyze(run.trace(tmp_path), "short-kernels").rows(named=True)
    assert row == {
        "name": "tiny",
        "operator": "aten::add",
        "count": 2,
        "count_pct": pytest.approx(200 / 3),
        "total_ns": 4_000,
        "mean_ns": 2_000.0,
        "gap_ns": 3_000,
    }


def test_a_gap_follows_all_earlier_work_of_the_stream(tmp_path: Path) -> None:
    run = (
        RankBuilder()
        .op("aten::add", 0, 9)
        .kernel(1, 10, 50, "long")
        .kernel(2, 15, 2, "tiny")
        .kernel(3, 70, 2, "tiny")
    )
    (row,) = etloom.analyze(run.trace(tmp_path), "short-kernels").rows(named=True)
    assert (row["count"], row["gap_ns"]) == (2, 10_000)


# What a vendor's attention and matrix products allocate, clear and view within themselves is their own.
OF_THE_VENDOR = [
    f"aten::{name}" for name in ("as_strided", "empty", "fill_", "permute", "view", "zero_", "zeros")
]


@pytest.mark.slow
def test_the_same_model_on_two_vendors(data: Path) -> None:
    tables = {}
    for vendor in ("h100", "mi300"):
        job = open_run(data / f"tracelens/{vendor}_qwen.json.gz")
        modules = etloom.analyze(job, "module-view")
        shared = ~pl.col("name").is_in(OF_THE_VENDOR)
        operators = etloom.analyze(job, "top-ops", top=10_000).filter(shared)
        arguments = etloom.analyze(job, "unique-args", top=10_000).filter(shared)
        # The same model makes the same calls with the same arguments, whatever they cost.
        tables[vendor] = (
            modules.select("path", "depth", "count", "instances").sort("path").rows(),
            dict(operators.select("name", "count").rows()),
            arguments.select("name", "shapes", "types", "values", "count").sort(pl.all()).rows(),
        )
        assert modules.filter(pl.col("depth") == 0)["kernels"].sum() > 1000
        top = modules.filter(pl.col("path") == "Qwen2Model").row(0, named=True)
        assert (
            top["device_ns"]
            == modules.filter(pl.col("path").str.starts_with("Qwen2Model"))["self_device_ns"].sum()
        )
    for ours, theirs in zip(tables["h100"], tables["mi300"], strict=True):
        assert ours == theirs
    assert tables["h100"][1]["aten::linear"] == 24 * 7  # layers, each with q, k, v, o, gate, up and down
    assert len(tables["h100"][1]) == 42


def test_an_empty_answer_is_explained(data: Path) -> None:
    job = open_run(data / "cpu/ddp_2")
    for name in (
        "idle-time",
        "launch-stats",
        "queue-length",
        "memory-bandwidth",
        "kernel-sequences",
        "module-view",
    ):
        with pytest.raises(AnalysisError) as raised:
            etloom.analyze(job, name)
        assert raised.value.remedy


BY_STEP = (
    *("annotations", "comm-overlap", "flops", "kernel-breakdown", "kernel-families", "kernel-overlap"),
    *(
        "launch-stats",
        "launches",
        "memory-bandwidth-summary",
        "mfu",
        "operator-delays",
        "queue-length",
        "recompute",
    ),
    *("steps", "temporal-breakdown", "top-ops", "unique-args"),
    *("annotated-kernels", "kernel-sequences", "memory-bandwidth"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "step"), [("nccl_ddp", 5), ("hta_multirank", 552)])
def test_a_requested_step_equals_the_trace_cut_to_it(data: Path, run: str, step: int) -> None:
    """These ask what happened in a step alone; a gap or a queue also depends on what was before it."""
    trace = open_run(data / run)[0]
    part = etloom.select(trace, step=step)
    answered = 0
    for name in BY_STEP:
        top = {"top": 10**6} if name in ("flops", "kernel-sequences", "top-ops", "unique-args") else {}
        try:
            asked, cut = etloom.analyze(trace, name, step=step, **top), etloom.analyze(part, name, **top)
        except AnalysisError:
            continue
        cut = cut.filter(pl.col("step") == step) if "step" in cut.columns else cut
        assert asked.sort(pl.exclude(pl.List)).rows() == cut.sort(pl.exclude(pl.List)).rows(), name
        answered += asked.height > 0
    assert answered >= len(BY_STEP) - 3


def test_modules_of_one_start_and_length_nest_by_their_records(tmp_path: Path) -> None:
    """B was recorded first, so A lies in it, whichever stands first in the file."""
    run = RankBuilder()
    for name, record in (("nn.Module: A_0", 9), ("nn.Module: B_0", 3)):
        run.op(name, 0, 100, "user_annotation", **{"Record function id": record})
    trace = etloom.link(run.op("aten::mm", 10, 20).kernel(12, 40, 8).trace(tmp_path))
    columns = ("path", "depth", "device_ns", "self_device_ns", "kernels")
    rows = etloom.analyze(trace, "module-view").select(columns).sort("depth").rows()
    assert rows == [("B", 0, 8_000, 0, 1), ("B/A", 1, 8_000, 8_000, 1)]
