"""The time of training steps from shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from etloom.simulator.network.model import NetworkModel
from etloom.simulator.network.topology import get_preset
from etloom.simulator.training_shapes import Array, Layout, ModelShape
from etloom.simulator.training_step import (
    FITTED,
    StepConstants,
    calibrate,
    matrix_product_time,
    predict_steps,
)

NETWORK = NetworkModel(get_preset("dgx-a100"))
Shapes = tuple[ModelShape, Layout]


def make_shapes(**sizes: object) -> Shapes:
    sizes = {
        "layers": 24,
        "hidden": 2048,
        "heads": 16,
        "sequence": 1024,
        "micro_batch": 4,
        "micro_batches": 8,
        "tensor": 1,
        "data": 1,
        "pipeline": 1,
        **sizes,
    }
    arrays = np.broadcast_arrays(*(np.asarray(value, float) for value in sizes.values()))
    return ModelShape(*arrays[:4]), Layout(*arrays[4:])


def predict_totals(shapes: Shapes, constants: StepConstants) -> Array:
    return predict_steps(*shapes, constants, NETWORK).total


def test_micro_batches_fill_and_drain_the_pipeline() -> None:
    constants = replace(StepConstants(), operators=0.0, head_operators=0.0, exchange_s=0.0)
    counts = np.array([1.0, 2.0, 9.0])
    steps = predict_totals(make_shapes(micro_batches=counts, pipeline=4), constants)
    slot = steps[1] - steps[0]
    assert steps[2] - steps[0] == pytest.approx(8 * slot)
    # Three further stages of the same layers before the first result.
    assert 3.2 * slot < steps[0] < 4.5 * slot


def test_a_slow_host_bounds_small_shapes_only() -> None:
    slow = replace(StepConstants(), operator_s=2e-4)
    small, large = make_shapes(hidden=256, micro_batch=1), make_shapes(hidden=8192, micro_batch=8)
    for shapes, is_bound in ((small, True), (large, False)):
        ratio = predict_totals(shapes, slow) / predict_totals(shapes, StepConstants())
        assert (ratio > 5).all() if is_bound else (ratio < 1.1).all()


def test_matrix_products_follow_waves_and_memory() -> None:
    constants = StepConstants(multiprocessors=100)
    rows, inner = np.array([1280.0]), np.array([4096.0])
    one, full, more = (
        matrix_product_time(rows, 128.0 * np.array([n]), inner, constants) for n in (1, 10, 11)
    )
    assert one == full and more == pytest.approx(2 * full)
    thin = matrix_product_time(np.array([1.0]), np.array([65536.0]), np.array([65536.0]), constants)
    assert thin == pytest.approx(2 * 65536**2 / (constants.bandwidth * constants.memory_efficiency), rel=0.01)


@pytest.mark.slow
def test_calibration_recovers_constants() -> None:
    generator = np.random.default_rng(0)
    sizes = {
        name: generator.choice(values, 60)
        for name, values in {
            "layers": (12, 24),
            "hidden": (1024, 4096),
            "micro_batch": (1, 2, 4, 8),
            "micro_batches": (2, 4, 8),
            "tensor": (1, 2, 4),
            "data": (1, 4),
            "pipeline": (1, 2),
        }.items()
    }
    shapes = make_shapes(**sizes)
    truth = replace(StepConstants(), tile_efficiency=0.6, operator_s=3e-5, memory_efficiency=0.9)
    measured = predict_totals(shapes, truth)
    constants, errors = calibrate(*shapes, measured, StepConstants(), NETWORK)
    predicted = predict_totals(shapes, constants)
    assert np.abs(predicted / measured - 1).mean() < 0.01
    assert np.abs(errors).max() < 0.1
    assert constants.operators == StepConstants().operators and "operators" not in FITTED
