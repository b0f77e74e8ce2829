"""The training and decoding jobs that `measure.py` times and records; one entry of `JOBS` each.

Each job but the first differs from another in one thing, so the time that the difference costs is measured.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 1024, 16, 1024, 16, 8192


@dataclass(frozen=True)
class Job:
    """A job and what it is compared with.

    Attributes:
        pattern: The finding that should come first; empty where no finding is expected.
        without: The job that lacks the problem.
        changes: What-if changes that lead to `without`.
        is_decoding: Whether it decodes tokens of one request, instead of training.
        options: Keywords of `Training` or `Decoding`.
        stack: Whether Python stacks are recorded.
    """

    pattern: str = ""
    without: str = "clean"
    changes: tuple[str, ...] = ()
    is_decoding: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    stack: bool = False


def chained_gelu(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, an elementwise operator at a time."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def fused_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu = chained_gelu if options.get("gelu") == "chained" else fused_gelu
        self.dropout = options.get("dropout", 0.0)
        self.layout_copies = options.get("layout_copies", False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)))
        y = self.gelu(self.up(self.norm2(x)))
        if self.layout_copies:
            for _ in range(2):
                y = y.transpose(1, 2).contiguous().transpose(1, 2).contiguous()
        return x + self._drop(self.down(y))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=True) if self.dropout else x


class Model(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(options) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.options.get("checkpoint") else block(x)
            if self.options.get("read_values"):
                assert x.detach().float().norm().item() >= 0
            if self.options.get("synchronize"):
                torch.cuda.synchronize()
            if self.options.get("zeros"):
                for _ in range(4):
                    torch.zeros(BATCH, LENGTH, 4 * WIDTH, device="cuda")
            if self.options.get("mask"):
                x[x[..., 0] > 1e9] = 0
        return self.head(x)


class Batches:
    """Token batches on the host."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.sleep_s = options.get("sleep_s", 0.0)
        self.tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).pin_memory()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            if self.sleep_s:
                time.sleep(self.sleep_s)
            yield self.tokens


class Samples(torch.utils.data.IterableDataset):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Training:
    """Steps of a transformer; `options` name what is done wrong."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.options = options
        self.model = Model(options).cuda()
        fused = {"fused": True} if options.get("fused", True) else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        loader = torch.utils.data.DataLoader(Samples(Batches(options)), batch_size=None)
        self.batches = iter(loader)
        self.features = torch.zeros(options.get("pageable_mb", 0) << 18)
        self.small = [torch.zeros(16) for _ in range(options.get("small_copies", 0))]
        self.values = torch.rand(options.get("sorted", 0))
        self.objects = [[index] for index in range(options.get("objects", 0))]
        self.count = 0

    def step(self) -> None:
        tokens = next(self.batches).cuda(non_blocking=True)
        if len(self.features):
            self.features.cuda()
        for values in self.small:
            values.cuda()
        if len(self.values):
            torch.sort(self.values)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.options.get("autocast", True)):
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.options.get("empty_cache"):
            torch.cuda.empty_cache()
        if self.objects:
            gc.collect()
        if self.options.get("save"):
            with Path(os.devnull).open("wb") as file:
                torch.save({"head": self.model.head.state_dict()}, file)
        self.count += 1
        if self.options.get("evaluate") and self.count % 3 == 0:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                self.model(tokens[:, :-1])


class Decoding:
    """A decoder that computes one token of one request a step, with or without a CUDA graph."""

    def __init__(self, *, graph: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Model({}).cuda().bfloat16().eval()
        self.tokens = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self._decode()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._decode()

    @torch.no_grad()
    def _decode(self) -> None:
        self.tokens.copy_(self.model(self.tokens)[:, -1:].argmax(-1))

    def step(self) -> None:
        for _ in range(8):
            if self.graph is None:
                self._decode()
            else:
                self.graph.replay()


def make(job: Job) -> Callable[[], None]:
    """Return the function that runs one step of the job."""
    options = dict(job.options)
    tf32 = options.pop("tf32", True)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return (Decoding if job.is_decoding else Training)(**options).step


JOBS = {
    "clean": Job(),
    "pageable copies": Job("copies", options=(("pageable_mb", 64),)),
    "small copies": Job("copies", options=(("small_copies", 600),)),
    "slow loader": Job("data-loading", options=(("sleep_s", 0.04),)),
    "values read": Job("host-sync", options=(("read_values", True),)),
    "synchronization": Job("host-sync", options=(("synchronize", True),)),
    "boolean masks": Job("host-sync", options=(("mask", True),)),
    "emptied cache": Job("allocator", options=(("empty_cache", True),)),
    "layout copies": Job("copies", options=(("layout_copies", True),)),
    "single-tensor optimizer": Job("launch-bound", options=(("fused", False),)),
    "zero-filling": Job("zero-fill", options=(("zeros", True),)),
    "sort on the host": Job("host-compute", options=(("sorted", 1_000_000),)),
    "garbage collection": Job("idle-host", options=(("objects", 1_000_000),)),
    "checkpoint in each step": Job("checkpoints", options=(("save", True),), stack=True),
    "recomputation": Job("recomputation", options=(("checkpoint", True),)),
    "elementwise chains": Job("elementwise-chains", options=(("gelu", "chained"),)),
    "evaluation": Job("additional-work", options=(("evaluate", True),)),
    "dropout": Job(
        changes=(
            "op:aten::native_dropout x0",
            "op:autograd*NativeDropoutBackward0 x0",
            "kernel:*dropout* x0",
        ),
        options=(("dropout", 0.1),),
    ),
    "tf32": Job(options=(("autocast", False),)),  # the job that fp32 is compared with
    "fp32": Job("fp32-gemm", without="tf32", options=(("autocast", False), ("tf32", False))),
    "decoding with a graph": Job(is_decoding=True, options=(("graph", True),)),
    "decoding": Job(
        "launch-bound", without="decoding with a graph", is_decoding=True, changes=("host x0", "launch x0")
    ),
}
