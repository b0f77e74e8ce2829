"""Which operator of torch's registry a recorded schema names, and whether a stranger's trace may run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from etloom.replayer.compute.index_checks import with_argument_checks

_REFUSED_OPERATORS = re.compile(
    r"from_file|set_data|set_source\w*|.*dlpack.*|pin_memory|record_stream|sym_\w*|segment_reduce|batch_norm_backward"
    r"|quantized_\w*|choose_qparams_optimized|mkldnn_rnn_\w*|fractional_max_pool[23]d_backward|bincount|fbgemm_\w*"
    r"|fused_moving_avg\w*|linalg_ldl_solve|slow_conv\w*|thnn_conv2d"
)
"""Operators that open files, take another's memory, or trust their arguments without a look at sizes or indices."""

_ALLOWED_PRIVATE_OPERATORS = re.compile(
    r"to_copy|unsafe_view|(?:log_)?softmax(?:_backward_data)?|local_scalar_dense|scaled_dot_product_\w+|conj\w*|neg_view"
    r"|(?:efficient|flash)_attention_(?:for|back)ward|foreach_(?!copy$)\w+|fused_adamw?_?|fused_rms_norm\w*"
    r"|embedding_bag(?:_forward_only|_backward|_dense_backward)?|weight_norm_interface\w*|reshape_alias"
    r"|adaptive_avg_pool[23]d(?:_backward)?|index_put_impl_|convolution\w*|cdist_\w+|prelu_kernel\w*"
    r"|batch_norm_(?:with_update\w*|impl_index)|native_batch_norm_legit\w*|thnn_fused_\w+|cudnn_rnn\w*|int_mm"
    r"|scaled_mm|grouped_mm|scaled_grouped_mm|addmm_activation|amp_\w+|linalg_\w+|fft_\w+|logcumsumexp|trilinear|upsample_\w+"
    r"|native_multi_head_attention|transformer_encoder_layer_fwd|shape_as_tensor|euclidean_dist|assert_async"
    r"|functional_sym_constrain\w*|log_api_usage\w*|sparse_\w*softmax|safe_softmax|mps_\w+|is_all_true|is_any_true"
)
"""Of private operators, whose callers have looked at their arguments, those that training and serving begin with."""


_SUBSTITUTES: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten::cudnn_batch_norm_backward": (
        "aten::native_batch_norm_backward",
        lambda x, grad, weight, mean, var, saved_mean, saved_var, epsilon, *_: (
            torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, saved_mean, saved_var, True, epsilon, [True] * 3
            )
        ),
    ),
    "aten::_scaled_dot_product_flash_attention_backward": (
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        lambda grad, q, k, v, out, sums, _, __, ___, ____, dropout, causal, *_____, scale=None: (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, sums, dropout, causal, attn_mask=None, scale=scale
            )
        ),
    ),
}


def portable_substitute(name: str) -> tuple[str, Callable[..., Any]] | None:
    """An operator of every device that computes what one of a vendor does, by its name, and a call with the same
    arguments."""
    return _SUBSTITUTES.get(name)


@dataclass(frozen=True)
class Argument:
    """One argument as this torch declares it. kind: its type, such as Optional[Tensor], List[int], ScalarType.
    writes: the operator changes it."""

    name: str
    kind: str
    keyword: bool
    default: Any
    writes: bool = False


@dataclass(frozen=True)
class Operator:
    """call: the operator. arguments: of the recorded schema, in its order, as this torch declares them.
    order: all that this torch declares, in its order. instead: why it is not the operator itself that is called."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Argument, ...]
    order: tuple[Argument, ...]
    instead: str | None = None


@lru_cache(maxsize=4096)
def resolve_operator(schema: str, namespaces: frozenset[str] = frozenset({"aten"})) -> Operator | str:
    """The operator that the schema names in this torch, or why it may not or cannot run.

    Only torch's own parser of schemas and its registry are asked: no text of the trace is run.
    """
    qualified = schema.partition("(")[0].strip()
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    if namespace not in namespaces:
        return f"namespace {namespace[:40] or '?'} is not allowed; --allow-namespace adds one"
    plain = name.lstrip("_")
    if _REFUSED_OPERATORS.fullmatch(plain) or (
        namespace == "aten" and name.startswith("_") and not _ALLOWED_PRIVATE_OPERATORS.fullmatch(plain)
    ):
        return "not run for a trace of unknown origin"
    try:
        recorded = [one.name for one in torch._C.parse_schema(schema).arguments]
        # What only TorchScript knows, as aten::save, is not among the dispatcher's operators.
        if not torch._C._dispatch_has_kernel(f"{namespace}::{name}{overload and '.'}{overload}"):
            return "not in this torch"
        call = torch._C._get_operation_overload(f"{namespace}::{name}", overload)
        declared = torch._C._get_schema(f"{namespace}::{name}", overload)
    except RuntimeError:
        call = None
    if call is None:
        return "not in this torch"
    order = tuple(_declared_argument(one) for one in declared.arguments)
    known = {one.name: one for one in order}
    if strange := [one for one in recorded if one not in known]:
        return f"this torch's operator has no argument {strange[0][:40]}"
    run = _reshape_alias if name == "_reshape_alias" else call[0]
    run = with_argument_checks(f"{namespace}::{name}", run, [one.name for one in order])
    return Operator(f"{namespace}::{name}", run, tuple(known[one] for one in recorded), order)


def _reshape_alias(tensor: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
    """aten::_reshape_alias, with a look at whether the storage holds it."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset())


def _declared_argument(one: Any) -> Argument:
    default = one.default_value if one.has_default_value() else None
    writes = one.alias_info is not None and one.alias_info.is_write
    return Argument(one.name, str(one.real_type), one.kwarg_only, default, writes)
