"""Training with experts on other ranks, on an emulated accelerator (each layer sleeps), with all-to-alls over gloo.

Each layer sends its tokens to the ranks of their experts, computes, and returns them, forward and backward. The ranks
get uneven parts, which differ by layer. Environment: as in step_times.py, and TOKENS_KB (that a rank sends).
"""

import os
import time

import torch
import torch.distributed as dist
from step_times import forward_s, layers, run_steps

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
elements = int(os.environ.get("TOKENS_KB", 1024)) * 256
parameter = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([parameter], lr=0.0)


def split(layer: int, sender: int) -> list[int]:
    """Return the elements that a rank sends to each rank: the popular expert of the layer gets twice as many."""
    weights = [1 + ((receiver + layer) % world == 0) + (receiver == sender) / 2 for receiver in range(world)]
    return [int(elements * weight / sum(weights)) for weight in weights]


def exchange(layer: int, backwards: bool) -> None:
    """Send tokens to their experts, or back."""
    sent, received = split(layer, rank), [split(layer, sender)[rank] for sender in range(world)]
    if backwards:
        sent, received = received, sent
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)


def step() -> None:
    """Run one step."""
    optimizer.zero_grad()
    for passes, compute_s in ((range(layers), forward_s), (reversed(range(layers)), 2 * forward_s)):
        for layer in passes:
            exchange(layer, backwards=False)
            time.sleep(compute_s)
            exchange(layer, backwards=True)
    parameter.grad = torch.ones(8)
    optimizer.step()


run_steps(step)
