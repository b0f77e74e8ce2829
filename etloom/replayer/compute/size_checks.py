"""Whether the sizes of an operator's arguments fit each other, for kernels that take that for granted.

Which do on a CPU was found by giving the operators of aten, torch 2.13, each argument smaller, larger, of other strides
or another number than the rest asks for, with memory behind every tensor that nobody may touch. Of those that are run
for a trace of unknown origin those of `FITTING` read or wrote there. Most are backward ones, whose callers in torch
give them what a forward one gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Arguments = Mapping[str, Any]


def require_matching_sizes(pattern: str) -> Callable[[Arguments], None]:
    """Tensors and their sizes: ``grad ... i j, self ... h w, grid n i j 2``. What has one letter must be of one size,
    what has one name of dots of the same sizes, and a number is a size itself. Tensors that are not given fit."""
    tensors = []
    for one in pattern.split(", "):
        name, *letters = one.split()
        dots = next((at for at, letter in enumerate(letters) if letter.startswith("...")), None)
        tensors.append((name, letters, dots))

    def look(had: Arguments) -> None:
        known: dict[str, Any] = {"1": 1, "2": 2, "3": 3}
        for name, letters, dots in tensors:
            if (tensor := had.get(name)) is None:
                continue
            shape = list(tensor.shape)
            more = len(shape) - len(letters) + (dots is not None)
            if more < 0 or (more and dots is None):
                raise IndexError(f"{name} has {len(shape)} dimensions, which do not fit the operator")
            if dots is not None:
                shape[dots : dots + more] = [tuple(shape[dots : dots + more])]  # type: ignore[list-item]
            for letter, size in zip(letters, shape, strict=True):
                if known.setdefault(letter, size) != size:
                    raise IndexError(f"{name} of sizes {list(tensor.shape)} does not fit the others")

    return look


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise IndexError(f"{what} does not fit the others")


def _check_batch_norm(had: Arguments) -> None:
    """Of a batch normalization, which takes the statistics of training, or else the running ones."""
    channels = had["input"].shape[1]
    training = had.get("train", had.get("training", True))
    for what in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        tensor = had.get(what)
        if tensor is not None and tensor.numel() < channels and (training or not what.startswith("save")):
            raise IndexError(f"{what} holds {tensor.numel()} elements for {channels} channels")
    if not training or "train" in had:
        for what in ("save_mean", "save_invstd") if training else ("running_mean", "running_var"):
            _require(had.get(what) is not None, f"no {what}")


def _check_cdist(had: Arguments) -> None:
    both = [had[what].shape[:-2] for what in ("x1", "x2")]
    _require(torch.broadcast_shapes(*both) == had["grad"].shape[:-2], "grad")  # type: ignore[no-untyped-call]


def _check_layer_norm(had: Arguments) -> None:
    rows = math.prod(had["input"].shape[: had["input"].dim() - len(had["normalized_shape"])])
    for what in ("mean", "rstd"):
        _require(had[what].numel() == rows, what)


def _check_group_norm(had: Arguments) -> None:
    _require(had["output_mask"][0] or had["input"].is_contiguous(), "output_mask")


def _check_contiguous_indices(had: Arguments) -> None:
    """Else the kernel reads a copy that is gone."""
    _require(had["indices"].is_contiguous(), "indices")


def _check_unfold(had: Arguments) -> None:
    sizes, dim = list(had["input_sizes"]), had["dim"]
    _require(-len(sizes) <= dim < len(sizes) and had["step"] > 0, "dim or step")
    sizes[dim] = (sizes[dim] - had["size"]) // had["step"] + 1
    _require(list(had["grad_in"].shape) == [*sizes, had["size"]], "grad_in")


def _check_lu_pivots(had: Arguments) -> None:
    *before, rows, columns = had["LU_data"].shape
    _require(list(had["LU_pivots"].shape) == [*before, min(rows, columns)], "LU_pivots")


def _check_loss_gradient(had: Arguments) -> None:
    each = had.get("reduction", 1) == 0
    _require(had["grad_output"].numel() >= (had["target"].shape[:1].numel() if each else 1), "grad_output")


def _check_fft(had: Arguments) -> None:
    x, dims = had["self"], had["dim"]
    _require(all(0 <= one < x.dim() for one in dims), "dim")
    last = had.get("last_dim_size")
    _require(last is None or not dims or x.shape[dims[-1]] == last // 2 + 1, "last_dim_size")


def _check_upsample_scales(had: Arguments) -> None:
    """Windows of anti-aliasing lie where the scale says, if one is given beside the sizes."""
    if "output_size" not in had or "scale_factors" in had:
        return
    before = had["input_size"][2:] if "input_size" in had else had["self"].shape[2:]
    for what, size, out in zip(("scales_h", "scales_w"), before, had["output_size"], strict=True):
        scale = had.get(what)
        _require(scale is None or (scale > 0 and abs(size * scale - out) <= 1), what)


def _make_padding_check(dimensions: int) -> Callable[[Arguments], None]:
    return lambda had: _require(len(had["padding"]) == 2 * dimensions, "padding")


def _check_embedding_bag(had: Arguments) -> None:
    _require(had["offsets"].numel() > had.get("include_last_offset", False), "offsets")


def _check_embedding_bag_backward(had: Arguments) -> None:
    bags, rows = had["grad"].shape[0], had["indices"].numel()
    _require(had["bag_size"].numel() == bags, "bag_size")
    _require("offsets" not in had or had["offsets"].numel() in (bags, bags + 1), "offsets")
    _require(had["offset2bag"].numel() in (rows, 0 if "offsets" in had else rows), "offset2bag")
    weights = had.get("per_sample_weights")
    _require(weights is None or weights.numel() == rows, "per_sample_weights")
    if had["mode"] == 2:
        _require(had["maximum_indices"].shape == had["grad"].shape, "maximum_indices")


def _check_lstm(had: Arguments) -> None:
    """Of an LSTM: a state for each layer and direction, and the weights of each."""
    ways, bias = 1 + had["bidirectional"], 4 if had["has_biases"] else 2
    _require(len(had["hx"]) == 2 and all(one.dim() == 3 for one in had["hx"]) and had["num_layers"] > 0, "hx")
    if "batch_sizes" in had:
        _check_packed_sequence(had)
        batch, inputs = had["hx"][0].shape[1], had["data"].shape[-1]
    else:
        _require(had["input"].dim() == 3, "input")
        batch, inputs = had["input"].shape[0 if had["batch_first"] else 1], had["input"].shape[2]
    parts = had["num_layers"] * ways
    given, hidden = (one.shape[2] for one in had["hx"])  # other than hidden where they are projected
    for state, size in zip(had["hx"], (given, hidden), strict=True):
        _require(list(state.shape) == [parts, batch, size], "hx")
    each = bias + (given != hidden)
    _require(len(had["params"]) == parts * each, "params")
    for part in range(parts):
        taken = inputs if part < ways else given * ways
        wanted = [[4 * hidden, taken], [4 * hidden, given], [4 * hidden], [4 * hidden]][:bias]
        wanted += [[given, hidden]] * (given != hidden)
        found = [list(one.shape) for one in had["params"][part * each : (part + 1) * each]]
        _require(found == wanted, "params")


def _check_packed_sequence(had: Arguments) -> None:
    _require("batch_sizes" not in had or had["batch_sizes"].numel() > 0, "batch_sizes")


def _check_weight_norm(had: Arguments) -> None:
    """Of weights, along their first or last dimension."""
    whole, dim = had.get("v", had.get("saved_v")), had["dim"]
    _require(whole.dim() > 0 and dim in (0, whole.dim() - 1), "dim")
    for what in (one for one in ("g", "saved_g", "saved_norms") if one in had):
        sizes = [size if at == dim else 1 for at, size in enumerate(whole.shape)]
        _require(list(had[what].shape) == sizes, what)
    _require("grad_w" not in had or had["grad_w"].shape == whole.shape, "grad_w")


def _check_attention_bias(had: Arguments) -> None:
    _require(had["qkv_bias"].dtype == had["qkv_weight"].dtype, "qkv_bias")


def _check_optimizer_lists(had: Arguments) -> None:
    """Of an optimizer, whose kernel goes through the memory of all tensors of a parameter at once."""
    names = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    for what in (one for one in names if had.get(one)):
        _require(len(had[what]) == len(had["self"]), what)
        for parameter, other in zip(had["self"], had[what], strict=True):
            _require(_shape_and_stride(parameter) == _shape_and_stride(other), what)
    for what in ("self", "state_steps"):
        _require(len(had[what]) == len(had["self"]), what)
        for tensor in had[what]:
            reach = sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
            _require(tensor.numel() == (0 if 0 in tensor.shape else reach + 1), what)
            _require(what == "self" or tensor.numel() == 1, what)


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
                whole = (
                    (_check_contiguous_indices,) if (name, dimensions) == ("adaptive_max_pool{}d", 3) else ()
                )
                yield f"{name.format(dimensions)}_backward", (pooled, *whole)
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
    f"aten::{name}": looks for name, looks in _size_checks()
}
"""Operator -> what raises IndexError where its arguments do not fit."""
