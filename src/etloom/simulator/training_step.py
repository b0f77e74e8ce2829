"""Predicts the time of a training step from the sizes of the model and of its layout, without a recording.

A stage of the pipeline takes, per micro-batch, the time of its GPU or of its host, whichever is longer:

- matrix products: waves of tiles over the multiprocessors, or the traffic to memory;
- attention: a fused kernel, or products and traffic of the scores to memory; element-wise operators: traffic;
- collectives of tensor, context and expert parallelism, by their placement on the hosts;
- host: a constant time per operator launched.

With m micro-batches, p stages and v chunks per stage, one-forward-one-backward (and GPipe) schedules take the sum over
the stages, divided by v, plus m - 1 times the slowest stage (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021). Gradients are reduced among the replicas, and the optimizer
updates the parameters.

Arrays hold one value per configuration, times in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from etloom.simulator.network.model import NetworkModel
from etloom.simulator.training_shapes import (
    HALF,
    Array,
    Layout,
    ModelShape,
    Product,
    Size,
    count_stage_layers,
    count_stage_parameters,
)

_SCORE_PASSES = 6
"""Reads and writes of the attention scores in a pass, if attention is not fused."""
_FUSED_BACKWARD = 2.5
"""Work of the backward pass of fused attention, which computes the scores again, relative to the forward pass."""
_LOGIT_PASSES = 12
"""Reads and writes of the logits in the loss, in bytes per logit and pass of half precision."""
_OPTIMIZER_BYTES = 30
"""Bytes read and written per parameter by Adam in mixed precision."""


@dataclass(frozen=True)
class StepConstants:
    """Constants of a GPU, its host and the software that determine step times.

    The defaults are those of an A100 (80 GB, SXM) and of Megatron-DeepSpeed with attention that is not fused.

    Attributes:
        peak_flops: of half precision; with ``bandwidth`` (bytes/s) and ``multiprocessors`` the vendor's figures.
        linear_speedup: peak of products with weights relative to ``peak_flops`` (FP8: 2).
        tile_efficiency: share of the peak inside a full wave of tiles.
        memory_efficiency: share of the bandwidth.
        attention_efficiency: share of the peak that fused attention reaches; 0: attention is not fused.
        activation_passes: reads and writes of a tensor of the size of the layer's input in a pass.
        sequence_parallel: whether tensor parallelism divides norms and residuals, too.
        operators: per layer, forward, recomputed and backward; each takes ``operator_s`` of host time.
        reduce_operator_s: host time of an all-reduce.
        head_operators: of embedding and loss.
        exchange_s: host time of receiving from and sending to the neighboring stages.
        step_s: host time of a step outside of micro-batches.
        gradient_bytes: per parameter.
        link_scale: factor of the times of transfers.
        sharpness: of the smooth maximum of the times of GPU and host; the higher, the better they overlap.
        overlap: share of computation during which gradients, gathered parameters and messages are transferred.
        overlaps_experts: whether all-to-alls are transferred during this share of the computation, too: that of another
            micro-batch (DualPipe, Megatron's --overlap-moe-expert-parallel-comm).
        reserved_multiprocessors: multiprocessors that execute communication (DeepSeek-V3: 20).
        product_recompute: share of the products with weights that selective recomputation repeats.
        slowdown: factor of the times on the GPU by what is not modelled.
    """

    peak_flops: float = 312e12
    bandwidth: float = 2.039e12
    multiprocessors: float = 108.0
    linear_speedup: float = 1.0
    tile_efficiency: float = 0.8
    memory_efficiency: float = 0.75
    attention_efficiency: float = 0.0
    activation_passes: float = 40.0
    sequence_parallel: bool = False
    operators: float = 160.0
    operator_s: float = 20e-6
    reduce_operator_s: float = 30e-6
    head_operators: float = 60.0
    exchange_s: float = 0.5e-3
    step_s: float = 10e-3
    gradient_bytes: float = 4.0
    link_scale: float = 1.0
    sharpness: float = 6.0
    overlap: float = 0.0
    overlaps_experts: bool = False
    reserved_multiprocessors: float = 0.0
    product_recompute: float = 0.0
    slowdown: float = 1.0

    @property
    def traffic_rate(self) -> float:
        """The bytes/s of memory that kernels reach."""
        return self.bandwidth * self.memory_efficiency


FITTED = (
    *("tile_efficiency", "memory_efficiency", "operator_s", "reduce_operator_s", "head_operators"),
    *("exchange_s", "step_s", "gradient_bytes", "link_scale", "sharpness"),
)
"""The constants that a calibration changes."""


@dataclass(frozen=True)
class StepTimes:
    """The parts of step times, in seconds, which add up to `total`.

    Attributes:
        compute: matrix products and attention of the slowest stage.
        memory: traffic of element-wise operators, loss and optimizer.
        tensor: exposed communication of tensor parallelism; ``context``, ``expert`` and ``data`` likewise.
        message: exposed messages between stages.
        bubble: filling and draining the pipeline.
        host: time in which the GPU waits for the host.
    """

    compute: Array
    memory: Array
    tensor: Array
    context: Array
    expert: Array
    data: Array
    message: Array
    bubble: Array
    host: Array

    @property
    def total(self) -> Array:
        """The step times."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self)))


def predict_steps(
    model: ModelShape, layout: Layout, constants: StepConstants, network: NetworkModel
) -> StepTimes:
    """Return the predicted time of a training step for each configuration."""
    layer, head = _time_layer(model, layout, constants, network), _time_head(model, layout, constants)
    depth, last_depth = count_stage_layers(model, layout)
    is_single = np.equal(layout.pipeline, 1)
    gpu = np.asarray(sum(layer.values()))
    host = _time_layer_on_host(layout, constants)
    head_gpu, head_host = sum(head.values()), constants.head_operators * constants.operator_s
    inner = _soft_maximum(depth * gpu, depth * host, constants.sharpness)
    # Megatron synchronizes the device after each exchange between stages, so that nothing hides the last stage's head.
    last = np.where(
        is_single,
        _soft_maximum(depth * gpu + head_gpu, depth * host + head_host, constants.sharpness),
        _soft_maximum(last_depth * gpu, last_depth * host, constants.sharpness)
        + np.maximum(head_gpu, head_host),
    )
    is_last_slowest = last >= inner
    slowest = np.maximum(last, inner)
    layers = np.where(is_last_slowest, last_depth, depth)
    parts = {
        name: layout.micro_batches * (layers * seconds + np.where(is_last_slowest, head.get(name, 0.0), 0.0))
        for name, seconds in layer.items()
    }
    waiting = layout.micro_batches * slowest - sum(parts.values())
    message = _time_message(model, layout, constants, network)
    exposed = 2 * layout.chunks * message * (1 - constants.overlap)
    bubble = (layout.pipeline - 1) * (inner / layout.chunks + 2 * message)
    data, update = _time_update(model, layout, constants, network, inner)
    return StepTimes(
        compute=parts["compute"],
        memory=parts["memory"] + update,
        tensor=parts["tensor"],
        context=parts["context"],
        expert=parts["expert"],
        data=data,
        message=np.asarray((layout.micro_batches - 1) * exposed),
        bubble=np.asarray(bubble),
        host=np.asarray(waiting + constants.step_s),
    )


def calibrate(
    model: ModelShape,
    layout: Layout,
    measured: Array,
    constants: StepConstants,
    network: NetworkModel,
    *,
    prior_deviation: float = 0.5,
    noise: float = 0.05,
) -> tuple[StepConstants, Array]:
    """Fit the constants listed in `FITTED` to measured step times, by multiplying each with a factor.

    Minimizes squared relative errors plus squared deviations from the given constants (in logarithms, of the standard
    deviations ``noise`` and ``prior_deviation``), by damped Gauss-Newton steps.

    Args:
        model, layout: configurations, as many as ``measured``.
        measured: seconds.

    Returns:
        The constants, and the errors (in logarithms) with which each measurement would be predicted without it.
    """

    def evaluate(factors: Array) -> Array:
        predicted = predict_steps(model, layout, scale_constants(constants, factors), network)
        return np.asarray(np.log(predicted.total / measured))

    factors, damping = np.zeros(len(FITTED)), 1.0
    error = evaluate(factors)
    for _ in range(60):
        jacobian = np.stack(
            [(evaluate(factors + step) - error) / 1e-4 for step in 1e-4 * np.eye(len(FITTED))], axis=1
        )
        normal = jacobian.T @ jacobian / noise**2 + np.eye(len(FITTED)) / prior_deviation**2
        gradient = jacobian.T @ error / noise**2 + factors / prior_deviation**2
        proposal = factors - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        new_error = evaluate(proposal)
        before, after = (
            float(e @ e / noise**2 + f @ f / prior_deviation**2)
            for e, f in ((error, factors), (new_error, proposal))
        )
        if after < before:
            factors, error, damping = proposal, new_error, damping / 3
        else:
            damping *= 4
    leverage = np.einsum("ij,ij->i", jacobian @ np.linalg.inv(normal), jacobian) / noise**2
    return scale_constants(constants, factors), error / (1 - np.minimum(leverage, 0.9))


def scale_constants(constants: StepConstants, factors: Array) -> StepConstants:
    """Return the constants, with each constant listed in `FITTED` multiplied by exp(factor)."""
    scaled = {
        name: getattr(constants, name) * float(np.exp(f)) for name, f in zip(FITTED, factors, strict=True)
    }
    return replace(constants, **scaled)


def _time_layer(
    model: ModelShape, layout: Layout, constants: StepConstants, network: NetworkModel
) -> dict[str, Array]:
    """Return the GPU time (s) of an average layer for a micro-batch, forward and backward, by part."""
    tokens = layout.micro_batch * model.sequence / layout.context
    products, attention = _time_products(model, layout, constants, tokens)
    again = np.equal(layout.recompute, 2)
    selected = np.greater_equal(layout.recompute, 1)
    tensor, ffn = layout.tensor, (1 - model.moe_share) * model.dense_ffn
    ffn = ffn + model.moe_share * (model.top_k + model.shared_experts) * model.expert_ffn
    divided = (
        model.heads * model.width + model.up_factor * ffn + 2 * model.moe_share * model.top_k * model.hidden
    )
    # Half of the element-wise work of a GPT is on tensors that tensor parallelism divides.
    share = (1 / tensor if constants.sequence_parallel else 1.0) + divided / (5 * model.hidden) / tensor
    elements = constants.activation_passes * tokens * model.hidden * 0.5 * share * (3 + selected)
    if not constants.attention_efficiency:
        scores = (
            layout.micro_batch * model.heads / tensor * (model.sequence / layout.context) * model.sequence
        )
        elements = elements + _SCORE_PASSES * scores * (2 + selected)
    # Experts take the part of tensor parallelism in the layers that have no other feed-forward network.
    reduces = (4 + 2 * again) * (1 - 0.5 * model.moe_share * np.equal(model.shared_experts, 0))
    # Copies of a token that cross the borders of nodes.
    spans = np.greater(model.routed_nodes, 0) & np.greater(layout.expert, network.topology.levels[0].size)
    copies = np.where(spans, model.routed_nodes, model.top_k)
    sizes = {
        "tensor": ("all_reduce", tokens * model.hidden, tensor, 1.0, reduces),
        "context": (
            "all_gather",
            tokens * layout.context * model.kv_elements / tensor,
            layout.context,
            tensor,
            3 + again,
        ),
        "expert": (
            "all_to_all",
            tokens / tensor * copies * model.hidden,
            layout.expert,
            1.0,
            (4 + 2 * again) * model.moe_share,
        ),
    }
    transfers = {
        name: constants.link_scale * count * network.compute_times(collective, HALF * size, ranks, stride)
        for name, (collective, size, ranks, stride, count) in sizes.items()
    }
    passes = 3 + again + constants.product_recompute * np.equal(layout.recompute, 1)
    compute = constants.slowdown * (passes * products + attention)
    memory = constants.slowdown * HALF * elements / constants.traffic_rate
    if constants.overlaps_experts:
        hidden = constants.overlap * (compute + memory)
        transfers["expert"] = np.maximum(transfers["expert"] - hidden, 0.0)
    return {"compute": np.asarray(compute), "memory": np.asarray(memory), **transfers}


def _time_products(
    model: ModelShape, layout: Layout, constants: StepConstants, tokens: Size
) -> tuple[Size, Size]:
    """Return the times (s) of a layer's products with weights in one pass, and of its attention in all passes."""
    linear = replace(constants, peak_flops=constants.peak_flops * constants.linear_speedup)

    def add_times(products: Iterable[Product], rows: Size, ways: Size, batch: Size = 1.0) -> Size:
        times = (matrix_product_time(rows, *product.divide(ways), linear, batch) for product in products)
        return sum(times)

    seconds = add_times(model.list_attention_products(), tokens, layout.tensor)
    seconds += (1 - model.moe_share) * add_times(
        model.list_ffn_products(model.dense_ffn), tokens, layout.tensor
    )
    if np.any(model.experts):
        routed, local = tokens / layout.tensor * model.top_k, model.experts / layout.expert
        experts = add_times(model.list_ffn_products(model.expert_ffn), routed / local, 1.0, local)
        shared = model.list_ffn_products(model.shared_experts * model.expert_ffn)
        experts += add_times(shared, tokens, layout.tensor)
        seconds += model.moe_share * experts
    heads, rows = layout.micro_batch * model.heads / layout.tensor, model.sequence / layout.context
    again = np.equal(layout.recompute, 2)
    if constants.attention_efficiency:
        flops = heads * rows * model.sequence * (2 * model.width + model.rope_width)
        passes = 1 + _FUSED_BACKWARD + again
        return seconds, passes * flops / (constants.peak_flops * constants.attention_efficiency)
    scores = matrix_product_time(rows, model.sequence, model.width + model.rope_width, constants, heads)
    values = matrix_product_time(rows, model.width, model.sequence, constants, heads)
    return seconds, (3 + np.greater_equal(layout.recompute, 1)) * (scores + values)


def _time_layer_on_host(layout: Layout, constants: StepConstants) -> Size:
    """Return the time (s) in which the host launches a layer's operators for a micro-batch."""
    passes = 3 + np.equal(layout.recompute, 2)
    reduces = np.where(np.greater(layout.tensor, 1), 2 * (passes - 1) * constants.reduce_operator_s, 0.0)
    return constants.operators * constants.operator_s * passes / 4 + reduces


def _time_head(model: ModelShape, layout: Layout, constants: StepConstants) -> dict[str, Array]:
    """Return the GPU time (s) of the logits and the loss for a micro-batch, forward and backward, by part."""
    tokens = layout.micro_batch * model.sequence / layout.context
    columns = model.vocabulary / layout.tensor
    return {
        "compute": 3 * matrix_product_time(tokens, columns, model.hidden, constants),
        "memory": np.asarray(_LOGIT_PASSES * HALF * tokens * columns / constants.traffic_rate),
    }


def matrix_product_time(
    rows: Size, columns: Size, inner: Size, constants: StepConstants, batch: Size = 1.0
) -> Array:
    """Return the time of half-precision products of (rows, inner) and (inner, columns) matrices, in seconds.

    A tile of 128 x 128 results takes a multiprocessor its share of the peak; the last wave may be partly empty.
    """
    tiles = batch * np.ceil(rows / 128) * np.ceil(columns / 128)
    waves = np.ceil(tiles / (constants.multiprocessors - constants.reserved_multiprocessors))
    tile_flops = 2 * 128 * 128 * inner
    compute = (
        waves * tile_flops * constants.multiprocessors / (constants.peak_flops * constants.tile_efficiency)
    )
    traffic = HALF * batch * (rows * inner + inner * columns + rows * columns)
    return np.asarray(np.maximum(compute, traffic / constants.traffic_rate))


def _time_message(
    model: ModelShape, layout: Layout, constants: StepConstants, network: NetworkModel
) -> Array:
    """Return the time (s) to pass a micro-batch's activations to the next stage, and the host's part of it."""
    size = HALF * layout.micro_batch * model.sequence / layout.context * model.hidden
    if constants.sequence_parallel:
        size = size / layout.tensor
    transfer = network.compute_times("message", size, layout.pipeline, layout.stage_ranks)
    host = np.where(np.greater(layout.pipeline, 1), constants.exchange_s / 2, 0.0)
    return np.asarray(host + constants.link_scale * transfer)


def _time_update(
    model: ModelShape, layout: Layout, constants: StepConstants, network: NetworkModel, window: Array
) -> tuple[Array, Array]:
    """Return the exposed time (s) of transfers among replicas, and the time of the optimizer.

    Gradients are reduced once per step, with ZeRO 2 and 3 after each micro-batch. With ZeRO 1 and 2, the new parameters
    are gathered once per step, with ZeRO 3 for each forward and each backward pass, layer by layer.

    Args:
        window: time of a stage for a micro-batch, during which transfers may overlap with computation.
    """
    stage, batches = layout.sharding, layout.micro_batches
    depth, _ = count_stage_layers(model, layout)
    transfers = np.where(np.equal(stage, 3), depth, 1.0)
    seconds, updated = np.zeros(np.shape(window)), np.zeros(np.shape(window))
    groups = (
        (layout.data * layout.context, layout.tensor),
        (layout.stage_ranks / layout.expert, layout.expert),
    )
    for count, (replicas, stride) in zip(count_stage_parameters(model, layout), groups, strict=True):
        times = {
            collective: np.where(np.greater(count, 0), transfers, 0.0)
            * network.compute_times(collective, size * count / transfers, replicas, stride)
            for collective, size in (
                ("all_reduce", constants.gradient_bytes),
                ("reduce_scatter", constants.gradient_bytes),
                ("all_gather", HALF),
            )
        }
        seconds = seconds + np.select(
            [np.equal(stage, 0), np.equal(stage, 1), np.equal(stage, 2)],
            [
                times["all_reduce"],
                times["reduce_scatter"] + times["all_gather"],
                batches * times["reduce_scatter"] + times["all_gather"],
            ],
            batches * (times["reduce_scatter"] + 2 * times["all_gather"]),
        )
        updated = updated + count / np.where(np.greater(stage, 0), replicas, 1)
    seconds = constants.link_scale * seconds
    repeats = np.where(np.greater(stage, 1), batches, 1)
    # The transfer for the first or last layer cannot be hidden.
    exposed = np.maximum(seconds - constants.overlap * repeats * window, seconds / (depth * repeats))
    return np.asarray(
        np.where(constants.overlap, exposed, seconds)
    ), _OPTIMIZER_BYTES * updated / constants.traffic_rate


def _soft_maximum(first: Size, second: Size, sharpness: float) -> Array:
    """Return a smooth maximum of GPU and host time: a host nearly as slow as the GPU sometimes delays the GPU."""
    largest = np.maximum(first, second)
    return np.asarray(largest * (1 + (np.minimum(first, second) / largest) ** sharpness) ** (1 / sharpness))
