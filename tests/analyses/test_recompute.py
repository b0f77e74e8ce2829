"""What ran again in backward: by hand, in runs of torch with and without checkpoints, and on real traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.analyses.recompute import _pack_calls, _pack_key
from etloom.core.errors import AnalysisError


def op(
    name: str, ts: int, dur: int, seq: int | None = None, forward: int = 0, tid: int = 1
) -> dict[str, Any]:
    args = {} if seq is None else {"Sequence number": seq, "Fwd thread id": forward}
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": tid,
        "args": args,
    }


def kernel(ts: int, dur: int, correlation: int) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


def launch(ts: int, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": ts,
        "dur": 1,
        "pid": 1,
        "tid": 1,
        "args": args,
    }


FORWARD = [op("aten::linear", 0, 10, 1), op("aten::gelu", 10, 10, 2)]
AGAIN = [
    op("GeluBackward0", 100, 50, 2, 1),
    op("aten::linear", 105, 10, 3),
    op("aten::addmm", 107, 6, 3),
    launch(108, 1),
    op("aten::gelu", 120, 5, 4),
    op("aten::gelu_backward", 130, 10),
    launch(131, 2),
    kernel(140, 30, 1),
    kernel(170, 10, 2),
    op("AddmmBackward0", 150, 50, 1, 1),
    op("aten::mm", 160, 10),
]


def asked(tmp_path: Path, events: list[dict[str, Any]], **options: Any) -> pl.DataFrame:
    path = tmp_path / "kineto_trace_0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return etloom.analyze(etloom.open(path, use_cache=False)[0], "recompute", **options)


def test_recomputed_operators_and_their_share_of_the_backward_pass(tmp_path: Path) -> None:
    # Backward takes 100 us on the host and 40 us on the device.
    assert asked(tmp_path, FORWARD + AGAIN).rows() == [
        ("aten::linear", "GeluBackward0", "repeated", 1, 10_000, 10.0, 30_000, 75.0),
        ("aten::gelu", "GeluBackward0", "repeated", 1, 5_000, 5.0, 0, 0.0),
    ]
    host = [event for event in AGAIN if event["cat"] == "cpu_op"]
    assert asked(tmp_path, FORWARD + host)["device_ns"].to_list() == [None, None]


def test_a_backward_pass_that_is_recorded_repeats_nothing(tmp_path: Path) -> None:
    events = [
        *FORWARD,
        op("GeluBackward0", 100, 50, 2, 1),
        op("aten::gelu_backward", 110, 10, 3),
        op("aten::zeros", 125, 5),  # numberless, though the rest is recorded
        op("aten::mul", 130, 5, 4),
    ]
    assert asked(tmp_path, events).is_empty()
    # A product's derivative is a product; recorded, it is no second run of the first.
    twice = [op("aten::mul", 10, 10, 2), op("MulBackward0", 100, 9, 2, 1), op("aten::mul", 101, 5, 5)]
    assert asked(tmp_path, twice).is_empty()


def test_checkpoints_are_recognized_by_their_names(tmp_path: Path) -> None:
    frame = op("torch/utils/checkpoint.py(1165): unpack_hook", 104, 30) | {"cat": "python_function"}
    by_frame = [*FORWARD, op("XBackward", 100, 50, 2, 1), frame, op("aten::mul", 105, 5, 5)]
    by_name = [*FORWARD, op("CheckpointFunctionBackward", 100, 50, 2, 1), op("aten::mul", 105, 5, 5)]
    for events in (by_frame, by_name):
        assert asked(tmp_path, events).select("operator", "how").rows() == [("aten::mul", "checkpoint")]


def test_a_trace_without_backward_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="no backward operators"):
        asked(tmp_path, FORWARD)


SCRIPT_MODES = ("reentrant", "saved", "by hand", "none", "twice")


def recorded(mode: str, path: Path, stack: bool) -> None:
    """A training step on the CPU whose block (linear, relu, linear, gelu) is run again as the mode says."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            context.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            x = context.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = block(x)
            torch.autograd.backward(y, gradient)
            return x.grad

    torch.manual_seed(0)
    parts = (torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.GELU())
    block, head = torch.nn.Sequential(*parts), torch.nn.Linear(8, 4)
    x = torch.randn(4, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], with_stack=stack) as profiler:
        if mode in ("reentrant", "saved"):
            y = checkpoint(block, x, use_reentrant=mode == "reentrant")
        else:
            y = ByHand.apply(x) if mode == "by hand" else block(x)
        loss = head(y).sum()
        if mode == "twice":
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (gradient * gradient).sum().backward()
        else:
            loss.backward()
    profiler.export_chrome_trace(str(path))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("mode", SCRIPT_MODES)
def test_runs_of_torch(mode: str, stack: bool, tmp_path: Path) -> None:
    recorded(mode, tmp_path / "kineto_trace_0.json", stack)
    found = etloom.analyze(etloom.open(tmp_path, use_cache=False)[0], "recompute")
    counts = dict(found.select("operator", "count").rows())
    if mode in ("none", "twice"):
        assert not counts
        return
    assert counts == {"aten::linear": 2, "aten::relu": 1, "aten::gelu": 1}
    inside = {
        "reentrant": "CheckpointFunctionBackward",
        "saved": "GeluBackward0",
        "by hand": "ByHandBackward",
    }
    assert found["backward"].unique().to_list() == [inside[mode]]
    by_torch = mode == "reentrant" or (mode == "saved" and stack)
    assert found["how"].unique().to_list() == ["checkpoint" if by_torch else "repeated"]
    assert 0 < found["host_pct"].sum() < 100


@given(st.lists(st.integers(-1, 30), max_size=30), st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)))
def test_callers_equal_those_of_climbing_the_tree(
    above: list[int], rows: set[int], callers: set[int]
) -> None:
    parent = np.array([min(one, at - 1) for at, one in enumerate(above)], np.int64)
    names = np.arange(len(above), dtype=np.int64) % 3
    rows_in, callers_in = (
        np.array(sorted(one for one in some if one < len(above)), np.int64) for some in (rows, callers)
    )
    expected = set()
    for row in rows_in:
        caller = parent[row]
        while caller >= 0:
            if caller in callers_in:
                expected.add(int(_pack_key(caller, names[row])))
            caller = parent[caller]
    assert set(_pack_calls(parent, rows_in, callers_in, names).tolist()) == expected


@pytest.mark.parametrize(
    "file",
    [
        "nccl_ddp",
        "dlrm",
        "linear",
        "hta_multirank",
        "cpu/ddp_2",
        "cpu/pp_4",
        "hta_misc/negative_queue_a100.json.gz",
    ],
)
def test_real_runs_without_checkpoints_repeat_nothing(data: Path, file: str) -> None:
    assert etloom.analyze(etloom.open(data / file), "recompute").is_empty()
