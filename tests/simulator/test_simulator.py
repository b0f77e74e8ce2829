"""What-if: the language, its answers against simulating anew, and the retimed job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom import _native
from etloom.analyses.helpers import dependency_graph
from etloom.analyses.kernel_families import classify_kernels
from etloom.cli import app, main
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.text import format_duration
from etloom.graphs import algorithms, build_graph, critical_paths
from etloom.graphs.graph import EdgeKind
from etloom.reports.summary import summarize_run
from etloom.simulator import (
    Change,
    Network,
    NoStraggler,
    RemoveSync,
    parse_change,
    recorded_run,
)
from etloom.simulator import simulate as simulate_with
from etloom.simulator.changed_lags import Lags, ScaleLags, SetLags, scale_lags
from etloom.simulator.changes import AnyChange, parse_duration_ns, parse_factor
from etloom.simulator.engine import _Schedule
from etloom.simulator.recorded_run import get_recorded_run
from support import simulated_jobs as jobs
from support import small_traces
from support.examples import slow_after
from support.real_runs import open_run
from support.simulated_jobs import FLOORS, World, event_times, true_times

LAWS: dict[str, tuple[World, AnyChange]] = {
    "kernels": (World(kernel=0.5), parse_change("kernel x0.5")),
    "communication": (World(transfer=0), parse_change("comm x0")),
    "host": (World(host=0.5), parse_change("host x0.5")),
    "launch": (World(launch=0), parse_change("launch =0ns")),
    "no sync": (World(syncs=False), RemoveSync("*")),
}


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("comm x0", Change("comm", times=0.0)),
        ("kernel:*gemm* x0.5", Change("kernel", "*gemm*", times=0.5)),
        (
            "op:aten::item step=5 rank=0 =20us",
            Change("op", "aten::item", {"step": "5", "rank": "0"}, to_ns=20_000),
        ),
        ("launch -1.5us", Change("launch", plus_ns=-1_500)),
        ("stream + 3ns", Change("stream", plus_ns=3)),
        (" sync   = 1ms ", Change("sync", to_ns=1_000_000)),
    ],
)
def test_the_language(text: str, change: Change) -> None:
    found = parse_change(text)
    assert (found.target, found.name, found.filters, found.times, found.to_ns, found.plus_ns) == (
        *(change.target, change.name, change.filters),
        *(change.times, change.to_ns, change.plus_ns),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kernels x2", "character 1: unknown target 'kernels'"),
        ("kernel: x2", "character 8: expected a name after the colon"),
        ("kernel", "character 7: the change is missing"),
        ("comm fast", "character 6: expected a change, got 'fast'"),
        ("comm x2 x3", "character 9: unexpected 'x3' after the change"),
        ("comm rank=two x2", "character 6: expected an integer, got rank=two"),
        ("comm rank=--5 x2", "character 6: expected an integer, got rank=--5"),
        (f"comm step={10**20} x2", "character 6: expected an integer, got step=100000000000000000000"),
        ("comm x1000001", "character 6: x1000001 is too large; at most x1e+06"),
        (f"comm x{'9' * 400}", "is too large"),
        ("comm =1000001s", "character 6: =1000001s is too large; at most 1e+06s"),
        (f"comm +{'9' * 400}s", "is too large"),
        ("", "character 1: unknown target ''"),
    ],
)
def test_the_error_of_unparsable_input_names_its_position(text: str, said: str) -> None:
    with pytest.raises(EtloomError) as raised:
        parse_change(text)
    assert said in str(raised.value)


@given(st.text(max_size=30))
def test_any_text_is_a_change_or_an_error(text: str) -> None:
    try:
        assert isinstance(parse_change(text), Change)
    except EtloomError as error:
        assert error.remedy


def test_factors_and_times() -> None:
    assert (parse_factor("2x"), parse_factor("x0.5"), parse_factor("3")) == (2.0, 0.5, 3.0)
    assert (parse_duration_ns("20us"), parse_duration_ns("1.5 ms")) == (20_000, 1_500_000)
    odd = (
        (parse_factor, "0"),
        (parse_factor, "0.0000001"),
        (parse_factor, "9" * 400),
        (parse_factor, "fast"),
    )
    for parsed, bad in (
        *odd,
        (parse_duration_ns, "20"),
        (parse_duration_ns, "-1us"),
        (parse_duration_ns, f"{'9' * 400}s"),
    ):
        with pytest.raises(EtloomError):
            parsed(bad)


@pytest.mark.slow
def test_times_that_fit_no_clock_are_refused() -> None:
    job = jobs.job_of(jobs.simulate(jobs.programs(0)))
    for texts in (("host x1000000",) * 3, ("host =1000000s", "host x1000000")):
        with pytest.raises(EtloomError, match="makes times exceed 64 bits"):
            simulate_with(job, [parse_change(text) for text in texts])


@pytest.mark.slow
def test_removed_operations_stay_removed() -> None:
    job = jobs.job_of(jobs.simulate(jobs.programs(0)))
    found = build_graph(job, FLOORS)
    without = simulate_with(job, [RemoveSync("*")], found)
    for text in ("sync +3us", "sync =20us", "sync x2"):
        again = simulate_with(job, [RemoveSync("*"), parse_change(text)], found)
        assert (again.upper_bound == without.upper_bound).all()


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("seed", slow_after(1, range(6)))
@pytest.mark.slow
def test_a_change_is_answered_to_the_nanosecond(seed: int, name: str) -> None:
    world, change = LAWS[name]
    programs = jobs.programs(seed)
    ranks = jobs.simulate(programs)
    job = jobs.job_of(ranks)
    done = simulate_with(job, [change], build_graph(job, FLOORS))
    expected = true_times(ranks, job, world, programs)
    for times in (done.upper_bound, done.lower_bound):
        assert event_times(done.graph.graph, times) == expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_the_retimed_job_has_the_times_of_simulating_again(seed: int) -> None:
    world, change = LAWS["kernels"]
    programs = jobs.programs(seed)
    job = jobs.job_of(jobs.simulate(programs))
    done = simulate_with(job, [change], build_graph(job, FLOORS))
    again = done.job
    for rank, trace in jobs.job_of(jobs.simulate(programs, world)).items():
        timed = (pl.col("cat") != "cuda_sync") & pl.col("dur").is_not_null()
        columns = pl.col("cat", "name").cast(pl.String), pl.col("ts", "dur", "correlation", "stream")
        ours, true = (
            one.events.filter(timed).select(*columns).sort("ts", "dur", "name", "correlation")
            for one in (again[rank], trace)
        )
        assert ours.equals(true)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "cpu/pp_4", "nccl_ddp", "tracelens/mi300_qwen.json.gz"])
def test_a_change_to_nothing_changes_nothing(data: Path, name: str) -> None:
    job = open_run(data / name)
    done = etloom.simulate(job, "kernel x1" if "pp_4" not in name else "host x1")
    assert np.array_equal(done.upper_bound, done.recorded)
    assert np.array_equal(done.lower_bound, done.recorded)
    assert done.table["upper_bound_change_pct"].to_list() == [0.0] * done.table.height
    same = done.job
    for rank, trace in job.items():
        assert (
            same[rank]
            .events.select("id", "ts", "dur", "name")
            .equals(trace.events.select("id", "ts", "dur", "name"))
        )
        assert same[rank].launches.equals(trace.launches)
        assert same[rank].flows.equals(trace.flows)


def test_four_ranks_of_dlrm_gain_little_from_a_free_network(data: Path) -> None:
    job = open_run(data / "dlrm")
    done = etloom.simulate(job, "comm x0")
    assert done.table.row(0, named=True)["upper_bound_change_pct"] == pytest.approx(-2.30, abs=0.05)
    for rank, before in done.table.filter(scope="step").select("rank", "before_ns").iter_rows():
        marks = job[rank].events.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep"))
        assert before >= marks["dur"].item()
    said = " ".join(done.reasons)
    assert "ranks wait 16.56 ms for other ranks" in said
    assert "4 of 8 ranks were recorded" in said
    assert "the critical path was 61 % host operators and calls, 34 % later start of a recording, " in said
    assert "a faster network shortens only the transfers" in said
    alone = etloom.simulate(job[0], "comm x0")
    assert alone.table["upper_bound_change_pct"][0] < -5
    assert "their time may include waits" in " ".join(alone.reasons)


@pytest.mark.slow
def test_memcpys_that_fill_the_queue_of_the_device(data: Path) -> None:
    run = etloom.open(data / "nsys" / "h100_2gpu_1s.sqlite.gz", use_cache=False)
    done = etloom.simulate(run, parse_change("copy x0.5"))
    assert done.graph.counts[1]["lost_waits"] == 0
    # The copies are 97 % of the critical path of either rank.
    assert done.table["upper_bound_change_pct"].to_list() == pytest.approx([-48.5] * 3, abs=0.1)


@pytest.mark.slow
def test_a_recording_that_is_not_explained_is_not_predicted(data: Path) -> None:
    sampled = open_run(data / "hta_multirank")
    message = r"no prediction: the graph does not explain the recording \(rank 0, 63 % of the kernel starts"
    for predict in (
        lambda: etloom.simulate(sampled, "kernel x0.5"),
        lambda: etloom.predict(sampled, device="h100"),
    ):
        with pytest.raises(AnalysisError, match=message):
            predict()
    few = etloom.simulate(open_run(data / "simple_add"), "kernel x0.5")
    assert few.reasons[0].startswith(
        "doubtful: the graph does not explain the recording (rank 0, only 4 kernel"
    )
    whole = etloom.simulate(open_run(data / "dlrm"), "comm x0")
    assert "doubtful" not in " ".join(whole.reasons)


def test_bandwidth_leaves_latency(data: Path) -> None:
    job = open_run(data / "dlrm")
    twice, free = etloom.simulate(job, Network(2.0)), etloom.simulate(job, "comm x0")
    same = etloom.simulate(job, Network(1.0))
    assert free.upper_bound.max() <= twice.upper_bound.max() <= same.upper_bound.max()
    assert np.array_equal(same.upper_bound, same.recorded)


@pytest.mark.parametrize(
    "change", ["kernel x0.5", "kernel:Cijk_* x2", "stream =0us", "host +1us", "launch -1us"]
)
def test_no_lag_raised_means_no_point_later_and_back(data: Path, change: str) -> None:
    job = open_run(data / "tracelens/mi300_qwen.json.gz")
    done = etloom.simulate(job, change)
    slower = "x2" in change or "+" in change
    moved = done.upper_bound - done.recorded
    assert (moved >= 0).all() if slower else (moved <= 0).all()
    assert (done.lower_bound <= np.maximum(done.upper_bound, done.recorded)).all()


@pytest.mark.slow
def test_the_retimed_job_is_a_job(data: Path, tmp_path: Path) -> None:
    job = open_run(data / "tracelens/h100_qwen.json.gz")
    done = etloom.simulate(job, "kernel x0.5")
    faster = done.job
    (rank,) = faster
    events = faster[rank].events
    assert events["ts"].is_sorted()
    assert events["id"].to_list() == list(range(events.height))
    before, after = (
        etloom.analyze(one, "kernel-breakdown").group_by("name").agg(pl.col("total_ns").sum()).sort("name")
        for one in (job, faster)
    )
    assert before["name"].equals(after["name"])
    kernels = [one[rank].events.filter(pl.col("cat") == "kernel")["dur"].sum() for one in (job, faster)]
    assert kernels[1] == pytest.approx(kernels[0] / 2, rel=1e-3)
    for table in ("launches", "kernels", "arguments", "sync_dependencies"):
        assert faster[rank].table(table).height == job[rank].table(table).height
    names = (
        job[rank]
        .launches.join(job[rank].events, left_on="device_event", right_on="id")["name"]
        .cast(str)
        .sort()
    )
    kept = faster[rank].launches.join(events, left_on="device_event", right_on="id")["name"].cast(str).sort()
    assert names.equals(kept)
    etloom.export(faster, tmp_path / "faster.json.gz")
    etloom.export(faster, tmp_path / "faster.parquet")
    assert etloom.open(tmp_path / "faster.parquet")[rank].events.equals(events)


@pytest.mark.slow
def test_the_verb(data: Path, tmp_path: Path) -> None:
    run, out = str(data / "dlrm"), tmp_path / "free.parquet"
    done = CliRunner().invoke(
        app, ["simulate", run, "--set", "comm x0", "--format", "json", "--out", str(out)]
    )
    assert done.exit_code == 0
    assert json.loads(done.stdout)[0]["upper_bound_change_pct"] == pytest.approx(-2.30, abs=0.05)
    assert out.exists()


@pytest.mark.slow
def test_the_path_has_the_lines_of_the_report(data: Path) -> None:
    """Copies as copies, and all parts of one sum."""
    job = open_run(data / "nsys")
    done = etloom.simulate(job, "kernel x1")
    (said,) = [one for one in done.reasons if one.startswith("the critical path was ")]
    assert said == "the critical path was 97 % memcpy and memset, 2 % kernels"
    (told,) = [one for one in summarize_run(job).lines if one.topic == "Critical path"]
    assert (told.figure, told.text.split("; ")[1].split(", ")[0]) == (
        *("97.0 % memcpy and memset", "then 2.3 % kernels"),
    )


@pytest.mark.parametrize("name", ["dlrm", "cpu/ddp_2", None])
@pytest.mark.parametrize(
    "changes",
    [
        ("comm x0.5",),
        ("host x0.3",),
        ("host +3us", "op:aten::* x1.7", "host =2us"),
        ("kernel x0.5", "launch x0"),
        (NoStraggler(), "host x0.5"),
        (RemoveSync("*"), "sync x2"),
        ("host x0.7", Network(2.0), "comm x0.5"),
    ],
)
def test_figures_and_path_are_those_of_the_times_of_all_points(
    data: Path, name: str | None, changes: tuple[Any, ...]
) -> None:
    """The answers come from the contracted graph; here from all points and edges."""
    job = jobs.job_of(jobs.simulate(jobs.programs(0))) if name is None else open_run(data / name)
    try:
        done = etloom.simulate(job, *changes)
    except EtloomError:
        return  # a run without what is changed
    graph, times = done.graph.graph, (done.recorded, done.upper_bound, done.lower_bound)
    for row in done.table.iter_rows(named=True):
        mask = np.ones(len(graph), bool)
        if row["rank"] is not None:
            mask &= graph.rank == row["rank"]
        if row["step"] is not None:
            events = job[row["rank"]].events
            mask &= np.isin(graph.event, events.filter(pl.col("step") == row["step"])["id"].to_numpy())
        spans = [int(time[mask].max() - time[mask].min()) for time in times]
        before, *bounds = spans
        assert [before, max(bounds), min(bounds)] == [
            row["before_ns"], row["upper_bound_ns"], row["lower_bound_ns"]
        ]  # fmt: skip
    path = algorithms.find_longest_path(graph, time=done.upper_bound, lag=done.lag)
    before = done.upper_bound[graph.source[path[0]]] - done.upper_bound.min()
    parts = critical_paths.summarize_path(graph, job, path, done.lag[path], int(before))
    assert parts["time_ns"].sum() == algorithms.compute_makespan(graph, done.upper_bound)
    shares = critical_paths.format_path_shares(parts, digits=0, most=4, least_pct=0.5)
    assert f"it becomes {', '.join(shares)}" in done.reasons


@pytest.mark.slow
@pytest.mark.parametrize("fewest", [0, 10**9])
@pytest.mark.parametrize(
    "change",
    [
        *("host x0.37", "kernel =3us", "kernel -1us", "host +7ns", "host x1000", "kernel x0"),
        *("op:*m* x0.37", "host:*e* x0.5", "host rank=0 x0.5", "launch x0.3"),
    ],
)
def test_one_pass_over_recorded_lags_equals_the_steps(
    change: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_run, "MIN_GROUPED_EDGES", fewest)
    job = jobs.job_of(jobs.simulate(jobs.programs(0)))
    first, later = (_Schedule(get_recorded_run(job), job) for _ in range(2))
    nothing = np.zeros(0, np.int64)
    later.lags.append(SetLags(nothing.astype(np.int32), Lags(nothing, nothing, nothing)))
    for schedule in (first, later):
        schedule.apply(parse_change(change))
    for chains in ("upper", "lower"):
        assert np.array_equal(getattr(first, chains).total, getattr(later, chains).total)
    assert np.array_equal(first.upper.last, later.upper.last)
    assert first.residual_ns == later.residual_ns
    assert first.total_lower == pytest.approx(later.total_lower)


def test_the_lag_of_a_removed_edge_is_scaled_without_a_warning() -> None:
    with np.errstate(invalid="raise"):
        assert scale_lags(np.array([algorithms.REMOVED_LAG]), 1000.0).tolist() == [-(2**62)]


@given(st.integers(0, 2**62), st.floats(0, 1e6))
def test_lags_are_rounded_as_numpy_rounds(lag: int, factor: float) -> None:
    edge, none, lags = np.zeros(1, np.int32), np.zeros(1, np.uint8), np.array([lag])
    sums = np.zeros((3, 1), np.int64)
    usual = np.zeros(1, np.int64)
    _native.scale_chains(
        edge, edge, edge, lags, usual, none, usual, factor, None, 0, sums[0], sums[1], sums[2]
    )
    assert sums[1].tolist() == scale_lags(lags, factor).tolist()


def test_a_change_that_matches_nothing_is_an_error(data: Path) -> None:
    job = open_run(data / "cpu/ddp_2")
    for change in ("op:aten::no_such x2", "host rank=9 x2"):
        with pytest.raises(
            EtloomError, match=r"matches nothing in this run.*analyze critical-path \S*cpu/ddp_2 "
        ):
            etloom.simulate(job, change)
    with pytest.raises(EtloomError, match="this run has no GPU activities; change op, host, python or comm"):
        etloom.simulate(job, "kernel x0.5")
    with pytest.raises(EtloomError, match="waits for the device"):
        etloom.simulate(job, RemoveSync("aten::item"))
    assert EdgeKind.SYNC not in etloom.graph(job).graph.kind


def test_the_calls_that_a_change_matches_are_counted(data: Path) -> None:
    job = open_run(data / "cpu/ddp_2")
    for name in ("aten::addmm", "aten::add_", "aten::linear"):
        calls = [trace.events.filter(pl.col("name").cast(pl.String) == name)["dur"] for trace in job.values()]
        count, total = sum(map(len, calls)), sum(durations.sum() for durations in calls)
        expected = f"'op:{name} x0.5' matches {count} calls, {format_duration(total)} as recorded"
        assert expected in etloom.simulate(job, f"op:{name} x0.5").reasons
    counted = [line for line in etloom.simulate(job, "comm x0", "host x1").reasons if " matches " in line]
    assert len(counted) == 2 and counted[0].startswith("'comm x0' matches 4 calls, ")


@pytest.mark.slow
def test_a_path_through_unexplained_time_states_it(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulation of these runs is refused belief, and so is their path, here and in the report."""
    for name, explained in (("dlrm", True), ("hta_multirank", False)):
        path = etloom.analyze(open_run(data / name), "critical-path")
        assert path["explainable"].unique().to_list() == [explained]
        assert main(["analyze", "critical-path", str(data / name)]) == 0
        assert ("do not rely on this path" in capsys.readouterr().err) is not explained
        sentence = next(
            one for one in summarize_run(open_run(data / name)).lines if one.topic == "Critical path"
        )
        assert ("not reliable" in sentence.text) is not explained


@pytest.mark.slow
def test_questions_about_a_job_share_its_graph_and_stay_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.job_of(jobs.simulate(jobs.programs(0)))
    builds = []
    build = dependency_graph.build_graph
    monkeypatch.setattr(dependency_graph, "build_graph", lambda run: [builds.append(run), build(run)][1])
    changes = ("kernel x0.5", "op x0.5", "launch =0ns", "kernel x0.5")
    first, *_, last = (etloom.simulate(job, change) for change in changes)
    etloom.analyze(job, "critical-path")
    assert len(builds) == 1
    assert last.table.equals(first.table)
    assert last.reasons == first.reasons
    alone = simulate_with(job, [parse_change("kernel x0.5")], build(job))
    assert last.table.equals(alone.table)


def test_the_upper_bound_is_the_longer_time(data: Path) -> None:
    table = etloom.simulate(open_run(data / "critical_path" / "alexnet.json.gz"), "launch x3").table
    assert (table["upper_bound_ns"] >= table["lower_bound_ns"]).all()
    assert (table["upper_bound_ns"] > table["lower_bound_ns"]).any()


@pytest.mark.slow
def test_many_changes_cost_what_each_costs_and_give_the_same_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = etloom.open(small_traces.write_run(tmp_path))
    changes = [f"kernel:* x1.{number}" for number in range(1, 30)] + ["comm x0.5", "launch +3us"] * 10
    calls = []
    compute = ScaleLags.compute
    monkeypatch.setattr(ScaleLags, "compute", lambda *values: calls.append(1) or compute(*values))
    simulated = etloom.simulate(job, *changes)
    assert len(calls) < 6 * len(changes)
    monkeypatch.setattr("etloom.simulator.changed_lags._MAX_REPEATED_STEPS", 1000)
    repeated = etloom.simulate(job, *changes)
    assert simulated.table.equals(repeated.table)
    assert (simulated.lag == repeated.lag).all()


@pytest.mark.slow
def test_a_change_of_a_kernel_family_changes_its_kernels(data: Path) -> None:
    job = open_run(data / "nccl_ddp")
    recording = get_recorded_run(job)
    kernels = classify_kernels(job[0])
    owner = recording.graph.graph.owner
    placed = set(owner[recording.edges.select_target("kernel")].tolist())
    for family in sorted(set(kernels["family"]) - {"communication", "copy"}):
        edges = recording.edges.select(parse_change(f"kernel family={family} x0.5")).edges
        expected = placed & set(kernels.filter(family=family)["id"].to_list())
        assert set(owner[edges].tolist()) == expected, family
    with pytest.raises(EtloomError, match="matches nothing in this run"):
        recording.edges.select(parse_change("kernel family=none x0.5"))
