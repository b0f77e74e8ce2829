"""Data-parallel training with an emulated accelerator (each layer sleeps) and a real network (gloo over TCP).

Environment: as in step_times.py, and BUCKET_MB. Rank 0 prints the step times in ms and their median after warm-up.
"""

import os
import time

import torch
import torch.distributed as dist
from step_times import forward_s, layers, run_steps, width
from torch.nn.parallel import DistributedDataParallel


class Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        time.sleep(forward_s)
        return x + weight.sum() * 0

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        time.sleep(2 * forward_s)
        return grad, torch.full_like(weight, 1e-3)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return Emulated.apply(x, self.weight)


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(
    torch.nn.Sequential(*[Layer() for _ in range(layers)]),
    bucket_cap_mb=float(os.environ.get("BUCKET_MB", 2)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(4, 8, requires_grad=True)


def step() -> None:
    """Run one step."""
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


run_steps(step)
