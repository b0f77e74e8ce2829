"""Record runs of steps of equal pieces of work, one run after the other: python steady.py OUT:PIECES OUT:PIECES ...

A step of 21 pieces takes 5 % longer than one of 20, but for the little that is not in the pieces.
"""

from __future__ import annotations

import sys

import torch

import etloom

STEPS = 60
WARMUP = 3


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randn(96, 96, requires_grad=True)
    x = torch.randn(96, 96)
    optimizer = torch.optim.SGD([weight], lr=1e-9)

    def step(pieces: int) -> None:
        for _ in range(pieces):
            (x @ weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for run in sys.argv[1:]:
        out, pieces = run.rsplit(":", 1)
        with etloom.record(out, steps=f"{WARMUP}:{WARMUP + STEPS}", shapes=False) as recording:
            for _ in range(WARMUP + STEPS + 1):
                step(int(pieces))
                recording.step()


if __name__ == "__main__":
    main()
