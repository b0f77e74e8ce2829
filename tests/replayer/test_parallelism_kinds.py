"""What a job of several kinds of parallelism called is called again: on a mesh of groups, and under every launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.replayer.comms.plan_builder import build_plan
from etloom.replayer.plan import plan_caveats
from support.paths import ROOT
from support.processes import LAUNCHERS, by_shell, ended, processes
from support.replays import all_reduce_call, write_calls

pytestmark = [pytest.mark.slow, pytest.mark.torch]

SCRIPT = """
import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, sys.argv[1])
from train_experts import Experts

dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "tensors"))


def layers():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


copied = nn.parallel.DistributedDataParallel(layers())
sharded = fully_shard(layers(), mesh=init_device_mesh("cpu", (world,)))
cut = layers()
parallelize_module(cut, mesh["tensors"], {str(at): (ColwiseParallel, RowwiseParallel)[at % 2]() for at in range(4)})
cut = fully_shard(cut, mesh=mesh["replicas"])
torch.manual_seed(dist.get_rank())
models = [copied, sharded, cut, Experts(world)]
optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
for _ in range(5):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
dist.barrier()
del copied, sharded, cut, models, optimizers, model, optimizer
gc.collect()
dist.destroy_process_group()
"""


def test_replicas_shards_tensors_and_experts_on_four_ranks(tmp_path: Path) -> None:
    """DDP and FSDP2 of all ranks, tensor parallelism of pairs within FSDP2 of pairs across, an expert a rank."""
    script, run, out = tmp_path / "train.py", tmp_path / "run", tmp_path / "replay.parquet"
    script.write_text(SCRIPT)
    examples = ROOT / "examples"
    collect = [sys.executable, "-m", "etloom", "collect", "--observer", "native", "--out", str(run), "--"]
    subprocess.run(
        [*collect, *by_shell(4, sys.executable, str(script), str(examples))],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True,
    )  # fmt: skip
    recorded = build_plan(etloom.open(run))
    assert (recorded.skipped, plan_caveats(recorded)) == ((), [])
    kinds = Counter((call.collective, call.group) for call in recorded.calls[1])
    # Of a step: gradients of copies; shards gathered, once for both ways, and gradients scattered.
    for collective, group in (
        ("all_reduce", (0, 1, 2, 3)), ("all_gather", (0, 1, 2, 3)), ("reduce_scatter", (0, 1, 2, 3)),
        ("all_gather", (1, 3)), ("reduce_scatter", (1, 3)), ("all_reduce", (0, 1)), ("all_to_all", (0, 1, 2, 3)),
    ):  # fmt: skip
        assert kinds.pop((collective, group)) >= 1, (collective, group)
    assert not kinds
    # Shares of experts differ between ranks, in rows 16 elements wide.
    splits = [call.in_split for own in recorded.calls for call in own if call.in_split]
    assert any(len(set(split)) > 1 for split in splits)
    assert all(elements % 16 == 0 for split in splits for elements in split)
    found = ended(processes(4, run, "--verify", "--repeats", "1", "--warmup", "0", "--out", str(out)))
    assert [status for status, _, _ in found] == [0] * 4, found
    replayed = etloom.open(out)
    for rank, own in enumerate(recorded.calls):
        rows = replayed[rank].comms.sort("id").select(
            pl.col("collective", "ranks", "dtype").cast(pl.String), "in_nelems", "out_nelems"
        )  # fmt: skip
        assert rows.rows() == [
            (call.collective, json.dumps(call.group), call.dtype, sum(call.inputs), sum(call.outputs))
            for call in own
        ]


@pytest.mark.parametrize("launcher", ["srun", "hydra"])
def test_launchers_by_their_variables(tmp_path: Path, launcher: str) -> None:
    assert launcher in LAUNCHERS
    run = write_calls(tmp_path, {rank: [all_reduce_call(8)] for rank in range(2)})
    found = ended(processes(2, run, "--verify", "--repeats", "1", launcher=launcher))
    assert [status for status, _, _ in found] == [0, 0], found
    assert [bool(out) for _, out, _ in found] == [True, False]
