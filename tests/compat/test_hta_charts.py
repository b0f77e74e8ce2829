"""Charts of HTA's methods: drawn in notebooks, nowhere else."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import small_traces

pytest.importorskip("pandas")
pytest.importorskip("altair")

from etloom.compat.hta import TraceAnalysis
from etloom.compat.hta.charts import draw_diff
from etloom.core.errors import EtloomError

METHODS: dict[str, tuple[Callable[[TraceAnalysis], Any], set[str]]] = {
    "get_comm_comp_overlap": (lambda t: t.get_comm_comp_overlap(), {"comp_comm_overlap_pctg"}),
    "get_temporal_breakdown": (lambda t: t.get_temporal_breakdown(), {"percent"}),
    "get_gpu_kernel_breakdown": (lambda t: t.get_gpu_kernel_breakdown(), {"sum", "sum (us)"}),
    "get_gpu_user_annotation_breakdown": (
        lambda t: t.get_gpu_user_annotation_breakdown(use_gpu_annotation=False),
        {"sum (us)"},
    ),
    "get_idle_time_breakdown": (lambda t: t.get_idle_time_breakdown(visualize_pctg=False), {"idle_time"}),
    "get_cuda_kernel_launch_stats": (
        lambda t: t.get_cuda_kernel_launch_stats(runtime_cutoff=0, launch_delay_cutoff=0),
        {"count"},
    ),
    "get_aten_op_kernels_and_delay": (lambda t: t.get_aten_op_kernels_and_delay(), {"occurrence_count"}),
    "get_frequent_cuda_kernel_sequences": (
        lambda t: t.get_frequent_cuda_kernel_sequences("aten::", min_pattern_len=1, visualize=True),
        {"GPU kernel duration (us)"},
    ),
}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> TraceAnalysis:
    return TraceAnalysis(
        trace_dir=small_traces.write_run(tmp_path_factory.mktemp("run")), include_last_profiler_step=True
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Vega-Lite of the charts that a notebook would display."""
    charts: list[dict[str, Any]] = []
    notebook = types.ModuleType("IPython")
    notebook.get_ipython = object  # type: ignore[attr-defined]
    display = types.ModuleType("IPython.display")
    display.display = lambda chart: charts.append(chart.to_dict())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return charts


@pytest.mark.parametrize("name", METHODS)
def test_each_method_draws_in_a_notebook(
    name: str, analysis: TraceAnalysis, drawn: list[dict[str, Any]]
) -> None:
    call, values = METHODS[name]
    call(analysis)
    assert {chart["encoding"]["y"]["field"] for chart in drawn} == values
    for chart in drawn:
        (rows,) = chart["datasets"].values()
        assert rows and {chart["encoding"][axis]["field"] for axis in ("x", "y")} <= rows[0].keys()


def test_charts_are_drawn_only_in_notebooks_and_if_visualize(
    analysis: TraceAnalysis, drawn: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_idle_time_breakdown(visualize=False)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    analysis.get_temporal_breakdown()
    assert drawn == []


def test_the_shares_of_a_rank_are_stacked(
    analysis: TraceAnalysis, drawn: list[dict[str, Any]], tmp_path: Path
) -> None:
    frame = analysis.get_temporal_breakdown()
    (chart,) = drawn
    (rows,) = chart["datasets"].values()
    first = {row["part"]: row["percent"] for row in rows if row["rank"] == 0}
    assert first == {name: frame[name][0] for name in first}
    assert len(first) == 3
    assert chart["encoding"]["color"]["field"] == "part"


def test_a_chart_that_cannot_be_written_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import altair
    import pandas

    columns = ("a_counts", "b_counts", "diff_counts", "a_total_duration", "b_total_duration")
    frame = pandas.DataFrame({name: [1.0] for name in columns}, index=["aten::mm"])
    file = tmp_path / "diff.html"
    draw_diff(frame, "counts", "title", False, str(file))
    assert "<html" in (earlier := file.read_text())

    def fail(chart: object, path: str, **_: object) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(altair.Chart, "save", fail)
    with pytest.raises(EtloomError, match=r"diff\.html: cannot be written: .*No space left on device"):
        draw_diff(frame, "counts", "title", False, str(file))
    assert file.read_text() == earlier and list(tmp_path.iterdir()) == [file]
