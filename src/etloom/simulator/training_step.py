"""Predicts the time of a GPT training step from model and parallelism sizes, without a recording.

A stage of the pipeline takes, per micro-batch, the time of its GPU or of its host, whichever is longer:

- matrix products: waves of tiles over the multiprocessors, or the traffic to memory;
- attention scores and element-wise operators: traffic to memory;
- all-reduces of tensor parallelism: a measured table, or bandwidth and latency;
- host: a constant time per operator launched.

With m micro-batches and p stages, one-forward-one-backward (and GPipe) schedules take the sum over the stages plus
m - 1 times the slowest stage (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021). Then gradients are all-reduced among the replicas and the optimizer updates the parameters.

Arrays hold one value per configuration, times in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
AllReduce = Callable[[Array, Array], Array]
"""(bytes, ranks) -> seconds."""

_FP16 = 2
_FORWARD_PASSES = 4
"""A layer's forward work: once forward, once to recompute activations, twice backward."""
_SCORE_PASSES = 18
"""Reads and writes of the attention scores: 6 forward, 6 to recompute them, 6 backward."""
_ACTIVATION_PASSES = 160
"""Reads and writes of a tensor of the size of the layer's input, forward, recomputed and backward."""
_ALL_REDUCES = 6
"""All-reduces of a layer under tensor parallelism: two forward, two recomputed, two backward."""
_LOGIT_PASSES = 12
"""Reads and writes of the logits in the loss, in bytes per logit and pass of half precision."""
_OPTIMIZER_BYTES = 30
"""Bytes read and written per parameter by Adam in mixed precision."""


@dataclass(frozen=True)
class TrainingShapes:
    """Model and parallelism sizes of GPT training steps, as arrays with one entry per configuration.

    ``micro_batches``: per replica and step. ``micro_batch``: sequences in each.
    """

    layers: Array
    hidden: Array
    heads: Array
    sequence: Array
    micro_batch: Array
    micro_batches: Array
    tensor: Array
    data: Array
    pipeline: Array
    vocabulary: float = 51_200.0

    def take(self, rows: NDArray[np.int64]) -> TrainingShapes:
        """Return the configurations at the positions ``rows``."""
        return replace(
            self,
            **{
                field.name: getattr(self, field.name)[rows]
                for field in fields(self)
                if field.name != "vocabulary"
            },
        )


@dataclass(frozen=True)
class StepConstants:
    """Constants of a GPU and its host that determine step times; the defaults are those of an A100 (80 GB, SXM).

    ``peak_flops``, ``bandwidth`` (bytes/s) and ``multiprocessors`` are the vendor's. ``tile_efficiency``: share of the
    peak inside a full wave of tiles. ``memory_efficiency``: share of the bandwidth. ``operators`` per layer (forward,
    recomputed and backward) and ``operator_s`` of host time each. ``reduce_operator_s``: host time of an all-reduce.
    ``head_operators``: of embedding and loss. ``exchange_s``: host time of receiving from and sending to the
    neighboring stages. ``step_s``: host time of a step outside of micro-batches. ``gradient_bytes`` per parameter.
    ``link_scale``: of the times of all-reduces. ``sharpness``: of the smooth maximum of the times of GPU and host; the
    higher, the better they overlap.
    """

    peak_flops: float = 312e12
    bandwidth: float = 2.039e12
    multiprocessors: float = 108.0
    tile_efficiency: float = 0.8
    memory_efficiency: float = 0.75
    operators: float = 160.0
    operator_s: float = 20e-6
    reduce_operator_s: float = 30e-6
    head_operators: float = 60.0
    exchange_s: float = 0.5e-3
    step_s: float = 10e-3
    gradient_bytes: float = 4.0
    link_scale: float = 1.0
    sharpness: float = 6.0


FITTED = (
    *("tile_efficiency", "memory_efficiency", "operator_s", "reduce_operator_s", "head_operators"),
    *("exchange_s", "step_s", "gradient_bytes", "link_scale", "sharpness"),
)
"""The constants that a calibration changes."""


def predict_steps(shapes: TrainingShapes, constants: StepConstants, all_reduce: AllReduce) -> Array:
    """Return the predicted time of a training step for each configuration, in seconds."""
    layer = _layer_gpu_time(shapes, constants, all_reduce)
    layer_host = constants.operators * constants.operator_s + np.where(
        shapes.tensor > 1, _ALL_REDUCES * constants.reduce_operator_s, 0.0
    )
    head = _head_gpu_time(shapes, constants)
    head_host = constants.head_operators * constants.operator_s
    exchange = np.where(shapes.pipeline > 1, constants.exchange_s, 0.0)
    depth = shapes.layers / shapes.pipeline
    inner = _soft_maximum(depth * layer, depth * layer_host, constants.sharpness)
    # Megatron synchronizes the device after each exchange between stages, so that nothing hides the last stage's head.
    last = np.where(
        shapes.pipeline > 1,
        inner + np.maximum(head, head_host),
        _soft_maximum(depth * layer + head, depth * layer_host + head_host, constants.sharpness),
    )
    message = exchange / 2 + _message_time(shapes, constants)
    stages = (shapes.pipeline - 1) * (inner + 2 * message) + last
    slots = stages + (shapes.micro_batches - 1) * (last + 2 * message)
    parameters = (12 * shapes.hidden**2 * depth + shapes.vocabulary * shapes.hidden) / shapes.tensor
    gradients = np.where(shapes.data > 1, all_reduce(constants.gradient_bytes * parameters, shapes.data), 0.0)
    update = _OPTIMIZER_BYTES * parameters / (constants.bandwidth * constants.memory_efficiency)
    return np.asarray(slots + constants.link_scale * gradients + update + constants.step_s)


def calibrate(
    shapes: TrainingShapes,
    measured: Array,
    constants: StepConstants,
    all_reduce: AllReduce,
    *,
    prior_deviation: float = 0.5,
    noise: float = 0.05,
) -> tuple[StepConstants, Array]:
    """Fit the constants listed in `FITTED` to measured step times, by multiplying each with a factor.

    Minimizes squared relative errors plus squared deviations from the given constants (in logarithms, of the standard
    deviations ``noise`` and ``prior_deviation``), by damped Gauss-Newton steps.

    Args:
        shapes: configurations, as many as ``measured``.
        measured: seconds.

    Returns:
        The constants, and the errors (in logarithms) with which each measurement would be predicted without it.
    """

    def evaluate(factors: Array) -> Array:
        return np.asarray(
            np.log(predict_steps(shapes, scale_constants(constants, factors), all_reduce) / measured)
        )

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


def _layer_gpu_time(shapes: TrainingShapes, constants: StepConstants, all_reduce: AllReduce) -> Array:
    """Return the GPU time (s) of a transformer layer for a micro-batch, forward and backward."""
    tokens, hidden, tensor = shapes.micro_batch * shapes.sequence, shapes.hidden, shapes.tensor
    heads, width = shapes.heads / tensor, shapes.hidden / shapes.heads
    products = (
        matrix_product_time(tokens, 3 * hidden / tensor, hidden, constants)
        + matrix_product_time(tokens, hidden, hidden / tensor, constants)
        + matrix_product_time(tokens, 4 * hidden / tensor, hidden, constants)
        + matrix_product_time(tokens, hidden, 4 * hidden / tensor, constants)
        + matrix_product_time(shapes.sequence, shapes.sequence, width, constants, shapes.micro_batch * heads)
        + matrix_product_time(shapes.sequence, width, shapes.sequence, constants, shapes.micro_batch * heads)
    )
    bandwidth = constants.bandwidth * constants.memory_efficiency
    scores = _SCORE_PASSES * _FP16 * shapes.micro_batch * heads * shapes.sequence**2 / bandwidth
    # Half of the element-wise work is on tensors that tensor parallelism divides.
    activations = _ACTIVATION_PASSES * _FP16 * tokens * hidden * (0.5 + 0.5 / tensor) / bandwidth
    reduces = np.where(tensor > 1, _ALL_REDUCES * all_reduce(_FP16 * tokens * hidden, tensor), 0.0)
    return np.asarray(_FORWARD_PASSES * products + scores + activations + constants.link_scale * reduces)


def _head_gpu_time(shapes: TrainingShapes, constants: StepConstants) -> Array:
    """Return the GPU time (s) of the logits and the loss for a micro-batch, forward and backward."""
    tokens, columns = shapes.micro_batch * shapes.sequence, shapes.vocabulary / shapes.tensor
    traffic = _LOGIT_PASSES * _FP16 * tokens * columns / (constants.bandwidth * constants.memory_efficiency)
    return 3 * matrix_product_time(tokens, columns, shapes.hidden, constants) + traffic


def matrix_product_time(
    rows: Array, columns: Array, inner: Array, constants: StepConstants, batch: Array | float = 1.0
) -> Array:
    """Return the time of half-precision products of (rows, inner) and (inner, columns) matrices, in seconds.

    A tile of 128 x 128 results takes a multiprocessor its share of the peak; the last wave may be partly empty.
    """
    tiles = batch * np.ceil(rows / 128) * np.ceil(columns / 128)
    waves = np.ceil(tiles / constants.multiprocessors)
    tile_flops = 2 * 128 * 128 * inner
    compute = (
        waves * tile_flops * constants.multiprocessors / (constants.peak_flops * constants.tile_efficiency)
    )
    traffic = _FP16 * batch * (rows * inner + inner * columns + rows * columns)
    return np.asarray(np.maximum(compute, traffic / (constants.bandwidth * constants.memory_efficiency)))


def _message_time(shapes: TrainingShapes, constants: StepConstants) -> Array:
    """Return the time (s) to pass a micro-batch's activations to the next stage: 20 µs, and bytes at 100 GB/s."""
    size = _FP16 * shapes.micro_batch * shapes.sequence * shapes.hidden
    return np.where(shapes.pipeline > 1, constants.link_scale * (20e-6 + size / 100e9), 0.0)


def _soft_maximum(first: Array, second: Array, sharpness: float) -> Array:
    """Return a smooth maximum of GPU and host time: a host nearly as slow as the GPU sometimes delays the GPU."""
    largest = np.maximum(first, second)
    return np.asarray(largest * (1 + (np.minimum(first, second) / largest) ** sharpness) ** (1 / sharpness))
