"""A part of a run: what is kept, what hangs on what afterwards, and parts that make up the whole."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import etloom
from etloom import cli, linker
from etloom.core.errors import AnalysisError, InvalidValue
from etloom.core.schema import TABLES
from etloom.core.text import TimeRange, parse_time_range
from etloom.core.trace import Job, Trace
from etloom.linker import selection
from support import small_traces
from support.examples import examples
from support.random_traces import LinkedTraceGenerator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_traces.write_run(tmp_path_factory.mktemp("selection") / "run")


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    """Step 3 from 0 to 1000 us; aten::linear 100-500, aten::mm in it 150-400, launches at 200 and 550 us."""
    return etloom.open(folder, use_cache=False)


def names(trace: Trace) -> list[str]:
    return trace.events["name"].cast(pl.String).sort().to_list()


def made(seed: int) -> Trace:
    return linker.link(LinkedTraceGenerator(random.Random(seed)).linked.host())


def whole(trace: Trace) -> None:
    """Every reference to an event reaches one, and depths are those of the parents."""
    ids = set(trace.events["id"])
    for name, table in trace.tables.items():
        for column in TABLES[name].columns:
            if column.refers == "events":
                assert set(table[column.name].drop_nulls()) <= ids, (name, column.name)
    depth = dict(trace.events.select("id", "depth").rows())
    for parent, level in (
        trace.events.filter(pl.col("depth").is_not_null()).select("parent", "depth").iter_rows()
    ):
        assert level == (0 if parent is None or depth[parent] is None else depth[parent] + 1)


def test_a_selection_without_filters_returns_the_run_itself(job: Job) -> None:
    assert selection.select_part(job) is job


def test_ranks(job: Job) -> None:
    assert selection.select_part(job, ranks=[1]).ranks == [1]
    with pytest.raises(AnalysisError, match="unknown rank 7"):
        selection.select_part(job, ranks=[1, 7])


def test_a_selected_name_keeps_enclosed_and_launched_events(job: Job) -> None:
    part = selection.select_part(job, names=["aten::linear"])[0]
    assert names(part) == ["ProfilerStep#3", "aten::linear", "aten::mm", "cudaLaunchKernel", "gemm"]
    whole(part)
    top = etloom.analyze(part, "top-ops").filter(pl.col("name") == "aten::linear").row(0, named=True)
    same = etloom.analyze(job[0], "top-ops").filter(pl.col("name") == "aten::linear").row(0, named=True)
    assert (top["self_ns"], top["device_ns"]) == (same["self_ns"], same["device_ns"]) == (150_000, 600_000)


def test_selecting_a_kernel_keeps_only_its_call(job: Job) -> None:
    part = selection.select_part(job, names=["nccl*"])[0]
    assert names(part) == ["ProfilerStep#3", "cudaLaunchKernel", "ncclDevKernel_AllReduce_Sum"]
    whole(part)
    assert etloom.analyze(part, "launches")["call_ns"].to_list() == [20_000]


def test_events_without_their_parent_get_the_next_enclosing_one(job: Job) -> None:
    part = selection.select_part(job, names=["gemm"])[0]
    step, call, _ = part.events.sort("ts").iter_rows(named=True)
    assert (step["name"], call["name"]) == ("ProfilerStep#3", "cudaLaunchKernel")
    assert (call["parent"], call["depth"]) == (step["id"], 1)
    assert part.launches["operator"].to_list() == [None]


def test_categories_and_kinds(job: Job) -> None:
    assert names(selection.select_part(job, categories=["cpu_op"])[0]) == [
        "ProfilerStep#3",
        "aten::linear",
        "aten::mm",
    ]
    part = selection.select_part(job, categories=["communication"])[0]
    assert names(part) == ["ProfilerStep#3", "cudaLaunchKernel", "ncclDevKernel_AllReduce_Sum"]
    with pytest.raises(AnalysisError, match=r"unknown category 'kernels'.*known: .*kernel"):
        selection.select_part(job, categories=["kernels"])


def test_time_counts_from_the_first_event_and_selects_by_begin(job: Job) -> None:
    part = selection.select_part(job, time=(100_000, 300_000))[0]
    assert names(part) == ["aten::linear", "aten::mm", "cudaLaunchKernel"]
    whole(part)
    assert names(selection.select_part(job, time=(None, 1))[0]) == ["ProfilerStep#3"]
    with pytest.raises(AnalysisError, match="no event of ranks 0, 1 begins in that time"):
        selection.select_part(job, time=(2_000_000, None))


def test_events_of_the_profiler_itself_do_not_count_for_the_time_of_a_run(tmp_path: Path) -> None:
    """Kineto's span of the recording begins 50 us before the work (100 to 1100 us) and outlasts it; so do its marks."""
    run = small_traces.kineto()
    run["traceEvents"] += [
        small_traces.complete_event("Trace", "PyTorch Profiler (0)", 50, 5000, "Spans", "PyTorch Profiler"),
        {
            "ph": "i",
            "s": "g",
            "name": "Iteration Start: PyTorch Profiler",
            "pid": "Traces",
            "tid": "T",
            "ts": 50,
        },
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9000},
    ]
    path = tmp_path / "kineto_trace_0.json"
    path.write_text(json.dumps(run))
    part = selection.select_part(etloom.open(path, use_cache=False), time=(100_000, 300_000))
    assert names(part[0]) == ["aten::linear", "aten::mm", "cudaLaunchKernel"]
    out = CliRunner().invoke(cli.app, ["info", str(path), "--no-cache", "--format", "json"])
    told = json.loads(out.stdout)
    assert (told["start_ns"], told["span_ns"]) == (small_traces.BASE_NS + 100_000, 1_000_000)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            {"names": ["zzz"]},
            "no event of ranks 0, 1 has a name that matches 'zzz'; patterns match the whole name ",
        ),
        ({"names": ["zzz", "gem"]}, "no event of ranks 0, 1 has a name that matches 'zzz' or 'gem'; "),
        ({"names": ["zzz"], "ranks": [1]}, "no event of rank 1 has a name that matches 'zzz'; "),
        ({"step": 99}, "unknown step 99 of ranks 0, 1; there is 3"),
        ({"step": 3, "names": ["zzz"]}, "no event of ranks 0, 1 has a name that matches 'zzz'; "),
        ({"categories": ["other"]}, "no event of ranks 0, 1 is of category 'other'; choose another category"),
        (
            {"names": ["gemm"], "categories": ["communication"]},
            "no event of ranks 0, 1 matches all filters (name, category), although each filter matches some; "
            "leave one out",
        ),
        (
            {"names": ["gemm"], "time": (0, 1000)},
            "no event of ranks 0, 1 matches all filters (name, time), although each filter matches some; leave one out",
        ),
    ],
)
def test_unmatched_filters_are_named(job: Job, filters: dict[str, object], message: str) -> None:
    with pytest.raises(AnalysisError) as raised:
        selection.select_part(job, **filters)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)


def test_a_category_of_one_rank_is_one_of_the_run(job: Job) -> None:
    bare = job[1].replace(
        events=job[1].events.filter(pl.col("cat").cast(pl.String) != "kernel"),
        launches=TABLES["launches"].empty(),
    )
    part = selection.select_part(Job({0: job[0], 1: bare}), categories=["kernel"])
    assert [names(part[rank])[-1] for rank in part] == ["ncclDevKernel_AllReduce_Sum", "ProfilerStep#3"]


@pytest.mark.slow
def test_the_error_of_an_analysis_names_filters_that_cause_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def err(*arguments: str) -> tuple[int, str]:
        status = cli.main(["analyze", arguments[0], str(folder), *arguments[1:]])
        return status, capsys.readouterr().err

    assert err("imbalance", "--rank", "1", "--name", "*") == (
        1,
        "etloom: imbalance needs at least two ranks (within --rank 1 --name *); the analysis works without "
        "these filters\n",
    )
    status, said = err("module-view", "--rank", "1")
    assert status == 1 and "leaves of the run" not in said, "the whole run has no modules either"
    status, said = err("kernel-breakdown", "--name", "zzz")
    assert status == 1 and said.startswith("etloom: no event of ranks 0, 1 has a name that matches 'zzz'")
    status, said = err("kernel-sequences", "--rank", "1", "--min-length", "9")
    assert status == 0 and said.endswith("--min-length kernels (within --rank 1)\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10ms:1.5s", (10_000_000, 1_500_000_000)),
        ("250us:", (250_000, None)),
        (":7ns", (None, 7)),
        (":", (None, None)),
    ],
)
def test_a_stretch_of_time(text: str, expected: TimeRange) -> None:
    assert parse_time_range(text) == expected


@pytest.mark.parametrize("text", ["", "10:20", "2ms:1ms", "1ms", "a:b", "1.2.3ms:", "1ms:1ms"])
def test_no_stretch_of_time(text: str) -> None:
    with pytest.raises(InvalidValue, match="START:END"):
        parse_time_range(text)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_stretches_share_out_the_events(seed: int, cuts: list[float]) -> None:
    trace = made(seed)
    length = trace.events["ts"].max() - trace.events["ts"].min() + 1
    borders = [None, *sorted({round(cut * length) for cut in cuts} - {0}), None]
    seen: list[int] = []
    for window in pairwise(borders):
        try:
            part = selection.select_part(Job({0: trace}), time=window)[0]
        except AnalysisError:
            continue
        whole(part)
        seen += part.events["id"].to_list()
    assert sorted(seen) == sorted(trace.events["id"])


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(0, 10**6), st.sampled_from(["aten::a*", "*", "work", "anyLaunch", "aten::[bc]1"]))
def test_selecting_by_name_again_changes_nothing_and_a_star_selects_all(seed: int, glob: str) -> None:
    trace = made(seed)
    try:
        part = selection.select_part(Job({0: trace}), names=[glob])
    except AnalysisError:
        return
    whole(part[0])
    again = selection.select_part(part, names=[glob])
    assert_frame_equal(again[0].events, part[0].events)
    if glob == "*":
        assert_frame_equal(part[0].events, trace.events)


def test_from_the_command_line(folder: Path) -> None:
    asked = ["analyze", "launches", str(folder), "--rank", "1", "--name", "aten::linear", "--format", "csv"]
    run = CliRunner().invoke(cli.app, [*asked, "--time", "100us:400us"])
    assert run.exit_code == 0, run.output
    assert len(run.stdout.splitlines()) == 2
    assert "gemm" in run.stdout
    assert "START:END" in CliRunner().invoke(cli.app, [*asked, "--time", "5"]).output


def test_from_python(job: Job) -> None:
    part = etloom.select(job, rank=1, name="aten::linear", time="100us:400us")
    assert part.ranks == [1]
    assert names(part[1]) == ["aten::linear", "aten::mm", "cudaLaunchKernel", "gemm"]
    assert names(etloom.select(job, rank=[0, 1], category=["communication"])[0]) == [
        "ProfilerStep#3",
        "cudaLaunchKernel",
        "ncclDevKernel_AllReduce_Sum",
    ]
    assert etloom.select(job, step=3, time=(0, 10**9)).ranks == [0, 1]


def test_a_trace_s_part_is_a_trace(folder: Path) -> None:
    read = etloom.read(folder / "kineto_trace_1.json")
    assert isinstance(read, Trace)
    assert read.meta.get("linked") is None
    part = etloom.select(read, name=["gemm"], rank=1)
    assert isinstance(part, Trace)
    assert names(part) == ["ProfilerStep#3", "cudaLaunchKernel", "gemm"]
    assert etloom.analyze(part, "launches").height == 1
    with pytest.raises(AnalysisError, match="unknown rank 0"):
        etloom.select(read, rank=0)


@pytest.mark.slow
def test_every_analysis_takes_every_filter(data: Path) -> None:
    run = etloom.open(data / "hta_multirank")
    for filters in (
        {"ranks": [1]},
        {"step": 551},
        {"time": (0, 300_000_000)},
        {"names": ["*All2All*", "## backward ##"]},
        {"categories": ["kernel"]},
    ):
        part = selection.select_part(run, **filters)
        for trace in part.values():
            whole(trace)
        for name in etloom.core.registry.list_plugins("analyses"):
            try:
                etloom.analyze(part, name)
            except AnalysisError as error:
                assert error.remedy
