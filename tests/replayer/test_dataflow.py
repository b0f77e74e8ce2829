"""Computation replay against a small interpreter: random programs with views, aliases and changes in place give the
values that the program itself gives on the same inputs, pass after pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import etloom
from support.examples import examples

torch = pytest.importorskip("torch")
from torch.profiler import ExecutionTraceObserver  # noqa: E402

from etloom.replayer.compute.executor import Executor  # noqa: E402
from etloom.replayer.compute.memory_limits import estimate_memory  # noqa: E402
from etloom.replayer.compute.program import build_program  # noqa: E402

pytestmark = pytest.mark.torch
INPUTS, BASES, KEPT = 5, 3, 5
"""Tensors to begin with, of which the last two are views of the first two; and how many results are still around."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    # views
    "t": lambda a, b: a.t(),
    "reshape": lambda a, b: a.reshape(-1),
    "slice": lambda a, b: torch.ops.aten.slice.Tensor(a, 0, 1, None, 2),
    "select": lambda a, b: a.select(0, -1),
    "expand": lambda a, b: a.expand(2, *a.shape),
    "as_strided": lambda a, b: a.as_strided((2, 2), (1, 1), 1),
    "chunk": lambda a, b: a.chunk(2),
    "detach": lambda a, b: a.detach(),
    # in place
    "add_": lambda a, b: a.add_(b),
    "copy_": lambda a, b: a.copy_(b),
    "cos_": lambda a, b: a.cos_(),
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(0.25),
    "add_each": lambda a, b: torch._foreach_add_([a, b], [b, a]) and None,
    "out": lambda a, b: torch.sub(a, b, out=a) if a.shape == b.shape else a.mul(b),
    # new
    "mul": lambda a, b: a.mul(b),
    "sum": lambda a, b: a.sum(-1),
    "cat": lambda a, b: torch.cat([a, b]),
    "clone": lambda a, b: a.clone(),
    "zeros": lambda a, b: torch.zeros_like(a),
    "max": lambda a, b: a.max(0),
    "to": lambda a, b: a.to(torch.float32),
    "double": lambda a, b: a.double(),
}
Program = Sequence[tuple[str, int, int]]
PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), *[st.integers(0, 30)] * 2), max_size=25)


def interpret(written: Program, inputs: Sequence[Any]) -> tuple[list[list[Any]], Program]:
    """What each operation gives (copied), and the operations that torch did. Arguments count from what is newest."""
    pool, given, done = list(inputs), [], []
    for name, first, second in written:
        a, b = pool[first % len(pool)], pool[second % len(pool)]
        try:
            results = OPERATIONS[name](a, b)
        except (RuntimeError, IndexError):
            continue
        tensors = [results] if isinstance(results, torch.Tensor) else list(results or ())
        given.append([one.clone() for one in tensors])
        done.append((name, first % len(pool), second % len(pool)))
        pool = after(pool, tensors)
    return given, done


def after(pool: list[Any], results: list[Any]) -> list[Any]:
    """The tensors to choose from next. Older results die, so that torch uses their memory again."""
    newest = [*pool[INPUTS:], *(one for one in results if one.is_floating_point())]
    return [*pool[:INPUTS], *newest[-KEPT:]]


def made_inputs() -> list[Any]:
    return [torch.rand(4, 6, dtype=torch.float64), torch.rand(4, 6), torch.rand(6)]


def with_views(bases: Sequence[Any]) -> list[Any]:
    return [*bases, bases[0].t(), bases[1][1:]]


def test_the_interpreter_applies_changes_through_views() -> None:
    """By hand: a change through a view of a view is seen in the tensor."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    given, done = interpret([("t", 0, 0), ("select", 1, 0), ("zero_", 2, 0), ("sum", 0, 0)], [x])
    assert [[one.tolist() for one in results] for results in given] == [
        [[[1.0, 3.0], [2.0, 4.0]]], [[2.0, 4.0]], [[0.0, 0.0]], [[1.0, 3.0]],
    ]  # fmt: skip
    assert len(done) == 4


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS)
def test_random_programs_replay_with_their_values(written: Program) -> None:
    with torch.no_grad():
        _, written = interpret(written, with_views(made_inputs()))
        if not written:
            return
        inputs = with_views(made_inputs())
        with tempfile.TemporaryDirectory() as folder:
            observer = ExecutionTraceObserver().register_callback(f"{folder}/torch_et_0.json")
            observer.start()
            pool_of(written, inputs)
            observer.unregister_callback()
            trace = etloom.read(Path(folder, "torch_et_0.json"))
        assert isinstance(trace, etloom.Trace)
        machine = Executor(build_program(etloom.link(trace)), torch.device("cpu"))
        made, given = spied(machine)
        machine.trial_run()
        assert [one.result for one in machine.outcomes] == ["replayed"] * len(machine.outcomes)
        used = used_inputs(written)
        own = made_inputs()
        for at, held in zip(used, made.values(), strict=True):
            own[at] = held.reshape(own[at].shape).clone()
        for _ in range(3):
            right, _ = interpret(written, with_views(own))
            assert_same([one for one in given if one], [one for one in right if one])
            given.clear()
            machine.run()
    assert_memory_is_known_before(machine)


def assert_memory_is_known_before(machine: Executor) -> None:
    """The need of a program is what its machine holds at most, also where a limit leaves steps out."""
    made = machine.program
    assert (
        estimate_memory(made).bytes == machine.peak_bytes
        and not estimate_memory(made, machine.peak_bytes).oversized
    )
    for limit in (machine.peak_bytes - 1, machine.peak_bytes // 2):
        partly = estimate_memory(made, limit)
        less = Executor(made, torch.device("meta"))
        less.trial_run(skip=partly.oversized)
        assert partly.oversized and partly.bytes == less.peak_bytes <= limit


def pool_of(written: Program, inputs: Sequence[Any]) -> None:
    """The operations and nothing else, which the observer would record."""
    pool = list(inputs)
    for name, first, second in written:
        results = OPERATIONS[name](pool[first], pool[second])
        tensors = [results] if isinstance(results, torch.Tensor) else list(results or ())
        pool = after(pool, tensors)


BOTH = ("add_", "copy_", "add_each", "out", "mul", "cat")


def used_inputs(written: Program) -> list[int]:
    """The inputs, or those that they are views of, in the order in which operations first take them."""
    found: list[int] = []
    for name, first, second in written:
        for at in (first, second) if name in BOTH else (first,):
            base = at - BASES if at >= BASES else at
            if at < INPUTS and base not in found:
                found.append(base)
    return found


def spied(machine: Executor) -> tuple[dict[int, Any], list[list[Any]]]:
    """Storage -> what was made up for it; and what each step gave, of the rehearsal and of each later pass."""
    made: dict[int, Any] = {}
    given: list[list[Any]] = []
    make, take, run = machine._allocate, machine._store_results, machine.run

    def making(view: Any) -> Any:
        whole = make(view)
        made[view.storage] = whole.clone()
        return whole

    def copied(results: Any) -> None:
        tensors = [results] if isinstance(results, torch.Tensor) else list(results or ())
        given.append([one.clone() for one in tensors])

    def taking(step: Any, ready: Any, results: Any) -> Any:
        copied(results)
        return take(step, ready, results)

    def running() -> None:
        for ready in machine._prepared:
            if not hasattr(ready.call, "spied"):
                ready.call = following(ready.call)
        run()

    def following(call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*arguments: Any, **named: Any) -> Any:
            results = call(*arguments, **named)
            copied(results)
            return results

        followed.spied = True  # type: ignore[attr-defined]
        return followed

    machine._allocate, machine._store_results, machine.run = making, taking, running  # type: ignore[method-assign]
    return made, given


def assert_same(given: list[list[Any]], right: list[list[Any]]) -> None:
    assert len(given) == len(right)
    for ours, theirs in zip(given, right, strict=True):
        assert [(one.shape, one.dtype) for one in ours] == [(one.shape, one.dtype) for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
