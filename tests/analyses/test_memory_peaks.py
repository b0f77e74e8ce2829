"""Memory over time: peaks by step, and who held them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.comparison.measures import measure_peak_memory
from etloom.core.errors import AnalysisError
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.timeline.memory.program import find_line, find_module
from support import small_traces


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """The run of small_traces.py with 100 B from before, 300 B by mm, 50 B by linear; mm frees its own."""
    full = etloom.open(small_traces.write_run(tmp_path / "run", (0,)), use_cache=False)[0]
    rows = [(260, 1, 300, 400), (510, 2, 50, 450), (520, 1, -300, 150), (590, 3, 200, 350), (700, 4, 8, 358)]
    start = small_traces.BASE_NS
    memory = pl.DataFrame(
        [
            (at, start + us * small_traces.US, 10, 11, addr, size, total, 1000, 1, 0)
            for at, (us, addr, size, total) in enumerate(rows)
        ],
        schema=dict(list(TABLES["memory"].schema.items())[:10]),
        orient="row",
    )
    return full.replace(memory=memory)


def test_the_peak_and_its_owners(trace: Trace) -> None:
    table = etloom.analyze(trace, "memory-timeline")
    assert table["step"].to_list() == [3, None]
    row = table.row(0, named=True)
    assert (row["peak_bytes"], row["peak_at_ns"]) == (450, small_traces.BASE_NS + 510 * small_traces.US)
    assert (row["operator"], row["operator_bytes"], row["unknown_bytes"]) == ("aten::mm", 300, 100)
    assert (row["allocations"], row["peak_reserved_bytes"]) == (4, 1000)


def test_freed_memory_no_longer_counts(trace: Trace) -> None:
    later = trace.replace(memory=trace.memory.with_columns(total_allocated=pl.col("id").cast(pl.Int64) * 100))
    row = etloom.analyze(later, "memory-timeline", step=3).row(0, named=True)
    assert (row["operator"], row["operator_bytes"]) == ("aten::linear", 250)


@pytest.mark.parametrize(("until", "allocations"), [(3, 1), (1, 0)])
def test_memory_allocated_before_a_step_is_in_its_peak(trace: Trace, until: int, allocations: int) -> None:
    times = pl.Series("ts", [small_traces.BASE_NS + us * small_traces.US for us in (50, 260, 510)])
    memory = trace.memory[:3].with_columns(
        times,
        addr=pl.Series([1, 1, 2], dtype=pl.UInt64),
        bytes=pl.Series([600, -600, 50]),
        total_allocated=pl.Series([600, 0, 50]),
    )
    table = etloom.analyze(trace.replace(memory=memory[:until]), "memory-timeline")
    step, whole = table.rows(named=True)
    assert (step["peak_bytes"], step["peak_at_ns"]) == (600, small_traces.BASE_NS + 100 * small_traces.US)
    assert (step["allocations"], step["peak_reserved_bytes"], step["unknown_bytes"]) == (allocations, 1000, 0)
    assert (whole["peak_bytes"], whole["peak_at_ns"]) == (600, small_traces.BASE_NS + 50 * small_traces.US)


def test_memory_allocated_before_the_recording_is_in_the_peak(trace: Trace) -> None:
    freed = trace.memory[2:3].with_columns(total_allocated=pl.lit(150, pl.Int64))  # of 450 B, 300
    whole = etloom.analyze(trace.replace(memory=freed), "memory-timeline").rows(named=True)[-1]
    assert (whole["peak_bytes"], whole["unknown_bytes"], whole["operator"]) == (450, 450, None)


@pytest.mark.slow
def test_memory_of_two_processes_on_a_device_is_summed(trace: Trace) -> None:
    # The other process has 1,000 B before its first event, and the same addresses.
    other = trace.memory[:2].with_columns(
        ts=pl.col("ts") + 15 * small_traces.US,  # 275 and 525 us
        pid=pl.lit(20, pl.Int64),
        bytes=pl.Series([24, -24]),
        addr=pl.Series([1, 1], dtype=pl.UInt64),
        total_allocated=pl.Series([1024, 1000]),
        total_reserved=pl.lit(4000, pl.Int64),
    )
    memory = pl.concat([trace.memory, other]).with_columns(id=pl.int_range(7, dtype=pl.UInt32))
    both = trace.replace(memory=memory)
    whole = etloom.analyze(both, "memory-timeline").rows(named=True)[-1]
    assert (whole["peak_bytes"], whole["peak_at_ns"]) == (1474, small_traces.BASE_NS + 510 * small_traces.US)
    assert (whole["operator"], whole["operator_bytes"], whole["unknown_bytes"]) == ("aten::mm", 300, 1100)
    assert (whole["allocations"], whole["peak_reserved_bytes"]) == (5, 5000)
    assert measure_peak_memory(both, False)["value"].to_list() == [1474]


def test_a_trace_without_allocations_is_refused_with_a_reason(trace: Trace) -> None:
    with pytest.raises(AnalysisError, match="profile_memory"):
        etloom.analyze(trace.replace(memory=TABLES["memory"].empty()), "memory-timeline")


@pytest.mark.slow
def test_peaks_of_a_real_run(data: Path) -> None:
    job = etloom.open(data / "tracelens" / "h100_qwen.json.gz")
    table = etloom.analyze(job, "memory-timeline").filter(pl.col("device_type") == 1)
    assert table["peak_bytes"].to_list() == [2_088_508_416] * 2


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (
            ["torch::unwind::unwind() (??:0)", "at::_ops::bmm::call(at::Tensor const&) (??:0)"],
            "at::_ops::bmm",
        ),
        (
            [
                "torch::unwind::unwind() (??:0)",
                "at::_ops::bmm::redispatch(c10::DispatchKeySet) (??:0)",
                "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&) (??:0)",
            ],
            "BmmBackward0",
        ),
        (
            ["torch::unwind::unwind() (??:0)", "step (/x/torch/optim/adam.py:7)", "train (a.py:3)"],
            "train (a.py:3)",
        ),
        (["torch::unwind::unwind() (??:0)", "malloc (:0)"], None),
        (["kernel_a", "kernel_b"], "kernel_a"),
    ],
)
def test_frames_that_gather_a_stack_are_not_where_memory_is_used(stack: list[str], line: str | None) -> None:
    assert find_line(stack) == line


@pytest.mark.parametrize(
    ("frames", "module"),
    [
        (["dropout (/torch/nn/func.py:7)", "forward (/m/block.py:3)", "a (/m/a.py:1)"], "forward (/m/block.py)"),
        (["zeros (/x/torch/_refs.py:7)", "step (/x/torch/optim/adam.py:8)", "train (/m/a.py:3)"], "train (/m/a.py)"),
        (["linear (/torch/nn/func.py:7)", "forward (/torch/nn/linear.py:9)"], "forward (/torch/nn/linear.py)"),
        (["forward (/m/a.py:3)", "module blocks.3 (Block:0)"], "blocks.3 (Block)"),
        (["at::_ops::bmm::call(at::Tensor const&) (??:0)"], "at::_ops::bmm"),
        ([], None),
    ],
)  # fmt: skip
def test_the_module_of_a_request_is_a_forward_else_a_function(frames: list[str], module: str | None) -> None:
    assert find_module(frames) == module


@pytest.mark.slow
def test_a_snapshot_with_frames_of_c_plus_plus(data: Path) -> None:
    trace = etloom.open(data / "cases/turn3/mem_cpp.pickle")[0]
    row = etloom.analyze(trace, "memory-timeline").row(0, named=True)
    assert (row["operator"], row["operator_bytes"], row["peak_bytes"]) == (
        "BmmBackward0",
        599_999_488,
        999_999_488,
    )
