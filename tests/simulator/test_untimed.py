"""Step times of runs without times: by the limits of a device and a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.analyses.flops.call_shapes import estimate_times, parse_calls
from etloom.analyses.flops.measured_tables import MeasuredRatios, count_limits
from etloom.analyses.flops.peaks import lookup_peaks
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.simulator.untimed import learn_times

SIZE = 4096
FLOPS = 2 * SIZE**3
BF16_TFLOPS = 312.0
"""A100."""


def describe_tensor(number: int, shape: list[int]) -> list[Any]:
    return [number, number, 0, shape[0] * shape[1], 2, "cuda:0"]


def write_trace(folder: Path, communications: int = 0, messages: int = 0) -> Path:
    """One step with two matrix products, then all-reduces of 2 GiB on 16 ranks, then messages to rank 8."""
    nodes: list[dict[str, Any]] = []

    def add(number: int, name: str, parent: int, scope: int = 0, **fields: Any) -> None:
        empty = {"values": [], "shapes": [], "types": [], "strides": []}
        attributes = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": scope, "tid": 1, "fw_tid": 0}
        attributes |= {"op_schema": fields.get("schema", ""), "kernel_backend": "", "kernel_file": ""}
        attributes |= fields.get("attributes", {})
        attrs = [
            {"name": key, "type": "string" if isinstance(value, str) else "int64", "value": value}
            for key, value in attributes.items()
        ]
        inputs, outputs = fields.get("inputs", empty), fields.get("outputs", empty)
        nodes.append(
            {
                "id": number,
                "name": name,
                "ctrl_deps": parent,
                "inputs": inputs,
                "outputs": outputs,
                "attrs": attrs,
            }
        )

    shape = [SIZE, SIZE]
    schema = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
    kind = "Tensor(c10::BFloat16)"
    for number in (4, 5):
        tensors = [describe_tensor(100 + i, shape) for i in range(2)]
        add(
            number,
            "aten::mm",
            3,
            schema=schema,
            inputs={
                "values": tensors,
                "shapes": [shape] * 2,
                "types": [kind] * 2,
                "strides": [[SIZE, 1]] * 2,
            },
            outputs={
                "values": [describe_tensor(110, shape)],
                "shapes": [shape],
                "types": [kind],
                "strides": [[SIZE, 1]],
            },
        )
    calls = [("allreduce", 16, 0)] * communications + [("send", 16, 8)] * messages
    for number, (name, size, peer) in enumerate(calls, 6):
        values = [[], [number, False], ["0", "default"], peer, name, [], [], 0, 1, size]
        attributes = {"collective_name": name, "dtype": "c10::BFloat16", "in_msg_nelems": 1 << 30}
        attributes |= {"out_msg_nelems": 1 << 30, "pg_name": "0", "pg_desc": "default", "pg_size": size}
        attributes |= {"global_rank_start": 0, "global_rank_stride": 1}
        types = ["GenericList[]", "GenericList[Int,Bool]", "GenericList[String,String]", "Int", "String"]
        types += ["GenericList[]", "GenericList[]", "Int", "Int", "Int"]
        inputs = {"values": values, "shapes": [[]] * 10, "types": types, "strides": [[]] * 10}
        add(number, "record_param_comms", 3, attributes=attributes, inputs=inputs)
    add(3, "ProfilerStep#7", 2, scope=7)
    add(2, "[pytorch|profiler|execution_trace|thread]", 1, scope=7)
    add(1, "[pytorch|profiler|execution_trace|process]", 0, scope=7)
    folder.mkdir(exist_ok=True)
    document = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 0, "nodes": nodes, "finish_ts": 0}
    (folder / "torch_et_0.json").write_text(json.dumps(document))
    return folder


def test_products_take_the_time_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredRatios, "load_times", lambda *_: None)  # as without etloom[devices]
    row = etloom.predict(write_trace(tmp_path / "run"), device="A100 SXM 80GB").table.row(0, named=True)
    limit = 2 * FLOPS / (BF16_TFLOPS * 1e3)
    assert (row["rank"], row["step"], row["operators"], row["unknown"]) == (0, 7, 2, 0)
    assert row["lower_bound_ns"] == pytest.approx(limit, rel=1e-3)
    assert row["step_ns"] == pytest.approx(limit / 0.65, rel=1e-3)
    assert row["upper_bound_ns"] == pytest.approx(limit / 0.4, rel=1e-3)
    assert row["exposed_communication_ns"] == row["bubble_ns"] == 0


def test_recordings_show_the_times_of_shapes_without_tables(tmp_path: Path) -> None:
    """A learned product takes its recorded time, others of about its size its share of the limit."""
    peaks = lookup_peaks("H100 SXM")
    calls = pl.DataFrame(
        {
            "name": ["aten::mm"] * 3 + ["aten::relu"],
            "dims": [
                "[[4096, 4096], [4096, 4096]]",
                "[[4096, 4096], [4096, 8192]]",
                "[[8, 8], [8, 8]]",
                "[[8]]",
            ],
            "dtype": ["c10::BFloat16"] * 4,
        }
    )
    shapes, kinds = parse_calls(calls, "gemm")
    recorded = np.array([200_000.0, np.nan, np.nan, np.nan])
    learned = MeasuredRatios.learn("gemm", shapes[:1], kinds[:1], recorded[:1], peaks)
    assert learned is not None
    unlisted = replace(peaks, name="another device")
    times, errors = estimate_times(calls, unlisted, {"gemm": learned})
    limits = count_limits("gemm", shapes[:2], "bfloat16", peaks)
    assert times[:2].tolist() == pytest.approx([200_000, 200_000 * limits[1] / limits[0]])
    assert np.isnan(times[2:]).all() and np.isfinite(errors).tolist() == [True, True, False, False]
    assert MeasuredRatios.learn("gemm", shapes[3:], kinds[3:], recorded[3:], peaks) is None


def test_recordings_of_other_devices_show_nothing(data: Path) -> None:
    run = etloom.open(data / "tracelens" / "h100_qwen.json.gz")
    job = Job({0: etloom.link(run[0] if isinstance(run, Job) else run)})
    learned = learn_times([job], lookup_peaks("H100 SXM"))
    assert "gemm" in learned and len(learned["gemm"].ratios["bfloat16"]) >= 3
    assert (learned["gemm"].ratios["bfloat16"] > 0.9).all()
    assert learn_times([job], lookup_peaks("A100 80GB SXM")) == {}
    with pytest.raises(EtloomError, match="recordings are for a run without times"):
        etloom.predict(job, learn_from=data / "tracelens" / "h100_qwen.json.gz")


def test_communication_takes_the_time_of_the_network(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "run", communications=1)
    row = etloom.predict(run, device="a100", network="400Gbit/s").table.row(0, named=True)
    ring = 2 * 15 / 16 * 2 * (1 << 30) / (0.95 * 50)  # bytes over GB/s, of which transfers reach 95 %
    assert row["communication_ns"] == pytest.approx(ring, rel=1e-6)
    assert row["exposed_communication_ns"] == row["communication_ns"]
    assert row["step_ns"] == row["computation_ns"] + row["communication_ns"]


def test_messages_of_a_pipeline_give_its_bubble(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "run", messages=4)
    row = etloom.predict(run, device="a100", network="dgx-a100").table.row(0, named=True)
    busy = row["computation_ns"] + row["exposed_communication_ns"]
    assert row["bubble_ns"] == pytest.approx(busy / 4, rel=1e-6)  # two stages, four micro-batches


@pytest.mark.slow
def test_missing_options_are_named(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "run", communications=1)
    for options, message in (
        ({}, "device is needed"),
        ({"device": "a100"}, "network is needed"),
        ({"device": "a100", "network": "x2"}, "factor"),
        ({"device": "a100", "network": "dgx-a100", "ranks": 4}, "needs a run with times"),
    ):
        with pytest.raises(EtloomError, match=message):
            etloom.predict(run, **options)
