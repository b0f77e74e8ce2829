"""collect --fake-world on scripts as users write them: wrappers of torch.distributed, compiled models, batch norms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import etloom
from support.paths import ROOT

pytest.importorskip("torch")

REDUCED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)], torch.nn.BatchNorm1d(256)).to(sys.argv[2])
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1, gradient_as_bucket_view=sys.argv[3] == "view")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    with model.no_sync():
        model(torch.randn(8, 256, device=sys.argv[2])).sum().backward()
    model(torch.randn(8, 256, device=sys.argv[2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled", "ddp", "device_mesh", "fsdp1", "fsdp2", "item"])
def test_a_script_as_users_write_it_is_recorded(name: str, data: Path, tmp_path: Path) -> None:
    script = data / f"cases/turn3/fake_world/{name}.py"
    result = etloom.collect([sys.executable, str(script)], tmp_path / "run", fake_world=8, ranks="0")
    assert (result.exit_status, list(result.ranks)) == (0, [0])
    names = etloom.open(tmp_path / "run", use_cache=False)[0].nodes["name"].cast(pl.String)
    assert names.is_in(["aten::addmm", "aten::mm"]).any()
    assert names.str.starts_with("c10d::").any() == (name not in ("compiled", "item", "device_mesh"))


@pytest.mark.slow
@pytest.mark.parametrize("view", ["view", "copy"])
def test_gradients_are_reduced_in_the_buckets_of_a_real_job(view: str, tmp_path: Path) -> None:
    """The communication of a step: order, kind and bytes."""
    (tmp_path / "train.py").write_text(REDUCED)
    script = [str(tmp_path / "train.py")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    collect = [sys.executable, "-m", "etloom", "collect", "--steps", "2:3", "--out"]
    for name, command, options in (
        ("real", [*launch, "gloo", "cpu", view], []),
        ("fake", [sys.executable, *script, "nccl", "cuda", view], ["--fake-world", "2"]),
    ):
        subprocess.run(
            [*collect, tmp_path / name, *options, "--", *command],
            check=True,
            capture_output=True,
            timeout=500,
            cwd=ROOT,
        )
    real, fake = (
        etloom.open(tmp_path / name, use_cache=False)[0].comms.select("collective", "bytes")
        for name in ("real", "fake")
    )
    assert fake.rows() == real.rows()
    assert (
        fake["collective"].to_list() == ["broadcast"] * 2 + ["all_reduce"] * 3
    )  # buffers of two types; buckets


@pytest.mark.slow
def test_a_batch_norm_and_a_communication_hook_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        REDUCED.replace(
            "optimizer =",
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
            "model.register_comm_hook(None, default_hooks.fp16_compress_hook)\noptimizer =",
        )
    )
    command = [sys.executable, str(tmp_path / "train.py"), "nccl", "cuda", "copy"]
    result = etloom.collect(command, tmp_path / "run", fake_world=4, ranks="3")
    assert list(result.ranks) == [3]
    reduced = etloom.open(tmp_path / "run", use_cache=False)[3].comms.filter(collective="all_reduce")
    assert reduced["dtype"].unique().to_list() == ["c10::Half"]
