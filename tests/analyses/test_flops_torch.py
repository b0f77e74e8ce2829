"""Flops of recorded models against torch's own counter, which sees the operators as they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.analyses.flops.formulas import MATRIX
from etloom.core.trace import Job

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
Work = Callable[[], Any]


def recorded(work: Work, folder: Path) -> Job:
    """A run of the work on the host, under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    file = folder / "kineto_trace_0.json"
    profiler.export_chrome_trace(str(file))
    return etloom.open(file, use_cache=False)


def matrix_flops(job: Job) -> int:
    table = etloom.analyze(job, "flops", top=1000)
    return int(table.filter(pl.col("family").is_in(MATRIX))["flops"].sum())


def torch_flops(work: Work) -> int:
    from torch.utils import flop_counter as own

    aten = torch.ops.aten
    # The host's fused attention has no formula there; those of the devices' fused ones fit.
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: own.sdpa_flop_count(
            q, k, v
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            own.sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    with own.FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    return int(counter.get_total_flops())


def mlp() -> Work:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10, bias=False))
    x = torch.randn(4, 7, 24)
    return lambda: model(x).sum().backward()


def convolutions() -> Work:
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, dilation=2),
        nn.ConvTranspose2d(16, 6, 4, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    x = torch.randn(2, 3, 33, 29)
    return lambda: model(x).sum().backward()


def convolutions_of_one_and_three_dimensions() -> Work:
    nn = torch.nn
    one, three = nn.Conv1d(4, 6, 3, padding=1), nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1))
    x, y = torch.randn(2, 4, 17, requires_grad=True), torch.randn(1, 2, 5, 6, 7)
    return lambda: (one(x).sum() + three(y).sum()).backward()


def attention(backend: str) -> Work:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 4, length, 16, requires_grad=True) for length in (12, 20, 20))

    def work() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    return work


def einsums() -> Work:
    a, b, c = torch.randn(3, 5, 7), torch.randn(3, 7, 2), torch.randn(5, 7)
    bias = torch.randn(3, 5, 2)

    def work() -> None:
        torch.einsum("bij,bjk->bik", a, b)
        torch.einsum("bij,ij->b", a, c)
        torch.baddbmm(bias, a, b)
        torch.matmul(a, b[0])

    return work


@pytest.mark.parametrize(
    "make",
    [
        mlp,
        convolutions,
        convolutions_of_one_and_three_dimensions,
        einsums,
        lambda: attention("MATH"),
        lambda: attention("FLASH_ATTENTION"),
    ],
    ids=["mlp", "convolutions", "1d and 3d", "einsum", "math attention", "fused attention"],
)
def test_flops_are_those_that_torch_counts(make: Callable[[], Work], tmp_path: Path) -> None:
    work = make()
    expected = torch_flops(work)
    assert expected > 1000
    assert matrix_flops(recorded(work, tmp_path)) == expected


def test_causal_attention_counts_the_pairs_that_the_mask_leaves(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 16, 8)
    job = recorded(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), tmp_path
    )
    assert matrix_flops(job) == 2 * 2 * (16 * 17 // 2) * (8 + 8)


def test_gradients_of_a_grouped_convolution_cost_as_much_as_it(tmp_path: Path) -> None:
    """Where torch's counter ignores the groups in the gradient of the weight."""
    layer, x = torch.nn.Conv2d(8, 12, 3, groups=4), torch.randn(2, 8, 10, 10, requires_grad=True)
    job = recorded(lambda: layer(x).sum().backward(), tmp_path)
    assert matrix_flops(job) == 3 * (2 * 2 * 64 * 12 * 2 * 9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_of_checkpointing_is_not_counted_as_model_flops(
    reentrant: bool, tmp_path: Path
) -> None:
    from torch.utils.checkpoint import checkpoint

    nn = torch.nn
    inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    outer = nn.Linear(16, 8)
    x = torch.randn(4, 16, requires_grad=True)
    job = recorded(lambda: outer(checkpoint(inner, x, use_reentrant=reentrant)).sum().backward(), tmp_path)
    found = etloom.analyze(job, "mfu", peak_tflops=1.0).row(-1, named=True)
    again = 2 * 4 * 16 * 32 * 2
    model = 3 * (2 * 4 * 16 * 32 * 2 + 2 * 4 * 16 * 8)
    assert found["model_flops"] == model
    assert found["flops"] == model + again


def test_a_backward_to_be_differentiated_is_not_recomputation(tmp_path: Path) -> None:
    weight, x = torch.randn(16, 8, requires_grad=True), torch.randn(4, 16, requires_grad=True)

    def work() -> None:
        (slope,) = torch.autograd.grad((x @ weight).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()

    found = etloom.analyze(recorded(work, tmp_path), "mfu", peak_tflops=1.0).row(-1, named=True)
    assert found["model_flops"] == found["flops"] == torch_flops(work)
