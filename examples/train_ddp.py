"""Train a small character-level transformer with DistributedDataParallel and print how long each step took.

    python examples/train_ddp.py --steps 6
    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 6
    etloom collect --out run/ --steps 3:5 -- torchrun --nproc-per-node 2 examples/train_ddp.py --steps 6

The text is generated: random sums such as "37+48=85". A step lasts from the return of the previous
optimizer.step() to the return of this one, without the work of a profiler between two steps.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ALPHABET = "0123456789+=;"


def make_text(sums: int, seed: int) -> torch.Tensor:
    """`sums` random sums as one int64 tensor of indices into ALPHABET."""
    generator = random.Random(seed)
    parts = []
    for _ in range(sums):
        a, b = generator.randrange(100), generator.randrange(100)
        parts.append(f"{a}+{b}={a + b};")
    return torch.tensor([ALPHABET.index(letter) for letter in "".join(parts)])


class Transformer(nn.Module):
    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2, context: int = 48) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(len(ALPHABET), width)
        self.position_embedding = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(ALPHABET))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        positions = torch.arange(length, device=text.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.out(
            self.encoder(
                self.token_embedding(text) + self.position_embedding(positions), mask=mask, is_causal=True
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer and time its steps")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 48 characters per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rank = int(os.environ.get("RANK", "0"))
    distributed = "RANK" in os.environ
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    text = make_text(4000, args.seed).to(device)
    model: nn.Module = Transformer().to(device)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Each rank reads other parts of the text.
    generator = torch.Generator().manual_seed(args.seed * 1000 + rank)

    ends: list[float] = []
    optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    times, losses = [], []
    begin = time.perf_counter()
    for _ in range(args.steps):
        starts = torch.randint(len(text) - 49, (args.batch,), generator=generator)
        window = text[(starts[:, None] + torch.arange(49)).to(device)]
        predicted = model(window[:, :-1])
        loss = nn.functional.cross_entropy(predicted.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        times.append(ends[-1] - begin)
        begin = time.perf_counter()

    lines = [f"rank {rank} step {step} {seconds * 1e3:.3f} ms" for step, seconds in enumerate(times)]
    if distributed:
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, lines)
        lines = [line for part in gathered for line in part]
        dist.destroy_process_group()
        # gloo's thread releases the tensors of the last collective a moment after its end. If Python (before 3.12) is
        # already shutting down at that time, torch aborts the process.
        time.sleep(0.2)
    if rank == 0:
        print("\n".join(lines))
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {args.steps} steps")


if __name__ == "__main__":
    main()
