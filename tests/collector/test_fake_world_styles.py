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
@pytest.mark.parametrize("view", ["copy"])  # views of buckets are in test_styles_communicate_like_a_real_job
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
def test_styles_communicate_like_a_real_job(tmp_path: Path) -> None:
    """HSDP, tensor parallelism under checkpointing, both kinds of DDP with unused parameters, pairs, and experts."""
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    script = str(ROOT / "tests/collector/scripts/fake_styles.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script]
    real = etloom.collect([*launch, "gloo", "cpu"], tmp_path / "real", steps="2:3")
    fake = etloom.collect(
        [sys.executable, script, "nccl", "cuda"], tmp_path / "fake", steps="2:3", fake_world=4
    )
    assert (real.exit_status, fake.exit_status) == (0, 0)
    expected, rows = (
        etloom.open(tmp_path / name, use_cache=False)[0]
        .comms.select(pl.col("collective").cast(pl.String), "bytes", "group_size")
        .filter(pl.col("collective") != "wait")
        .rows()
        for name in ("real", "fake")
    )
    assert rows == expected


STYLES = """
import copy, os, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.many = nn.MultiheadAttention(64, 4, batch_first=True)
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        both = F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v, mask)
        return self.many(*[self.out(both.transpose(1, 2).flatten(-2))] * 3, need_weights=False)[0]

class Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        one = torch.ones((), device=x.device)
        kind = torch.float8_e4m3fn
        return torch._scaled_mm(x.to(kind), weight.to(kind).t(), scale_a=one, scale_b=one, out_dtype=x.dtype)
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

images = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).cuda()
model = copy.deepcopy(nn.ModuleList([Attention(), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)])).cuda()
data = torch.utils.data.TensorDataset(torch.randn(64, 16, 64), torch.randn(64, 3, 8, 8))
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True)
optimizer = torch.optim.AdamW([*model.parameters(), *images.parameters()])
for x, pictures in loader:
    torch.cuda.nvtx.range_push("step")
    with torch.autocast("cuda", torch.bfloat16):
        y = model[0](x.cuda(non_blocking=True))
        y = y + Fp8.apply(y.flatten(0, 1), model[1].weight.bfloat16()).view_as(y)
        scores, choice = model[2](y).topk(2)
        rows, _ = torch.where(choice.flatten(0, 1) == 1)
        loss = y[y.sum(-1) > 0].square().mean() + images(pictures.cuda()).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch.unique(choice).tolist(), torch.masked_select(y, y > 0), loss.detach().float().cpu().numpy()
    torch.cuda.nvtx.range_pop()
"""


@pytest.mark.slow
def test_operators_are_those_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STYLES)
    result = etloom.collect([sys.executable, str(tmp_path / "train.py")], tmp_path / "run", fake_world=8)
    assert result.exit_status == 0
    trace = etloom.open(tmp_path / "run", use_cache=False)[0]
    counts = dict(trace.nodes["name"].cast(pl.String).value_counts().iter_rows())
    assert counts["aten::_scaled_dot_product_flash_attention"] == 2
    assert counts["aten::_scaled_dot_product_efficient_attention"] == 1
    assert counts["aten::_scaled_mm"] == 1 and counts["aten::batch_norm_stats"] == 1
    assert "aten::_softmax" not in counts and "aten::_foreach_lerp_" in counts
    shape = trace.tensors.filter(pl.col("node") == trace.nodes.filter(name="aten::masked_select")["id"][0])[
        "shape"
    ]
    assert shape.cast(pl.String).to_list()[-1] == "[4096]"  # all of 4 x 16 x 64


PIPELINE = """
import os, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
part = torch.nn.Linear(32, 64 if rank == 0 else 32).to(device) if rank != 1 else torch.nn.Linear(64, 32).to(device)
schedule = Schedule1F1B(PipelineStage(part, rank, size, device), 4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters())
for step in range(3):
    batch = torch.randn(8, 32, device=device)
    schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == size - 1 else {}))
    optimizer.step()
"""


@pytest.mark.slow
def test_stages_of_a_pipeline_learn_their_shapes_from_earlier_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.pipelining")
    (tmp_path / "train.py").write_text(PIPELINE)
    command = [sys.executable, str(tmp_path / "train.py")]
    result = etloom.collect(command, tmp_path / "run", fake_world=3, ranks="0-1")
    assert list(result.ranks) == [0, 1]
    messages = etloom.open(tmp_path / "run", use_cache=False)[1].comms.select("collective", "bytes").unique()
    assert sorted(messages.rows()) == [("recv", 256), ("recv", 512), ("send", 256), ("send", 512)]
    assert not list((tmp_path / "run").glob(".etloom-*")), "objects of ranks are removed"
    alone = etloom.collect(command, tmp_path / "alone", fake_world=3, ranks="2")
    assert list(alone.ranks) == []
    assert alone.exit_status == 1


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
