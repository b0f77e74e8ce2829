"""Computation replay: sizes that do not fit are an outcome in one line, also where torch's kernel would not look and
read or write beyond a tensor's end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from etloom.replayer.compute.operators import resolve_operator  # noqa: E402
from etloom.replayer.compute.size_checks import SIZE_CHECKS, require_matching_sizes  # noqa: E402

pytestmark = pytest.mark.torch
Given = tuple[Any, ...]


def some(*sizes: int) -> Any:
    return torch.rand(sizes)


def with_(given: Given, at: int, other: Any) -> Given:
    return (*given[:at], other, *given[at + 1 :])


def cases() -> Iterator[tuple[str, Given, list[tuple[int, Any]]]]:
    """(operator, arguments, what does not fit in their place)."""
    for dimensions in (1, 2, 3):
        x, grad, one = some(2, 3, *[4] * dimensions), some(2, 3, *[2] * dimensions), [1] * dimensions
        padded = some(2, 3, *[6] * dimensions)
        for kind in ("reflection", "replication"):
            pads = [1, 1] * dimensions
            yield (
                f"{kind}_pad{dimensions}d_backward",
                (padded, x, pads),
                [(0, padded[:1]), (1, x[:, :1]), (2, [])],
            )
        if dimensions == 1:
            continue
        two, places = [2] * dimensions, torch.zeros(grad.shape, dtype=torch.int64)
        small = [(0, grad[:1]), (0, grad[:, :1]), (1, x[:1])]
        yield f"_adaptive_avg_pool{dimensions}d_backward", (grad, x), small
        apart = torch.stack([places, places], -1)[..., 0]
        wrong = [*small, (2, places[..., :1]), *([(2, apart)] if dimensions == 3 else [])]
        yield f"adaptive_max_pool{dimensions}d_backward", (grad, x, places), wrong
        window = (two, two, [0] * dimensions)
        yield f"avg_pool{dimensions}d_backward", (grad, x, *window, False, True, None), small
        given = (grad, x, *window, one, False, places)
        yield f"max_pool{dimensions}d_with_indices_backward", given, [*small, (7, places[:1])]
        grid = some(2, *[2] * dimensions, dimensions)
        wrong = [*small[:2], (0, grad[..., :1]), (1, x[:1]), (2, grid[..., :1])]
        yield f"grid_sampler_{dimensions}d_backward", (grad, x, grid, 0, 0, False, [True, True]), wrong

    x, side, less = some(2, 3, 4), some(3), some(2)
    for name, train in (
        ("native_batch_norm", (True,)),
        ("_native_batch_norm_legit", (False,)),
        ("_native_batch_norm_legit_functional", (True,)),
        ("_native_batch_norm_legit_no_training", ()),
        ("_batch_norm_with_update", ()),
        ("_batch_norm_with_update_functional", ()),
    ):
        wrong = [(at, less) for at in (1, 2, 3, 4)] + ([(5, False)] if name == "native_batch_norm" else [])
        running = (None, None) if name == "native_batch_norm" else (side, side)
        yield name, (x, side, side, *running, *train, 0.1, 0.1), wrong
    yield "batch_norm_update_stats", (x, side, side, 0.1), [(1, less), (2, less)]
    given = (x, x, *[side] * 5, True, 0.1, [True] * 3)
    yield "native_batch_norm_backward", given, [(0, x[:1]), (2, less), (5, less), (6, None)]
    rows, weight = some(2, 3, 1), some(4)
    given = (x, x, [4], rows, rows, weight, weight, [True] * 3)
    yield "native_layer_norm_backward", given, [(0, x[:1]), (3, rows[:1]), (4, rows[:0])]
    nearby = some(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    given = (nearby, nearby, some(2, 2), some(2, 2), some(4), 2, 4, 9, 2, [True] * 3)
    yield "native_group_norm_backward", given, [(9, [False, True, True])]
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        yield name, (x, x, 1, torch.float), [(0, x[:1]), (1, x[..., :1])]

    q, k = some(1, 2, 4, 8), some(1, 2, 5, 8)
    wrong = [(0, some(2, 2, 4, 8)), (1, k[:, :1]), (1, k[:, :, :1]), (2, k[:, :, :1])]
    yield "_scaled_dot_product_flash_attention_for_cpu", (q, k, k), wrong
    yield "scaled_dot_product_attention", (q, k, k), [(1, k[:, :, :1]), (2, k[:, :, :1])]
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    given = (q, q, k, k, out, sums, 0.0, False)
    yield (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        given,
        [(0, q[:, :1]), (4, q[..., :1]), (5, sums[:, :1])],
    )

    p, r, apart = some(5, 3), some(6, 3), some(5, 6)
    yield "_cdist_backward", (apart, p, r, 2.0, apart), [(0, apart[:1]), (0, apart[None]), (4, apart[:, :1])]
    kernel, images = some(3, 2, 3, 3), some(1, 2, 5, 5)
    around = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    grad = some(1, 3, 3, 3)
    yield "convolution_backward", (grad, images, kernel, [3], *around), [(0, grad[:0])]
    given = (images, kernel, side, grad, kernel, images, *around)
    yield "_convolution_double_backward", given, [(3, torch.tensor(1.0))]
    yield (
        "unfold_backward",
        (some(2, 3, 2), [2, 4], 1, 2, 1),
        [(0, some(2, 3, 1)), (0, some(2, 2, 2)), (2, 2), (4, 0)],
    )
    yield (
        "lu_unpack",
        (some(3, 4), torch.tensor([1, 2, 3], dtype=torch.int32)),
        [(1, torch.ones(2, dtype=torch.int32))],
    )
    labels = torch.zeros(2, 3, dtype=torch.int64)
    yield "multi_margin_loss_backward", (some(), some(2, 3), labels[:, 0], 1, 1.0), [(0, some(0))]
    each = (some(2), some(2, 3), labels[:, 0], 1, 1.0, None, 0)
    yield "multi_margin_loss_backward", each, [(0, some(1))]
    yield "multilabel_margin_loss_backward", (some(), some(2, 3), labels, 1, some(2, 3)), [(0, some(0))]
    waves = torch.fft.rfft(some(2, 8))
    yield "_fft_r2c", (some(2, 8), [1], 0, True), [(1, [2]), (1, [-1])]
    yield "_fft_c2c", (waves, [1], 0, True), [(1, [1 << 40])]
    yield "_fft_c2r", (waves, [1], 0, 8), [(1, [2]), (3, 10)]
    for kind in ("bilinear", "bicubic", "lanczos"):
        sizes = (False, 0.5, 0.5)
        yield (
            f"_upsample_{kind}2d_aa",
            (some(1, 2, 6, 7), [3, 3], *sizes),
            [(0, some(1, 2, 6, 1)), (1, [7, 3])],
        )
        given = (some(1, 2, 3, 3), [3, 3], [1, 2, 6, 7], *sizes)
        yield f"_upsample_{kind}2d_aa_backward", given, [(2, [1, 2, 6, 1])]

    table, rows, starts = some(5, 3), torch.tensor([1, 2, 4, 3]), torch.tensor([0, 2])
    begun = (table, rows, starts, False, 2, False, None)
    for name, last in (
        ("embedding_bag", True),
        ("_embedding_bag", False),
        ("_embedding_bag_forward_only", True),
    ):
        yield name, (*begun, last), [(2, starts[: 1 if last else 0])]
    _, of, sizes, most = torch.ops.aten._embedding_bag(*begun)
    given = (some(2, 3), rows, starts, of, sizes, most, 5, False, 2, False, None)
    wrong = [(0, some(1, 3)), (2, rows), (4, sizes[:1]), (5, most[:, :1])]
    yield "_embedding_bag_backward", given, wrong
    _, of, sizes, most = torch.ops.aten._embedding_bag(table, rows, starts, False, 1)
    given = (some(2, 3), rows, of, sizes, most, 5, False, 1, None)
    yield "_embedding_bag_dense_backward", given, [(2, of[:2]), (3, sizes[:1]), (8, some(1))]

    steps = (
        torch.ones(5, 2, 3),
        [some(1, 2, 4), some(1, 2, 4)],
        [some(16, 3), some(16, 4), some(16), some(16)],
    )
    given = (*steps, True, 1, 0.0, False, False, False)
    wrong = [(0, some(5, 3, 3)), (0, some(5, 2, 2)), (1, [some(1, 1, 4)] * 2), (2, [some(1), *steps[2][1:]])]
    yield "lstm.input", given, wrong
    data, packed, state = some(5, 3), torch.tensor([2, 2, 1]), some(1, 2, 4)
    given = (data, packed, *steps[1:], True, 1, 0.0, False, False)
    short = [some(1, 2, 4), some(0, 2, 4)]
    yield "lstm.data", given, [(0, some(5, 2)), (1, packed[:0]), (2, short), (2, short[::-1])]
    grown = [some(2, 2, 5), some(2, 2, 4)], [some(16, 3), some(16, 5), some(16), some(16), some(5, 4)] * 2
    yield "lstm.input", (steps[0], *grown, True, 1, 0.0, False, True, False), [(2, grown[1][:5]), (7, False)]
    for kind, parts in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        weights = [some(4 * parts, 3), some(4 * parts, 4), some(4 * parts), some(4 * parts)]
        yield (
            f"{kind}.data",
            (data, packed, state, weights, True, 1, 0.0, False, False),
            [(1, packed[:0])],
        )
    x, square, wide = some(2, 3, 4), some(4, 4), some(12, 4)
    bias = some(12).double()
    given = (x, x, x, 4, 2, wide, some(12), square, some(4))
    yield "_native_multi_head_attention", given, [(6, bias)]
    normed, inner = [some(4) for _ in range(4)], (some(8, 4), some(8), some(4, 8), some(4))
    given = (x, 4, 2, wide, some(12), square, some(4), False, False, 0.1, *normed, *inner)
    yield "_transformer_encoder_layer_fwd", given, [(4, bias)]
    v, g = some(4, 3), some(4, 1)
    yield "_weight_norm_interface", (v, g, 0), [(1, g[:1]), (1, g[0, 0]), (0, some(12)), (2, 7)]
    yield "_weight_norm_interface_backward", (v, v, g, g, 0), [(0, v[:1]), (2, g[:1]), (3, g[:0])]
    lists, counts = [[some(3, 4), some(5)] for _ in range(4)], [torch.tensor(1.0)] * 2
    given = (*lists, [], counts, 0.1, 0.9, 0.9, 0.1, 0.1, False, False)
    short, turned, spread = (
        [some(3, 4), some(4)],
        [some(4, 3).t(), some(5)],
        [some(1, 1).expand(3, 4), some(5)],
    )
    wrong = [(0, short), (0, spread), (1, short), (1, lists[1][:1]), (2, turned), (3, short), (5, counts[:1])]
    for name in ("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_"):
        yield name, given, wrong


CASES = list(cases())


@pytest.mark.parametrize(("name", "given", "wrong"), CASES, ids=[name for name, *_ in CASES])
def test_fitting_shapes_are_computed_and_others_raise(
    name: str, given: Given, wrong: list[tuple[int, Any]]
) -> None:
    plain, call, rest = resolved_with(name, given)
    once, again = (
        tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, rest) for _ in "ab"
    )
    torch.manual_seed(0)
    found = call(*once[0], **once[1])
    torch.manual_seed(0)
    torch.testing.assert_close(found, plain(*again[0], **again[1]), rtol=0, atol=0, equal_nan=True)
    written, right = (
        [one for one in tree_leaves(each) if isinstance(one, torch.Tensor)] for each in (once, again)
    )
    torch.testing.assert_close(written, right, rtol=0, atol=0, equal_nan=True)
    for at, other in wrong:
        _, call, (positional, named) = resolved_with(name, with_(given, at, other))
        with pytest.raises(IndexError, match=r"match|elements|dimensions|missing"):
            call(*positional, **named)


def resolved_with(name: str, given: Given) -> tuple[Any, Any, tuple[Given, dict[str, Any]]]:
    """The operator, as torch has it and as it is replayed, and the arguments by place and name."""
    base, _, overload = name.partition(".")
    plain = getattr(getattr(torch.ops.aten, base), overload or "default")
    found = resolve_operator(str(plain._schema))
    assert not isinstance(found, str), found
    places = [one for one in found.order if not one.keyword]
    names = [one.name for one in found.order[len(places) :]]
    return plain, found.call, (given[: len(places)], dict(zip(names, given[len(places) :], strict=False)))


def test_every_check_has_a_test_case() -> None:
    tried = {f"aten::{name.partition('.')[0]}" for name, *_ in CASES}
    assert tried == SIZE_CHECKS.keys()


def test_letters_dots_and_numbers() -> None:
    look = require_matching_sizes("a ... i, b ... i 2, c ...c i")
    look({"a": some(3, 4), "b": some(3, 4, 2), "c": some(7, 7, 4), "d": some(1)})
    look({"a": some(4), "b": None})
    for wrong in (some(3, 4), some(3, 4, 3), some(2, 4, 2), some(4, 2), some(3, 5, 2)):
        with pytest.raises(IndexError, match=r"^b of sizes .* does not match the other arguments$"):
            look({"a": some(3, 4), "b": wrong})
    with pytest.raises(IndexError, match="a has 0 dimensions"):
        look({"a": some()})


@pytest.mark.parametrize(
    "name", ["_pdist_backward", "linalg_ldl_solve", "slow_conv3d", "_masked_softmax", "_spdiags"]
)
def test_kernels_without_checks_are_refused_in_untrusted_traces(name: str) -> None:
    assert (
        resolve_operator(str(getattr(torch.ops.aten, name).default._schema))
        == "not run for traces of unknown origin"
    )
