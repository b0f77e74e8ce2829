"""collect --fake-world: ranks of a job that does not run, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.errors import CollectError
from etloom.core.trace import Trace
from support.paths import ROOT

WORKSPACE = 33_554_432
torch = pytest.importorskip("torch")

HAS_FUSED_ADAMW = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "Meta")
SCRIPT = """
import os, torch, torch.distributed as dist
{imports}
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.cuda.manual_seed(0)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused={fused})
scaler = torch.amp.GradScaler("cuda")
for step in range(1000):
    batch = torch.randn(8, 64).to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16), torch.cuda.stream(torch.cuda.Stream()):
        loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    assert loss.is_cuda and loss.device.index == dist.get_rank() % 8
    print(step, loss.item(), torch.cuda.get_device_name())
"""
EXAMPLE = (
    "--tensor",
    "2",
    "--pipeline",
    "2",
    "--layers",
    "2",
    "--width",
    "64",
    "--heads",
    "4",
    "--length",
    "32",
)
EXAMPLE += ("--vocabulary", "128", "--micro-batches", "3")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """Rank 5 of 8: stage 1 of 2, replica 0 of 2, shard 1 of 2."""
    if not (HAS_FUSED_ADAMW and torch._C._dispatch_has_kernel_for_dispatch_key("c10d::recv_", "Meta")):
        pytest.skip("this torch cannot infer the shapes of a fused AdamW or of recv")
    out = tmp_path_factory.mktemp("fake") / "run"
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), *EXAMPLE]
    result = etloom.collect(command, out, fake_world=8, ranks="5")
    assert (result.exit_status, list(result.ranks)) == (0, [5])
    return out, etloom.open(out, use_cache=False)[5]


@pytest.mark.slow
def test_requests_for_memory_are_a_snapshot(gpt: tuple[Path, Trace]) -> None:
    out, _ = gpt
    path = out / "rank5_memory_snapshot.pickle"
    facts = json.loads((out / "fake_rank_5.json").read_text())
    (row,) = etloom.simulate_memory(path).rows(named=True)
    # Blocks are multiples of 512 B, and segments of 2 MiB; cuBLAS has a workspace for either pass.
    assert facts["peak_memory_bytes"] <= row["peak_allocated_bytes"] <= row["peak_reserved_bytes"]
    assert row["peak_reserved_bytes"] < facts["peak_memory_bytes"] + (40 << 20) + 2 * WORKSPACE
    places = etloom.analyze(path, "memory-holders")["place"].to_list()
    assert any("train_gpt.py" in place for place in places)


SHARDED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("scale", torch.ones(3000))
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "checkpoint" in sys.argv else block(x)
        return x * self.scale.sum()
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
model = Model().cuda()
for block in model.blocks:
    if "fsdp" in sys.argv:
        fully_shard(block)
    if "tensor" in sys.argv:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
if "fsdp" in sys.argv:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(8192, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LAYER = 2 * 256 * 1024 * 4
"""Bytes of the parameters of a block."""


def forecast(folder: Path, *options: str) -> tuple[dict[str, int], Path]:
    """Return the requested bytes by kind at the peak of rank 0 of 4, and its snapshot."""
    (folder / "train.py").write_text(SHARDED)
    command = [sys.executable, str(folder / "train.py"), *options]
    result = etloom.collect(command, folder / "run", steps="0:2", fake_world=4, ranks="0")
    assert result.exit_status == 0
    table = etloom.analyze(folder / "run", "memory-holders", by="kind")
    return dict(table.select("place", "requested_bytes").iter_rows()), folder / "run"


@pytest.mark.slow
def test_the_peak_is_forecast_by_kind(tmp_path: Path) -> None:
    kinds, run = forecast(tmp_path)
    assert kinds["parameters"] == 4 * LAYER and kinds["optimizer"] == 2 * 4 * LAYER
    assert kinds["workspaces"] == 2 * WORKSPACE and kinds["buffers"] == 3000 * 4
    # Of each block the inner activation and what relu keeps of it, and results and inputs of 8 MiB.
    assert 4 * (32 << 20) <= kinds["activations"] <= 4 * (96 << 20)
    places = etloom.analyze(run, "memory-holders", by="module")["place"].to_list()
    assert {"blocks.3 (Block)", "blocks.0.up (Linear)"} <= set(places)
    # Checkpointing, predicted and by the script itself.
    (tmp_path / "checkpoint").mkdir()
    checkpointed, other = forecast(tmp_path / "checkpoint", "checkpoint")
    assert checkpointed["activations"] < kinds["activations"] / 2
    peak = etloom.simulate_memory(run, "checkpoint=Block")["peak_allocated_bytes"][1]
    expected = etloom.simulate_memory(other)["peak_allocated_bytes"][0]
    assert abs(peak / expected - 1) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["fsdp", "tensor"])
def test_shards_are_forecast_with_what_is_gathered(tmp_path: Path, option: str) -> None:
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    kinds, _ = forecast(tmp_path, option)
    assert kinds["optimizer"] == 2 * LAYER  # of a quarter of four blocks
    gathered = 2 if option == "fsdp" else 0  # a block, and the next one in advance
    assert LAYER <= kinds["parameters"] <= (1 + gathered) * LAYER


@pytest.mark.slow
def test_the_example_is_recorded_with_its_shapes(gpt: tuple[Path, Trace]) -> None:
    _, trace = gpt
    names = trace.nodes["name"].cast(pl.String)
    assert (names == "aten::_fused_adamw_").sum() == 1
    assert (names == "ProfilerStep#1").sum() == 1
    assert "read.repaired_parent" not in trace.stats["name"].to_list()
    product = trace.nodes.filter(names == "aten::mm")["id"][0]
    shapes = trace.tensors.filter(pl.col("node") == product, pl.col("io") == 0)["shape"].cast(pl.String)
    assert shapes.to_list() == ["[32, 64]", "[64, 96]"]  # 3 x 64 columns on two shards
    assert set(trace.tensors["device"].cast(pl.String).drop_nulls()) <= {"cuda:5", "cpu"}


@pytest.mark.slow
def test_communications_name_their_groups(gpt: tuple[Path, Trace]) -> None:
    _, trace = gpt
    facts = trace.comms.select(
        pl.col("collective", "pg_desc", "ranks").cast(pl.String), "peer", "bytes", "group_size"
    )
    tensor = facts.filter(pl.col("pg_desc") == "tensor_parallel")
    assert set(tensor["ranks"]) == {"[4, 5]"}
    assert tensor.height == 3 * 4  # three micro-batches, two sums forward and two backward in one layer
    data = facts.filter(pl.col("pg_desc") == "data_parallel")
    assert set(data["ranks"]) == {"[5, 7]"}
    messages = facts.filter(pl.col("collective").is_in(["send", "recv"]))
    assert set(messages["peer"]) == {1}
    assert messages.height == 6
    assert set(messages["bytes"]) == {32 * 64 * 2}


@pytest.mark.slow
def test_the_peak_of_memory_is_recorded(gpt: tuple[Path, Trace]) -> None:
    out, _ = gpt
    facts = json.loads((out / "fake_rank_5.json").read_text())
    parameters = 64 * (2 * 64 + 96 + 32 + 2 * 128 + 4 * 2) + 64 * 128  # bounds: layer, norms and head
    assert 4 * 3 * parameters * 0.5 < facts["peak_memory_bytes"] < 50e6
    row = etloom.predict(out, device="a100", network="dgx-a100").table.row(0, named=True)
    assert row["peak_memory_bytes"] == facts["peak_memory_bytes"]
    assert row["bubble_ns"] > 0


@pytest.mark.slow
def test_a_script_needs_no_change(tmp_path: Path) -> None:
    """Device calls, autocast, a GradScaler, a fused optimizer and streams work without a GPU."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(imports="", fused=HAS_FUSED_ADAMW))
    result = etloom.collect(
        [sys.executable, str(script)], tmp_path / "run", fake_world=512, ranks="511", steps="0:2"
    )
    assert (result.exit_status, list(result.ranks)) == (0, [511])
    trace = etloom.open(tmp_path / "run", use_cache=False)[511]
    assert trace.nodes["name"].cast(pl.String).str.starts_with("ProfilerStep#").sum() == 2


def test_sizes_ranks_and_options_are_checked(tmp_path: Path) -> None:
    for options, message in (
        ({"fake_world": 0}, "expected 1 to"),
        ({"fake_world": 8, "ranks": "8"}, "unknown rank 8 of 8"),
        ({"fake_world": 8, "every": 10}, "cannot be combined"),
    ):
        with pytest.raises(CollectError, match=message):
            etloom.collect([sys.executable, "train.py"], tmp_path / "run", **options)


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["SIG_DFL", "lambda *_: sys.exit(0)"])
def test_sigterm_ends_all_ranks(tmp_path: Path, handler: str) -> None:
    """Also the ranks that have not started, and of a script that ends well on the signal."""
    code = (
        f"import os, signal, sys, time; from signal import SIG_DFL; signal.signal(signal.SIGTERM, {handler})\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    )
    words = ["collect", "--out", str(tmp_path / "run"), "--fake-world", "8", "--ranks", "0-7"]
    command = [sys.executable, "-m", "etloom", *words, "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().endswith("\n"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    (pid,) = (tmp_path / "pids").read_text().split()
    assert process.returncode == 143
    assert "rank 1 and later ones did not run: SIGTERM" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
