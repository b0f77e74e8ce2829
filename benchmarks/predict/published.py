"""Compares predictions from shapes with published step times, throughputs and memory: python published.py

The layouts are those of the publications; where these do not state a value, the row assumes it. Of the constants, the
slowdown of PyTorch's kernels was set after the figures of torchtitan for A100s were seen, and the errors by class after
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from requirements import state

from etloom.simulator.network.model import NetworkModel
from etloom.simulator.planning import bound_errors, choose_constants
from etloom.simulator.training_jobs import OPTIMIZER_BYTES, Cluster, TrainingJob, parse_cluster, read_job
from etloom.simulator.training_shapes import Layout, ModelShape, estimate_memory
from etloom.simulator.training_step import predict_steps

SOURCES = """Korthikanti et al. 2022: arXiv 2205.05198; Grattafiori et al. 2024: arXiv 2407.21783
DeepSeek-AI 2024: arXiv 2412.19437; torchtitan: github.com/pytorch/torchtitan, folder benchmarks
Megatron Bridge: github.com/NVIDIA-NeMo/Megatron-Bridge, folder docs
recompute 0: nothing, 1: selective, 2: layers; bound_pct: upper half of the 90 % interval
"""


@dataclass(frozen=True)
class Publication:
    """A published figure: seconds per step, or tokens per second and GPU."""

    source: str
    job: TrainingJob
    cluster: Cluster
    layout: Layout
    step_s: float | None = None
    tokens_per_s: float | None = None
    memory_gib: float | None = None


def make_cluster(name: str, gpus: int, device: str | None = None, **changes: Any) -> Cluster:
    device = device or {"dgx-a100": "A100 80GB SXM", "dgx-h100": "H100 SXM"}[name]
    return parse_cluster({"device": device, "network": name, "gpus": gpus, **changes}, name)


def list_publications() -> list[Publication]:
    """Return the published figures."""
    rows = []
    source = "Korthikanti et al. 2022, table 5"
    for sizes, gpus, pipeline, chunks, batch, micro, full, selective in (
        ((48, 6144, 64), 8, 1, 1, 4, 4, 1.42, 1.10),
        ((96, 12288, 96), 64, 8, 3, 64, 1, 18.13, 13.75),
        ((105, 20480, 128), 280, 35, 3, 280, 1, 49.05, 37.83),
        ((128, 25600, 160), 512, 64, 1, 512, 1, 94.42, 71.49),
    ):
        job = TrainingJob("GPT", ModelShape(*map(float, sizes), 2048.0), batch, kernels="unfused")
        for recompute, seconds in ((2, full), (1, selective)):
            layout = Layout(micro, batch / micro, 8, 1, pipeline, chunks=chunks, recompute=recompute)
            rows.append(Publication(source, job, make_cluster("dgx-a100", gpus), layout, step_s=seconds))
    llama = {size: read_job(f"llama3-{size}") for size in ("8b", "70b", "405b")}
    source = "Grattafiori et al. 2024 (Llama 3), table 4"
    for data, context, batches, sequence, tflops in (
        (64, 1, 32, 8192, 430),
        (128, 1, 16, 8192, 400),
        (8, 16, 16, 131072, 380),
    ):
        model = replace(llama["405b"].model, sequence=float(sequence))
        job = replace(llama["405b"], model=model, batch=data * batches)
        layout = Layout(1, batches, 8, data, 16, context, chunks=8, sharding=1, recompute=0)
        rate = tflops * 1e12 / float(model.count_token_flops())
        cluster = make_cluster("dgx-h100", 128 * data * context)
        rows.append(Publication(source, job, cluster, layout, tokens_per_s=rate))
    for size, gpus, tensor, context, micro, sequence, precision, recompute, rate, memory in (
        ("8b", 8, 1, 1, 2, 8192, "bf16", 1, 6667, 77.0),
        ("8b", 8, 1, 1, 2, 8192, "fp8", 1, 8532, 76.8),
        ("8b", 128, 1, 1, 2, 8192, "bf16", 1, 6514, 62.0),
        ("8b", 128, 1, 1, 2, 8192, "fp8", 1, 8380, 61.8),
        ("8b", 8, 1, 1, 1, 32768, "fp8", 2, 3890, 83.9),
        ("8b", 8, 1, 2, 1, 65536, "fp8", 2, 2540, 84.2),
        ("8b", 8, 1, 4, 1, 131072, "fp8", 2, 1071, 84.0),
        ("70b", 256, 8, 1, 16, 8192, "fp8", 2, 829, 71.9),
        ("70b", 256, 8, 1, 16, 8192, "bf16", 2, 597.3, None),
    ):
        data = gpus // (tensor * context)
        model = replace(llama[size].model, sequence=float(sequence))
        job = replace(llama[size], model=model, batch=data * micro, kernels="torch", precision=precision)
        layout = Layout(micro, 1, tensor, data, 1, context, sharding=3, recompute=recompute)
        # 500 W: "the actual peak is between SXM and NVL" (989 and 835 TFLOP/s).
        cluster = make_cluster("dgx-h100", gpus, tflops=912.0, bandwidth_gbs=2400.0)
        file = "asyncTP_llama3_h100_2025-06" if memory is None else "llama3_h100_202412"
        source = f"torchtitan, benchmarks/{file}"
        rows.append(Publication(source, job, cluster, layout, tokens_per_s=rate, memory_gib=memory))
    source = "torchtitan, benchmarks/llama3_8b_h200_2025-06"
    for gpus, rate in ((32, 10938), (64, 10753)):
        job = replace(llama["8b"], batch=2 * gpus, kernels="torch", precision="fp8")
        layout = Layout(2, 1, 1, gpus, 1, sharding=3, recompute=1)
        cluster = make_cluster("dgx-h100", gpus, "H200 SXM")
        rows.append(Publication(source, job, cluster, layout, tokens_per_s=rate))
    source = "torchtitan, docs/performance.md of 2024"
    for size, recompute, rate in (("8b", 1, 2973), ("70b", 2, 323)):
        job = replace(llama[size], batch=64, kernels="torch")
        layout = Layout(1, 1, 1, 64, 1, sharding=3, recompute=recompute)
        rows.append(Publication(source, job, make_cluster("dgx-a100", 64), layout, tokens_per_s=rate))
    rows += list_bridge_publications()
    deepseek = read_job("deepseek-v3-like")
    cluster = make_cluster("dgx-h100", 2048, "H800 SXM")
    layout = Layout(1, 120, 1, 128, 16, expert=64, sharding=1, recompute=1)
    rate = 1e12 / (180e3 * 3600)
    source = "DeepSeek-AI 2024 (V3), 180,000 GPU hours per 10^12 tokens"
    rows.append(Publication(source, deepseek, cluster, layout, tokens_per_s=rate))
    return rows


def list_bridge_publications() -> list[Publication]:
    """Return figures of Megatron Bridge on DGX H100 in FP8; no recomputation, which it does not state, is assumed."""
    source = "Megatron Bridge, performance-summary-archive.md"
    rows = []
    for name, gpus, batch, sharding, layout, rate in (
        ("llama3-8b", 8, 128, 3, {}, 14451),
        ("llama3-70b", 64, 128, 1, {"tensor": 4, "pipeline": 8, "chunks": 5}, 1602),
        ("llama3-70b", 64, 256, 1, {"tensor": 4, "pipeline": 8, "chunks": 5}, 1621),
        ("llama3-405b", 1024, 512, 1, {"tensor": 8, "pipeline": 8, "context": 2, "chunks": 8}, 292),
        ("llama3-405b", 1024, 1536, 1, {"tensor": 8, "pipeline": 8, "context": 2, "chunks": 8}, 311),
        ("qwen3-moe-like", 256, 2048, 1, {"tensor": 2, "pipeline": 8, "chunks": 4, "expert": 32}, 1575),
        ("qwen3-moe-like", 256, 8192, 1, {"tensor": 2, "pipeline": 8, "chunks": 4, "expert": 32}, 1633),
        ("deepseek-v3-like", 1024, 8192, 1, {"tensor": 2, "pipeline": 8, "chunks": 4, "expert": 64}, 1297),
    ):
        job = replace(read_job(name), batch=batch, precision="fp8", overlap_experts=False)
        if name == "qwen3-moe-like":
            job = replace(job, model=replace(job.model, sequence=4096.0))
        ways = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
        data = gpus // ways
        placed = Layout(1, batch / data, layout.get("tensor", 1), data, layout.get("pipeline", 1))
        placed = replace(
            placed, **{key: value for key, value in layout.items() if key not in ("tensor", "pipeline")}
        )
        placed = replace(placed, sharding=sharding, recompute=0)
        rows.append(Publication(source, job, make_cluster("dgx-h100", gpus), placed, tokens_per_s=rate))
    return rows


def compare(row: Publication) -> dict[str, Any]:
    """Return a row of the table: published and predicted step time and memory."""
    job, cluster = row.job, row.cluster
    constants = choose_constants(job, cluster)
    network = NetworkModel(cluster.topology)
    seconds = float(predict_steps(job.model, row.layout, constants, network).total)
    memory = estimate_memory(
        job.model,
        row.layout,
        gradient_bytes=constants.gradient_bytes,
        state_bytes=OPTIMIZER_BYTES[job.optimizer],
        fused=job.fused,
    )
    factor, _ = bound_errors(job, cluster, row.layout)
    tokens = job.batch * job.model.sequence
    published = row.step_s or tokens / (row.tokens_per_s or 0) / cluster.gpus
    flops = tokens * float(job.model.count_token_flops()) / cluster.gpus / seconds
    return {
        "source": row.source,
        "model": f"{float(job.model.count_parameters()) / 1e9:.0f}B",
        "gpus": cluster.gpus,
        "kernels": job.kernels,
        "precision": job.precision,
        "recompute": int(row.layout.recompute),
        "published_s": round(published, 3),
        "predicted_s": round(seconds, 3),
        "error_pct": round(100 * (seconds / published - 1), 1),
        "inside": bool(abs(np.log(seconds / published)) <= np.log(factor)),
        "bound_pct": round(100 * (float(factor) - 1)),
        "tflops": round(flops / 1e12),
        "memory_gib": row.memory_gib,
        "predicted_gib": round(float(sum(memory.values())) / 2**30, 1),
    }


def main() -> None:
    rows = [compare(row) for row in list_publications()]
    table = pl.DataFrame(rows)
    for kernels, part in table.partition_by("kernels", as_dict=True, maintain_order=True).items():
        errors = part["error_pct"].abs()
        text = f"mean {errors.mean():.1f} %, median {errors.median():.1f} %, worst {errors.max():.1f} %"
        state(f"published steps, {kernels[0]} kernels, error of {part.height}", "printed", text)
    inside = 100 * table["inside"].mean()
    state("published steps inside the 90 % intervals", "85 to 95 %", f"{inside:.0f} %", 85 <= inside <= 95)
    llama = next(row for row in rows if row["kernels"] == "torch" and row["gpus"] == 8)
    width = (1 + llama["bound_pct"] / 100) ** 2
    holds = width <= 1.5 and llama["inside"]
    text = f"{width:.2f}, contains {llama['published_s']} s"
    state("Llama 3 8B on 8 GPUs, width of the interval", "1.5", text, holds)
    print(SOURCES)
    with pl.Config(
        tbl_cols=-1, tbl_rows=-1, tbl_width_chars=220, tbl_hide_column_data_types=True, fmt_str_lengths=60,
        tbl_formatting="ASCII_MARKDOWN", tbl_hide_dataframe_shape=True,
    ):  # fmt: skip
        print(table)


if __name__ == "__main__":
    main()
