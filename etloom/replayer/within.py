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

from etloom.replayer.fitting import FITTING

Places = Iterable[tuple[str, torch.Tensor, int]]


def _classes(had: Mapping[str, Any]) -> Places:
    target, x = had["target"], had["self"]
    yield "target", target.where(target != had["ignore_index"], 0), x.shape[1 if x.dim() > 1 else 0]


def _symbols(had: Mapping[str, Any]) -> Places:
    yield "targets", had["targets"], had["log_probs"].shape[-1]


def _bags(had: Mapping[str, Any]) -> Places:
    yield "indices", had["indices"], had["num_weights"]
    yield "offset2bag", had["offset2bag"], had["grad"].shape[0]


def _starts(had: Mapping[str, Any]) -> Places:
    yield "offsets", had["offsets"], had["indices"].numel() + 1


def _rows(had: Mapping[str, Any]) -> Places:
    if had["scale_grad_by_freq"]:  # else the kernel looks
        yield "indices", had["indices"], had["num_weights"]


def _pooled(dimensions: int) -> Callable[[Mapping[str, Any]], Places]:
    def places(had: Mapping[str, Any]) -> Places:
        yield "indices", had["indices"], math.prod(had["self"].shape[-dimensions:])

    return places


_OF: dict[str, Callable[[Mapping[str, Any]], Places]] = {
    "aten::nll_loss_backward": _classes,
    "aten::nll_loss2d_backward": _classes,
    "aten::ctc_loss": _symbols,
    "aten::embedding_backward": _rows,
    "aten::embedding_dense_backward": _rows,
    "aten::embedding_bag": _starts,
    "aten::_embedding_bag": _starts,
    "aten::_embedding_bag_forward_only": _starts,
    "aten::_embedding_bag_backward": _bags,
    "aten::_embedding_bag_dense_backward": _bags,
    "aten::max_pool2d_with_indices_backward": _pooled(2),
    "aten::max_pool3d_with_indices_backward": _pooled(3),
    "aten::adaptive_max_pool2d_backward": _pooled(2),
    "aten::adaptive_max_pool3d_backward": _pooled(3),
}


def looking(name: str, call: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """The call of an operator, which raises IndexError where an index is out of range or sizes do not fit.
    arguments: their names, in the order in which it declares them."""
    places, looks = _OF.get(name), FITTING.get(name, ())
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
