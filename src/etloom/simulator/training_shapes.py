"""Sizes of a transformer and of the layout of its training: parameters, FLOPs, and memory per GPU.

A layout distributes the GPUs over tensor, context, data and pipeline parallelism. Experts are whole and distributed
over ``expert`` consecutive ranks of a stage, whatever their place on the other axes. Values are numbers or arrays with
one entry per configuration; sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Size = Array | float
_Shape = TypeVar("_Shape", bound="ModelShape | Layout")

HALF = 2
"""Bytes of a value of half precision."""
_LOGIT_BYTES = 8
"""Bytes per logit: half precision, single precision, and the gradient in half precision."""
_RUNTIME_BYTES = 2 << 30
"""Memory of the CUDA context, of libraries and of NCCL's buffers."""


class Product(NamedTuple):
    """A matrix product of a layer with a weight (``inner``, ``columns``), which tensor parallelism may divide."""

    columns: Size
    inner: Size
    divided: str = "columns"

    def divide(self, ways: Size) -> tuple[Size, Size]:
        """Return the columns and inner size of each of ``ways`` parts."""
        return (
            self.columns / (ways if self.divided == "columns" else 1),
            self.inner / (ways if self.divided == "inner" else 1),
        )

    def count_parameters(self, ways: Size) -> Size:
        """Return the number of weights in each of ``ways`` parts."""
        columns, inner = self.divide(ways)
        return columns * inner


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        kv_heads: default: ``heads``.
        head_width: of keys without rotary part, and of values; default: hidden / heads.
        ffn: inner size of the feed-forward network of dense layers; default: 4 x hidden.
        gated: whether feed-forward networks multiply two projections (SwiGLU).
        tied: whether the embedding is also the output projection.
        experts: routed experts per layer; 0: a dense model.
        top_k: routed experts of a token.
        dense_layers: number of first layers without experts.
        routed_nodes: nodes that have the experts of a token, to each of which it is sent once; 0: a token is sent to
            each of its experts.
        kv_rank: of the latent of keys and values (multi-head latent attention); 0: ordinary attention.
        q_rank: of the latent of queries; 0: none.
        rope_width: separate rotary part of each query head, and of all keys together.
    """

    layers: Size
    hidden: Size
    heads: Size
    sequence: Size
    vocabulary: Size = 51_200.0
    kv_heads: Size | None = None
    head_width: Size | None = None
    ffn: Size | None = None
    gated: bool = False
    tied: bool = True
    experts: Size = 0.0
    top_k: Size = 0.0
    expert_ffn: Size = 0.0
    shared_experts: Size = 0.0
    dense_layers: Size = 0.0
    routed_nodes: Size = 0.0
    kv_rank: Size = 0.0
    q_rank: Size = 0.0
    rope_width: Size = 0.0

    @property
    def width(self) -> Size:
        """The width of a head."""
        return self.hidden / self.heads if self.head_width is None else self.head_width

    @property
    def kv_elements(self) -> Size:
        """The elements of keys and values of a token that context parallelism exchanges."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        return np.where(self.kv_rank, self.kv_rank + self.rope_width, 2 * kv_heads * self.width)

    @property
    def dense_ffn(self) -> Size:
        """The inner size of a dense feed-forward network."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def moe_share(self) -> Size:
        """The share of the layers that have experts."""
        return np.where(self.experts, 1 - self.dense_layers / self.layers, 0.0)

    @property
    def up_factor(self) -> int:
        """The number of projections to the inner size of a feed-forward network."""
        return 1 + self.gated

    def list_attention_products(self) -> Iterator[Product]:
        """Yield the projections of attention."""
        inner = self.heads * self.width
        queries = self.heads * (self.width + self.rope_width)
        if np.any(self.kv_rank):
            if np.any(self.q_rank):
                yield Product(self.q_rank, self.hidden, "no")
            yield Product(queries, self.q_rank if np.any(self.q_rank) else self.hidden)
            yield Product(self.kv_elements, self.hidden, "no")
            yield Product(2 * inner, self.kv_rank)
        else:
            yield Product(queries + self.kv_elements, self.hidden)
        yield Product(self.hidden, inner, "inner")

    def list_ffn_products(self, ffn: Size) -> Iterator[Product]:
        """Yield the projections of a feed-forward network of inner size ``ffn``."""
        yield Product(self.up_factor * ffn, self.hidden)
        yield Product(self.hidden, ffn, "inner")

    def count_layer_parameters(self, tensor: Size = 1.0) -> Array:
        """Return the parameters of an average layer without routed experts, in each of ``tensor`` parts."""
        attention = sum(product.count_parameters(tensor) for product in self.list_attention_products())
        dense, shared = (
            sum(product.count_parameters(tensor) for product in self.list_ffn_products(ffn))
            for ffn in (self.dense_ffn, self.shared_experts * self.expert_ffn)
        )
        router = self.hidden * self.experts
        share = self.moe_share
        return np.asarray(attention + 2 * self.hidden + (1 - share) * dense + share * (shared + router))

    def count_expert_parameters(self) -> Size:
        """Return the parameters of a routed expert."""
        return (1 + self.up_factor) * self.hidden * self.expert_ffn

    def count_parameters(self, *, active: bool = False) -> Array:
        """Return the parameters of the model; ``active``: only those that compute a token, without the embedding."""
        experts = (self.top_k if active else self.experts) * self.moe_share * self.count_expert_parameters()
        ends = self.vocabulary * self.hidden * (1 if active or self.tied else 2)
        return np.asarray(self.layers * (self.count_layer_parameters() + experts) + ends)

    def count_token_flops(self) -> Array:
        """Return the FLOPs of a token, forward and backward: 6 per active parameter, and causal attention."""
        attention = 3 * self.layers * self.sequence * self.heads * (2 * self.width + self.rope_width)
        return np.asarray(6 * self.count_parameters(active=True) + attention)

    def count_activations(self, recompute: Size, *, fused: bool) -> Array:
        """Return the elements that an average layer keeps per token for the backward pass.

        Each matrix product and norm keeps its input (Korthikanti et al., "Reducing Activation Recomputation in Large
        Transformer Models", 2022).

        Args:
            recompute: 0: nothing, 1: selective, 2: layers.
            fused: whether attention does not write its scores; selective recomputation then leaves out norms and
                activation functions, else the scores.
        """
        *inputs, _ = (product.columns for product in self.list_attention_products())
        routed = self.top_k * self.moe_share
        inner = (1 - self.moe_share) * self.dense_ffn + (
            routed + self.shared_experts * self.moe_share
        ) * self.expert_ffn
        attention = 2 * self.hidden + sum(inputs) + self.heads * self.width
        kept = attention + 2 * self.hidden + (1 + self.up_factor) * inner + 2 * routed * self.hidden
        scores = 0.0 if fused else 2.5 * self.heads * self.sequence
        selected = kept - 2 * self.hidden - inner if fused else kept
        return np.asarray(np.select([recompute == 0, recompute == 1], [kept + scores, selected], self.hidden))


@dataclass(frozen=True)
class Layout:
    """The distribution of a training step over GPUs.

    Attributes:
        micro_batch: sequences in a micro-batch.
        micro_batches: per replica and step.
        chunks: model chunks per stage (interleaved 1F1B).
        expert: ranks that share the experts.
        sharding: stage of ZeRO: 1 divides optimizer states among replicas, 2 also gradients, 3 also parameters (FSDP).
        recompute: 0: nothing, 1: selective, 2: whole layers.
    """

    micro_batch: Size
    micro_batches: Size
    tensor: Size
    data: Size
    pipeline: Size
    context: Size = 1.0
    expert: Size = 1.0
    chunks: Size = 1.0
    sharding: Size = 0.0
    recompute: Size = 2.0

    @property
    def stage_ranks(self) -> Size:
        """The number of GPUs of a pipeline stage, in all replicas."""
        return self.tensor * self.context * self.data


def take_rows(shape: _Shape, rows: NDArray[np.int64]) -> _Shape:
    """Return a `ModelShape` or `Layout` with the configurations at the positions ``rows``."""
    arrays: dict[str, Any] = {
        field.name: value[rows]
        for field in fields(shape)
        if isinstance(value := getattr(shape, field.name), np.ndarray)
    }
    return replace(shape, **arrays)


def count_stage_layers(model: ModelShape, layout: Layout) -> tuple[Array, Array]:
    """Return the layers of a middle stage, and of the last one, which has fewer if they do not divide evenly."""
    depth = np.ceil(model.layers / (layout.pipeline * layout.chunks)) * layout.chunks
    spare = depth * layout.pipeline - model.layers
    return depth, np.asarray(depth - np.minimum(np.ceil(spare / 2), depth - 1))


def count_stage_parameters(model: ModelShape, layout: Layout) -> tuple[Array, Array]:
    """Return the parameters of a GPU of an end stage: all but routed experts, and routed experts."""
    depth, _ = count_stage_layers(model, layout)
    ends = np.where((layout.pipeline > 1) | model.tied, 1.0, 2.0) * model.vocabulary * model.hidden
    common = depth * model.count_layer_parameters(layout.tensor) + ends / layout.tensor
    experts = depth * model.moe_share * model.experts / layout.expert * model.count_expert_parameters()
    return np.asarray(common), np.asarray(experts)


def estimate_memory(
    model: ModelShape, layout: Layout, *, gradient_bytes: float, state_bytes: float, fused: bool
) -> dict[str, Array]:
    """Return the peak memory (bytes) of the GPU that needs most, by kind.

    Kinds: parameters, gradients, optimizer, activations, logits (where they are larger than what the first stage keeps
    for further micro-batches), runtime. Sequence parallelism divides activations among tensor-parallel ranks.

    Args:
        gradient_bytes: per parameter.
        state_bytes: of the optimizer per parameter, with the parameter in single precision.
    """
    common, experts = count_stage_parameters(model, layout)
    replicas, expert_replicas = layout.data * layout.context, layout.stage_ranks / layout.expert

    def divide(stage: int) -> Array:
        """Return the parameters of which a GPU holds a value that ZeRO divides from ``stage`` on."""
        divided = layout.sharding >= stage
        return common / np.where(divided, replicas, 1) + experts / np.where(divided, expert_replicas, 1)

    depth, last_depth = count_stage_layers(model, layout)
    gathered = (common + experts) / depth * (2 * HALF + gradient_bytes)
    tokens = layout.micro_batch * model.sequence / layout.context
    per_token = HALF * model.count_activations(layout.recompute, fused=fused) / layout.tensor
    whole = HALF * model.count_activations(0, fused=fused) / layout.tensor
    working = np.where(layout.recompute == 2, tokens * whole, 0.0)
    stages, chunks = layout.pipeline, layout.chunks
    warmup = np.where(chunks > 1, (stages - 1) / chunks, 0.0)
    first, last = (
        layers * per_token * tokens * np.minimum(in_flight, layout.micro_batches)
        for layers, in_flight in (
            (depth, stages + warmup),
            (last_depth, (stages * (chunks - 1) + 1) / chunks),
        )
    )
    logits = _LOGIT_BYTES * tokens * model.vocabulary / layout.tensor
    is_single = np.equal(layout.pipeline, 1)
    return {
        # Of FSDP, the optimizer's parameters are the only ones, and two layers are gathered.
        "parameters": np.asarray(np.where(layout.sharding >= 3, gathered, HALF * (common + experts))),
        "gradients": gradient_bytes * divide(2),
        "optimizer": state_bytes * divide(1),
        "activations": np.asarray(np.where(is_single, last, np.maximum(first, last)) + working),
        "logits": np.asarray(
            np.where(is_single, logits, np.maximum(logits - np.maximum(first - last, 0), 0))
        ),
        "runtime": np.full(np.broadcast(common, tokens).shape, float(_RUNTIME_BYTES)),
    }
