"""simulate --memory batch=x2 of a forecast: the sizes that grow with the batch follow from shapes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import etloom
from etloom.core.errors import AnalysisError

torch = pytest.importorskip("torch")
SCRIPT = """
import sys, torch
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.down(torch.relu(self.up(self.norm(x))))
batch = int(sys.argv[1])
model = nn.Sequential(nn.Embedding(1000, 192), Block(192), Block(192), nn.Linear(192, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 1000, (batch, 64), device="cuda")
loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
loss.backward()
optimizer.step()
"""
PEAKS = ("peak_reserved_bytes", "peak_allocated_bytes", "needed_bytes")


def forecast(folder: Path, batch: int) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    out = folder / f"batch{batch}"
    result = etloom.collect(
        [sys.executable, str(folder / "train.py"), str(batch)], out, fake_world=1, steps="0:1"
    )
    assert result.exit_status == 0
    return out


@pytest.mark.slow
def test_the_peak_of_another_batch_is_that_of_its_forecast(tmp_path: Path) -> None:
    runs = {batch: forecast(tmp_path, batch) for batch in (5, 10)}
    recorded = etloom.simulate_memory(runs[10]).select(PEAKS).row(0)
    assert etloom.simulate_memory(runs[5], "batch=x2").select(PEAKS).row(1) == recorded
    smaller = etloom.simulate_memory(runs[5]).select(PEAKS).row(0)
    assert etloom.simulate_memory(runs[10], "batch=x0.5").select(PEAKS).row(1) == smaller
    assert smaller[1] < recorded[1]


@pytest.mark.slow
def test_a_batch_that_cannot_be_seen_in_the_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"the batch is 1, .*--other-batch"):
        etloom.simulate_memory(forecast(tmp_path, 1), "batch=x2")
    # 3 * 64 tokens are as many as the width.
    with pytest.raises(AnalysisError, match=r"requests are undecided; .*--other-batch"):
        etloom.simulate_memory(forecast(tmp_path, 3), "batch=x2")
