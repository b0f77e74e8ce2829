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

Had = Mapping[str, Any]


def alike(pattern: str) -> Callable[[Had], None]:
    """Tensors and their sizes: ``grad ... i j, self ... h w, grid n i j 2``. What has one letter must be of one size,
    what has one name of dots of the same sizes, and a number is a size itself. Tensors that are not given fit."""
    tensors = []
    for one in pattern.split(", "):
        name, *letters = one.split()
        dots = next((at for at, letter in enumerate(letters) if letter.startswith("...")), None)
        tensors.append((name, letters, dots))

    def look(had: Had) -> None:
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


def _need(fits: bool, what: str) -> None:
    if not fits:
        raise IndexError(f"{what} does not fit the others")


def _channels(had: Had) -> None:
    """Of a batch normalization, which takes the statistics of training, or else the running ones."""
    channels = had["input"].shape[1]
    training = had.get("train", had.get("training", True))
    for what in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        tensor = had.get(what)
        if tensor is not None and tensor.numel() < channels and (training or not what.startswith("save")):
            raise IndexError(f"{what} holds {tensor.numel()} elements for {channels} channels")
    if not training or "train" in had:
        for what in ("save_mean", "save_invstd") if training else ("running_mean", "running_var"):
            _need(had.get(what) is not None, f"no {what}")


def _distances(had: Had) -> None:
    both = [had[what].shape[:-2] for what in ("x1", "x2")]
    _need(torch.broadcast_shapes(*both) == had["grad"].shape[:-2], "grad")  # type: ignore[no-untyped-call]


def _layers(had: Had) -> None:
    rows = math.prod(had["input"].shape[: had["input"].dim() - len(had["normalized_shape"])])
    for what in ("mean", "rstd"):
        _need(had[what].numel() == rows, what)


def _groups(had: Had) -> None:
    _need(had["output_mask"][0] or had["input"].is_contiguous(), "output_mask")


def _together(had: Had) -> None:
    """Else the kernel reads a copy that is gone."""
    _need(had["indices"].is_contiguous(), "indices")


def _folds(had: Had) -> None:
    sizes, dim = list(had["input_sizes"]), had["dim"]
    _need(-len(sizes) <= dim < len(sizes) and had["step"] > 0, "dim or step")
    sizes[dim] = (sizes[dim] - had["size"]) // had["step"] + 1
    _need(list(had["grad_in"].shape) == [*sizes, had["size"]], "grad_in")


def _pivots(had: Had) -> None:
    *before, rows, columns = had["LU_data"].shape
    _need(list(had["LU_pivots"].shape) == [*before, min(rows, columns)], "LU_pivots")


def _some(had: Had) -> None:
    each = had.get("reduction", 1) == 0
    _need(had["grad_output"].numel() >= (had["target"].shape[:1].numel() if each else 1), "grad_output")


def _frequencies(had: Had) -> None:
    x, dims = had["self"], had["dim"]
    _need(all(0 <= one < x.dim() for one in dims), "dim")
    last = had.get("last_dim_size")
    _need(last is None or not dims or x.shape[dims[-1]] == last // 2 + 1, "last_dim_size")


def _scales(had: Had) -> None:
    """Windows of anti-aliasing lie where the scale says, if one is given beside the sizes."""
    if "output_size" not in had or "scale_factors" in had:
        return
    before = had["input_size"][2:] if "input_size" in had else had["self"].shape[2:]
    for what, size, out in zip(("scales_h", "scales_w"), before, had["output_size"], strict=True):
        scale = had.get(what)
        _need(scale is None or (scale > 0 and abs(size * scale - out) <= 1), what)


def _padding(dimensions: int) -> Callable[[Had], None]:
    return lambda had: _need(len(had["padding"]) == 2 * dimensions, "padding")


def _bags(had: Had) -> None:
    _need(had["offsets"].numel() > had.get("include_last_offset", False), "offsets")


def _bags_backward(had: Had) -> None:
    bags, rows = had["grad"].shape[0], had["indices"].numel()
    _need(had["bag_size"].numel() == bags, "bag_size")
    _need("offsets" not in had or had["offsets"].numel() in (bags, bags + 1), "offsets")
    _need(had["offset2bag"].numel() in (rows, 0 if "offsets" in had else rows), "offset2bag")
    weights = had.get("per_sample_weights")
    _need(weights is None or weights.numel() == rows, "per_sample_weights")
    if had["mode"] == 2:
        _need(had["maximum_indices"].shape == had["grad"].shape, "maximum_indices")


def _recurrent(had: Had) -> None:
    """Of an LSTM: a state for each layer and direction, and the weights of each."""
    ways, bias = 1 + had["bidirectional"], 4 if had["has_biases"] else 2
    _need(len(had["hx"]) == 2 and all(one.dim() == 3 for one in had["hx"]) and had["num_layers"] > 0, "hx")
    if "batch_sizes" in had:
        _packed(had)
        batch, inputs = had["hx"][0].shape[1], had["data"].shape[-1]
    else:
        _need(had["input"].dim() == 3, "input")
        batch, inputs = had["input"].shape[0 if had["batch_first"] else 1], had["input"].shape[2]
    parts = had["num_layers"] * ways
    given, hidden = (one.shape[2] for one in had["hx"])  # other than hidden where they are projected
    for state, size in zip(had["hx"], (given, hidden), strict=True):
        _need(list(state.shape) == [parts, batch, size], "hx")
    each = bias + (given != hidden)
    _need(len(had["params"]) == parts * each, "params")
    for part in range(parts):
        taken = inputs if part < ways else given * ways
        wanted = [[4 * hidden, taken], [4 * hidden, given], [4 * hidden], [4 * hidden]][:bias]
        wanted += [[given, hidden]] * (given != hidden)
        found = [list(one.shape) for one in had["params"][part * each : (part + 1) * each]]
        _need(found == wanted, "params")


def _packed(had: Had) -> None:
    _need("batch_sizes" not in had or had["batch_sizes"].numel() > 0, "batch_sizes")


def _norms(had: Had) -> None:
    """Of weights, along their first or last dimension."""
    whole, dim = had.get("v", had.get("saved_v")), had["dim"]
    _need(whole.dim() > 0 and dim in (0, whole.dim() - 1), "dim")
    for what in (one for one in ("g", "saved_g", "saved_norms") if one in had):
        sizes = [size if at == dim else 1 for at, size in enumerate(whole.shape)]
        _need(list(had[what].shape) == sizes, what)
    _need("grad_w" not in had or had["grad_w"].shape == whole.shape, "grad_w")


def _bias(had: Had) -> None:
    _need(had["qkv_bias"].dtype == had["qkv_weight"].dtype, "qkv_bias")


def _lists(had: Had) -> None:
    """Of an optimizer, whose kernel goes through the memory of all tensors of a parameter at once."""
    names = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    for what in (one for one in names if had.get(one)):
        _need(len(had[what]) == len(had["self"]), what)
        for parameter, other in zip(had["self"], had[what], strict=True):
            _need(_laid_out(parameter) == _laid_out(other), what)
    for what in ("self", "state_steps"):
        _need(len(had[what]) == len(had["self"]), what)
        for tensor in had[what]:
            reach = sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
            _need(tensor.numel() == (0 if 0 in tensor.shape else reach + 1), what)
            _need(what == "self" or tensor.numel() == 1, what)


def _laid_out(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride()


def _table() -> Iterator[tuple[str, tuple[Callable[[Had], None], ...]]]:
    for dimensions, letters in ((1, "i"), (2, "i j"), (3, "i j k")):
        inner = letters.upper()
        pooled = alike(f"grad_output ... {letters}, indices ... {letters}, self ... {inner}")
        if dimensions > 1:
            for name in (
                "_adaptive_avg_pool{}d",
                "adaptive_max_pool{}d",
                "avg_pool{}d",
                "max_pool{}d_with_indices",
            ):
                whole = (_together,) if (name, dimensions) == ("adaptive_max_pool{}d", 3) else ()
                yield f"{name.format(dimensions)}_backward", (pooled, *whole)
            sampled = alike(f"grad_output n c {letters}, input n c {inner}, grid n {letters} {dimensions}")
            yield f"grid_sampler_{dimensions}d_backward", (sampled,)
        for name in ("reflection", "replication"):
            yield f"{name}_pad{dimensions}d_backward", (pooled, _padding(dimensions))
    for name in ("native_batch_norm", "batch_norm_update_stats", "_native_batch_norm_legit"):
        yield name, (_channels,)
    for name in ("_functional", "_no_training"):
        yield f"_native_batch_norm_legit{name}", (_channels,)
    for name in ("_batch_norm_with_update", "_batch_norm_with_update_functional"):
        yield name, (_channels,)
    yield "native_batch_norm_backward", (alike("grad_out ..., input ..."), _channels)
    yield "native_layer_norm_backward", (alike("grad_out ..., input ..."), _layers)
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        yield name, (alike("grad_output ..., output ..."),)
    attention = "query n h q e, key n h k e, value n h k e, grad_out n h q e, out n h q e, logsumexp n h q"
    for name in ("", "_backward"):
        yield f"_scaled_dot_product_flash_attention_for_cpu{name}", (alike(attention),)
    yield "scaled_dot_product_attention", (alike("query ...q i e, key ...k j e, value ...v j f"),)
    yield "native_group_norm_backward", (_groups,)
    yield "_cdist_backward", (alike("x1 ...x p m, x2 ...y r m, grad ...g p r, cdist ...g p r"), _distances)
    yield "_convolution_double_backward", (alike("gO n o ...s, self n c ...t"),)
    yield "convolution_backward", (alike("grad_output n o ...s, input n c ...t"),)
    yield "unfold_backward", (_folds,)
    yield "lstm", (_recurrent,)
    for name in ("gru", "rnn_tanh", "rnn_relu"):
        yield name, (_packed,)
    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        yield name, (_bias,)
    for name in ("", "_backward"):
        yield f"_weight_norm_interface{name}", (_norms,)
    yield "lu_unpack", (_pivots,)
    for name in ("multi_margin_loss", "multilabel_margin_loss"):
        yield f"{name}_backward", (_some,)
    for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
        yield name, (_frequencies,)
    for name in ("bilinear", "bicubic", "lanczos"):
        for way in ("", "_backward"):
            yield f"_upsample_{name}2d_aa{way}", (_scales,)
    for name in ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"):
        yield name, (_bags,)
    for name in ("_embedding_bag_backward", "_embedding_bag_dense_backward"):
        yield name, (_bags_backward,)
    for name in ("adam", "adamw"):
        for way in ("", "_"):
            yield f"_fused_{name}{way}", (_lists,)


FITTING: Mapping[str, tuple[Callable[[Had], None], ...]] = {
    f"aten::{name}": looks for name, looks in _table()
}
"""Operator -> what raises IndexError where its arguments do not fit."""
