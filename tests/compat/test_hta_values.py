"""Arguments and values of HTA's front that users' code depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etloom.core.errors import EtloomError
from support import small_traces
from support.small_traces import complete_event

pytest.importorskip("pandas", reason="pandas is not installed")
from etloom.compat.hta import LabeledTrace, TraceAnalysis, TraceDiff, execution_trace
from etloom.compat.hta.frames import shorten_kernel_name

HOST, DEVICE = (10, 11), (0, 7)


def write_trace(path: Path, events: list[dict[str, Any]], rank: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**small_traces.kineto(rank, world=2), "traceEvents": events}))
    return path


def annotation(name: str, ts: float, dur: float) -> dict[str, Any]:
    return complete_event("user_annotation", name, ts, dur, *HOST)


@pytest.mark.parametrize(
    "name",
    ["## forward ##", "autograd::engine::evaluate_function: MulBackward0", "Memcpy HtoD (a -> b)", "a b"],
)
def test_names_without_brackets_are_unchanged(name: str) -> None:
    assert shorten_kernel_name(name) == name


def test_short_names_do_not_merge_annotations(tmp_path: Path) -> None:
    events = [
        annotation("ProfilerStep#3", 0, 100),
        annotation("## forward ##", 1, 10),
        annotation("## backward ##", 20, 30),
        complete_event("cpu_op", "SigmoidBackward0", 21, 5, *HOST),
        complete_event("cpu_op", "autograd::engine::evaluate_function: SigmoidBackward0", 20.5, 6, *HOST),
    ]
    folder = write_trace(tmp_path / "a" / "kineto_trace_0.json", events).parent
    table = TraceDiff.compare_traces(str(folder), str(folder), use_short_name=True)
    assert table["Control_counts"].tolist() == [1] * 5
    assert {"## forward ##", "## backward ##"} <= set(table.index)


def test_allowed_annotations_keep_their_rows(tmp_path: Path) -> None:
    durations = {"large": 50, "medium": 20, "small one": 3, "small two": 2, "tiny": 1}
    starts = range(0, 1000, 100)
    events = [annotation(name, ts, dur) for (name, dur), ts in zip(durations.items(), starts, strict=False)]
    analyzer = TraceAnalysis(trace_files=[str(write_trace(tmp_path / "t.json", events))])
    options: dict[str, Any] = {"use_gpu_annotation": False, "num_kernels": 1, "duration_ratio": 1.0}
    table = analyzer.get_gpu_user_annotation_breakdown(**options, allowlist_patterns=["small", "not there"])
    sums = table.set_index("name")["sum (us)"].to_dict()
    assert sums == {"large": 50, "small one": 3, "small two": 2, "others": 21}
    without = analyzer.get_gpu_user_annotation_breakdown(**options, allowlist_patterns=[])
    assert without.set_index("name")["sum (us)"].to_dict() == {"large": 50, "others": 26}


@pytest.mark.slow
@pytest.mark.parametrize("count", [-1, 0, 1])
def test_at_least_one_candidate(data: Path, count: int) -> None:
    files = {rank: next((data / "dlrm").glob(f"kineto_trace_{rank}*")) for rank in range(2)}
    analyzer = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
    assert len(analyzer.get_potential_stragglers(num_candidates=count)) == 1


def kernel(name: str, ts: float, dur: float, correlation: int, **args: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation, **args}
    return complete_event("kernel", name, ts, dur, *DEVICE, **args)


@pytest.mark.parametrize("streams", [None, [], [7], [999]])
def test_idle_statistics_without_gaps(tmp_path: Path, streams: list[int] | None) -> None:
    path = write_trace(tmp_path / "t.json", [kernel("gemm", 1, 5, 1), kernel("gemm", 6, 5, 2)])
    analyzer = TraceAnalysis(trace_files={0: path})
    breakdown, stats = analyzer.get_idle_time_breakdown(streams=streams, show_idle_interval_stats=True)
    assert breakdown["idle_time"].sum() == 0 and len(stats) == 0
    assert set(breakdown["stream"]) == ({7} if streams != [999] else set())
    statistics = ["count", "mean", "std", "min", "25%", "50%", "75%", "max"]
    assert list(stats.columns) == ["rank", "stream", *statistics] and stats.index.name == "idle_category"


def test_no_streams_means_all_that_are_stated(tmp_path: Path) -> None:
    events = [kernel("gemm", ts, 5, ts) for ts in (10, 20)]
    copies = [complete_event("gpu_memcpy", "copy", ts, 5, 0, 9, device=0) for ts in (10, 40)]
    analyzer = TraceAnalysis(trace_files={0: write_trace(tmp_path / "t.json", [*events, *copies])})
    everything, _ = analyzer.get_idle_time_breakdown()
    listed, stats = analyzer.get_idle_time_breakdown(streams=[], show_idle_interval_stats=True)
    # Activity without a stream is on that of its thread.
    assert set(everything["stream"]) == set(listed["stream"]) == set(stats["stream"]) == {7, 9}
    assert everything["stream"].dtype.kind == "i" and listed["idle_time"].sum() == 5 + 25


def test_annotations_have_an_empty_schema(data: Path) -> None:
    folder = data / "simple_add"
    analyzer = TraceAnalysis(trace_files=[folder / "benchmark_simple_add_trace.json.gz"])
    et = execution_trace.load_execution_trace(folder / "benchmark_simple_add_et.json.gz")
    execution_trace.correlate_execution_trace(analyzer.t, 0, et)
    df = analyzer.t.get_trace(0).copy()
    execution_trace.add_et_column(df, et, "op_schema")
    schemas = df.dropna(subset=["et_node"])["op_schema"]
    assert schemas.notna().all() and (schemas == "").any() and (schemas != "").any()
    assert df[df["et_node"].isna()]["op_schema"].isna().all()


def test_delays_of_mtia_operators(tmp_path: Path) -> None:
    events = []
    for i, ts in enumerate((0, 100), start=1):
        events += [
            complete_event("cpu_op", "aten::mul", ts, 20, *HOST),
            complete_event("mtia_runtime", "runFunction - job_launch", ts + 4, 10, *HOST, correlation=i),
            complete_event("mtia_ccp_events", "job_exe", ts + 30, 8, *DEVICE, stream=7, correlation=i),
        ]
    analyzer = TraceAnalysis(trace_files={0: write_trace(tmp_path / "t.json", events)})
    (row,) = analyzer.get_aten_op_kernels_and_delay()[0].to_dict("records")
    assert (row["aten_op_name"], row["kernel_sequence"], row["occurrence_count"]) == (
        "aten::mul",
        "job_exe",
        2,
    )
    assert (row["avg_aten_op_launch_delay"], row["avg_runtime_delay"]) == (4, 26)


@pytest.mark.slow
def test_files_as_a_list_by_relative_names_and_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    events = small_traces.kineto()["traceEvents"]
    first = write_trace(tmp_path / "run" / "a.json", events, rank=3)
    second = write_trace(tmp_path / "run" / "b.json", events, rank=5)
    assert TraceAnalysis(trace_files=[str(second), first]).t.get_ranks() == [3, 5]
    relative = TraceAnalysis(trace_files={0: "a.json", 1: "b.json"}, trace_dir=str(tmp_path / "run"))
    assert relative.t.get_ranks() == [0, 1]
    assert TraceAnalysis(trace_dir="~/run").t.get_ranks() == [3, 5]
    assert TraceAnalysis(trace_files={4: "~/run/a.json"}).t.get_ranks() == [4]
    assert LabeledTrace("a", trace_dir="~/run").ranks() == [3, 5]
    again = write_trace(tmp_path / "run" / "c.json", events, rank=3)
    with pytest.raises(ValueError, match=r"is a second file of rank 3; the first is a\.json"):
        TraceAnalysis(trace_files=[first, again])


def test_bad_values_are_value_errors(tmp_path: Path) -> None:
    write_trace(tmp_path / "run" / "kineto_trace_0.json", small_traces.kineto()["traceEvents"])
    labeled = LabeledTrace("a", trace_dir=str(tmp_path / "run"))
    calls: list[Any] = [
        lambda: labeled.extract_ops(rank="bad"),
        lambda: labeled.extract_ops(rank=7),
        lambda: labeled.extract_ops(iteration="bad"),
        lambda: labeled.extract_ops(iteration=[99]),
        lambda: LabeledTrace("b"),
        lambda: LabeledTrace("b", trace_dir=str(tmp_path / "no such folder")),
        lambda: labeled.t.get_trace(7),
        lambda: TraceAnalysis(trace_dir=tmp_path / "run").get_potential_stragglers(profiler_steps=[99]),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        assert isinstance(error.value, EtloomError)
    with pytest.raises(ValueError, match="contains no rank 'bad'"):
        labeled.extract_ops(rank="bad")


@pytest.mark.slow
def test_extracted_operators_have_the_index_of_the_frame(data: Path) -> None:
    labeled = LabeledTrace("a", trace_dir=data / "hta_multirank")
    step = labeled.iterations()[1]
    single, several = labeled.extract_ops(1, step), labeled.extract_ops([0, 1], step)
    frame = labeled.t.get_trace(1)
    assert single.equals(frame[frame["iteration"] == step])
    assert several.columns[:3].tolist() == ["rank", "idx", "index"]
    assert several.loc[several["rank"] == 1, "idx"].tolist() == single.index.tolist()


def test_the_run_states_its_files_and_finds_names(tmp_path: Path) -> None:
    events = [annotation("work.a", 0, 9), annotation("work+b", 10, 9), annotation("rest", 20, 9)]
    file = write_trace(tmp_path / "t.json", events)
    run = TraceAnalysis(trace_files={0: file}).t
    assert run.trace_files == {0: str(file)} and run.is_parsed
    names = run.symbol_table.find_matched_symbols(["work+", "st"])
    assert set(names) == {"work+b", "rest"}
    assert [
        run.symbol_table.sym_table[number] for number in run.symbol_table.find_matches(["work+", "st"])
    ] == names


def test_names_that_notebooks_import() -> None:
    import pandas as pd

    from etloom.compat.hta import CUDA_SASS_INSTRUCTION_COUNTER_FLOPS, flatten_column_names, shorten_name

    assert shorten_name("void f<int>(int)") == "f"
    df = pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("dur", "sum"), ("name", "")]))
    flatten_column_names(df)
    assert list(df.columns) == ["dur_sum", "name"]
    flatten_column_names(df)
    assert list(df.columns) == ["dur_sum", "name"]
    flops = CUDA_SASS_INSTRUCTION_COUNTER_FLOPS
    assert len(flops) == 9 and flops["smsp__sass_thread_inst_executed_op_hfma_pred_on.sum"] == 2
    assert flops["smsp__sass_thread_inst_executed_op_dadd_pred_on.sum"] == 1


@pytest.mark.parametrize("quantity", ["counts", "duration"])
def test_differences_are_drawn(tmp_path: Path, quantity: str) -> None:
    pytest.importorskip("altair", reason="Altair is not installed")
    folder = write_trace(tmp_path / "a" / "kineto_trace_0.json", small_traces.kineto()["traceEvents"]).parent
    table = TraceDiff.compare_traces(str(folder), str(folder))
    draw = getattr(TraceDiff, f"visualize_{quantity}_diff")
    draw(table, show_image=False, export_image_path=str(tmp_path / "chart.json"))
    chart = json.loads((tmp_path / "chart.json").read_text())
    (rows,) = chart["datasets"].values()
    assert {row["trace"] for row in rows} == {"Control", "Test", "Difference"} and len(rows) == 3 * len(table)
    assert sum(row["value"] for row in rows if row["trace"] == "Difference") == 0
    with pytest.raises(ValueError, match="pass the result of compare_traces"):
        draw(table[["diff_counts"]], show_image=False)


@pytest.mark.slow
def test_kernels_with_annotations_are_numbered_as_in_hta(data: Path) -> None:
    work = TraceAnalysis(trace_dir=data / "nccl_ddp").get_gpu_kernels_with_user_annotations(0)
    assert work.index.tolist() == list(range(len(work)))
    assert work.columns[work.columns.get_loc("dur") + 1] == "end"
    complete = TraceAnalysis(trace_dir=data / "nccl_ddp").get_gpu_kernels_with_user_annotations(
        0, shortern_names=False
    )
    assert complete["s_name"].str.contains("<").any() and not work["s_name"].str.contains("<").any()


def test_overlays_contain_the_trace_outside_the_annotation(tmp_path: Path) -> None:
    inside = [annotation("work", 100, 100), complete_event("cpu_op", "aten::mul", 110, 50, *HOST)]
    outside = [complete_event("cpu_op", "aten::add", 300, 50, *HOST), annotation("later", 400, 10)]
    analyzer = TraceAnalysis(trace_files={0: write_trace(tmp_path / "t.json", [*inside, *outside])})
    graph, _ = analyzer.critical_path_analysis(0, "work")
    names = {}
    for only in (True, False):
        path = analyzer.overlay_critical_path_analysis(
            0, graph, tmp_path / str(only), only_show_critical_events=only
        )
        events = json.loads(Path(path).read_text())["traceEvents"]
        names[only] = {event["name"] for event in events if event["ph"] == "X"}
    assert {"work", "aten::mul", "later"} <= names[True] and "aten::add" not in names[True]
    assert names[False] == names[True] | {"aten::add"}


@pytest.mark.slow
def test_the_arrows_of_an_overlay_are_htas(tmp_path: Path) -> None:
    """The host waits for a kernel. Times in the overlay begin with the first event, at 100 us here."""
    correlated = {"correlation": 1}
    events = [
        annotation("work", 100, 200),
        complete_event("cuda_runtime", "cudaLaunchKernel", 110, 20, *HOST, **correlated),
        complete_event("cuda_runtime", "cudaStreamSynchronize", 135, 125, *HOST, correlation=2),
        complete_event("kernel", "k", 150, 100, *DEVICE, stream=7, device=0, **correlated),
        complete_event("cuda_sync", "Stream Sync", 136, 124, *DEVICE, stream=7, correlation=2),
        complete_event("cpu_op", "aten::other", 400, 10, *HOST),
    ]
    analyzer = TraceAnalysis(trace_files={0: write_trace(tmp_path / "t.json", events)})
    graph, _ = analyzer.critical_path_analysis(0, "work", None)
    arrows = {}
    for all_edges in (False, True):
        path = analyzer.overlay_critical_path_analysis(
            0, graph, tmp_path / str(all_edges), only_show_critical_events=False, show_all_edges=all_edges
        )
        arrows[all_edges] = [
            (event["ph"], event["ts"], *event["args"].values())
            for event in json.loads(Path(path).read_text())["traceEvents"]
            if event.get("cat") == event["name"] == "critical_path"
        ]
    assert ("s", 29.999, "critical_path_kernel_launch_delay", 1, 20.0) in arrows[False]
    assert ("f", 50.0, "critical_path_kernel_launch_delay", 1, 20.0) in arrows[False]
    assert ("f", 159.999, "critical_path_sync_dependency", 1, 10.0) in arrows[False]
    assert all(critical for _, _, _, critical, _ in arrows[False])
    assert set(arrows[False]) < set(arrows[True])
    assert {critical for _, _, _, critical, _ in arrows[True]} == {0, 1}


def test_a_saved_critical_path_is_restored(tmp_path: Path) -> None:
    from etloom.compat.hta import restore_cpgraph

    events = [annotation("work", 100, 100), complete_event("cpu_op", "load", 110, 50, *HOST)]
    events.append(complete_event("cpu_op", "aten::add", 300, 50, *HOST))
    analyzer = TraceAnalysis(trace_files={0: write_trace(tmp_path / "t.json", events)})
    graph, _ = analyzer.critical_path_analysis(0, "work", data_load_events=["load"])
    file = graph.save(str(tmp_path / "saved" / "graph"))
    assert file == str(tmp_path / "saved" / "graph.zip")
    again = restore_cpgraph(file, analyzer.t, 0)
    assert again.get_critical_path_breakdown().equals(graph.get_critical_path_breakdown())
    assert again.summary().equals(graph.summary()) and "data_loading" in again.summary()
    assert again.job[0].events.equals(graph.job[0].events)
    (tmp_path / "text.zip").write_text("not a zip file")
    with pytest.raises(EtloomError, match="is not a saved critical path"):
        restore_cpgraph(tmp_path / "text.zip", analyzer.t, 0)
    with pytest.raises(ValueError, match="unknown rank 5"):
        restore_cpgraph(file, analyzer.t, 5)
