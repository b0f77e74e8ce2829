"""A small job on one GPU: copies, two streams, an event, a synchronization and a device graph in each step.

    etloom collect --out run --steps 3:5 -- python benchmarks/gpu/small.py

tests/data/gpu_small was recorded with it.
"""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    side, copied = torch.cuda.Stream(), torch.cuda.Event()
    pinned, pageable = torch.randn(64, 256).pin_memory(), torch.randn(64, 256)
    head = nn.Linear(256, 256).cuda().eval()
    fixed = torch.zeros(64, 256, device="cuda")
    with torch.no_grad():
        head(fixed).relu_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = head(fixed).relu_()
    for _ in range(8):
        with torch.cuda.stream(side):
            batch = pinned.cuda(non_blocking=True)
            copied.record()
        other = pageable.cuda()
        torch.cuda.current_stream().wait_event(copied)
        loss = model(batch + other).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        fixed.copy_(other)
        graph.replay()
        assert result.sum().item() >= 0
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
