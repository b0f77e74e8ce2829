"""Training with 1F1B pipelines on an emulated accelerator (each layer sleeps) over gloo.

Environment: as in step_times.py, MICRO_BATCHES, and MESSAGE_KB (of activations between stages). Each rank is a stage
with its share of the layers; the first also sleeps for an embedding, the last for a head. Rank 0 prints the step times
in ms and their median after warm-up.
"""

import os
import time

import torch
import torch.distributed as dist
from step_times import forward_s, layers, run_steps

micro_batches = int(os.environ.get("MICRO_BATCHES", 6))
width = 64
rows = int(os.environ.get("MESSAGE_KB", 2)) * 1024 // width // 4


class Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
layer_seconds = [forward_s] * (layers // stages)
if rank == 0:
    layer_seconds.insert(0, 0.5 * forward_s)
if rank == stages - 1:
    layer_seconds.append(0.75 * forward_s)
weight = torch.nn.Parameter(torch.ones(width))
optimizer = torch.optim.SGD([weight], lr=0.0)


def run_forward():
    """Receive, compute, and send to the next stage; return input and output."""
    x = torch.ones(rows, width)
    if rank > 0:
        dist.recv(x, rank - 1)
    x.requires_grad_()
    y = x * weight
    for seconds in layer_seconds:
        y = Emulated.apply(y, seconds)
    if rank < stages - 1:
        sends.append(dist.isend(y.detach(), rank + 1))
    return x, y


def run_backward(x, y):
    """Receive the gradient, compute, and send to the previous stage."""
    grad = torch.ones_like(y)
    if rank < stages - 1:
        dist.recv(grad, rank + 1)
    y.backward(grad)
    if rank > 0:
        sends.append(dist.isend(x.grad, rank - 1))


sends: list = []


def step() -> None:
    """Run one step: as many micro-batches forward as there are stages behind, then one forward, one backward."""
    optimizer.zero_grad()
    waiting = []
    for number in range(micro_batches):
        waiting.append(run_forward())
        if number >= stages - rank - 1:
            run_backward(*waiting.pop(0))
    while waiting:
        run_backward(*waiting.pop(0))
    for send in sends:
        send.wait()
    sends.clear()
    optimizer.step()


run_steps(step)
