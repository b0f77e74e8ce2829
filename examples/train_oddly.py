"""Train a linear layer in a script that raises, exits early, or uses torch.profiler itself.

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
    parser = argparse.ArgumentParser(description="Fit a line; raise, exit or profile")
    parser.add_argument("mode", choices=("raise", "exit", "profile"))
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(64, 8)
    profiler = None
    if args.mode == "profile":
        profiler = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda p: print(
                f"profiled {sum(e.name == 'aten::addmm' for e in p.events())} layers"
            ),
        )
    with profiler or nullcontext():
        for step in range(args.steps):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            if profiler is not None:
                profiler.step()
    if args.mode == "raise":
        raise RuntimeError("the data ran out")
    if args.mode == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main()
