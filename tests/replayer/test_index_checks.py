"""Computation replay: an index out of range is an outcome in one line, also where torch's kernel would not look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from etloom.core.errors import EtloomError  # noqa: E402
from etloom.replayer.compute.executor import Executor  # noqa: E402
from etloom.replayer.compute.operators import (  # noqa: E402
    INDEX_ARGUMENTS,
    Operator,
    resolve_operator,
)
from etloom.replayer.compute.program import build_program  # noqa: E402
from support.models import record  # noqa: E402

pytestmark = pytest.mark.torch
GRAD, TABLE, ONES = torch.rand(2, 3), 5, torch.ones((), dtype=torch.float)


def pooled(dimensions: int, adaptive: bool) -> Callable[[Any], tuple[Any, ...]]:
    x = torch.rand(1, 2, *[4] * dimensions)
    grad = torch.rand(1, 2, *[2] * dimensions)
    most = 4**dimensions - 1

    def given(place: int) -> tuple[Any, ...]:
        indices = torch.full(grad.shape, most)
        indices.view(-1)[-1] = most if place == TABLE - 1 else place
        two = [2] * dimensions
        windows = () if adaptive else (two, two, [0] * dimensions, [1] * dimensions, False)
        return grad, x, *windows, indices

    return given


def bag(place: int, bag: int = 0) -> tuple[Any, ...]:
    one = torch.tensor
    return one([1, place, 0]), one([0, bag, 1]), one([2, 1]), torch.zeros(2, 3, dtype=torch.int64)


GIVEN: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "nll_loss_backward": lambda place: (
        ONES, torch.rand(3, TABLE), torch.tensor([0, -100, place]), None, 2, -100, ONES,
    ),
    "nll_loss2d_backward": lambda place: (
        ONES, torch.rand(1, TABLE, 1, 3), torch.tensor([[[0, -100, place]]]), None, 2, -100, ONES,
    ),
    "ctc_loss": lambda place: (
        torch.rand(6, 1, TABLE).log_softmax(2), torch.tensor([[1, place]]), torch.tensor([6]), torch.tensor([2]),
    ),
    "embedding_backward": lambda place: (GRAD, torch.tensor([1, place]), TABLE, -1, True, False),
    "embedding_dense_backward": lambda place: (GRAD, torch.tensor([1, place]), TABLE, -1, True),
    **dict.fromkeys(
        ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"),
        lambda place: (torch.rand(TABLE, 3), torch.tensor([1, 2, 4, 3]), torch.tensor([0, place])),
    ),
    "_embedding_bag_backward": lambda place: (
        GRAD, bag(place)[0], torch.tensor([0, 2]), *bag(place)[1:], TABLE, False, 0, False, None,
    ),
    "_embedding_bag_dense_backward": lambda place: (GRAD, *bag(place), TABLE, False, 0, None),
    "max_pool2d_with_indices_backward": pooled(2, False),
    "max_pool3d_with_indices_backward": pooled(3, False),
    "adaptive_max_pool2d_backward": pooled(2, True),
    "adaptive_max_pool3d_backward": pooled(3, True),
}  # fmt: skip
"""Arguments of operators, with an integer that must lie within 0..4, or what corresponds to that."""


def resolved(name: str) -> tuple[Any, Any]:
    overload = "Tensor" if name == "ctc_loss" else "default"
    plain = getattr(getattr(torch.ops.aten, name), overload)
    found = resolve_operator(str(plain._schema), frozenset({"aten"}))
    assert isinstance(found, Operator)
    return plain, found.call


@pytest.mark.parametrize("name", GIVEN)
def test_indices_in_range_are_computed_and_others_raise(name: str) -> None:
    plain, call = resolved(name)
    fine = GIVEN[name](TABLE - 1)
    torch.testing.assert_close(call(*fine), plain(*fine), rtol=0, atol=0)
    for wrong in (1 << 40, -1):
        with pytest.raises(
            IndexError, match=rf"(indices|offsets|targets?) has index {wrong}, which is not within 0\.\."
        ):
            call(*GIVEN[name](wrong))
    if name != "ctc_loss":  # which torch has not on meta
        assert call(*(one.to("meta") if isinstance(one, torch.Tensor) else one for one in fine)) is not None


def test_every_check_has_a_test_case() -> None:
    assert {f"aten::{name}" for name in GIVEN} == INDEX_ARGUMENTS.keys()


def test_bags_are_checked() -> None:
    _, call = resolved("_embedding_bag_dense_backward")
    with pytest.raises(IndexError, match=r"offset2bag has index 2, which is not within 0\.\.1"):
        call(GRAD, *bag(4, bag=2), TABLE, False, 0, None)


def test_an_index_that_grows_from_pass_to_pass_ends_in_one_line(tmp_path: Path) -> None:
    """The labels are computed from a number that each pass makes larger."""
    out, count = torch.rand(2, 4).log_softmax(1), torch.tensor(0.0)

    def step() -> None:
        with torch.no_grad():
            labels = count.add_(1).to(torch.int64).expand(2)
            torch.ops.aten.nll_loss_backward(ONES, out, labels, None, 1, -100, ONES)

    machine = Executor(build_program(record(tmp_path, step)), torch.device("cpu"))
    machine.trial_run()
    assert {one.result for one in machine.outcomes} == {"replayed"}
    with pytest.raises(
        EtloomError,
        match=r"nll_loss_backward failed after it had run before: target has index 4, which is not",
    ):
        for _ in range(9):
            machine.run()
