"""Which operator of torch's registry a recorded schema names, and whether a stranger's trace may run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_REFUSED = re.compile(
    r"from_file|_?set_data|_?set_source\w*|.*unsafe.*|_nested_\w*|_copy_from\w*|_?pin_memory|record_stream"
    r"|_test_\w*|\w*backward_?hook\w*|_?resize_output_?|_assert_\w*|\w*dlpack\w*|_cudnn_init_dropout_state|sym_\w*"
)
"""Operators that open files, take another's memory, or trust their arguments without a look at sizes or indices."""


_OTHERS: dict[str, tuple[str, Callable[..., Any]]] = {
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


def other(name: str) -> tuple[str, Callable[..., Any]] | None:
    """An operator of every device that computes what one of a vendor does, by its name, and a call with the same
    arguments."""
    return _OTHERS.get(name)


@dataclass(frozen=True)
class Argument:
    """One argument as this torch declares it. kind: its type, such as Optional[Tensor], List[int], ScalarType."""

    name: str
    kind: str
    keyword: bool
    default: Any


@dataclass(frozen=True)
class Operator:
    """call: the operator. arguments: of the recorded schema, in its order, as this torch declares them.
    order: all that this torch declares, in its order."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Argument, ...]
    order: tuple[Argument, ...]


@lru_cache(maxsize=4096)
def resolve(schema: str, namespaces: frozenset[str] = frozenset({"aten"})) -> Operator | str:
    """The operator that the schema names in this torch, or why it may not or cannot run.

    Only torch's own parser of schemas and its registry are asked: no text of the trace is run.
    """
    qualified = schema.partition("(")[0].strip()
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    if namespace not in namespaces:
        return f"namespace {namespace[:40] or '?'} is not allowed; --allow-namespace adds one"
    if _REFUSED.fullmatch(name):
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
    order = tuple(_argument(one) for one in declared.arguments)
    known = {one.name: one for one in order}
    if strange := [one for one in recorded if one not in known]:
        return f"this torch's operator has no argument {strange[0][:40]}"
    return Operator(f"{namespace}::{name}", call[0], tuple(known[one] for one in recorded), order)


def _argument(one: Any) -> Argument:
    default = one.default_value if one.has_default_value() else None
    return Argument(one.name, str(one.real_type), one.kwarg_only, default)
