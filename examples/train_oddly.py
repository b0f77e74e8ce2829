"""Train a linear layer as scripts sometimes do: one raises, one exits, one has a torch.profiler of its own.

etloom collect --out run/ -- python examples/train_oddly.py raise
etloom collect --out run/ --step-by profiler -- python examples/train_oddly.py profile
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line, and end oddly")
    parser.add_argument("how", choices=("raise", "exit", "profile"))
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(64, 8)
    own = None
    if given.how == "profile":
        own = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda p: print(
                f"profiled {sum(e.name == 'aten::addmm' for e in p.events())} layers"
            ),
        )
    with own or nullcontext():
        for step in range(given.steps):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            if own is not None:
                own.step()
    if given.how == "raise":
        raise RuntimeError("the data ran out")
    if given.how == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main()
