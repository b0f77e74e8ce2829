"""Has callbacks of the garbage collector and finalizers that compute."""

import gc
import weakref

import torch
from training import describe, train


class Node:
    def __init__(self) -> None:
        self.itself = self


def on_collection(phase: str, _info: dict[str, int]) -> None:
    phases.add(phase)
    torch.ones(2) + 1


phases: set[str] = set()
finalized: list[int] = []
gc.callbacks.append(on_collection)
for number in range(10):
    weakref.finalize(Node(), finalized.append, number)
    train(2)
    gc.collect()
print("finalized", finalized, sorted(phases))
describe()
