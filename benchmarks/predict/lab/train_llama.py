"""Llama 3 8B with FSDP2 and selective recomputation, as torchtitan has it: attention and every second product are kept.

Recorded in a fake world by benchmarks/predict/fake_world.py. Environment: BATCH.
"""

import os
from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

DIM, HEADS, KV_HEADS, FFN, VOCABULARY, LAYERS, SEQUENCE = 4096, 32, 8, 14336, 128256, 32, 8192
BATCH = int(os.environ.get("BATCH", 2))
KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, DIM // HEADS * KV_HEADS, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).view(batch, length, -1, DIM // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        k, v = (heads.repeat_interleave(HEADS // KV_HEADS, 1) for heads in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, DIM))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def make_contexts() -> tuple[object, object]:
    """Return the contexts in which products are counted, so that every second one is repeated."""
    counts: dict[bool, int] = defaultdict(int)

    def choose(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
        is_kept = operator in KEPT or (
            operator == torch.ops.aten.mm.default and counts[context.is_recompute] % 2
        )
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.RMSNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        run = partial(checkpoint, use_reentrant=False, context_fn=make_contexts)
        for block in self.blocks:
            x = run(block, x)
        return self.head(self.norm(x))


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
with torch.device("meta"):
    model = Llama()
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for module in (*model.blocks, model):
    fully_shard(module, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device="cuda")
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
