"""Train a small network with FSDP2, tensor parallelism or pipeline parallelism.

etloom collect --out run/ -- torchrun --nproc-per-node 2 examples/train_parallel.py fsdp
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Train across ranks")
    parser.add_argument("mode", choices=("fsdp", "tensor", "pipeline"))
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * world)))
    batch = torch.randn(16, WIDTH)
    schedule = None
    if args.mode == "pipeline":
        model = model[2 * rank : 2 * rank + 2]
        stage = PipelineStage(model, rank, world, torch.device("cpu"), input_args=(batch[:4],))
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    elif args.mode == "tensor":
        plan = {str(i): ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(2 * world)}
        model = parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(args.steps):
        optimizer.zero_grad()
        if schedule is None:
            model(batch).square().mean().backward()
        elif rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        optimizer.step()
        if rank == 0:
            print(f"step {step} done")
    dist.barrier()
    # With hooks of FSDP alive at exit, torch now and then ends with "terminate called".
    del model, optimizer, schedule
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
