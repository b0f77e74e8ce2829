"""The bugs that the bench injects into a training run; one entry of `BUGS` each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def do_nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Bug:
    """A bug, and the finding that names it.

    Attributes:
        pattern: The pattern of `etloom analyze findings` that must come first; empty for the clean run.
        load: Called with the rank for each sample.
        work: Called with the model and the rank in each step, before the optimizer's.
        ddp: Options of DistributedDataParallel.
        collect: Options of etloom collect.
    """

    pattern: str
    load: Callable[[int], None] = do_nothing
    work: Callable[[nn.Module, int], None] = do_nothing
    ddp: dict[str, Any] = field(default_factory=dict)
    collect: tuple[str, ...] = ()


def sleep_for_sample(_: int) -> None:
    time.sleep(0.01)


def sleep_on_rank_1(_: nn.Module, rank: int) -> None:
    if rank == 1:
        time.sleep(0.06)


def reduce_single_values(_: nn.Module, __: int) -> None:
    for _ in range(150):
        dist.all_reduce(torch.ones(1))


def save_checkpoint(_: nn.Module, __: int) -> None:
    state = {"buffer": torch.empty(16 << 20)}
    with Path(os.devnull).open("wb") as file:
        torch.save(state, file)


def sum_elements(_: nn.Module, __: int) -> None:
    values, total = torch.ones(1_500), torch.zeros(())
    for i in range(len(values)):
        total = total + values[i]


def read_each_gradient(model: nn.Module, _: int) -> None:
    for parameter in model.parameters():
        for tensor in (parameter.grad, parameter):
            assert tensor is not None
            values = tensor.detach()
            for statistic in (values.norm(), values.max(), values.min(), values.mean(), values.std()):
                statistic.item()


def copy_layouts(_: nn.Module, __: int) -> None:
    image = torch.ones(1_000, 2_000)
    for _ in range(5):
        image.t().contiguous()


BUGS = {
    "clean": Bug(""),
    "slow loader": Bug("data-loading", load=sleep_for_sample),
    "sleeping rank": Bug("stragglers", work=sleep_on_rank_1),
    "tiny all-reduces": Bug("small-collectives", work=reduce_single_values),
    "small buckets": Bug("small-collectives", ddp={"bucket_cap_mb": 0.001}),
    "torch.save": Bug("checkpoints", work=save_checkpoint, collect=("--stack",)),
    "tiny operators": Bug("tiny-operators", work=sum_elements),
    ".item()": Bug("item-calls", work=read_each_gradient),
    "copies": Bug("copies", work=copy_layouts),
}
