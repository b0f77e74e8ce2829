"""Size checks for ATen kernels that rely on the sizes of their arguments matching each other.

These kernels were found by calling the operators of aten, torch 2.13, on a CPU with each argument smaller, larger, with
other strides or another number than the rest requires, with protected memory behind every tensor. Among the operators
that may run for untrusted traces, the operators in `SIZE_CHECKS` accessed the protected memory. Most of them are
backward operators, which torch calls with results of the forward operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Arguments = Mapping[str, Any]


def require_matching_sizes(pattern: str) -> Callable[[Arguments], None]:
    """Return a function that raises IndexError unless the shapes of argument tensors match ``pattern``.

    In ``grad ... i j, self ... h w, grid n i j 2`` dimensions with the same letter must have the same size, dots with
    the same name the same sizes, and a number is the size itself. Tensors that are not passed are not checked.
    """
    tensors = []
    for part in pattern.split(", "):
        name, *letters = part.split()
        dots = next((index for index, letter in enumerate(letters) if letter.startswith("...")), None)
        tensors.append((name, letters, dots))

    def check(args: Arguments) -> None:
        sizes: dict[str, Any] = {"1": 1, "2": 2, "3": 3}
        for name, letters, dots in tensors:
            if (tensor := args.get(name)) is None:
                continue
            shape = list(tensor.shape)
            extra = len(shape) - len(letters) + (dots is not None)
            if extra < 0 or (extra and dots is None):
                raise IndexError(f"{name} has {len(shape)} dimensions, which the operator does not support")
            if dots is not None:
                shape[dots : dots + extra] = [tuple(shape[dots : dots + extra])]  # type: ignore[list-item]
            for letter, size in zip(letters, shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    raise IndexError(
                        f"{name} of sizes {list(tensor.shape)} does not match the other arguments"
                    )

    return check


def _require(matches: bool, argument: str) -> None:
    if not matches:
        raise IndexError(f"the size of {argument} does not match the other arguments")


def _check_batch_norm(args: Arguments) -> None:
    """Check that weights and statistics of a batch normalization exist where needed and cover all channels."""
    channels = args["input"].shape[1]
    training = args.get("train", args.get("training", True))
    for name in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        tensor = args.get(name)
        if tensor is not None and tensor.numel() < channels and (training or not name.startswith("save")):
            raise IndexError(f"{name} has {tensor.numel()} elements for {channels} channels")
    if not training or "train" in args:
        for name in ("save_mean", "save_invstd") if training else ("running_mean", "running_var"):
            if args.get(name) is None:
                raise IndexError(f"{name} is missing")


def _check_cdist(args: Arguments) -> None:
    both = [args[name].shape[:-2] for name in ("x1", "x2")]
    _require(torch.broadcast_shapes(*both) == args["grad"].shape[:-2], "grad")  # type: ignore[no-untyped-call]


def _check_layer_norm(args: Arguments) -> None:
    rows = math.prod(args["input"].shape[: args["input"].dim() - len(args["normalized_shape"])])
    for name in ("mean", "rstd"):
        _require(args[name].numel() == rows, name)


def _check_group_norm(args: Arguments) -> None:
    _require(args["output_mask"][0] or args["input"].is_contiguous(), "output_mask")


def _check_contiguous_indices(args: Arguments) -> None:
    """Check that ``indices`` is contiguous; otherwise the kernel would read a temporary copy that is freed already."""
    _require(args["indices"].is_contiguous(), "indices")


def _check_unfold(args: Arguments) -> None:
    sizes, dim = list(args["input_sizes"]), args["dim"]
    _require(-len(sizes) <= dim < len(sizes) and args["step"] > 0, "dim or step")
    sizes[dim] = (sizes[dim] - args["size"]) // args["step"] + 1
    _require(list(args["grad_in"].shape) == [*sizes, args["size"]], "grad_in")


def _check_lu_pivots(args: Arguments) -> None:
    *before, rows, columns = args["LU_data"].shape
    _require(list(args["LU_pivots"].shape) == [*before, min(rows, columns)], "LU_pivots")


def _check_loss_gradient(args: Arguments) -> None:
    each = args.get("reduction", 1) == 0
    _require(args["grad_output"].numel() >= (args["target"].shape[:1].numel() if each else 1), "grad_output")


def _check_fft(args: Arguments) -> None:
    x, dims = args["self"], args["dim"]
    _require(all(0 <= dim < x.dim() for dim in dims), "dim")
    last = args.get("last_dim_size")
    _require(last is None or not dims or x.shape[dims[-1]] == last // 2 + 1, "last_dim_size")


def _check_upsample_scales(args: Arguments) -> None:
    """Check that the scales of an anti-aliased upsampling are positive and match its input and output sizes."""
    if "output_size" not in args or "scale_factors" in args:
        return
    before = args["input_size"][2:] if "input_size" in args else args["self"].shape[2:]
    for name, size, out in zip(("scales_h", "scales_w"), before, args["output_size"], strict=True):
        scale = args.get(name)
        _require(scale is None or (scale > 0 and abs(size * scale - out) <= 1), name)


def _make_padding_check(dimensions: int) -> Callable[[Arguments], None]:
    return lambda args: _require(len(args["padding"]) == 2 * dimensions, "padding")


def _check_embedding_bag(args: Arguments) -> None:
    _require(args["offsets"].numel() > args.get("include_last_offset", False), "offsets")


def _check_embedding_bag_backward(args: Arguments) -> None:
    bags, rows = args["grad"].shape[0], args["indices"].numel()
    _require(args["bag_size"].numel() == bags, "bag_size")
    _require("offsets" not in args or args["offsets"].numel() in (bags, bags + 1), "offsets")
    _require(args["offset2bag"].numel() in (rows, 0 if "offsets" in args else rows), "offset2bag")
    weights = args.get("per_sample_weights")
    _require(weights is None or weights.numel() == rows, "per_sample_weights")
    if args["mode"] == 2:
        _require(args["maximum_indices"].shape == args["grad"].shape, "maximum_indices")


def _check_lstm(args: Arguments) -> None:
    """Check that the states and weights of an LSTM have the right number and shapes for all layers and directions."""
    ways, bias = 1 + args["bidirectional"], 4 if args["has_biases"] else 2
    _require(
        len(args["hx"]) == 2 and all(tensor.dim() == 3 for tensor in args["hx"]) and args["num_layers"] > 0,
        "hx",
    )
    if "batch_sizes" in args:
        _check_packed_sequence(args)
        batch, inputs = args["hx"][0].shape[1], args["data"].shape[-1]
    else:
        _require(args["input"].dim() == 3, "input")
        batch, inputs = args["input"].shape[0 if args["batch_first"] else 1], args["input"].shape[2]
    parts = args["num_layers"] * ways
    output, hidden = (tensor.shape[2] for tensor in args["hx"])  # they differ if outputs are projected
    for state, size in zip(args["hx"], (output, hidden), strict=True):
        _require(list(state.shape) == [parts, batch, size], "hx")
    is_projected = output != hidden
    each = bias + is_projected
    _require(len(args["params"]) == parts * each, "params")
    for part in range(parts):
        input_size = inputs if part < ways else output * ways
        expected = [[4 * hidden, input_size], [4 * hidden, output], [4 * hidden], [4 * hidden]][:bias]
        if is_projected:
            expected.append([output, hidden])
        shapes = [list(tensor.shape) for tensor in args["params"][part * each : (part + 1) * each]]
        _require(shapes == expected, "params")


def _check_packed_sequence(args: Arguments) -> None:
    _require("batch_sizes" not in args or args["batch_sizes"].numel() > 0, "batch_sizes")


def _check_weight_norm(args: Arguments) -> None:
    """Check that a weight normalization has a valid dimension (first or last) and matching tensor shapes."""
    weight, dim = args.get("v", args.get("saved_v")), args["dim"]
    _require(weight.dim() > 0 and dim in (0, weight.dim() - 1), "dim")
    for name in ("g", "saved_g", "saved_norms"):
        sizes = [size if index == dim else 1 for index, size in enumerate(weight.shape)]
        _require(name not in args or list(args[name].shape) == sizes, name)
    _require("grad_w" not in args or args["grad_w"].shape == weight.shape, "grad_w")


def _check_attention_bias(args: Arguments) -> None:
    _require(args["qkv_bias"].dtype == args["qkv_weight"].dtype, "qkv_bias")


def _check_optimizer_lists(args: Arguments) -> None:
    """Check that the tensor lists of a fused optimizer have equal lengths, and their tensors matching layouts."""
    names = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    for name in filter(args.get, names):
        _require(len(args[name]) == len(args["self"]), name)
        for parameter, state in zip(args["self"], args[name], strict=True):
            _require(_shape_and_stride(parameter) == _shape_and_stride(state), name)
    for name in ("self", "state_steps"):
        _require(len(args[name]) == len(args["self"]), name)
        for tensor in args[name]:
            reach = sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
            _require(tensor.numel() == (0 if 0 in tensor.shape else reach + 1), name)
            _require(name == "self" or tensor.numel() == 1, name)


def _shape_and_stride(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride()


def _size_checks() -> Iterator[tuple[str, tuple[Callable[[Arguments], None], ...]]]:
    for dimensions, letters in ((1, "i"), (2, "i j"), (3, "i j k")):
        inner = letters.upper()
        pooled = require_matching_sizes(f"grad_output ... {letters}, indices ... {letters}, self ... {inner}")
        if dimensions > 1:
            for name in (
                "_adaptive_avg_pool{}d",
                "adaptive_max_pool{}d",
                "avg_pool{}d",
                "max_pool{}d_with_indices",
            ):
                extra = (
                    (_check_contiguous_indices,) if (name, dimensions) == ("adaptive_max_pool{}d", 3) else ()
                )
                yield f"{name.format(dimensions)}_backward", (pooled, *extra)
            sampled = require_matching_sizes(
                f"grad_output n c {letters}, input n c {inner}, grid n {letters} {dimensions}"
            )
            yield f"grid_sampler_{dimensions}d_backward", (sampled,)
        for name in ("reflection", "replication"):
            yield f"{name}_pad{dimensions}d_backward", (pooled, _make_padding_check(dimensions))
    for name in ("native_batch_norm", "batch_norm_update_stats", "_native_batch_norm_legit"):
        yield name, (_check_batch_norm,)
    for name in ("_functional", "_no_training"):
        yield f"_native_batch_norm_legit{name}", (_check_batch_norm,)
    for name in ("_batch_norm_with_update", "_batch_norm_with_update_functional"):
        yield name, (_check_batch_norm,)
    yield "native_batch_norm_backward", (require_matching_sizes("grad_out ..., input ..."), _check_batch_norm)
    yield "native_layer_norm_backward", (require_matching_sizes("grad_out ..., input ..."), _check_layer_norm)
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        yield name, (require_matching_sizes("grad_output ..., output ..."),)
    attention = "query n h q e, key n h k e, value n h k e, grad_out n h q e, out n h q e, logsumexp n h q"
    for name in ("", "_backward"):
        yield f"_scaled_dot_product_flash_attention_for_cpu{name}", (require_matching_sizes(attention),)
    yield (
        "scaled_dot_product_attention",
        (require_matching_sizes("query ...q i e, key ...k j e, value ...v j f"),),
    )
    yield "native_group_norm_backward", (_check_group_norm,)
    yield (
        "_cdist_backward",
        (require_matching_sizes("x1 ...x p m, x2 ...y r m, grad ...g p r, cdist ...g p r"), _check_cdist),
    )
    yield "_convolution_double_backward", (require_matching_sizes("gO n o ...s, self n c ...t"),)
    yield "convolution_backward", (require_matching_sizes("grad_output n o ...s, input n c ...t"),)
    yield "unfold_backward", (_check_unfold,)
    yield "lstm", (_check_lstm,)
    for name in ("gru", "rnn_tanh", "rnn_relu"):
        yield name, (_check_packed_sequence,)
    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        yield name, (_check_attention_bias,)
    for name in ("", "_backward"):
        yield f"_weight_norm_interface{name}", (_check_weight_norm,)
    yield "lu_unpack", (_check_lu_pivots,)
    for name in ("multi_margin_loss", "multilabel_margin_loss"):
        yield f"{name}_backward", (_check_loss_gradient,)
    for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
        yield name, (_check_fft,)
    for name in ("bilinear", "bicubic", "lanczos"):
        for way in ("", "_backward"):
            yield f"_upsample_{name}2d_aa{way}", (_check_upsample_scales,)
    for name in ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"):
        yield name, (_check_embedding_bag,)
    for name in ("_embedding_bag_backward", "_embedding_bag_dense_backward"):
        yield name, (_check_embedding_bag_backward,)
    for name in ("adam", "adamw"):
        for way in ("", "_"):
            yield f"_fused_{name}{way}", (_check_optimizer_lists,)


SIZE_CHECKS: Mapping[str, tuple[Callable[[Arguments], None], ...]] = {
    f"aten::{name}": checks for name, checks in _size_checks()
}
"""Operator -> checks that raise IndexError if its arguments do not match."""
