"""Three threads begin to train at the same time."""

import threading

import torch
from training import describe, train


def work(number: int) -> None:
    barrier.wait()
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(12):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    finished[number] = 12


barrier = threading.Barrier(3)
finished: dict[int, int] = {}
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("finished", sorted(finished.items()))
train()
describe()
