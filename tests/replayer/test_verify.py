"""What --verify expects of each call, by hand, and that it finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from etloom.core.errors import EtloomError
from etloom.replayer.plan import Call

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

GROUP = (0, 1, 2)
"""Which put in 1, 2 and 3; of bool 0, 1 and 0."""


def ready(collective: str, ins: list[int], outs: list[int], dtype: Any = torch.float32, **more: Any) -> Any:
    from etloom.replayer.comms.distributed_calls import PreparedCall

    call = Call(0, collective, more.pop("group", GROUP), "float", tuple(ins), tuple(outs), **more)
    tensors = [[torch.zeros(size, dtype=dtype) for size in sizes] for sizes in (ins, outs)]
    return PreparedCall(call, None, *tensors)


@pytest.mark.parametrize(
    ("rank", "collective", "ins", "outs", "more", "right"),
    [
        (0, "all_reduce", [4], [], {}, [[6, 6, 6, 6]]),
        (1, "all_reduce", [1, 2], [], {"reduce_op": "max"}, [[3], [3, 3]]),
        (1, "all_reduce", [1], [], {"reduce_op": "product"}, [[6]]),
        (1, "all_reduce", [1], [], {"reduce_op": "bxor"}, [[0]]),
        (0, "reduce", [2], [], {"root": 0}, [[6, 6]]),
        (1, "reduce", [2], [], {"root": 0}, []),
        (0, "broadcast", [2], [], {"root": 2}, [[3, 3]]),
        (0, "all_gather", [2], [6], {}, [[1, 1, 2, 2, 3, 3]]),
        (0, "all_gather", [2], [2, 2, 2], {}, [[1, 1], [2, 2], [3, 3]]),
        (0, "reduce_scatter", [6], [2], {}, [[6, 6]]),
        (2, "all_to_all", [3], [3], {}, [[1, 2, 3]]),
        (2, "all_to_all", [3], [4], {"in_split": (1, 1, 1), "out_split": (1, 0, 3)}, [[1], [3, 3, 3]]),
        (2, "all_to_all", [1, 1, 1], [1, 1, 1], {}, [[1], [2], [3]]),
        (1, "gather", [1], [1, 1, 1], {"root": 1}, [[1], [2], [3]]),
        (1, "scatter", [1, 1, 1], [1], {"root": 1}, [[2]]),
        (0, "recv", [], [2], {"peer": 2, "group": (0, 2)}, [[3, 3]]),
        (0, "send", [2], [], {"peer": 2, "group": (0, 2)}, []),
        (0, "barrier", [], [], {}, []),
    ],
)
def test_expected_results_of_calls(
    rank: int,
    collective: str,
    ins: list[int],
    outs: list[int],
    more: dict[str, Any],
    right: list[list[float]],
) -> None:
    from etloom.replayer.comms.distributed_calls import expected_results

    found = expected_results(ready(collective, ins, outs, **more), rank, 3)
    assert [values.tolist() for _, values in found] == right
    assert all(tensor.shape == values.shape for tensor, values in found)


def test_expected_results_distinguish_ranks() -> None:
    from etloom.replayer.comms.distributed_calls import expected_results

    gathered = expected_results(ready("all_gather", [1], [3], torch.bool), 0, 3)
    assert [values.tolist() for _, values in gathered] == [[False, True, False]]
    ((_, reduced),) = expected_results(ready("all_reduce", [1], [], torch.bool), 0, 3)
    assert reduced.tolist() == [True]


@pytest.mark.parametrize("world", [3, 8, 16, 160, 2048, 20_000])
@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float32"]
)
@pytest.mark.slow
def test_no_type_rounds_the_sum_over_a_large_world(name: str, world: int) -> None:
    from etloom.replayer.comms.distributed_calls import verification_value

    dtype = getattr(torch, name)
    total, plain = torch.zeros((), dtype=dtype), 0
    for rank in range(world):
        own = verification_value(rank, dtype, world)
        total = (total.to(torch.float64) + own).to(dtype)
        plain += own
        assert total.item() == plain
    assert plain >= min(world, 2)


def test_a_mean_may_be_rounded_like_each_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL does, which alone has it."""
    monkeypatch.setattr("torch.distributed.get_backend", lambda group=None: "nccl")
    from etloom.replayer.comms.runner import Runner
    from etloom.replayer.launch_environment import Process

    one = ready("all_reduce", [2], [], torch.bfloat16, reduce_op="avg", group=(0, 1, 2, 3, 4))
    runner = object.__new__(Runner)
    runner.process, runner.calls, runner.position = Process(0, 5, 0), [one.call], 0
    one.inputs[0].fill_(sum(torch.tensor(each / 5, dtype=torch.bfloat16).item() for each in (1, 2, 3, 1, 2)))
    runner._check_result(one)
    one.inputs[0].fill_(1.5)
    with pytest.raises(EtloomError, match="returned 2 wrong elements of 2"):
        runner._check_result(one)


def test_a_wrong_result_ends_the_replay_with_its_call() -> None:
    from etloom.replayer.comms.runner import Runner
    from etloom.replayer.launch_environment import Process

    one = ready("all_reduce", [4], [])
    runner = object.__new__(Runner)
    runner.process, runner.calls, runner.position = Process(0, 3, 0), [one.call], 0
    one.inputs[0].fill_(6)
    runner._check_result(one)
    one.inputs[0][1:3] = 5
    said = r"call 0 \(all_reduce, 16 B, with ranks 0-2\) returned 2 wrong elements of 4"
    with pytest.raises(EtloomError, match=said):
        runner._check_result(one)
