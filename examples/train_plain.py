"""Train a linear layer in one process: etloom collect --out run/ -- python examples/train_plain.py"""

from __future__ import annotations

import argparse

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    run = torch.compile(model, backend="aot_eager") if args.compile else model
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(64, 8)
    for step in range(args.steps):
        loss = nn.functional.mse_loss(run(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
