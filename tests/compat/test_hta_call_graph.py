"""HTA's CallGraph and Timeline over etloom: the stack columns, questions about stacks, charts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pandas", reason="pandas is not installed")
import pandas as pd

from etloom.compat.hta import Trace
from etloom.compat.hta.call_graph import HOST, CallGraph
from etloom.compat.hta.timeline import (
    Filter,
    GPUKernelFilter,
    PlotFormat,
    Timeline,
    TimelinePlotSetting,
    align_module_with_kernels,
    plot_timeline_gpu_kernels_from_trace,
)
from etloom.core.errors import EtloomError


@pytest.fixture(scope="module")
def trace(data: Path) -> Trace:
    trace = Trace(trace_dir=data / "hta_multirank")
    trace.parse_traces(max_ranks=1)
    return trace


@pytest.fixture(scope="module")
def graph(trace: Trace) -> CallGraph:
    return CallGraph(trace)


def test_stack_columns_sum_what_an_event_and_all_below_it_launched(graph: CallGraph) -> None:
    frame = graph.trace_data.get_trace(0)
    device = frame["stream"] != HOST
    roots = frame[frame["parent"] == HOST]
    assert roots["num_kernels"].sum() == device.sum()
    assert roots["kernel_dur_sum"].sum() == pytest.approx(frame.loc[device, "dur"].sum())
    launched = frame.loc[device & (frame["parent"] != HOST)]
    assert len(launched) > 0
    calls = frame.loc[launched["parent"]]
    assert (calls["correlation"].to_numpy() == launched["correlation"].to_numpy()).all()
    inner = frame[~device & (frame["parent"] != HOST)]
    around = frame.loc[inner["parent"]]
    same_thread = around["tid"].to_numpy() == inner["tid"].to_numpy()
    assert (inner["ts"].to_numpy() >= around["ts"].to_numpy() - 1e-3)[same_thread].all()
    assert (inner["depth"].to_numpy() == around["depth"].to_numpy() + 1).all()


def test_stacks_of_events_and_of_their_kernels(graph: CallGraph) -> None:
    frame = graph.trace_data.get_trace(0)
    operator = frame[(frame["num_kernels"] > 1) & (frame["stream"] == HOST) & (frame["depth"] > 1)].iloc[0]
    stack = graph.get_stack_of_node(int(operator["index"]), skip_ancestors=True)
    assert (stack["stream"] != HOST).sum() == operator["num_kernels"]
    with_ancestors = graph.get_stack_of_node(int(operator["index"]))
    assert len(with_ancestors) == len(stack) + operator["depth"]
    kernel = stack[stack["stream"] != HOST].iloc[0]
    assert graph.get_csg_of_node(int(kernel["index"])).identity.tid == operator["tid"]
    assert len(graph.get_gpu_kernels()) == (frame["stream"] != HOST).sum()
    assert "main" in graph.mapping["label"].to_numpy()
    assert sum(len(one.df) for one in graph.get_call_stacks(rank=0)) == (frame["stream"] == HOST).sum()
    with pytest.raises(ValueError, match="no event has the index"):
        graph.get_node_attributes(10**9)
    with pytest.raises(ValueError, match="none of the ranks"):
        CallGraph(graph.trace_data, ranks=[7])


def test_a_timeline_has_a_line_per_stream_and_is_written(
    trace: Trace, graph: CallGraph, tmp_path: Path
) -> None:
    pytest.importorskip("altair", reason="Altair is not installed")

    class Own(Filter):
        """As the notebook defines one, without `mask`."""

        def __call__(self, df: pd.DataFrame, symbol_table: object = None) -> pd.DataFrame:
            return GPUKernelFilter()(df)

    frame = trace.get_trace(0)
    timeline = Timeline(frame, trace.symbol_table, filter_func=Own())
    events = timeline.timeline_events
    assert events["task"].nunique() == frame.loc[frame["stream"] != HOST, "stream"].nunique()
    assert events["calibrated_start_global"].min() == 0
    assert (events["calibrated_end_global"] - events["calibrated_start_global"]).min() >= 1000
    assert timeline.plot("kernels", str(tmp_path / "a.html")) is None
    assert "<html" in (tmp_path / "a.html").read_text()
    setting = TimelinePlotSetting(plot_format=PlotFormat.HTML)
    assert "<html" in str(Timeline(events.head(5), None, setting=setting).plot("kernels"))
    plot_timeline_gpu_kernels_from_trace("kernels", trace, streams=[7])


def test_modules_are_aligned_with_their_kernels(trace: Trace, graph: CallGraph) -> None:
    frame = trace.get_trace(0)
    aligned = align_module_with_kernels(frame, ["ProfilerStep"], trace.symbol_table)
    moved = aligned[aligned["stream"] == 0]
    moved = moved[moved["num_kernels"] > 1]
    assert len(moved) and np.allclose(moved["ts"], moved["first_kernel_start"])
    assert len(aligned) == (frame["stream"] != HOST).sum() + len(moved)
    with pytest.raises(ValueError, match="construct a CallGraph first"):
        align_module_with_kernels(frame.drop(columns="num_kernels"), ["a"])
    with pytest.raises(EtloomError, match="no column dur"):
        Timeline(frame.drop(columns="dur"), trace.symbol_table)
