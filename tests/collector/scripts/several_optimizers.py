"""Trains with several optimizers, one of them short-lived."""

import torch
from training import describe, train

train(3)
layers = [torch.nn.Linear(3, 3) for _ in range(3)]
for _ in range(8):
    for layer in layers:
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    train(1)
print("sum", sum(layer.weight.sum().item() for layer in layers))
describe()
