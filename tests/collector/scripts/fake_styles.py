"""Several styles of parallel training in each step, on devices or not: python fake_styles.py BACKEND DEVICE."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

backend, device = sys.argv[1:]
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Partly(nn.Module):
    """A model with a part that a step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.ModuleList(Mlp() for _ in range(3)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.used:
            x = block(x)
        return x


mesh = init_device_mesh(device, (2, size // 2), mesh_dim_names=("replicate", "shard"))
hybrid = nn.Sequential(Mlp(), Mlp()).to(device)
for block in hybrid:
    fully_shard(block, mesh=mesh)
fully_shard(hybrid, mesh=mesh)
sequence = nn.Sequential(Mlp(), Mlp()).to(device)
for block in sequence:
    parallelize_module(block, mesh["shard"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
searching = DistributedDataParallel(Partly().to(device), find_unused_parameters=True, bucket_cap_mb=0.1)
static = DistributedDataParallel(Partly().to(device), static_graph=True, bucket_cap_mb=0.1)
pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
other = rank ^ 1


def exchange(x: torch.Tensor) -> torch.Tensor:
    """Send to the other rank of a pair and receive from it, as pipelines do."""
    received = torch.empty_like(x)
    operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def route(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Send each row to the rank of its expert: as many to each as were counted."""
    counts = torch.histc(experts.float(), bins=size, min=0, max=size - 1).long()
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)
    rows = x.new_empty(int(incoming.sum().item()), x.shape[1])
    dist.all_to_all_single(rows, x, incoming.tolist(), counts.tolist())
    return rows[rows.abs().sum(1) >= 0]


models = nn.ModuleList([hybrid, sequence, searching, static])
optimizer = torch.optim.AdamW(models.parameters(), lr=1e-3, foreach=False)
for step in range(4):
    x = torch.randn(8, 64, device=device)
    loss = hybrid(x).square().mean() + checkpoint(sequence, x, use_reentrant=False).square().mean()
    loss = loss + searching(x).square().mean() + static(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(hybrid.parameters(), 1.0)
    exchange(x)
    route(x, torch.arange(8, device=device) % size)
    dist.all_reduce(x, group=pairs[rank // 2])
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
