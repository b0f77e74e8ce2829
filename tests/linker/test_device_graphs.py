"""Kernels of replayed device graphs: each has the operator of its captured call, or is counted as uncertain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom import linker
from etloom.core import names
from etloom.core.trace import Trace
from etloom.linker.device_graphs import attribution
from etloom.linker.device_graphs import replays as kernel_sequences
from etloom.linker.device_graphs.replays import align_sequences, count_cells

LAYER = ["norm", "gemm_a", "rope", "attend", "gemm_b", "norm", "gemm_c", "act", "gemm_d"]
KERNELS = ["embed", *(LAYER * 12), "norm", "gemm_e"]
CODES = np.unique(KERNELS, return_inverse=True)[1].astype(np.int64)


def event(cat: str, name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
    pid = 9 if cat in ("kernel", "gpu_memcpy") else 1
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": 1, "args": args}


def capture(
    kernels: Sequence[str], start: int = 0, name: str = "capture_8_FULL", width: int = 8, named: bool = True
) -> list[dict[str, Any]]:
    """The capture of a graph: an operator for each kernel, in a module."""
    rows, ts = [], start + 10
    for i, kernel in enumerate(kernels):
        args = {"kernel": kernel} if named else {}
        rows.append(
            event("cpu_op", f"aten::{kernel}", ts, 8, **{"Input Dims": [[width, i]], "Input type": ["float"]})
        )
        rows.append(
            event("cuda_runtime", "hipLaunchKernel", ts + 2, 3, correlation=start + 10_000 + i, **args)
        )
        ts += 10
    return [
        event("user_annotation", name, start, ts - start + 20),
        event("python_function", "nn.Module: Model_0", start + 1, ts - start + 10),
        event("cuda_runtime", "hipStreamBeginCapture", start + 5, 1, correlation=start + 1),
        event("cuda_runtime", "hipStreamEndCapture", ts, 1, correlation=start + 2),
        *rows,
    ]


def replay(
    kernels: Sequence[str], start: int, correlation: int, iteration: str | None = None
) -> list[dict[str, Any]]:
    rows = [event("cuda_runtime", "hipGraphLaunch", start + 1, 2, correlation=correlation)]
    if iteration is not None:
        rows.append(event("user_annotation", iteration, start, 5))
    ts = start + 5
    for kernel in kernels:
        rows.append(event("kernel", kernel, ts, 3, correlation=correlation, stream=7, device=0))
        ts += 4
    return rows


def read(folder: Path, *parts: list[dict[str, Any]]) -> Trace:
    path = folder / f"{next(_numbers)}.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [row for part in parts for row in part]}))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    return trace


_numbers = count()


def operators(trace: Trace) -> list[str | None]:
    """The name of the operator of each kernel, in order of time."""
    names = dict(trace.events.select("id", pl.col("name").cast(pl.String)).rows())
    return [names.get(operator) for operator in trace.launches.sort("device_event")["operator"]]


def counts(trace: Trace) -> dict[str, int]:
    """The rows of stats about graphs, without the prefix."""
    rows = (
        trace.stats.filter(pl.col("name").str.starts_with("link.graph_activity_"))
        .select("name", "count")
        .rows()
    )
    return {name.removeprefix("link.graph_activity_"): number for name, number in rows}


def test_replays_have_the_operators_of_the_capture_in_the_same_trace(tmp_path: Path) -> None:
    trace = linker.link(
        read(tmp_path, capture(KERNELS), replay(KERNELS, 5_000, 1), replay(KERNELS, 9_000, 2))
    )
    assert operators(trace) == [f"aten::{kernel}" for kernel in KERNELS] * 2
    assert counts(trace) == {"attributed": 2 * len(KERNELS)}
    table = etloom.analyze(trace, "top-ops", by="device", top=100).filter(pl.col("name") == "aten::gemm_a")
    assert table.select("count", "replayed", "device_ns").row(0) == (12, 24, 24 * 3_000)
    modules = etloom.analyze(trace, "module-view")
    assert modules.filter(pl.col("device_ns") > 0).select("path", "count", "kernels").row(0) == (
        "Model",
        3,  # the capture itself, and two replays
        2 * len(KERNELS),
    )


def test_a_captured_operator_has_no_launch_delay_and_each_replay_counts_as_a_call(tmp_path: Path) -> None:
    trace = linker.link(
        read(tmp_path, capture(KERNELS), replay(KERNELS, 5_000, 1), replay(KERNELS, 9_000, 2))
    )
    row = etloom.analyze(trace, "operator-delays", operator="aten::embed").row(0, named=True)
    assert (row["launch_delay_ns"], row["runtime_delay_ns"], row["count"]) == (None, 4_000, 2)
    assert row["kernel_count"] == 1


def test_a_capture_in_another_trace_is_used_and_survives_linking_again(tmp_path: Path) -> None:
    of_replay = read(tmp_path, replay(KERNELS, 5_000, 1))
    trace = linker.link(of_replay, captures=[read(tmp_path, capture(KERNELS))])
    assert operators(trace) == [f"aten::{kernel}" for kernel in KERNELS]
    again = linker.link(trace)
    assert again.launches.equals(trace.launches)
    assert again.events.height == trace.events.height
    part = etloom.select(trace, category="kernel", name="gemm_a")
    assert set(operators(part)) == {"aten::gemm_a"}


def test_an_eager_run_of_the_same_kernels_takes_the_place_of_a_capture(tmp_path: Path) -> None:
    eager: list[dict[str, Any]] = []
    for i, kernel in enumerate(KERNELS):
        eager.append(event("cpu_op", f"aten::{kernel}", 10 * i, 8, **{"Input Dims": [[8, i]]}))
        eager.append(event("cuda_runtime", "cudaLaunchKernel", 10 * i + 2, 3, correlation=100 + i))
        eager.append(event("kernel", kernel, 10 * i + 6, 3, correlation=100 + i, stream=7, device=0))
    trace = linker.link(read(tmp_path, eager, replay(KERNELS, 5_000, 1)))
    assert operators(trace) == [f"aten::{kernel}" for kernel in KERNELS] * 2
    assert counts(trace) == {"attributed": len(KERNELS)}


def test_a_capture_without_kernel_names_fits_by_number_and_operators(tmp_path: Path) -> None:
    calls = capture(KERNELS, named=False)
    trace = linker.link(read(tmp_path, calls, replay(KERNELS, 5_000, 1)))
    assert counts(trace) == {"attributed": len(KERNELS)}
    # Kernels that contradict the operators: another graph of as many kernels.
    rng = np.random.default_rng(1)
    trace = linker.link(
        read(
            tmp_path,
            capture(["gemm_a"] * 50, named=False, width=4),
            replay(list(rng.permutation(KERNELS))[:50], 5_000, 1),
        )
    )
    assert counts(trace) == {"attributed": 50} or "refused" in counts(trace)


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        ([f"other_{name}" for name in KERNELS], "refused"),
        ([f"{name}_16x64" if "gemm" in name else name for name in KERNELS], "refused"),
    ],
)
def test_a_capture_of_another_model_or_batch_size_is_refused(
    tmp_path: Path, kernels: list[str], reason: str
) -> None:
    trace = linker.link(read(tmp_path, capture(kernels), replay(KERNELS, 5_000, 1)))
    assert counts(trace) == {"attributed": 0, reason: len(KERNELS)} or counts(trace) == {reason: len(KERNELS)}
    assert trace.launches["captured"].null_count() == len(KERNELS)


def test_without_a_capture_the_kernels_are_counted(tmp_path: Path) -> None:
    trace = linker.link(read(tmp_path, replay(KERNELS, 5_000, 1)))
    assert counts(trace) == {"without_capture": len(KERNELS)}


@pytest.mark.slow
def test_the_batch_of_the_iteration_decides_between_captures_of_the_same_kernels(tmp_path: Path) -> None:
    captures = [
        capture(KERNELS, start, f"capture_{size}_FULL", size)
        for start, size in ((0, 4), (10_000, 8), (20_000, 16))
    ]
    iteration = "execute_context_0(0)_generation_{}({})"
    for batch, size in ((3, 4), (5, 8), (8, 8), (16, 16)):
        name = iteration.format(batch, batch)
        trace = linker.link(read(tmp_path, *captures, replay(KERNELS, 50_000, 1, name)))
        shapes = etloom.analyze(trace, "unique-args", operator="aten::embed").filter(pl.col("replayed") > 0)[
            "shapes"
        ]
        assert shapes.to_list() == [f"[[{size}, 0]]"]
    # A larger batch than any capture has, and no batch at all: not decided, and counted.
    for name in (iteration.format(17, 17), None):
        trace = linker.link(read(tmp_path, *captures, replay(KERNELS, 50_000, 1, name)))
        assert counts(trace) == {"undecided": len(KERNELS)}


@pytest.mark.parametrize("dropped", [[0], [5], [20, 21], [60, 90], list(range(10, 19))])
def test_attributed_and_other_time_add_up_to_all_kernels(tmp_path: Path, dropped: list[int]) -> None:
    kernels = [name for i, name in enumerate(KERNELS) if i not in dropped]
    trace = linker.link(read(tmp_path, capture(KERNELS), replay(kernels, 5_000, 1)))
    number = counts(trace)
    assert sum(number.values()) == len(kernels)
    assert trace.launches["captured"].count() == number.get("attributed", 0)
    for kernel, operator in zip(kernels, operators(trace), strict=True):
        assert operator in (None, f"aten::{kernel}")


@st.composite
def changed_sequences(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    """Positions of the capture in a replay of which 1 to 5 % were dropped, repeated or moved, and those touched."""
    size = len(KERNELS)
    changes = draw(st.integers(1, size // 20))
    positions, touched = list(range(size)), set()
    for _ in range(changes):
        at = draw(st.integers(0, len(positions) - 1))
        kind = draw(st.sampled_from(["drop", "repeat", "move", "swap"]))
        touched.add(positions[at])
        if kind == "drop":
            del positions[at]
        elif kind == "repeat":
            positions.insert(draw(st.integers(0, len(positions))), positions[at])
        elif kind == "move":
            positions.insert(draw(st.integers(0, len(positions) - 1)), positions.pop(at))
        else:
            other = draw(st.integers(0, len(positions) - 1))
            touched.add(positions[other])
            positions[at], positions[other] = positions[other], positions[at]
    return positions, touched


@given(changed_sequences())
def test_no_untouched_kernel_is_attributed_to_another_call(changed: tuple[list[int], set[int]]) -> None:
    """A moved kernel may take the place of one of the same name; nothing can tell these apart."""
    positions, touched = changed
    result = align_sequences(CODES[positions][None], CODES)[0]
    if result is None:
        return
    for position, at in zip(positions, result.tolist(), strict=True):
        assert at < 0 or at == position or (position in touched and CODES[at] == CODES[position])
    certain = result[result >= 0]
    assert (np.diff(certain) > 0).all()


def test_with_a_missing_layer_only_certain_links_remain() -> None:
    """Any of twelve equal layers may be the lost one, so only the ends are certain."""
    positions = [*range(1 + 3 * len(LAYER)), *range(1 + 4 * len(LAYER), len(KERNELS))]
    result = align_sequences(CODES[positions][None], CODES)[0]
    assert result is not None
    assert all(at in (-1, position) for at, position in zip(result.tolist(), positions, strict=True))
    assert (result < 0).sum() > 80


def make_different_replays(number: int) -> list[list[str]]:
    """Replays that differ from the capture and from each other: each lacks another pair of kernels."""
    return [
        [kernel for at, kernel in enumerate(KERNELS) if at not in (i % 100, 1 + (i * 7 + i // 100) % 100)]
        for i in range(number)
    ]


@pytest.mark.slow
def test_replays_that_all_differ_are_aligned(tmp_path: Path) -> None:
    replays = make_different_replays(230)
    assert len({tuple(kernels) for kernels in replays}) > 200
    parts = [replay(kernels, 5_000 + 1_000 * i, i + 1) for i, kernels in enumerate(replays)]
    trace = linker.link(read(tmp_path, capture(KERNELS), *parts))
    numbers = counts(trace)
    assert "refused" not in numbers
    assert sum(numbers.values()) == sum(map(len, replays))
    assert numbers["attributed"] > 0.6 * sum(map(len, replays))
    kernels = [kernel for part in replays for kernel in part]
    for kernel, operator in zip(kernels, operators(trace), strict=True):
        assert operator in (None, f"aten::{kernel}")


def test_replays_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = make_different_replays(3)
    sizes = [count_cells(len(kernels), len(KERNELS)) for kernels in replays]
    monkeypatch.setattr(attribution, "MAX_ALIGNED_CELLS", sizes[0] + sizes[1])
    parts = [replay(kernels, 5_000 + 1_000 * i, i + 1) for i, kernels in enumerate(replays)]
    assert counts(linker.link(read(tmp_path, capture(KERNELS), *parts)))["refused"] == len(replays[2])


def test_replays_are_aligned_together_as_individually(monkeypatch: pytest.MonkeyPatch) -> None:
    code_by_name = dict(zip(KERNELS, CODES.tolist(), strict=True))
    pairs = [kernels for kernels in make_different_replays(40) if len(kernels) == len(KERNELS) - 2]
    replays = np.array([[code_by_name[kernel] for kernel in kernels] for kernels in pairs])
    replays[3, 10:60] = replays[3, 10]  # another graph
    together = align_sequences(replays, CODES)
    alone = [align_sequences(row[None], CODES)[0] for row in replays]
    monkeypatch.setattr(kernel_sequences, "_BATCH_CELLS", 3 * count_cells(replays.shape[1], CODES.size))
    in_batches = align_sequences(replays, CODES)
    assert together[3] is None
    for results in zip(together, alone, in_batches, strict=True):
        assert len({None if result is None else tuple(result.tolist()) for result in results}) == 1


@pytest.mark.parametrize("name", [f"capture_{'9' * 5000}_FULL", "graph of a user"])
def test_a_capture_whose_name_states_no_size_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(names, "_user_files", {})
    file = tmp_path / "names.yaml"
    file.write_text("captures:\n- pattern: '^graph of'\n")
    try:
        names.add_names(file)
        trace = linker.link(read(tmp_path, capture(LAYER, name=name), replay(LAYER, 2000, 7)))
    finally:
        names.list_names.cache_clear()
    assert operators(trace) == [f"aten::{kernel}" for kernel in LAYER]
