"""Bounds checks for ATen kernels that do not validate their indices and could access memory out of bounds.

These kernels were found by calling the operators of aten, torch 2.13, on a CPU with integers out of range: the
operators below ended the process, all others that run for traces of unknown origin raise. `size_checks` does the same
for sizes. The integers that a replay computes are not known in advance. On a GPU the assertions of its kernels are
relied on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from etloom.replayer.compute.size_checks import SIZE_CHECKS

IndexArguments = Iterable[tuple[str, torch.Tensor, int]]
"""(argument, tensor of indices, exclusive upper bound)"""


def _loss_targets(args: Mapping[str, Any]) -> IndexArguments:
    target, x = args["target"], args["self"]
    yield "target", target.where(target != args["ignore_index"], 0), x.shape[1 if x.dim() > 1 else 0]


def _ctc_targets(args: Mapping[str, Any]) -> IndexArguments:
    yield "targets", args["targets"], args["log_probs"].shape[-1]


def _bag_indices(args: Mapping[str, Any]) -> IndexArguments:
    yield "indices", args["indices"], args["num_weights"]
    yield "offset2bag", args["offset2bag"], args["grad"].shape[0]


def _bag_offsets(args: Mapping[str, Any]) -> IndexArguments:
    yield "offsets", args["offsets"], args["indices"].numel() + 1


def _embedding_indices(args: Mapping[str, Any]) -> IndexArguments:
    if args["scale_grad_by_freq"]:  # otherwise the kernel checks
        yield "indices", args["indices"], args["num_weights"]


def _pooling_indices(dimensions: int) -> Callable[[Mapping[str, Any]], IndexArguments]:
    def pooled_indices(args: Mapping[str, Any]) -> IndexArguments:
        yield "indices", args["indices"], math.prod(args["self"].shape[-dimensions:])

    return pooled_indices


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
    """Return a function that checks the indices and sizes in an operator's arguments and then calls the operator.

    It raises IndexError if an index is out of range or sizes do not match.

    Args:
        name: The operator.
        call: Runs it.
        arguments: Names of its arguments, in the order in which it declares them.
    """
    index_arguments, size_checks = INDEX_ARGUMENTS.get(name), SIZE_CHECKS.get(name, ())
    if index_arguments is None and not size_checks:
        return call

    def checked_call(*positional: Any, **named: Any) -> Any:
        args = {**dict(zip(arguments, positional, strict=False)), **named}
        for check in size_checks:
            check(args)
        for argument, tensor, limit in index_arguments(args) if index_arguments else ():
            _check_indices(argument, tensor, limit)
        return call(*positional, **named)

    return checked_call


def _check_indices(argument: str, tensor: torch.Tensor, limit: int) -> None:
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(tensor))
    if low < 0 or high >= limit:
        raise IndexError(
            f"{argument} has index {low if low < 0 else high}, which is not within 0..{limit - 1}"
        )
