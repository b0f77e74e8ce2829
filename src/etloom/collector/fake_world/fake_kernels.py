"""Shapes of operators that torch has on the device only, and no shape function for: those of SyncBatchNorm."""

from __future__ import annotations

from typing import Any


def install(torch: Any) -> None:
    """Define what the operators return for fake tensors."""
    from torch._subclasses import fake_impls

    aten = torch.ops.aten
    shapes = {
        aten.batch_norm_stats.default: lambda values, _epsilon: _make_channel_pair(values),
        aten.batch_norm_gather_stats_with_counts.default: lambda values, *_: _make_channel_pair(values),
        aten.batch_norm_gather_stats.default: lambda values, *_: _make_channel_pair(values),
        aten.batch_norm_elemt.default: lambda values, *_: torch.empty_like(values),
        aten.batch_norm_backward_reduce.default: lambda gradient, values, *_: _make_channel_pair(values) * 2,
        aten.batch_norm_backward_elemt.default: lambda gradient, values, *_: torch.empty_like(values),
    }
    fake_impls.op_implementations_dict.update(
        {
            function: lambda _mode, _function, *values, shape=shape: shape(*values)
            for function, shape in shapes.items()
        }
    )


def _make_channel_pair(values: Any) -> tuple[Any, Any]:
    """Return two results with one element per channel, in the precision of statistics."""
    import torch

    kind = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    return tuple(values.new_empty((values.shape[1],), dtype=kind) for _ in range(2))  # type: ignore[return-value]
