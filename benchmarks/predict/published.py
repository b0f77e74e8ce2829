"""Compares predictions from shapes with published step times, throughputs and memory: python published.py

The layouts are those of the publications; where these do not state a value, the row assumes it. No constant was changed
after these figures were seen.
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
        job = TrainingJob("GPT", ModelShape(*map(float, sizes), 2048.0), batch, fused=False)
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
    for size, gpus, tensor, micro, recompute, rate, memory in (
        ("8b", 8, 1, 2, 1, 6667, 77.0),
        ("8b", 128, 1, 2, 1, 6514, 62.0),
        ("70b", 256, 8, 16, 2, 597.3, None),
    ):
        data = gpus // tensor
        job = replace(llama[size], batch=data * micro)
        layout = Layout(micro, 1, tensor, data, 1, sharding=3, recompute=recompute)
        cluster = make_cluster("dgx-h100", gpus)
        source = (
            f"torchtitan, benchmarks/{'asyncTP_llama3_h100_2025-06' if tensor > 1 else 'llama3_h100_202412'}"
        )
        rows.append(Publication(source, job, cluster, layout, tokens_per_s=rate, memory_gib=memory))
    source = "torchtitan, docs/performance.md of 2024"
    for size, recompute, rate in (("8b", 1, 2973), ("70b", 2, 323)):
        job = replace(llama[size], batch=64)
        layout = Layout(1, 1, 1, 64, 1, sharding=3, recompute=recompute)
        rows.append(Publication(source, job, make_cluster("dgx-a100", 64), layout, tokens_per_s=rate))
    deepseek = read_job("deepseek-v3-like")
    cluster = make_cluster("dgx-h100", 2048, "H800 SXM")
    layout = Layout(1, 120, 1, 128, 16, expert=64, sharding=1, recompute=1)
    rate = 1e12 / (180e3 * 3600)
    source = "DeepSeek-AI 2024 (V3), 180,000 GPU hours per 10^12 tokens"
    rows.append(Publication(source, deepseek, cluster, layout, tokens_per_s=rate))
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
    table = pl.DataFrame([compare(row) for row in list_publications()])
    errors = table["error_pct"].abs()
    state("published step times, mean error of etloom plan", "", f"{errors.mean():.1f} %")
    state("published step times inside the 90 % intervals", "", f"{100 * table['inside'].mean():.0f} %")
    with pl.Config(
        tbl_cols=-1, tbl_rows=-1, tbl_width_chars=200, tbl_hide_column_data_types=True, fmt_str_lengths=60
    ):
        print(table)


if __name__ == "__main__":
    main()
