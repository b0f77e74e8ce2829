"""Small models, and recordings of their training steps, made by torch here and now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etloom

torch = pytest.importorskip("torch")
from torch.profiler import ExecutionTraceObserver, profile  # noqa: E402


def record(folder: Path, step: Callable[[], Any]) -> etloom.Trace:
    """The linked trace of two calls, the second recorded."""
    step()
    observer = ExecutionTraceObserver().register_callback(str(folder / "torch_et_0.json"))
    with profile(execution_trace_observer=observer, record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / "kineto_trace_0.json"))
    return etloom.open(folder, use_cache=False)[0]


def training(
    model: Any, *inputs: Any, loss: Callable[[Any], Any] = lambda out: out.sum()
) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model(*inputs)).backward()
        optimizer.step()

    return step


def mlp() -> Callable[[], None]:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 8))
    labels = torch.randint(8, (16,))
    return training(model, torch.rand(16, 32), loss=lambda out: nn.functional.cross_entropy(out, labels))


def transformer() -> Callable[[], None]:
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))
    return training(model, torch.randint(50, (4, 12)))


def resnet() -> Callable[[], None]:
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.inner(x))

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), Block(), nn.MaxPool2d(2), Block(), nn.AdaptiveAvgPool2d(1)
    )
    return training(model, torch.rand(2, 3, 33, 33))


def bags() -> Callable[[], None]:
    model = torch.nn.EmbeddingBag(100, 8, mode="sum")
    return training(model, torch.randint(100, (30,)), torch.tensor([0, 4, 9, 21]))
