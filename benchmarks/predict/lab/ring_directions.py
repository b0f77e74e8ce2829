"""Times of gloo's rings alone and together, relative to the rate of the network: what `predict` assumes of them.

    RATE=200 PYTHON=.venv/bin/python bash net_lab.sh 3 200mbit ring_directions.py

An all-gather sends to the next rank, a reduction to the previous one. Each of CHAIN collectives waits for the one
before it. Measured at 100, 200 and 500 Mbit/s on 2, 3 and 4 ranks: all-gathers take 1.38 to 1.48 times as long as their
data on 2 ranks, 1.08 to 1.24 on more; reductions 1.02 to 1.14; both together 1.02 to 1.07 on 2 ranks, 1.27 to 1.33 on
more (one measurement, 4 ranks at 500 Mbit/s and a load of 8, was not steady).
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

CHAIN, ROUNDS, ELEMENTS = 8, 5, 512 * 512
torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()
shards = [torch.zeros(ELEMENTS // world) for _ in range(CHAIN)]
wholes = [torch.zeros(ELEMENTS // world * world) for _ in range(CHAIN)]


def run_chain(gathers: bool, reduces: bool) -> None:
    """Run the collectives; reductions follow the all-gather that they overlap."""
    reductions = []
    for shard, whole in zip(shards, wholes, strict=True):
        if gathers:
            gather = dist.all_gather_into_tensor(whole, shard, async_op=True)
        if reduces:
            reductions.append(dist.reduce_scatter_tensor(shard, whole, async_op=True))
        (gather if gathers else reductions[-1]).wait()
    for reduction in reductions:
        reduction.wait()


shares = []
for gathers, reduces in ((True, False), (False, True), (True, True)):
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        run_chain(gathers, reduces)
        times.append(time.perf_counter() - start)
    passes = gathers + 2 * reduces  # gloo executes a reduce-scatter as an all-reduce
    moved = passes * CHAIN * 4 * wholes[0].numel() * (world - 1) / world
    shares.append(statistics.median(times) * float(os.environ["RATE"]) * 1e6 / 8 / moved)
if dist.get_rank() == 0:
    print("STEPS_MS all-gather {:.2f}, reduction {:.2f}, both {:.2f}".format(*shares))
dist.barrier()
dist.destroy_process_group()
