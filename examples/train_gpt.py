"""Train a GPT with tensor, pipeline and data parallelism, in plain PyTorch.

One process per GPU, with torchrun:

    torchrun --nproc-per-node 8 examples/train_gpt.py --tensor 2 --pipeline 2

On a laptop without a GPU, ranks of a job of any size are recorded without running it:

    etloom collect --out run/ --fake-world 512 --ranks 0,256 -- python examples/train_gpt.py --tensor 8 --pipeline 8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Size of the model and of the job."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int
    micro_batches: int
    tensor: int
    pipeline: int


class Mesh:
    """The process groups of a rank. Neighbouring ranks share a layer, then come replicas, then stages."""

    def __init__(self, tensor: int, pipeline: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        data = world // (tensor * pipeline)
        if tensor * data * pipeline != world:
            raise SystemExit(f"{world} ranks cannot form tensor {tensor} x pipeline {pipeline}")
        ranks = list(range(world))
        place = {r: (r // (tensor * data), r // tensor % data, r % tensor) for r in ranks}
        self.stage, self.replica, self.shard = place[rank]
        self.stages, self.replicas, self.shards = pipeline, data, tensor
        self.tensor = self.data = None
        # Every rank creates every group, in the same order.
        for stage in range(pipeline):
            for replica in range(data):
                members = [r for r in ranks if place[r][:2] == (stage, replica)]
                group = dist.new_group(members, group_desc="tensor_parallel")
                self.tensor = group if rank in members else self.tensor
            for shard in range(tensor):
                members = [r for r in ranks if (place[r][0], place[r][2]) == (stage, shard)]
                group = dist.new_group(members, group_desc="data_parallel")
                self.data = group if rank in members else self.data
        self.previous, self.next = rank - tensor * data, rank + tensor * data

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


class CopyToShards(torch.autograd.Function):
    """Pass the input to all shards; sum their gradients."""

    @staticmethod
    def forward(context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient: Tensor):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class SumOfShards(torch.autograd.Function):
    """Sum the outputs of all shards; pass the gradient to each."""

    @staticmethod
    def forward(context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context, gradient: Tensor):
        return gradient, None


class Block(nn.Module):
    """A transformer layer; heads and hidden units are divided among the shards."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        super().__init__()
        self.group, self.heads = mesh.tensor, config.heads // mesh.shards
        inner = config.width // mesh.shards
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * inner, bias=False)
        self.projection = nn.Linear(inner, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * inner, bias=False)
        self.down = nn.Linear(4 * inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = CopyToShards.apply(self.attention_norm(x), self.group)
        q, k, v = self.qkv(y).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.projection(y.transpose(1, 2).reshape(batch, length, -1))
        x = x + SumOfShards.apply(y, self.group)
        y = CopyToShards.apply(self.mlp_norm(x), self.group)
        return x + SumOfShards.apply(self.down(F.gelu(self.up(y))), self.group)


class Stage(nn.Module):
    """The layers of a pipeline stage, with the embedding on the first and the loss on the last."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        if mesh.is_first:
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config, mesh) for _ in range(config.layers // mesh.stages))
        if mesh.is_last:
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.mesh.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return (
            F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
            if self.mesh.is_last
            else x
        )


def order_1f1b(stage: int, stages: int, micro_batches: int) -> Iterator[str]:
    """Yield "forward" and "backward" in the order of the 1F1B schedule."""
    warmup = min(stages - stage - 1, micro_batches)
    yield from ["forward"] * warmup
    yield from ["forward", "backward"] * (micro_batches - warmup)
    yield from ["backward"] * warmup


def train_step(model: Stage, config: Config, mesh: Mesh, device: str) -> None:
    """Compute the gradients of all micro-batches; messages of the pipeline carry activations and gradients."""
    shape = (config.micro_batch, config.length)
    running: list[tuple[Tensor, Tensor]] = []
    for direction in order_1f1b(mesh.stage, mesh.stages, config.micro_batches):
        if direction == "forward":
            tokens = torch.randint(config.vocabulary, shape, device=device)
            x = tokens
            if not mesh.is_first:
                x = torch.empty(*shape, config.width, device=device, dtype=torch.bfloat16, requires_grad=True)
                with torch.no_grad():
                    dist.recv(x, mesh.previous)
            with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
                y = model(x, tokens)
            if not mesh.is_last:
                y = y.to(torch.bfloat16)
                dist.send(y.detach(), mesh.next)
            running.append((x, y))
        else:
            x, y = running.pop(0)
            gradient = None
            if not mesh.is_last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, mesh.next)
            y.backward(gradient)
            if not mesh.is_first:
                dist.send(x.grad, mesh.previous)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT")
    parser.add_argument("--steps", type=int, default=5)
    for name, default in {
        "layers": 24,
        "width": 2048,
        "heads": 16,
        "length": 2048,
        "vocabulary": 50304,
        "micro-batch": 1,
        "micro-batches": 8,
        "tensor": 1,
        "pipeline": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = vars(parser.parse_args())
    steps = arguments.pop("steps")
    config = Config(**arguments)
    uses_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if uses_cuda else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if uses_cuda else "cpu"
    if uses_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    mesh = Mesh(config.tensor, config.pipeline)
    model = Stage(config, mesh).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        train_step(model, config, mesh, device)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.data)
            parameter.grad /= mesh.replicas
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
