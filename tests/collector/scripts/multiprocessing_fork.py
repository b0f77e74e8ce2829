"""Trains in workers of multiprocessing, and loads data with others."""

import multiprocessing

import torch
from training import describe, train


def work(number: int) -> float:
    train(2, 0)
    return float(torch.ones(number).sum())


train(5)
with multiprocessing.get_context("fork").Pool(2) as pool:
    print("pool", pool.map(work, range(6)))
data = torch.utils.data.TensorDataset(torch.arange(32.0))
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
print("loaded", sum(float(batch.sum()) for (batch,) in loader))
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
print("process", process.exitcode)
train()
describe()
