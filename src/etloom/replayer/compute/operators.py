"""Finds the operator of torch's registry that a recorded schema names, and decides whether a trace may run it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from etloom.replayer.compute.size_checks import SIZE_CHECKS

_REFUSED_OPERATORS = re.compile(
    r"from_file|set_data|set_source\w*|.*dlpack.*|pin_memory|record_stream|sym_\w*|segment_reduce|batch_norm_backward"
    r"|quantized_\w*|choose_qparams_optimized|mkldnn_rnn_\w*|fractional_max_pool[23]d_backward|bincount|fbgemm_\w*"
    r"|fused_moving_avg\w*|linalg_ldl_solve|slow_conv\w*|thnn_conv2d"
)
"""Operators that open files, access the memory of others, or do not validate sizes or indices of their arguments."""

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
"""Private operators that training and inference call. Others may rely on checks in their callers, and are not run."""


_QUALIFIED_NAME = re.compile(r"\w{1,100}::\w{1,200}(\.\w{1,200})?", re.ASCII)
_SCHEMA_PART = re.compile(r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\w+|[()\[\],=]""")
_MAX_ARGUMENTS = 1000  # those of aten have at most 40

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
    """Return a device-independent equivalent of a vendor's operator (such as cuDNN's); None if there is none.

    Returns:
        Its name, and a function with the arguments of the vendor's operator.
    """
    return _SUBSTITUTES.get(name)


@dataclass(frozen=True)
class Argument:
    """An operator's argument as the installed torch declares it: name, type, default, and if the operator modifies it.

    Attributes:
        kind: Its type, such as Optional[Tensor], List[int], ScalarType.
        keyword: It is keyword-only.
        writes: The operator modifies it.
    """

    name: str
    kind: str
    keyword: bool
    default: Any
    writes: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator of the installed torch, and its arguments in the order of the schema in the recording.

    Attributes:
        call: Runs it.
        arguments: The arguments of the recorded schema, in its order, as this torch declares them.
        order: All arguments that this torch declares, in its order.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[Argument, ...]
    order: tuple[Argument, ...]


@lru_cache(maxsize=4096)
def resolve_operator(schema: str, namespaces: frozenset[str] = frozenset({"aten"})) -> Operator | str:
    """Return the installed torch's operator that a schema names, or the reason why it cannot or must not run.

    Only torch's registry is used: no text of the trace is executed or parsed by torch.
    """
    qualified = schema.partition("(")[0].strip()
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    if not _QUALIFIED_NAME.fullmatch(qualified):
        return f"{qualified[:40]!r} is not the name of an operator"
    if namespace not in namespaces:
        return f"namespace {namespace[:40] or '?'} is not allowed; --allow-namespace adds one"
    plain = name.lstrip("_")
    is_private = namespace == "aten" and name.startswith("_")
    if _REFUSED_OPERATORS.fullmatch(plain) or (
        is_private and not _ALLOWED_PRIVATE_OPERATORS.fullmatch(plain)
    ):
        return "not run for traces of unknown origin"
    try:
        recorded = _argument_names(schema)
        # Operators that only TorchScript has, such as aten::save, are not in the dispatcher.
        if not torch._C._dispatch_has_kernel(f"{namespace}::{name}{overload and '.'}{overload}"):
            return "not in this torch"
        call = torch._C._get_operation_overload(f"{namespace}::{name}", overload)
        declared = torch._C._get_schema(f"{namespace}::{name}", overload)
    except ValueError as error:
        return str(error)
    except RuntimeError:
        call = None
    if call is None:
        return "not in this torch"
    order = tuple(map(_declared_argument, declared.arguments))
    by_name = {argument.name: argument for argument in order}
    if unknown := [argument for argument in recorded if argument not in by_name]:
        return f"this torch's operator has no argument {unknown[0][:40]}"
    run = _reshape_alias if name == "_reshape_alias" else call[0]
    run = with_argument_checks(f"{namespace}::{name}", run, list(by_name))
    return Operator(f"{namespace}::{name}", run, tuple(by_name[argument] for argument in recorded), order)


def _argument_names(schema: str) -> list[str]:
    """Parse a recorded operator schema and return the names of its arguments, without types and defaults.

    torch's own parser would end the process: it recurses as deep as types are nested, and allocates N defaults for [N].

    Raises:
        ValueError: The text is not a schema.
    """
    names: list[str] = []
    depth, name, is_default = 0, "", False
    for part in _SCHEMA_PART.findall(schema, schema.find("(")):
        depth += (part in "([") - (part in ")]")
        if depth == 0 or (depth == 1 and part == ","):
            names += [name] if name else []  # the star before keyword-only arguments has none
            name, is_default = "", False
        elif depth == 1 and part == "=":
            is_default = True
        elif depth == 1 and not is_default and part.isidentifier():
            name = part
        if depth == 0 or len(names) > _MAX_ARGUMENTS:
            break
    if depth or "(" not in schema:
        raise ValueError("the schema of the operator was not recorded completely")
    return names


def _reshape_alias(tensor: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
    """Run aten::_reshape_alias, checking that the storage is large enough."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset())


def _declared_argument(declared: Any) -> Argument:
    default = declared.default_value if declared.has_default_value() else None
    writes = declared.alias_info is not None and declared.alias_info.is_write
    return Argument(declared.name, str(declared.real_type), declared.kwarg_only, default, writes)


# Bounds checks for ATen kernels that do not validate their indices and could access memory out of bounds.
#
# These kernels were found by calling the operators of aten, torch 2.13, on a CPU with integers out of range: the
# operators below ended the process, all others that run for traces of unknown origin raise. `size_checks` does the same
# for sizes. The integers that a replay computes are not known in advance. On a GPU the assertions of its kernels are
# relied on.

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
