"""HTA's names for devices, annotations, critical paths and differences, against the figures HTA itself gave."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Trace

pytest.importorskip("pandas", reason="pandas is not installed")
import pandas as pd

from etloom.compat.hta import DeviceType, LabeledTrace, TraceAnalysis, TraceDiff
from etloom.compat.hta.frames import shorten_kernel_name

FOLDERS = {"sampled_all_steps": True, "sampled_first_step": False}


@pytest.fixture(scope="module", params=FOLDERS)
def both(request: pytest.FixtureRequest, data: Path, golden: Path) -> tuple[TraceAnalysis, Path]:
    """The analysis of ranks 0 and 1, and the folder of HTA's tables of the same."""
    analyzer = TraceAnalysis(
        trace_dir=data / "hta_multirank", include_last_profiler_step=FOLDERS[request.param]
    )
    return analyzer, golden / "hta" / request.param


def table(folder: Path, name: str, **options: Any) -> Any:
    return pd.read_csv(folder / f"{name}.csv", **options)


@pytest.mark.slow
def test_launches_are_those_of_hta(both: tuple[TraceAnalysis, Path]) -> None:
    analyzer, folder = both
    ours = analyzer.get_cuda_kernel_launch_stats()[0]
    theirs = table(folder, "get_cuda_kernel_launch_stats.0")
    assert list(ours.columns) == list(theirs.columns)
    pd.testing.assert_frame_equal(
        *(one.sort_values("correlation", ignore_index=True) for one in (ours, theirs)), check_dtype=False
    )
    kernels = analyzer.get_cuda_kernel_launch_stats([0], include_memory_events=False)[0]
    assert 0 < len(kernels) < len(ours)


@pytest.mark.parametrize("name", ["get_queue_length_summary", "get_memory_bw_summary"])
def test_summaries_are_those_of_hta(both: tuple[TraceAnalysis, Path], name: str) -> None:
    analyzer, folder = both
    ours = getattr(analyzer, name)([0, 1])
    theirs = table(folder, name, header=[0, 1], index_col=[0, 1])
    pd.testing.assert_frame_equal(ours, theirs, check_dtype=False, rtol=1e-6)


def test_idle_times_are_those_of_hta(both: tuple[TraceAnalysis, Path]) -> None:
    analyzer, folder = both
    keys = ["rank", "stream", "idle_category"]
    ours, none = analyzer.get_idle_time_breakdown([0, 1])
    theirs = table(folder, "get_idle_time_breakdown.0", index_col=0)
    assert none is None and list(ours.columns) == list(theirs.columns)
    # HTA leaves out the categories of a stream of one event.
    matched = theirs.merge(ours, on=keys, suffixes=("_hta", ""))
    assert len(matched) == len(theirs)
    assert list(matched["idle_time"]) == pytest.approx(list(matched["idle_time_hta"]), abs=1)
    few, stats = analyzer.get_idle_time_breakdown([1], streams=[7], show_idle_interval_stats=True)
    assert set(few["stream"]) == {7} and set(few["rank"]) == {1}
    sums = (stats["count"] * stats["mean"]).to_dict()
    assert sums == pytest.approx(dict(zip(few["idle_category"], few["idle_time"], strict=True)))
    if folder.name == "sampled_first_step":
        wanted = table(folder, "idle_stats").query("rank == 1 and stream == 7").set_index("idle_category")
        pd.testing.assert_frame_equal(stats.loc[wanted.index].round(2), wanted, check_dtype=False)


def test_every_stream_of_every_rank_can_be_blocked(both: tuple[TraceAnalysis, Path]) -> None:
    """HTA keeps the last stream of a rank only."""
    analyzer, _ = both
    series = analyzer.get_queue_length_time_series([0, 1])
    assert list(series[0].columns) == ["ts", "pid", "tid", "stream", "queue_length"]
    frame = analyzer.t.get_trace(0)
    launches = series[0][series[0]["queue_length"].diff() > 0]
    assert launches["ts"].to_numpy() == pytest.approx(frame.loc[launches.index, "ts"].to_numpy())
    blocked = analyzer.get_time_spent_blocked_on_full_queue(series, max_queue_length=30)
    assert list(blocked.columns) == [
        *("rank", "stream", "duration_at_max_queue_length", "relative_duration_at_max_queue_length")
    ]
    by_stream = etloom.analyze(analyzer.job, "queue-summary", limit=30).filter(pl.col("step").is_null())
    wanted = {
        (row["rank"], row["stream"]): row["blocked_ns"] / 1e3
        for row in by_stream.iter_rows(named=True)
        if row["blocked_ns"]
    }
    named = blocked.set_index(["rank", "stream"])
    assert named["duration_at_max_queue_length"].to_dict() == pytest.approx(wanted, abs=1)
    assert named["duration_at_max_queue_length"][0, 7] > 100_000
    share = named["relative_duration_at_max_queue_length"][0, 7]
    assert share == pytest.approx(
        named["duration_at_max_queue_length"][0, 7] / analyzer.t.get_trace_duration(0)
    )


def test_operators_kernels_and_sequences(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "hta_multirank", include_last_profiler_step=True)
    delays = analyzer.get_aten_op_kernels_and_delay([0, 1])
    columns = ["aten_op_name", "kernel_sequence", "occurrence_count"]
    assert list(delays[0].columns) == [*columns, "avg_aten_op_launch_delay", "avg_runtime_delay"]
    # 487 launches of aten operators a rank and step, as HTA counts rank 0; its later ranks hold the earlier ones too.
    assert delays[0]["aten_op_name"].str.startswith("aten::").all()
    assert delays[1]["occurrence_count"].sum() < 1.1 * delays[0]["occurrence_count"].sum()
    by_count = analyzer.get_frequent_cuda_kernel_sequences("aten::linear", "", min_pattern_len=1, top_k=2)
    assert list(by_count.columns) == ["pattern", "count", "GPU kernel duration (us)", "CPU op duration (us)"]
    assert len(by_count) > 2 and by_count["pattern"].str.startswith("aten::linear|").all()
    assert by_count["count"].is_monotonic_decreasing


@pytest.mark.slow
def test_annotations_and_the_kernels_in_them(data: Path) -> None:
    analyzer = TraceAnalysis(trace_dir=data / "nccl_ddp", include_last_profiler_step=True)
    on_device = analyzer.get_gpu_user_annotation_breakdown()
    assert list(on_device.columns) == [
        *("name", "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)", "rank")
    ]
    marks = analyzer.job[0].events.filter(pl.col("cat") == "gpu_user_annotation")
    assert on_device["sum (us)"].sum() == pytest.approx(marks["dur"].sum() / 1e3)
    few = analyzer.get_gpu_user_annotation_breakdown(num_kernels=2, duration_ratio=1.0)
    assert len(few) == 3
    kept = analyzer.get_gpu_user_annotation_breakdown(
        num_kernels=2, duration_ratio=1.0, allowlist_patterns=["nccl:"]
    )
    assert {"nccl:all_reduce", "nccl:broadcast"} <= set(kept["name"])
    assert few["sum (us)"].sum() == pytest.approx(on_device["sum (us)"].sum())
    work = analyzer.get_gpu_kernels_with_user_annotations(0)
    assert len(work) == len(etloom.analyze(analyzer.job, "annotated-kernels")) or len(work) > 3000
    by_name = work.groupby("s_user_annotation")["dur"].sum()
    wanted = etloom.analyze(analyzer.job, "annotated-kernels", by="annotation").drop_nulls("annotation")
    known = {row["annotation"]: row["total_ns"] / 1e3 for row in wanted.iter_rows(named=True)}
    # A communication is in the range of its own, which annotated-kernels leaves out.
    own = work[work["s_user_annotation"].str.startswith("nccl:")]
    assert own["s_name"].str.startswith("nccl").all() and len(own) == 21
    of_forward = "DistributedDataParallel.forward"
    sent = own[own["s_user_annotation"] == "nccl:broadcast"]["dur"].sum()
    assert by_name[of_forward] + sent == pytest.approx(known[of_forward])
    cpu = TraceAnalysis(trace_dir=data / "cpu" / "ddp_2")
    assert cpu.get_gpu_kernels_with_user_annotations(0) is None
    assert cpu.get_gpu_user_annotation_breakdown() is None


def test_names_are_cut_to_the_name_of_the_kernel() -> None:
    assert shorten_kernel_name("void at::native::f<4, g<int> >(int, h<char*>)") == "at::native::f"
    assert shorten_kernel_name("void (anonymous namespace)::k<1>(int)") == "k"
    assert shorten_kernel_name("Memset (Device)") == "Memset (Device)"
    assert shorten_kernel_name("aten::mm") == "aten::mm"


@pytest.mark.slow
def test_the_critical_path_of_an_instance(data: Path, tmp_path: Path) -> None:
    """The last kernel had ended before the host came to wait for it, so the host is all the path there is."""
    file = data / "critical_path" / "simple_add.json.gz"
    analyzer = TraceAnalysis(trace_files={0: str(file)}, include_last_profiler_step=True)
    name = "[param|pytorch.model.alex_net|0|0|0|measure|forward]"
    found = analyzer.critical_path_analysis(0, name, 1)
    assert found is not None and found[1]
    path = found[0]
    pieces = path.get_critical_path_breakdown()
    assert list(pieces.columns) == [
        *("event_idx", "duration", "type", "s_name", "cat", "pid", "tid", "stream", "index", "bound_by")
    ]
    assert pieces["duration"].sum() == 243351
    assert path.summary().to_dict() == {"cpu_bound": 100}
    assert pieces.set_index("s_name")["duration"]["cudaMalloc"].max() == 179324
    assert analyzer.t.meta_data[0]["deviceProperties"] and "traceEvents" not in analyzer.t.meta_data[0]
    nodes, edges = path.critical_path_nodes, path.critical_path_edges_set
    assert len(edges) == len(nodes) - 1 == len(pieces)
    assert sum(edge.weight for edge in edges) == 243351
    assert path.critical_path_events_set >= set(pieces["event_idx"])
    for node in path.node_list:
        row = path.trace_df.loc[node.ev_idx]
        # A call that launches a kernel submits it some time before its end.
        assert node.ts == row["ts"] if node.is_start else row["ts"] <= node.ts <= row["end"]
    (longest,) = (edge for edge in edges if edge.weight == 179324)
    event = path.get_event_attribution_for_edge(longest)
    assert (
        longest in path.get_edges_attributed_to_event(event)
        and longest.type.value == "critical_path_operator"
    )
    start, end = path.get_nodes_for_event(event)
    assert (start.idx, end.idx) == (longest.begin, longest.end)
    assert path.get_events_for_edge(longest) == (event, event)
    loading = analyzer.critical_path_analysis(0, name, 1, data_load_events=["cudaMalloc"])
    assert loading is not None and loading[0].summary()["data_loading"] > 80
    first, both = (analyzer.critical_path_analysis(0, name, which) for which in (None, (0, 1)))
    assert first is not None and both is not None
    assert (
        both[0].path["time_ns"].sum() == first[0].path["time_ns"].sum() == 296813000
    )  # the second lies in the first
    assert analyzer.critical_path_analysis(0, "nowhere") is None
    assert analyzer.critical_path_analysis(0, name, 7) is None
    written = analyzer.overlay_critical_path_analysis(0, path, tmp_path)
    assert Path(written).parent == tmp_path and Path(written).name.startswith("overlaid_critical_path_")
    shown = etloom.read(written)
    critical = shown.events.filter(pl.col("args").cast(pl.String).str.contains('"critical": 1'))
    assert critical.height == pieces["event_idx"].nunique()
    others = shown.events.filter(~pl.col("id").is_in(critical["id"].implode()) & (pl.col("ph") == "X"))
    assert set(others["cat"]) <= {"user_annotation", "python_function"}
    arrows = read_arrows(shown)
    assert len(arrows) == 50 and {args["type"] for args in arrows} == {"critical_path_dependency"}
    every = analyzer.overlay_critical_path_analysis(
        0, path, tmp_path / "all", only_show_critical_events=False, show_all_edges=True
    )
    assert etloom.read(every).events.height == analyzer.full_job[0].events.height
    kinds = Counter(args["type"].removeprefix("critical_path_") for args in read_arrows(etloom.read(every)))
    assert kinds["kernel_launch_delay"] == 2 * path.job[0].launches.height
    assert set(kinds) == {
        "operator", "dependency", "kernel_launch_delay", "kernel_kernel_delay", "sync_dependency"
    }  # fmt: skip
    with pytest.raises(AnalysisError):
        analyzer.overlay_critical_path_analysis(1, path, tmp_path)


def read_arrows(trace: Trace) -> list[dict[str, Any]]:
    """The arguments of the ends of the overlay's arrows."""
    arrows = trace.flows.filter((pl.col("cat") == "critical_path") & (pl.col("name") == "critical_path"))
    return [json.loads(args) for args in arrows["args"]]


@pytest.mark.slow
def test_the_bounds_of_a_step_on_its_device(data: Path) -> None:
    file = data / "hta_misc" / "negative_queue_a100.json.gz"
    analyzer = TraceAnalysis(trace_files={0: str(file)}, include_last_profiler_step=True)
    found = analyzer.critical_path_analysis(0, "ProfilerStep")
    assert found is not None
    pieces = found[0].get_critical_path_breakdown()
    number = analyzer.t.symbol_table.sym_index
    work = pieces[pieces["cat"].isin([number[cat] for cat in ("kernel", "gpu_memcpy", "gpu_memset")])]
    on_device = work[work["type"] == "critical_path_operator"]
    assert set(on_device["bound_by"]) == {"gpu_compute_bound", "gpu_communication_bound"}
    assert on_device[on_device["bound_by"] == "gpu_communication_bound"]["s_name"].str.contains("nccl").all()
    delays = pieces[pieces["bound_by"] == "gpu_kernel_launch_overhead"]
    assert set(delays["type"]) == {"critical_path_kernel_launch_delay"}
    assert pieces["duration"].sum() * 1e3 == pytest.approx(found[0].path["time_ns"].sum())


@pytest.mark.slow
@pytest.mark.parametrize("device", list(DeviceType))
def test_the_difference_of_two_traces_is_hta_s(data: Path, golden: Path, device: DeviceType) -> None:
    def labeled(label: str, name: str) -> LabeledTrace:
        files = {0: str(data / "hta_misc" / f"compare_{name}.json.gz")}
        return LabeledTrace(label, t=TraceAnalysis(trace_files=files, include_last_profiler_step=True).t)

    control, test = labeled("Control", "base"), labeled("Test", "test")
    ours = TraceDiff.compare_traces(control, test, device_type=device)
    file = golden / "hta" / "compare" / f"cmp.compare_traces.{device.name}.csv"
    pd.testing.assert_frame_equal(ours, pd.read_csv(file, index_col=0), check_dtype=False)


@pytest.mark.slow
def test_added_removed_and_unchanged_operators(tmp_path: Path) -> None:
    from support import small_traces

    def run(name: str, operators: list[str]) -> Path:
        host = (10, 11)
        events = [small_traces.complete_event("user_annotation", "ProfilerStep#3", 0, 100, *host)]
        events += [
            small_traces.complete_event("cpu_op", op, 1 + 5 * at, 4, *host) for at, op in enumerate(operators)
        ]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kineto_trace_0.json").write_text(
            json.dumps({**small_traces.kineto(world=1), "traceEvents": events})
        )
        return folder

    a = run("a", ["gone", "more", "less", "less", "same"])
    b = run("b", ["new", "more", "more", "less", "same"])
    found = TraceDiff.ops_diff(a, b)
    assert {
        kind: [name for name in names if not name.startswith("Prof")] for kind, names in found.items()
    } == {
        "added": ["new"],
        "deleted": ["gone"],
        "increased": ["more"],
        "decreased": ["less"],
        "unchanged": ["same"],
    }
    table = TraceDiff.compare_traces(a, b)
    assert table.loc["more", ["Control_counts", "Test_counts", "diff_duration"]].tolist() == [1, 2, 4]
    with pytest.raises(ValueError, match="no step 9"):
        TraceDiff.compare_traces(a, b, control_iteration=9)
    with pytest.raises(EtloomError):
        LabeledTrace("nothing")


def test_a_rank_that_is_not_there(data: Path) -> None:
    with pytest.raises(AnalysisError, match="unknown rank"):
        TraceAnalysis(trace_dir=data / "cpu" / "ddp_2").get_queue_length_summary([7])
