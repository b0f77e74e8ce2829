"""HTA's names over etloom: the demo of the execution trace, and HTA's own figures where they are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError, EtloomError, LinkError, ReadError
from support.paths import ROOT

pytest.importorskip("pandas", reason="pandas is not installed")
from etloom.compat.hta import TraceAnalysis, execution_trace

COLUMNS = ("et_node_name", "op_schema", "input_shapes", "input_types", "output_shapes", "output_types")


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook = ROOT / "docs" / "coming-from-hta.ipynb"
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    called = (
        "TraceAnalysis(trace_dir=",
        "load_execution_trace(",
        "correlate_execution_trace(analyzer.t, 0, et)",
    )
    called += (
        "analyzer.t.get_trace(0)",
        "analyzer.t.symbol_table.add_symbols_to_trace_df(",
        "add_et_column(",
    )
    assert [call for call in called if call not in code] == []
    checks = """
assert trace_df.et_node.notna().sum() == 377, trace_df.et_node.notna().sum()
assert (trace_df.rf_id.notna() == trace_df.et_node.notna()).all()
names = trace_df.dropna(subset="et_node")
assert (names.et_node_name == names["name"]).all()
linear = names[names["name"] == "aten::linear"].iloc[0]
assert linear.op_schema.startswith("aten::linear("), linear.op_schema
assert len(linear.input_shapes) == len(linear.input_types) == len(linear.input_values) == 3, linear
assert len(linear.output_shapes) == len(linear.output_types) == 1, linear
"""
    done = subprocess.run(
        [sys.executable, "-c", code + checks], cwd=notebook.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_demo_gives_the_results_of_hta(data: Path, golden: Path) -> None:
    folder = data / "simple_add"
    analyzer = TraceAnalysis(trace_files={0: str(folder / "benchmark_simple_add_trace.json.gz")})
    et = execution_trace.load_execution_trace(folder / "benchmark_simple_add_et.json.gz")
    execution_trace.correlate_execution_trace(analyzer.t, 0, et)
    df = analyzer.t.get_trace(0).copy()
    for column in ("cat", "name"):
        analyzer.t.symbol_table.add_symbols_to_trace_df(df, col=column)
    for column in COLUMNS:
        execution_trace.add_et_column(df, et, column)
    ours = {
        int(row.external_id): (
            row.name_, int(row.et_node), row.et_node_name, row.op_schema or "",
            *(getattr(row, column) for column in COLUMNS[2:]),
        )
        for row in df.rename(columns={"name": "name_"}).dropna(subset=["et_node"]).itertuples()
    }  # fmt: skip
    peer = pl.read_csv(golden / "hta/simple_add_et/et_simple_add.csv").drop_nulls("et_node")
    theirs = {
        row["external_id"]: (
            row["name"], int(row["et_node"]), row["et_node_name"], row["op_schema"] or "",
            *(json.loads(row[column]) for column in COLUMNS[2:]),
        )
        for row in peer.iter_rows(named=True)
    }  # fmt: skip
    clean = {
        key: (*values[:3], "" if values[3] != values[3] else values[3], *values[4:])
        for key, values in ours.items()
    }
    assert len(clean) == 36
    assert clean == theirs


@pytest.mark.slow
def test_hta_s_breakdowns(data: Path, golden: Path) -> None:
    for folder, every in (("sampled_all_steps", True), ("sampled_first_step", False)):
        analyzer = TraceAnalysis(trace_dir=data / "hta_multirank", include_last_profiler_step=every)
        ours = analyzer.get_temporal_breakdown()
        assert list(ours["rank"]) == [0, 1]
        theirs = _golden(golden / "hta" / folder, "temporal")
        for column in ("idle_time(us)", "compute_time(us)", "non_compute_time(us)", "kernel_time(us)"):
            assert list(ours[column]) == pytest.approx(list(theirs[column]), abs=200)


def _golden(folder: Path, name: str) -> pl.DataFrame:
    (file,) = [file for file in folder.iterdir() if name in file.name and file.suffix == ".csv"]
    return pl.read_csv(file).sort("rank")


@pytest.mark.slow
def test_columns_and_small_questions(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "hta_multirank", include_last_profiler_step=True)
    kinds, kernels = analyzer.get_gpu_kernel_breakdown(num_kernels=3)
    assert list(kinds.columns) == ["kernel_type", "sum", "percentage"]
    assert list(kernels.columns) == [
        *("name", "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)", "kernel_type", "rank")
    ]
    assert kernels.groupby(["rank", "kernel_type"]).size().max() <= 4
    work = etloom.query(
        analyzer.job, "select rank, sum(dur) / 1e3 as us from events where cat = 'kernel' group by rank"
    )
    listed = kernels[kernels.kernel_type != "MEMORY"].groupby("rank")["sum (us)"].sum()
    assert dict(listed) == pytest.approx(dict(work.iter_rows()))
    assert analyzer.get_potential_stragglers() == [1]
    assert len(analyzer.get_profiler_steps()) == 2
    assert list(analyzer.get_comm_comp_overlap().columns) == ["rank", "comp_comm_overlap_pctg"]


@pytest.mark.slow
def test_the_symbol_table_maps_between_texts_and_numbers(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "dlrm", include_last_profiler_step=True)
    texts = analyzer.t.symbol_table.get_sym_table()
    numbers = analyzer.t.symbol_table.get_sym_id_map()
    events = pl.concat(trace.events.select("name", "cat") for trace in analyzer.job.values())
    held = {text for name in ("name", "cat") for text in events[name].cast(pl.String).drop_nulls()}
    assert sorted(texts) == ["", *sorted(held)]
    assert [numbers[text] for text in texts] == list(range(len(texts))) and len(numbers) == len(texts)
    df = analyzer.t.get_trace(0)
    kernels = analyzer.job[0].events.filter(pl.col("cat") == "kernel", pl.col("dur").is_not_null())
    found = [texts[number] for number in df[df.cat == numbers["kernel"]].sort_values("ts").name]
    assert sorted(found) == sorted(kernels["name"].cast(pl.String)) and len(found) > 0


@pytest.mark.slow
def test_the_frame_contains_partners(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "dlrm", include_last_profiler_step=True)
    df = analyzer.t.get_trace(0)
    kernel = analyzer.t.symbol_table.sym_index["kernel"]
    partners = df[(df.cat == kernel) & (df.index_correlation > 0)]
    launches = df.loc[partners.index_correlation.to_numpy()]
    assert len(partners) > 0
    assert (launches.correlation.to_numpy() == partners.correlation.to_numpy()).all()
    assert (launches.ts.to_numpy() <= partners.ts.to_numpy()).all()


@pytest.mark.slow
def test_wrong_input_is_one_line(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "cpu/ddp_2")
    with pytest.raises(ReadError, match="is not an execution trace"):
        execution_trace.load_execution_trace(data / "cpu/ddp_2/kineto_trace_0.json.gz")
    with pytest.raises(AnalysisError, match="unknown rank"):
        analyzer.t.get_trace(7)
    et = execution_trace.load_execution_trace(data / "linear/torch_et_0.json.gz")
    with pytest.raises(LinkError):
        execution_trace.correlate_execution_trace(analyzer.t, 0, et)
    df = analyzer.t.get_trace(0)
    with pytest.raises(EtloomError, match="no column et_node"):
        execution_trace.add_et_column(df, et, "op_schema")
