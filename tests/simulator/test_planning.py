"""Ranked layouts of training jobs: closed formulas, laws, and answers to wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

import etloom
from etloom import cli
from etloom.core.errors import AnalysisError, EtloomError
from etloom.simulator.interval_classes import ERRORS, combine_errors, explain_interval
from etloom.simulator.network.model import NetworkModel
from etloom.simulator.network.topology import Level, Topology, get_preset
from etloom.simulator.planning import AXES, plan
from etloom.simulator.training_jobs import (
    Cluster,
    list_jobs,
    parse_cluster,
    parse_job,
    read_cluster,
    read_job,
)
from etloom.simulator.training_shapes import Layout, ModelShape, count_stage_parameters, estimate_memory
from etloom.simulator.training_step import StepConstants, StepTimes, predict_steps
from support.paths import ROOT

PUBLISHED_BILLIONS = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
    "mixtral-8x7b": 46.70,
    "deepseek-v3-like": 671.03,
    "qwen3-moe-like": 235.09,
}
JOB = {
    "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 8192, "gated": True,
    "vocabulary": 32000, "sequence": 4096, "batch": 64,
}  # fmt: skip
GOLDEN = [
    (1, 1, 1, 16, "zero1", 4, "none"),
    (1, 1, 1, 8, "zero1", 8, "none"),
    (1, 2, 6, 8, "zero2", 1, "none"),
]
"""The first rows (tp, pp, vp, dp, sharding, micro-batch, recomputation) for `JOB` on `CLUSTER`."""
CLUSTER = {"device": "h100", "gpus": 16, "network": "dgx-h100"}


def scale_network(cluster: Cluster, factor: float) -> Cluster:
    levels = tuple(
        replace(level, bytes_per_second=level.bytes_per_second * factor) for level in cluster.topology.levels
    )
    return replace(cluster, topology=Topology("scaled", levels))


@pytest.mark.parametrize("name", list_jobs())
def test_example_models_have_the_published_number_of_parameters(name: str) -> None:
    count = float(read_job(name).model.count_parameters())
    assert count / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], abs=0.005)


def test_a_dense_model_needs_six_flops_per_parameter_and_token() -> None:
    model = read_job("llama3-8b").model
    attention = 6 * 32 * 4096 * 8192  # causal: half of 12 x layers x hidden x sequence
    embedding = 128256 * 4096
    products = float(model.count_parameters()) - embedding
    assert float(model.count_token_flops()) == pytest.approx(6 * products + attention)


def test_memory_of_a_dense_model_follows_closed_formulas() -> None:
    model = ModelShape(24.0, 2048.0, 16.0, 4096.0, 32000.0)
    parameters = 24 * (12 * 2048**2 + 2 * 2048) + 32000 * 2048
    assert float(model.count_parameters()) == parameters
    options: dict[str, Any] = {"gradient_bytes": 4, "state_bytes": 12, "fused": True}
    single = estimate_memory(model, Layout(2.0, 1.0, 1.0, 1.0, 1.0, recompute=0.0), **options)
    assert float(single["parameters"]) == 2 * parameters
    assert float(single["gradients"]) == 4 * parameters
    assert float(single["optimizer"]) == 12 * parameters
    # 32 bytes per token and hidden element (Korthikanti et al. 2022: 34, with two of dropout's masks).
    assert float(single["activations"]) == 24 * 32 * 2 * 4096 * 2048
    sharded = estimate_memory(model, Layout(2.0, 1.0, 1.0, 8.0, 1.0, sharding=1.0, recompute=0.0), **options)
    assert float(sharded["optimizer"]) == 12 * parameters / 8
    assert float(sharded["gradients"]) == 4 * parameters
    fsdp = estimate_memory(model, Layout(2.0, 1.0, 1.0, 8.0, 1.0, sharding=3.0, recompute=0.0), **options)
    assert float(fsdp["gradients"] + fsdp["optimizer"]) == 16 * parameters / 8
    assert float(fsdp["parameters"]) == (2 * 2 + 4) * parameters / 24  # two layers, and the gradients of one
    full = estimate_memory(model, Layout(2.0, 1.0, 1.0, 1.0, 1.0, recompute=2.0), **options)
    assert float(full["activations"]) == (24 * 2 + 32) * 2 * 4096 * 2048


@pytest.mark.parametrize(("chunks", "first"), [(1, 4.0), (2, 4 + 3 / 2), (6, 4 + 3 / 6)])
def test_stages_keep_the_activations_of_the_schedule(chunks: int, first: float) -> None:
    """Compare with 1F1B, and its interleaved form (Korthikanti et al. 2022: p (1 + (p - 1) / (p v)) micro-batches)."""
    model = ModelShape(24.0, 2048.0, 16.0, 4096.0, 32000.0)
    layout = Layout(1.0, 16.0, 2.0, 1.0, 4.0, context=2.0, chunks=float(chunks), recompute=0.0)
    options: dict[str, Any] = {"gradient_bytes": 4, "state_bytes": 12, "fused": True}
    memory = estimate_memory(model, layout, **options)
    stage = 24 / 4 * 32 * 4096 * 2048 / 2 / 2  # of a micro-batch, divided by tp and cp
    last = (4 * (chunks - 1) + 1) / chunks
    assert float(memory["activations"]) == pytest.approx(first * stage)
    logits = 8 * 4096 / 2 * 32000 / 2
    assert float(memory["logits"]) == pytest.approx(max(logits - (first - last) * stage, 0))


def test_stages_and_tensor_parallelism_divide_parameters() -> None:
    model = read_job("mixtral-8x7b").model
    whole, experts = count_stage_parameters(model, Layout(1.0, 1.0, 1.0, 1.0, 1.0))
    assert float(whole + experts) == float(model.count_parameters())
    _, divided = count_stage_parameters(model, Layout(1.0, 1.0, 2.0, 4.0, 4.0, expert=8.0))
    assert float(divided) == float(experts) / 4 / 8


def test_groups_of_an_axis_share_the_network_of_their_nodes() -> None:
    network = NetworkModel(get_preset("dgx-h100"))
    size = 1e9
    inside = network.compute_times("all_reduce", size, 8.0, 1.0)
    across = network.compute_times("all_reduce", size, np.array([16.0, 16.0]), np.array([1.0, 8.0]))
    assert inside < across[0] < across[1]
    # 16 ranks of two nodes have the rates of eight GPUs; with one rank per node, a rank has that of one GPU.
    rate = 0.8 * 50e9
    assert across[0] == pytest.approx(2 * 15 / 16 * size / (8 * rate), rel=0.05)
    assert across[1] == pytest.approx(2 * 15 / 16 * size / rate, rel=0.05)
    assert network.compute_times("all_reduce", size, 1.0) == 0.0


SHAPE = ModelShape(4.0, 1024.0, 16.0, 2048.0, 512.0, kv_heads=4.0, ffn=4096.0)
EXPERTS = replace(SHAPE, experts=16.0, top_k=2.0, expert_ffn=512.0)
TOKENS_BYTES = 2 * 2048 * 1024
"""Bytes of the activations of a sequence between layers."""


def time_parts(model: ModelShape, layout: Layout, rate: float = 1e9, latency_ns: int = 0) -> StepTimes:
    level = Level("wire", 4096, "switch", rate, latency_ns)
    constants = StepConstants(attention_efficiency=0.5, operators=0.0, exchange_s=0.0, step_s=0.0)
    return predict_steps(model, layout, constants, NetworkModel(Topology("flat", (level,))))


@pytest.mark.parametrize(
    ("part", "model", "layout", "expected"),
    [
        # Megatron: four all-reduces per layer, with full recomputation six.
        ("tensor", SHAPE, Layout(1.0, 3.0, 4.0, 1.0, 1.0, recompute=0.0), 3 * 4 * 4 * 1.5 * TOKENS_BYTES),
        ("tensor", SHAPE, Layout(1.0, 3.0, 4.0, 1.0, 1.0, recompute=2.0), 3 * 4 * 6 * 1.5 * TOKENS_BYTES),
        # Keys and values (4 heads of 64) are gathered forward and backward, and their gradients scattered.
        (
            "context",
            SHAPE,
            Layout(1.0, 3.0, 1.0, 1.0, 1.0, context=4.0, recompute=0.0),
            3 * 4 * 3 * 0.75 * 2 * 2048 * 2 * 4 * 64,
        ),
        # Each token goes to two experts and back, in both passes.
        (
            "expert",
            EXPERTS,
            Layout(1.0, 3.0, 1.0, 8.0, 1.0, expert=8.0, recompute=0.0),
            3 * 4 * 4 * 7 / 8 * 2 * TOKENS_BYTES,
        ),
    ],
)
def test_volumes_of_a_layer_follow_closed_formulas(
    part: str, model: ModelShape, layout: Layout, expected: float
) -> None:
    assert float(getattr(time_parts(model, layout), part)) == pytest.approx(expected / 1e9)


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"), [(0, 2 * 4), (1, 4 + 2), (2, 3 * 4 + 2), (3, 3 * (4 + 2 + 2))]
)
def test_volumes_among_replicas_follow_closed_formulas(stage: int, bytes_per_parameter: int) -> None:
    layout = Layout(1.0, 3.0, 1.0, 8.0, 1.0, sharding=float(stage))
    expected = 7 / 8 * bytes_per_parameter * float(SHAPE.count_parameters()) / 1e9
    assert float(time_parts(SHAPE, layout).data) == pytest.approx(expected)


def test_fully_sharded_parameters_wait_for_the_network_in_each_layer() -> None:
    layout = Layout(1.0, 3.0, 1.0, 8.0, 1.0, sharding=3.0)
    latency = 3 * 4 * 3 * 7 * 1e-6  # micro-batches, layers, transfers, rounds of the ring
    assert float(time_parts(SHAPE, layout, 1e30, 1000).data) == pytest.approx(latency)


@pytest.mark.parametrize(("chunks", "micro_batches"), [(1, 4), (1, 32), (2, 8), (4, 16)])
def test_the_bubble_of_interleaved_stages_follows_the_closed_formula(chunks: int, micro_batches: int) -> None:
    model = replace(SHAPE, layers=32.0, vocabulary=1.0)
    layout = Layout(8.0, float(micro_batches), 1.0, 1.0, 4.0, chunks=float(chunks), recompute=0.0)
    times = time_parts(model, layout, 1e30)
    share = float(times.bubble / (times.compute + times.memory + times.bubble))
    assert share == pytest.approx(3 / (chunks * micro_batches + 3), rel=0.03)


def test_a_message_between_stages_crosses_nodes_if_the_pipeline_does() -> None:
    network = NetworkModel(get_preset("dgx-h100"))
    inside, across = network.compute_times("message", 1e8, np.array([2.0, 4.0]), np.array([4.0, 4.0]))
    assert across == pytest.approx(inside * 9, rel=0.1)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_a_slower_network_is_never_faster(name: str) -> None:
    job, cluster = read_job(name), read_cluster("dgx-h100", 64)
    tables = [plan(job, scale_network(cluster, factor)).table for factor in (1.0, 0.5, 0.1)]
    mesh = ["tp", "cp", "pp", "dp", "ep"]
    for fast, slow in pairwise(tables):
        both = fast.join(slow, on=mesh, suffix="_slow")
        assert both.height == fast.height == slow.height
        assert (both["step_ns_slow"] >= both["step_ns"]).all()


def test_more_memory_never_fits_less() -> None:
    job, cluster = read_job("llama3-70b"), read_cluster("dgx-h100", 64)
    ranked = [plan(job, replace(cluster, memory_bytes=gib * 2**30)).table for gib in (60.0, 80.0, 141.0)]
    for small, large in pairwise(ranked):
        both = small.join(large, on=["tp", "cp", "pp", "dp", "ep"], suffix="_large")
        assert both.height == small.height <= large.height
        assert (both["step_ns_large"] <= both["step_ns"]).all()


def test_parts_add_up_and_the_ranking_is_sorted() -> None:
    answer = etloom.plan("deepseek-v3-like", gpus=2048)
    table = answer.table
    assert table["step_ns"].is_sorted()
    assert ((table["lower_bound_ns"] < table["step_ns"]) & (table["step_ns"] < table["upper_bound_ns"])).all()
    kinds = pl.sum_horizontal(f"{kind}_bytes" for kind in answer.memory)
    assert table.select((kinds - pl.col("memory_bytes")).abs().max()).item() <= 6
    assert (table["memory_bytes"] <= 0.95 * answer.cluster.memory_bytes).all()
    assert (table["tp"] * table["cp"] * table["pp"] * table["dp"] == 2048).all()
    assert (table["tp"] * table["cp"] * table["dp"] % table["ep"] == 0).all()
    assert (table["dp"] * table["micro_batch"] * table["micro_batches"] == 15360).all()
    assert set(table["interval"]) == {"not calibrated"}


def test_the_ranking_of_a_small_cluster_is_as_before() -> None:
    table = plan(parse_job(JOB, "job"), parse_cluster(CLUSTER, "cluster")).table
    rows = table.select("tp", "pp", "vp", "dp", "sharding", "micro_batch", "recompute").head(3).rows()
    assert rows == GOLDEN


def test_fixed_axes_and_the_price_are_kept() -> None:
    cluster = parse_cluster({**CLUSTER, "price_per_gpu_hour": 3.6}, "cluster")
    table = plan(parse_job(JOB, "job"), cluster, {"tp": 2, "mb": 4}).table
    assert set(table["tp"]) == {2} and set(table["micro_batches"]) == {4}
    cost = 16 * 3.6 / 3600 / table["tokens_per_s"] * 1e6
    assert table["cost_per_million_tokens"].to_list() == pytest.approx(cost.to_list())


@pytest.mark.parametrize(("recompute", "words"), [("full", {"calibrated"}), ("none", {"not calibrated"})])
def test_only_the_measured_class_is_calibrated(recompute: str, words: set[str]) -> None:
    job = parse_job({**JOB, "kernels": "unfused", "recompute": recompute, "sharding": "zero1"}, "job")
    cluster = parse_cluster({"device": "A100 80GB SXM", "gpus": 8, "network": "dgx-a100"}, "cluster")
    answer = plan(job, cluster, {"cp": 1})
    assert set(answer.table["interval"]) == words
    assert ("(708 measurements)" in " ".join(answer.reasons)) == (words == {"calibrated"})
    width = answer.table["upper_bound_ns"] / answer.table["step_ns"]
    assert (width < 1.19).all() == (words == {"calibrated"})


def test_classes_without_held_out_measurements_are_not_calibrated() -> None:
    """torchtitan's steps are 64 % inside intervals from the other publications."""
    holds = {"unfused kernels": True, "torch kernels": np.array([False, True])}
    deviation, is_calibrated = combine_errors(holds)
    assert is_calibrated.tolist() == [True, False]
    assert deviation[1] == pytest.approx(np.hypot(deviation[0], ERRORS["torch kernels"].deviation))
    assert explain_interval(["unfused kernels", "torch kernels"]) == "interval not calibrated: torch kernels"


@pytest.mark.slow
def test_a_recording_is_a_job() -> None:
    """Rank 0 of 16 of examples/train_gpt.py, --tensor 2 --pipeline 2, recorded in a fake world."""
    model = {
        "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "head_width": 64, "ffn": 2048, "vocabulary": 5000,
        "sequence": 256,
    }  # fmt: skip
    described = parse_job({**model, "batch": 3 * 2 * 4, "kernels": "torch"}, "fake_gpt")
    recorded = etloom.plan(ROOT / "tests" / "data" / "fake_gpt", gpus=16)
    assert recorded.job == described
    assert recorded.table.equals(plan(described, read_cluster("dgx-h100", 16)).table)
    with pytest.raises(AnalysisError, match=r"no attention operator .*; describe the job in YAML"):
        etloom.plan(ROOT / "tests" / "data" / "ddp_2")


def test_a_recorded_job_states_how_each_value_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    run = str(ROOT / "tests" / "data" / "fake_gpt")
    assert cli.main(["plan", run, "--set", "optimizer=sgd", "--describe", "--format", "json"]) == 0
    rows = {row.pop("key"): row for row in json.loads(capsys.readouterr().out)}
    source = "micro-batch x micro-batches x dp of the recording"
    assert rows["batch"] == {"value": "24", "basis": "inferred", "source": source}
    assert rows["optimizer"] == {"value": "sgd", "basis": "set", "source": "--set"}
    assert rows["tied"]["basis"] == "assumed" and rows["pp"]["value"] == "2"
    answer = etloom.plan(run, gpus=16, changes={"batch": 48})
    assert answer.job.batch == 48
    text = " ".join(answer.description)
    assert "inferred: layers 4, hidden 512, heads 8" in text and "set: batch 48" in text
    assert "recorded: micro-batch 3, micro-batches 2, tp 2, cp 1, dp 4, pp 2" in text
    for option, message in (
        ("batch", "--set: expected KEY=VALUE, such as batch=512, got 'batch'"),
        ("batch=many", "batch: expected a whole number from 1 to 16,777,216, got 'many'"),
        ("batc=3", "job: unknown key 'batc'"),
    ):
        assert cli.main(["plan", run, "--set", option]) != 0
        assert message in capsys.readouterr().err
    assert cli.main(["plan", "llama3-8b", "--describe"]) != 0
    assert "expected a recording" in capsys.readouterr().err


def test_a_recording_of_inference_is_no_training_job(data: Path) -> None:
    with pytest.raises(AnalysisError, match="the recording has no backward pass, so it is not of training"):
        etloom.plan(data / "tracelens" / "h100_qwen.json.gz")


def test_each_row_states_its_memory_and_the_largest_part() -> None:
    answer = etloom.plan("llama3-70b", gpus=64)
    row, usable = answer.table.row(0, named=True), 0.95 * answer.cluster.memory_bytes
    kind = max(answer.memory, key=lambda name: row[f"{name}_bytes"])
    used, share = row["memory_bytes"] / usable, row[f"{kind}_bytes"] / row["memory_bytes"]
    assert row["memory_limit"] == f"{100 * used:.0f} % used, {kind} {100 * share:.0f} %"
    (line,) = (line for line in answer.reasons if line.startswith("memory: "))
    assert f"needs {row['memory_bytes'] / 1e9:.1f} of {usable / 1e9:.1f} GB (95 % of 85.9): {kind} " in line


def test_a_slow_host_limits_small_steps() -> None:
    answers = [
        plan(parse_job(JOB, "job"), parse_cluster({**CLUSTER, "host": host}, "cluster"), {"tp": 8})
        for host in (1.0, 30.0)
    ]
    fast, slow = (answer.table.row(0, named=True) for answer in answers)
    assert slow["step_ns"] > 2 * fast["step_ns"]
    assert slow["limit"].startswith("host") and not fast["limit"].startswith("host")


def test_experts_overlap_and_nodes_limit_their_traffic() -> None:
    layout = Layout(1.0, 8.0, 1.0, 16.0, 1.0, expert=16.0, recompute=0.0)
    network = NetworkModel(get_preset("dgx-h100"))
    constants = StepConstants(attention_efficiency=0.5, overlap=0.02)
    limited = replace(EXPERTS, top_k=4.0, routed_nodes=1.0)
    everywhere, near = (
        predict_steps(model, layout, constants, network).expert
        for model in (replace(limited, routed_nodes=0.0), limited)
    )
    assert near == pytest.approx(everywhere / 4, rel=0.3)
    hidden = predict_steps(limited, layout, replace(constants, overlaps_experts=True), network)
    plain = predict_steps(limited, layout, constants, network)
    assert plain.expert - 0.02 * (plain.compute + plain.memory) < hidden.expert < plain.expert
    one_node = replace(layout, data=8.0, expert=8.0)
    assert (
        predict_steps(limited, one_node, constants, network).expert
        == predict_steps(replace(limited, routed_nodes=0.0), one_node, constants, network).expert
    )


def test_a_file_that_is_no_job_is_answered_with_what_a_plan_accepts(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A project\n")
    with pytest.raises(EtloomError) as caught:
        etloom.plan(tmp_path / "README.md")
    assert caught.value.what == f"{tmp_path / 'README.md'}: neither the description of a job nor a recording"
    assert str(caught.value.remedy).startswith(
        "expected a YAML file (docs/plan.md), one of deepseek-v3-like, "
    )


def test_a_key_that_is_there_twice_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("layers: 2\nhidden: 64\nlayers: 3\n")
    with pytest.raises(EtloomError, match=r"job\.yaml: line 3: key 'layers' is there twice"):
        read_job(tmp_path / "job.yaml")
    (tmp_path / "cluster.yaml").write_text("network:\n  levels:\n  - {size: 8, size: 9, bandwidth: 1GB/s}\n")
    with pytest.raises(EtloomError, match=r"line 3: key 'size' is there twice"):
        read_cluster(tmp_path / "cluster.yaml")


def test_if_nothing_fits_the_answer_states_what_is_missing() -> None:
    with pytest.raises(
        AnalysisError,
        match=r"no layout fits into .* GB; the smallest needs .* GB \(optimizer .*\): tp=.*; more GPUs",
    ):
        etloom.plan("llama3-405b", gpus=8)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"tp": 16}, "tp x cp x pp x dp = 16 does not divide 8 GPUs"),
        ({"dp": 8, "mb": 7}, "dp x mb = 56 does not divide a batch of 512"),
        ({"ep": 2}, "ep does not divide 0 experts"),
        ({"pp": 1, "vp": 2}, "vp: model chunks need several stages"),
        ({"tp": 2.0}, "tp: expected a whole number above 0, got 2.0"),
        ("tp=2", "expected sizes by axis, got 'tp=2'"),
        (
            {"cp": 8, "vp": 3},
            "no layout with cp=8,vp=3 divides 8 GPUs, 32 heads, 32 layers and 512 sequences",
        ),
    ],
)
def test_contradictory_sizes_are_one_line(parallel: Any, text: str) -> None:
    with pytest.raises(EtloomError, match=text):
        etloom.plan("llama3-8b", gpus=8, parallel=parallel)


def test_messages_are_short_lines() -> None:
    for job, cluster, gpus in (("deepseek-v3-like", "dgx-h100", 256), ("llama3-405b", "mi300x", 16384)):
        lines = etloom.plan(job, cluster, gpus=gpus).reasons
        assert max(map(len, lines)) <= 150


def test_too_many_layouts_end_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etloom.simulator.planning._MAX_LAYOUTS", 1000)
    with pytest.raises(AnalysisError, match="more than 1,000 layouts; fix some axes"):
        etloom.plan("llama3-8b", gpus=64)


WRONG_JOBS: dict[str, tuple[Any, str]] = {
    "a list": ([1], r"job: expected keys and values, got \[1\]"),
    "no batch": ({**JOB, "batch": None}, "batch: expected a whole number from 1 to 16,777,216, got None"),
    "an unknown key": ({**JOB, "layer": 3}, "job: unknown key 'layer'; expected batch, "),
    "a missing key": ({"layers": 3}, "job: hidden is missing"),
    "text": ({**JOB, "layers": "many"}, "layers: expected a whole number from 1 to 10,000, got 'many'"),
    "a huge number": ({**JOB, "hidden": 10**300}, "hidden: expected a whole number from 1 to 1,048,576"),
    "a negative number": ({**JOB, "ffn": -1}, "ffn: expected a whole number from 1"),
    "a word for a flag": ({**JOB, "gated": "yes"}, "gated: expected true or false, got 'yes'"),
    "a precision": ({**JOB, "precision": "bf61"}, "unknown precision 'bf61'; did you mean 'bf16'"),
    "an optimizer": ({**JOB, "optimizer": ["adamw"]}, r"unknown optimizer .*\['adamw'\]"),
    "heads": ({**JOB, "heads": 15}, "hidden: expected a multiple of heads, or head_width"),
    "kv_heads": ({**JOB, "kv_heads": 3}, "kv_heads: expected a divisor of heads"),
    "experts": ({**JOB, "experts": 8}, "experts: expert_ffn and top_k are missing"),
    "an expert size only": ({**JOB, "shared_experts": 1}, "experts is missing, which top_k, .* need"),
    "latent attention": ({**JOB, "q_rank": 8}, "kv_rank is missing, which q_rank and rope_width need"),
}


@pytest.mark.parametrize("case", WRONG_JOBS)
def test_a_wrong_job_is_one_line_with_the_key(case: str, tmp_path: Path) -> None:
    document, text = WRONG_JOBS[case]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(EtloomError, match=text) as info:
        etloom.plan(path)
    assert str(info.value).startswith(f"{path}: ") and "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"device": "h1000"}, "device: unknown device 'h1000'; expected one of V100 PCIe"),
        ({"device": ["h100"]}, r"device: expected a name, got \['h100'\]"),
        ({"device": "V100 SXM2"}, "memory_gib is missing: the memory of the V100 SXM2 is not known"),
        ({"gpus": 0}, "gpus: expected a whole number from 1 to 131,072, got 0"),
        (
            {"network": "ib"},
            "network: unknown network 'ib'; expected levels, a YAML file, or one of dgx-a100",
        ),
        ({"network": {"levels": []}}, "levels: expected a list of 1 to 8 levels"),
        ({"price_per_gpu_hour": float("nan")}, "price_per_gpu_hour: expected a number above 0"),
        ({"nodes": 3}, "cluster: unknown key 'nodes'; expected bandwidth_gbs, device"),
    ],
)
def test_a_wrong_cluster_is_one_line_with_the_key(change: dict[str, Any], text: str) -> None:
    with pytest.raises(EtloomError, match=text):
        parse_cluster({**CLUSTER, **change}, "cluster")


def test_names_precede_folders_and_a_network_lies_next_to_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("llama3-8b", "dgx-h100", "sub"):
        (tmp_path / name).mkdir()
    assert etloom.plan("llama3-8b", gpus=8).job.name == "llama3-8b"
    (tmp_path / "sub/net.yaml").write_text("{name: ours, levels: [{size: 8, bandwidth: 400GB/s}]}")
    (tmp_path / "sub/cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, "network": "net.yaml"}))
    assert read_cluster("sub/cluster.yaml").topology.name == "ours"


def _make_bomb(key: str) -> str:
    lists = ", ".join(f"&l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30))
    return f"{key}: [&l0 [x], {lists}]\n" + "".join(f"{name}: 1\n" for name in ("hidden", "heads"))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "layers: " + "9" * 5000,
        "layers: 0x" + "f" * 5000,
        "layers: 2020-99-99",
        "? [a]\n: b",
        "!!python/object/apply:os.system ['true']",
        "\x00\x01",
        "a: b: c",
        _make_bomb("layers"),
        "",
    ],
    ids=["nested", "digits", "hexadecimal", "date", "key", "tag", "binary", "syntax", "bomb", "empty"],
)
def test_hostile_yaml_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    for words in ([str(path)], ["llama3-8b", "--cluster", str(path)]):
        assert cli.main(["plan", *words]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"etloom: {path}: ") and error.count("\n") == 1 and len(error) < 600


def test_a_missing_file_names_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        EtloomError, match=r"job.yaml: No such file .*; expected a YAML file, or one of deepseek"
    ):
        etloom.plan(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["llama3-8"], "unknown job 'llama3-8'; did you mean 'llama3-8b'?"),
        (
            ["llama3-8b", "--cluster", "dgx-h10"],
            "--cluster: unknown cluster 'dgx-h10'; did you mean 'dgx-h100'?",
        ),
        (["llama3-8b", "--gpus", "0"], "--gpus: expected 1 to 131,072 GPUs, got 0"),
        (["llama3-8b", "--parallel", "xx=2"], "--parallel: expected sizes of "),
    ],
)
def test_wrong_names_are_wrong_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_command_prints_a_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "llama3-8b", "--gpus", "64", "--top", "3"]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 4 and "limit" in output.out
    assert "  ep  " not in output.out
    for words in ("8.03 billion parameters", "64 H100 SXM in nodes of 8", "more meshes", "not calibrated"):
        assert words in output.err
    assert cli.main(["plan", "llama3-8b", "--gpus", "64", "--format", "csv"]) == 0
    assert "activations_bytes" in capsys.readouterr().out.splitlines()[0]


def test_every_axis_of_predict_is_an_axis_of_plan() -> None:
    from etloom.simulator.resizing import parse_parallel

    assert parse_parallel(",".join(f"{axis}=1" for axis in AXES)) == dict.fromkeys(AXES, 1)


@pytest.mark.slow
def test_the_search_of_large_clusters_is_fast() -> None:
    import time

    begin = time.process_time()
    for name in ("llama3-70b", "mixtral-8x7b", "qwen3-moe-like"):
        etloom.plan(name, gpus=1024)
    assert time.process_time() - begin < 30
