"""HTA's frames, counters and the trace files that its front writes."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Job
from support import nccl_profiles, small_traces

pytest.importorskip("pandas", reason="pandas is not installed")
from etloom.compat.hta import TimeSeriesTypes, TraceAnalysis
from etloom.compat.hta.frames import HtaTrace
from support.small_traces import COUNTER_EVENTS, counter_event

HTA_COLUMNS = [
    "index", "cat", "name", "pid", "tid", "ts", "dur", "stream", "correlation", "bytes", "memory_bw_gbps",
    "wait_on_stream", "wait_on_cuda_event_record_corr_id", "input_dims", "input_type", "input_strides",
    "external_id", "python_id", "python_parent_id", "collective_name", "in_msg_nelems", "out_msg_nelems",
    "msg_dtype", "group_size", "process_rank", "in_split_size", "out_split_size", "index_correlation", "iteration",
    "end",
]  # fmt: skip


SIGNATURES = {
    "__init__": "trace_files=None trace_dir include_last_profiler_step=False",
    "get_comm_comp_overlap": "visualize=True",
    "get_profiler_steps": "",
    "get_potential_stragglers": (
        "profiler_steps=None num_candidates=2 visualize=False straggler_identification_impl"
    ),
    "get_gpu_kernel_breakdown": (
        "visualize=True duration_ratio=0.8 num_kernels=10 include_memory_kernels=True image_renderer=''"
    ),
    "get_gpu_kernels_with_user_annotations": "rank expand_names=True shorten_names=True shortern_names=None",
    "get_gpu_user_annotation_breakdown": (
        "use_gpu_annotation=True visualize=True duration_ratio=0.8 num_kernels=1000 allowlist_patterns=None "
        "image_renderer=None"
    ),
    "get_temporal_breakdown": "visualize=True",
    "get_frequent_cuda_kernel_sequences": (
        "operator_name output_dir min_pattern_len=3 rank=0 top_k=5 visualize=False compress_other_kernels=True"
    ),
    "get_aten_op_kernels_and_delay": "ranks=None sort_by=None",
    "get_cuda_kernel_launch_stats": (
        "ranks=None runtime_cutoff=50 launch_delay_cutoff=100 include_memory_events=True visualize=True"
    ),
    "generate_trace_with_counters": "time_series=None ranks=None output_suffix='_with_counters'",
    "get_queue_length_summary": "ranks=None",
    "get_queue_length_summary_from_time_series": "queue_length_dict",
    "get_queue_length_time_series": "ranks=None",
    "get_time_spent_blocked_on_full_queue": "queue_length_dict max_queue_length=1024",
    "get_memory_bw_summary": "ranks=None",
    "get_memory_bw_time_series": "ranks=None",
    "get_idle_time_breakdown": (
        "ranks=None streams=None visualize=True visualize_pctg=True show_idle_interval_stats=False "
        "consecutive_kernel_delay=30"
    ),
    "get_cupti_counter_data_with_operators": "ranks=None",
    "critical_path_analysis": "rank annotation instance_id data_load_events=None",
    "overlay_critical_path_analysis": (
        "rank critical_path_graph output_dir only_show_critical_events=True show_all_edges=False"
    ),
}
"""Of HTA 0.6.1: what each method takes, in order, with the default where it is the same here."""


@pytest.mark.parametrize("method", SIGNATURES)
def test_methods_have_the_parameters_of_hta(method: str) -> None:
    ours = list(inspect.signature(getattr(TraceAnalysis, method)).parameters.values())[1:]
    theirs = [one.partition("=") for one in SIGNATURES[method].split()]
    assert [one.name for one in ours] == [name for name, _, _ in theirs]
    for one, (_, given, default) in zip(ours, theirs, strict=True):
        assert not given or repr(one.default) == default


def test_nothing_else_is_public() -> None:
    assert {name for name in vars(TraceAnalysis) if not name.startswith("_")} <= set(SIGNATURES)
    assert {name for name in dir(TraceAnalysis) if not name.startswith("_")} == set(SIGNATURES) - {"__init__"}


def analyzer_of(
    folder: Path, events: list[dict[str, Any]], name: str = "kineto_trace_0.json"
) -> TraceAnalysis:
    (folder / name).write_text(json.dumps({**small_traces.kineto(world=1), "traceEvents": events}))
    return TraceAnalysis(trace_files={0: str(folder / name)}, include_last_profiler_step=True)


def device(
    name: str, ts: float, dur: float, correlation: int, cat: str = "kernel", **args: Any
) -> dict[str, Any]:
    said = {"stream": 7, "device": 0, "correlation": correlation, **args}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": said}


def call(ts: float, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "ts": ts,
        "dur": 1,
        "pid": 10,
        "tid": 11,
        "args": args,
    }


def operator(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 10,
        "tid": 11,
        "args": args,
    }


BANDWIDTH = {"memory bandwidth (GB/s)": 2.0}
RUN = [
    {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 1, "dur": 99, "pid": "Spans", "tid": "x"},
    operator("aten::linear", 10, 10, **{"Input Dims": [[2, 3], []], "Input type": ["float", ""]}),
    call(12, 1),
    call(15, 2),
    device("gemm", 30, 5, 1),
    device("bias", 36, 2, 2),
    operator("aten::linear", 40, 10),
    call(42, 3),
    call(45, 4),
    device("gemm", 60, 5, 3),
    device("bias", 66, 3, 4),
    operator("aten::relu", 70, 9, Note="kept"),
    call(72, 5),
    call(74, 6, "cudaMemcpyAsync"),
    device("relu", 80, 1, 5),
    device("Memcpy DtoH (Device -> Pageable)", 90, 4, 6, "gpu_memcpy", bytes=8000, **BANDWIDTH),
]  # fmt: skip


def test_a_run_without_times_starts_at_zero(tmp_path: Path) -> None:
    line = json.dumps(nccl_profiles.inspector_line(0, 0))
    (tmp_path / "host-pid1.log").write_text(line + "\n")
    job = etloom.open(tmp_path)
    untimed = Job(
        {rank: trace.replace(events=trace.events.with_columns(ts=None)) for rank, trace in job.items()}
    )
    assert HtaTrace(untimed).min_ts == 0


def test_a_frame_has_htas_columns_index_and_values_for_nothing(tmp_path: Path) -> None:
    table = analyzer_of(tmp_path, RUN).t.get_trace(0)
    assert list(table.columns) == HTA_COLUMNS
    # The place in the file, without the span of the profiler itself, from which no time is counted either.
    assert list(table.index) == list(table["index"]) == list(range(1, len(RUN)))
    linear = table.loc[1]
    assert (linear.ts, linear.dur, linear.end) == (0, 10, 10)
    assert (linear.input_dims, linear.input_type, linear.input_strides) == ([[2, 3], []], ["float", ""], "-1")
    assert (linear.stream, linear.correlation, linear.index_correlation, linear.bytes) == (-1, -1, -1, -1)
    assert (linear.collective_name, linear.group_size, linear.in_split_size, linear.process_rank) == (
        "",
        0,
        "[]",
        -1,
    )
    assert (table.loc[2].index_correlation, table.loc[4].index_correlation) == (4, 2)
    copy = table.loc[15]
    assert (copy.bytes, copy.memory_bw_gbps, copy.stream) == (8000, 2.0, 7)


@pytest.mark.slow
def test_frames_are_htas(data: Path) -> None:
    """Places, iterations and partners that HTA 0.6 gives for rows of the first steps of this file."""
    analyzer = TraceAnalysis(trace_files={0: str(data / "hta_misc" / "negative_queue_a100.json.gz")})
    table = analyzer.t.get_trace(0)
    row = table.loc[25545]
    assert (row.ts, row.dur, row.correlation, row.index_correlation, row.iteration) == (
        584628,
        3,
        863350,
        25547,
        551,
    )
    assert table["ts"].min() == 0
    assert analyzer.t.get_iterations() == [550, 551, 552, 553]
    analyzer.t.decode_symbol_ids()
    assert table["s_cat"].loc[25545] == "kernel"


@pytest.mark.slow
def test_communication_is_in_the_frame(data: Path) -> None:
    analyzer = TraceAnalysis(trace_files={0: str(data / "nccl_ddp" / "kineto_trace_0.json.gz")})
    table = analyzer.t.get_trace(0)
    reduced = table[table["collective_name"] == "all_reduce"]
    assert len(reduced) == 20 and set(reduced["group_size"]) == {2} and set(reduced["msg_dtype"]) == {"Float"}
    assert (reduced["in_msg_nelems"] == reduced["out_msg_nelems"]).all() and (
        reduced["in_msg_nelems"] > 0
    ).all()


@pytest.mark.slow
def test_counters_are_by_kernel_with_the_operators_around_its_launch(tmp_path: Path) -> None:
    (found,) = analyzer_of(tmp_path, COUNTER_EVENTS).get_cupti_counter_data_with_operators([0])
    assert found["name"].tolist() == ["gemm", "gemm", "alone"] and set(found["cat"]) == {
        "cuda_profiler_range"
    }
    assert found["op_stack"].tolist() == [["aten::linear", "aten::addmm"]] * 2 + [[]]
    assert found["top_level_op"].tolist() == ["aten::linear", "aten::linear", ""]
    assert found["bottom_level_op"].tolist() == ["aten::addmm", "aten::addmm", ""]
    assert found["index_runtime"].tolist() == [2, 4, 5]
    assert found["inst"].tolist() == [10, 30, 7] and found["dram__bytes"].tolist() == [1.5, 0.5, 2]
    assert list(found.columns) == [
        *(*HTA_COLUMNS, "inst", "dram__bytes"), "index_runtime", "op_stack", "top_level_op", "bottom_level_op"
    ]  # fmt: skip
    two = analyzer_of(tmp_path, [*COUNTER_EVENTS, counter_event("more", 31, inst=1)], "kineto_trace_1.json")
    with pytest.raises(AnalysisError, match="4 measured kernels"):
        two.get_cupti_counter_data_with_operators()


@pytest.mark.slow
def test_counters_of_a_real_trace_are_htas(data: Path) -> None:
    """Of 77 kernels, what HTA 0.6 gives: the first's stack and launch, and the sums of a counter."""
    path = data / "hta_misc" / "benchmark_result_924719_1679055439_trace.json.gz"
    analyzer = TraceAnalysis(trace_files={0: str(path)})
    (found,) = analyzer.get_cupti_counter_data_with_operators()
    assert len(found) == 77 and found["index"][0] == 4107 and found["index_runtime"][0] == 473
    assert found["op_stack"][0] == ["aten::rand", "aten::uniform_"]
    assert found["op_stack"][5] == [
        "aten::conv2d",
        "aten::convolution",
        "aten::_convolution",
        "aten::cudnn_convolution",
    ]
    ffma = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
    assert found[ffma][0] == 38_731_776
    assert found.groupby("bottom_level_op")[ffma].sum()["aten::addmm"] == 15_067_250_688
    assert TraceAnalysis(trace_dir=data / "cpu" / "ddp_2").get_cupti_counter_data_with_operators() == []


@pytest.mark.slow
def test_a_rank_without_gpu_activity_is_omitted_from_series(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "cpu" / "ddp_2")
    assert analyzer.get_queue_length_time_series([0, 1]) == analyzer.get_memory_bw_time_series([0, 1]) == {}
    assert analyzer.get_queue_length_summary() is analyzer.get_memory_bw_summary() is None
    assert len(analyzer.get_time_spent_blocked_on_full_queue({})) == 0


@pytest.mark.slow
def test_counters_are_written_into_a_trace_next_to_the_file(tmp_path: Path) -> None:
    analyzer = analyzer_of(tmp_path, RUN)
    before = (tmp_path / "kineto_trace_0.json").read_bytes()
    assert analyzer.generate_trace_with_counters() is None
    assert (tmp_path / "kineto_trace_0.json").read_bytes() == before
    written = etloom.read(tmp_path / "kineto_trace_0_with_counters.json")
    assert written.events.height == analyzer.job[0].events.height
    samples = written.counters.select(
        (pl.col("ts") - small_traces.BASE_NS) // 1000, "pid", "name", "series", "value"
    ).rows()
    assert [row for row in samples if row[3] == "Memcpy BW"] == [
        (90, 0, "Memcpy DtoH", "Memcpy BW", 2.0), (94, 0, "Memcpy DtoH", "Memcpy BW", 0.0)
    ]  # fmt: skip
    queue = [(row[0], row[4]) for row in samples if row[2:4] == ("Queue Length (stream 7)", "Queue Length")]
    assert queue[:4] == [(12, 1), (15, 2), (30, 1), (36, 0)] and queue[-1] == (90, 0) and len(queue) == 12
    analyzer.generate_trace_with_counters(TimeSeriesTypes.MEMCPY_BANDWIDTH, [0], "_bw")
    assert set(etloom.read(tmp_path / "kineto_trace_0_bw.json").counters["series"]) == {"Memcpy BW"}
    with pytest.raises(AnalysisError, match="unknown rank 3"):
        analyzer.generate_trace_with_counters(ranks=[3])


@pytest.mark.slow
def test_counters_of_compressed_traces_are_written_next_to_them(data: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        shutil.copy(data / "hta_multirank" / f"sampled_rank-{rank}.json.gz", tmp_path)
    analyzer = TraceAnalysis(trace_dir=tmp_path)
    analyzer.generate_trace_with_counters(ranks=[1])
    made = {path.name for path in tmp_path.iterdir()} - {"sampled_rank-0.json.gz", "sampled_rank-1.json.gz"}
    assert made == {"sampled_rank-1_with_counters.json.gz"}
    counters = etloom.read(tmp_path / made.pop()).counters
    queue = analyzer.get_queue_length_time_series([1])[1]
    assert counters.filter(pl.col("series") == "Queue Length").height == len(queue)


@pytest.mark.parametrize("compress", [True, False])
def test_frequent_sequences_are_shown_in_a_trace(tmp_path: Path, compress: bool) -> None:
    analyzer = analyzer_of(tmp_path, RUN)
    out = tmp_path / "out"
    table = analyzer.get_frequent_cuda_kernel_sequences(
        "aten::", str(out), min_pattern_len=1, top_k=1, compress_other_kernels=compress
    )
    relu = "aten::relu|relu|Memcpy DtoH (Device -> Pageable)"
    assert table.values.tolist() == [["aten::linear|gemm|bias", 2, 15, 20], [relu, 1, 5, 9]]
    (file,) = out.iterdir()
    assert file.name == "overlaid_kineto_trace_0.json"
    said = json.loads(file.read_text())
    slices = [event for event in said["traceEvents"] if event["ph"] == "X"]
    pattern = {"aten::linear|gemm|bias": 2}
    shown = [event for event in slices if event.get("args", {}).get("Patterns") == pattern]
    assert sorted(event["name"] for event in shown) == sorted(
        ["aten::linear", "cudaLaunchKernel", "cudaLaunchKernel", "gemm", "bias"] * 2
    )
    assert {event["args"].get("correlation") for event in shown} >= {1, 2, 3, 4}
    rest = [event for event in slices if event not in shown]
    names = {event["name"] for event in rest} - {"PyTorch Profiler (0)"}
    if compress:
        symbols = said["symbols"]
        assert {symbols[name] for name in names} == {
            *("aten::relu", "relu", "cudaLaunchKernel", "cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)")
        }
        assert not any(event.get("args") for event in rest)
    else:
        assert "aten::relu" in names and "symbols" not in said
        assert [event["args"]["Note"] for event in rest if event["name"] == "aten::relu"] == ["kept"]


def test_sequences_without_a_folder_write_nothing(tmp_path: Path) -> None:
    analyzer = analyzer_of(tmp_path, RUN)
    assert len(analyzer.get_frequent_cuda_kernel_sequences("aten::linear", min_pattern_len=2)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kineto_trace_0.json"]


@pytest.mark.slow
def test_sequences_of_an_absent_operator_are_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    analyzer = analyzer_of(tmp_path, RUN)
    present, absent = (
        analyzer.get_frequent_cuda_kernel_sequences(name, tmp_path / "out", min_pattern_len=2)
        for name in ("aten::linear", "nowhere")
    )
    assert absent.empty and absent.columns.equals(present.columns)
    assert "no operator name contains 'nowhere'" in caplog.text


@pytest.mark.slow
def test_stragglers_of_some_steps(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "cpu" / "ddp_2", include_last_profiler_step=True)
    steps = analyzer.get_profiler_steps()
    every = analyzer.get_potential_stragglers(num_candidates=1)
    assert every and every == analyzer.get_potential_stragglers(steps, num_candidates=1)
    by_step = [analyzer.get_potential_stragglers([step]) for step in steps]
    assert set().union(*by_step) >= set(every)
    with pytest.raises(UnknownName, match="step"):
        analyzer.get_potential_stragglers([77])


def test_memory_may_be_left_out_of_the_breakdown(tmp_path: Path) -> None:
    analyzer = analyzer_of(tmp_path, RUN)
    kinds, kernels = analyzer.get_gpu_kernel_breakdown(include_memory_kernels=False)
    assert kinds.values.tolist() == [["COMPUTATION", 16, 100]]
    assert kernels[["name", "sum (us)", "stddev"]].values.tolist()[1:] == [["gemm", 10, 0], ["relu", 1, 0]]
    assert kernels["stddev"][0] == pytest.approx(0.5**0.5)
    assert analyzer.get_gpu_kernel_breakdown()[0]["kernel_type"].tolist() == ["COMPUTATION", "MEMORY"]
