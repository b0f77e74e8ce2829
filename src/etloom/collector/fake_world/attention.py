"""Keeps attention one operator, as on a device: torch built without CUDA would run matrix products and a softmax.

The choice follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash attention, else the memory-efficient one,
else products; torch.backends.cuda and `sdpa_kernel` switch each off as on a device.
"""

from __future__ import annotations

from typing import Any

_MAX_FLASH_WIDTH = 256
_registrations: list[Any] = []
"""Each ends with its object."""


def install() -> None:
    """Replace scaled_dot_product_attention on the device, for callers in Python and C++ and for shards of DTensor."""
    from torch import library

    registration = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    registration.impl("scaled_dot_product_attention", _attend, "AutogradCUDA")  # type: ignore[no-untyped-call]
    _registrations.append(registration)


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    import torch

    operators: Any = torch.ops.aten
    backends: Any = torch.backends.cuda
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() == 4 and query.dtype == key.dtype == value.dtype and query.numel() and key.numel():
        width = query.shape[-1]
        if (
            backends.flash_sdp_enabled()
            and is_half
            and attn_mask is None
            and width == value.shape[-1] <= _MAX_FLASH_WIDTH
            and (enable_gqa or query.shape[1] == key.shape[1])
        ):
            padded = [
                torch.nn.functional.pad(each, (0, -width % 8)) if width % 8 else each
                for each in (query, key, value)
            ]
            result = operators._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=scale
            )[0]
            return result[..., :width] if width % 8 else result
        if (
            backends.mem_efficient_sdp_enabled()
            and (is_half or query.dtype == torch.float32)
            and query.shape[1] == key.shape[1]
        ):
            needs_gradient = torch.is_grad_enabled() and any(
                each.requires_grad for each in (query, key, value)
            )
            mask = _expand_mask(attn_mask, query, key)
            return operators._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
            )[0]
    options = {"enable_gqa": enable_gqa} if enable_gqa else {}
    return operators._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, **options
    )[0]


def _expand_mask(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask as what is added to the scores, one of each batch and head; the kernel takes no other."""
    import torch

    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zeros = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zeros, float("-inf")).to(query.dtype)
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
