"""A look at indices and sizes before the kernels that take none themselves, and would read or write anywhere.

Which kernels do on a CPU was found by giving out-of-range integers, and tensors of one element, to the operators of
aten, torch 2.13: of those that are run for a trace of unknown origin those below ended the process, all others raise.
Nobody knows beforehand what the integers that a replay computes will be. A GPU is left to its kernels' assertions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

Places = Iterable[tuple[str, torch.Tensor, int]]


def _classes(had: Mapping[str, Any]) -> Places:
    target, x = had["target"], had["self"]
    yield "target", target.where(target != had["ignore_index"], 0), x.shape[1 if x.dim() > 1 else 0]


def _symbols(had: Mapping[str, Any]) -> Places:
    yield "targets", had["targets"], had["log_probs"].shape[-1]


def _bags(had: Mapping[str, Any]) -> Places:
    yield "indices", had["indices"], had["num_weights"]
    yield "offset2bag", had["offset2bag"], had["grad"].shape[0]


def _rows(had: Mapping[str, Any]) -> Places:
    if had["scale_grad_by_freq"]:  # else the kernel looks
        yield "indices", had["indices"], had["num_weights"]


def _pooled(dimensions: int) -> Callable[[Mapping[str, Any]], Places]:
    def places(had: Mapping[str, Any]) -> Places:
        yield "indices", had["indices"], math.prod(had["self"].shape[-dimensions:])

    return places


def _channels(had: Mapping[str, Any]) -> Places:
    channels = had["input"].shape[1]
    for what in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        tensor = had.get(what)
        # The last two are empty where the statistics of training are not asked for.
        if (
            tensor is not None
            and tensor.numel() < channels
            and not (what.startswith("save") and not had["train"])
        ):
            raise IndexError(f"{what} holds {tensor.numel()} elements for {channels} channels")
    return ()


_OF: dict[str, Callable[[Mapping[str, Any]], Places]] = {
    "aten::nll_loss_backward": _classes,
    "aten::nll_loss2d_backward": _classes,
    "aten::ctc_loss": _symbols,
    "aten::embedding_backward": _rows,
    "aten::embedding_dense_backward": _rows,
    "aten::_embedding_bag_backward": _bags,
    "aten::_embedding_bag_dense_backward": _bags,
    "aten::max_pool2d_with_indices_backward": _pooled(2),
    "aten::max_pool3d_with_indices_backward": _pooled(3),
    "aten::adaptive_max_pool2d_backward": _pooled(2),
    "aten::adaptive_max_pool3d_backward": _pooled(3),
    "aten::native_batch_norm": _channels,
    "aten::native_batch_norm_backward": _channels,
    "aten::batch_norm_update_stats": _channels,
    "aten::_native_batch_norm_legit": _channels,
    "aten::_native_batch_norm_legit_functional": _channels,
    "aten::_native_batch_norm_legit_no_training": _channels,
    "aten::_batch_norm_with_update": _channels,
    "aten::_batch_norm_with_update_functional": _channels,
}


def looking(name: str, call: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """The call of an operator, which raises IndexError where an index is out of range or a tensor too small.
    arguments: their names, in the order in which it declares them."""
    places = _OF.get(name)
    if places is None:
        return call

    def looked(*given: Any, **named: Any) -> Any:
        for what, tensor, below in places({**dict(zip(arguments, given, strict=False)), **named}):
            if tensor.device.type == "cpu" and tensor.numel():
                low, high = (int(one) for one in torch.aminmax(tensor))
                if low < 0 or high >= below:
                    raise IndexError(
                        f"{what} holds {low if low < 0 else high}, which is not within 0..{below - 1}"
                    )
        return call(*given, **named)

    return looked
