"""Sharded training with an emulated accelerator: all-gather of weights, reduce-scatter of gradients, over gloo.

Each layer sleeps for a known time. Its weights are gathered while the layer before it computes, and its gradients are
reduced and scattered while the layer before it computes its own. Environment: as in step_times.py.
"""

import time

import torch
import torch.distributed as dist
from step_times import forward_s, layers, run_steps, width

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()
shard = width * width // world
shards = [torch.nn.Parameter(torch.zeros(shard)) for _ in range(layers)]
optimizer = torch.optim.SGD(shards, lr=0.01)


def gather(layer: int) -> tuple[torch.Tensor, dist.Work]:
    """Start to gather the weights of a layer."""
    full = torch.empty(shard * world)
    return full, dist.all_gather_into_tensor(full, shards[layer].detach(), async_op=True)


def run_layers(order: list[int], compute_s: float, gradients: bool) -> list[dist.Work]:
    """Compute the layers in this order, each with its weights gathered during the one before it."""
    pending, reductions = gather(order[0]), []
    for position, layer in enumerate(order):
        full, work = pending
        work.wait()
        if position + 1 < len(order):
            pending = gather(order[position + 1])
        time.sleep(compute_s)
        if gradients:
            shards[layer].grad = torch.empty_like(shards[layer])
            reductions.append(dist.reduce_scatter_tensor(shards[layer].grad, full, async_op=True))
    return reductions


def step() -> None:
    """Run one step."""
    optimizer.zero_grad()
    run_layers(list(range(layers)), forward_s, gradients=False)
    for reduction in run_layers(list(reversed(range(layers))), 2 * forward_s, gradients=True):
        reduction.wait()
    optimizer.step()


run_steps(step)
