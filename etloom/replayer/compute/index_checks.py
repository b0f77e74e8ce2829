"""A look at indices and sizes before the kernels that take none themselves, and would read or write anywhere.

Which kernels do with indices on a CPU was found by giving out-of-range integers to the operators of aten, torch 2.13:
of those that are run for a trace of unknown origin those below ended the process, all others raise. Sizes: `fitting`.
Nobody knows beforehand what the integers that a replay computes will be. A GPU is left to its kernels' assertions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from etloom.replayer.compute.size_checks import SIZE_CHECKS

IndexArguments = Iterable[tuple[str, torch.Tensor, int]]


def _loss_targets(had: Mapping[str, Any]) -> IndexArguments:
    target, x = had["target"], had["self"]
    yield "target", target.where(target != had["ignore_index"], 0), x.shape[1 if x.dim() > 1 else 0]


def _ctc_targets(had: Mapping[str, Any]) -> IndexArguments:
    yield "targets", had["targets"], had["log_probs"].shape[-1]


def _bag_indices(had: Mapping[str, Any]) -> IndexArguments:
    yield "indices", had["indices"], had["num_weights"]
    yield "offset2bag", had["offset2bag"], had["grad"].shape[0]


def _bag_offsets(had: Mapping[str, Any]) -> IndexArguments:
    yield "offsets", had["offsets"], had["indices"].numel() + 1


def _embedding_indices(had: Mapping[str, Any]) -> IndexArguments:
    if had["scale_grad_by_freq"]:  # else the kernel looks
        yield "indices", had["indices"], had["num_weights"]


def _pooling_indices(dimensions: int) -> Callable[[Mapping[str, Any]], IndexArguments]:
    def places(had: Mapping[str, Any]) -> IndexArguments:
        yield "indices", had["indices"], math.prod(had["self"].shape[-dimensions:])

    return places


INDEX_ARGUMENTS: dict[str, Callable[[Mapping[str, Any]], IndexArguments]] = {
    "aten::nll_loss_backward": _loss_targets,
    "aten::nll_loss2d_backward": _loss_targets,
    "aten::ctc_loss": _ctc_targets,
    "aten::embedding_backward": _embedding_indices,
    "aten::embedding_dense_backward": _embedding_indices,
    "aten::embedding_bag": _bag_offsets,
    "aten::_embedding_bag": _bag_offsets,
    "aten::_embedding_bag_forward_only": _bag_offsets,
    "aten::_embedding_bag_backward": _bag_indices,
    "aten::_embedding_bag_dense_backward": _bag_indices,
    "aten::max_pool2d_with_indices_backward": _pooling_indices(2),
    "aten::max_pool3d_with_indices_backward": _pooling_indices(3),
    "aten::adaptive_max_pool2d_backward": _pooling_indices(2),
    "aten::adaptive_max_pool3d_backward": _pooling_indices(3),
}


def with_argument_checks(name: str, call: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """The call of an operator, which raises IndexError where an index is out of range or sizes do not fit.
    arguments: their names, in the order in which it declares them."""
    places, looks = INDEX_ARGUMENTS.get(name), SIZE_CHECKS.get(name, ())
    if places is None and not looks:
        return call

    def looked(*given: Any, **named: Any) -> Any:
        had = {**dict(zip(arguments, given, strict=False)), **named}
        for look in looks:
            look(had)
        for what, tensor, below in places(had) if places else ():
            if tensor.device.type == "cpu" and tensor.numel():
                low, high = (int(one) for one in torch.aminmax(tensor))
                if low < 0 or high >= below:
                    raise IndexError(
                        f"{what} holds {low if low < 0 else high}, which is not within 0..{below - 1}"
                    )
        return call(*given, **named)

    return looked
