"""HTA's import names over etloom: `install`, Trace, its filters, and the configuration of its parser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas", reason="pandas is not installed")
from etloom.compat.hta import ParserConfig, Trace, TraceAnalysis, timeline
from etloom.core.errors import EtloomError
from support import small_traces

NOTEBOOK = """
import etloom.compat.hta
etloom.compat.hta.install()
etloom.compat.hta.install()

import sys
import hta
from hta.trace_analysis import TraceAnalysis, TimeSeriesTypes
from hta.trace_diff import TraceDiff, LabeledTrace, DeviceType
from hta.common import execution_trace
from hta.common.execution_trace import load_execution_trace
from hta.common.trace import Trace, TraceSymbolTable
from hta.common.trace_call_graph import CallGraph
from hta.common.timeline import Timeline, PlotFormat, align_module_with_kernels
from hta.analyzers.timeline import plot_timeline_gpu_kernels
from hta.configs.config import logger
from hta.common.trace_filter import (CompositeFilter, CPUOperatorFilter, FirstIterationFilter, GPUKernelFilter,
    IterationFilter, IterationIndexFilter, NameFilter, TimeRangeFilter)
from hta.common.trace_symbol_table import TraceSymbolTable
from hta.configs.parser_config import ParserConfig
from hta.analyzers.critical_path_analysis import CPGraph, restore_cpgraph
from hta.analyzers.trace_counters import TimeSeriesTypes
from hta.utils.utils import shorten_name
import hta.common.trace as module
assert module.Trace is Trace and hta.common.execution_trace is execution_trace

cfg = ParserConfig.get_default_cfg()
cfg.add_args(ParserConfig.ARGS_INPUT_SHAPE)
ParserConfig.set_default_cfg(cfg)
t = Trace(trace_dir=sys.argv[1])
t.parse_traces(use_multiprocessing=False)
t.decode_symbol_ids()
df, symbol_table = t.get_trace(0), t.symbol_table
print(len(NameFilter("gem.*")(df, symbol_table)), len(GPUKernelFilter()(df)), len(CPUOperatorFilter()(df)))
print(len(TraceAnalysis(trace_dir=sys.argv[1]).get_temporal_breakdown(visualize=False)))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_traces.write_run(tmp_path / "run")


@pytest.mark.slow
def test_no_import_of_a_notebook_changes(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 2 5", "2"]


@pytest.mark.slow
def test_a_loaded_hta_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hta.py").write_text("")
    code = "import hta, etloom.compat.hta; etloom.compat.hta.install()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "hta is imported already" in done.stderr


@pytest.mark.slow
def test_traces_are_parsed_with_the_times_of_the_file_and_loaded_from_zero(data: Path) -> None:
    t = Trace(trace_dir=data / "hta_multirank")
    assert not t.is_parsed
    t.parse_traces(max_ranks=1)
    assert t.get_ranks() == [0]
    first = t.get_trace(0)["ts"].min()
    t.align_and_filter_trace(include_last_profiler_step=True)
    assert (t.get_trace(0)["ts"].min(), first > 1e12) == (0, True)
    t.load_traces()
    analyzer = TraceAnalysis(trace_dir=str(data / "hta_multirank"))
    assert t.get_trace(1).equals(analyzer.t.get_trace(1))


@pytest.mark.slow
def test_a_trace_accepts_htas_positional_arguments_and_must_be_read_first(run: Path) -> None:
    trace = Trace(trace_dir=str(run))
    with pytest.raises(EtloomError, match="call parse_traces"):
        trace.align_and_filter_trace()
    trace.parse_traces(-1, True, False)
    trace.align_and_filter_trace(True)
    assert trace.is_parsed


@pytest.mark.slow
def test_filters_select_what_they_name(data: Path) -> None:
    t = Trace(trace_dir=data / "hta_multirank")
    t.parse_traces()
    df = t.get_trace(0)
    texts = t.symbol_table.sym_table
    names = df["name"].map(lambda number: texts[number])
    assert (
        timeline.NameFilter("aten::.*mm")(df, t.symbol_table)["index"].tolist()
        == df.loc[names.str.match("aten::.*mm"), "index"].tolist()
    )
    t.decode_symbol_ids(use_shorten_name=False)
    assert len(timeline.NameFilter("aten::.*mm")(t.get_trace(0))) == names.str.match("aten::.*mm").sum()
    start, end = df["ts"].quantile(0.2), df["ts"].quantile(0.4)
    chosen = timeline.TimeRangeFilter((start, end))(df)
    assert len(chosen) > 0 and chosen["ts"].min() >= start and (chosen["ts"] + chosen["dur"]).max() <= end
    steps = sorted(step for step in df["iteration"].unique() if step >= 0)
    by_number, by_place = timeline.IterationFilter(int(steps[0])), timeline.FirstIterationFilter()
    assert len(by_number(df)) > 0 and by_number(df).equals(by_place(df))
    both = timeline.CompositeFilter([by_place, timeline.GPUKernelFilter()])
    assert both(df)["stream"].min() >= 0 and len(both(df)) < len(by_place(df))
    assert len(timeline.RankFilter(0)(df)) == len(df), "a frame without the column is not filtered"


@pytest.mark.parametrize(
    "wrong", [lambda: timeline.TimeRangeFilter((2, 1)), lambda: timeline.IterationFilter("x")]
)  # type: ignore[arg-type]
def test_wrong_arguments_of_filters_are_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        wrong()  # type: ignore[operator]


def test_the_parser_keeps_everything_whatever_is_chosen() -> None:
    cfg = ParserConfig(["a"])
    cfg.add_args(["a", "b"])
    ParserConfig.set_default_cfg(cfg)
    assert ParserConfig.get_default_cfg().get_args() == ["a", "b"]
