"""Slowdown of a job by stragglers: published results, made schedules with known answers, and linked traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.analyses import slowdown
from etloom.analyses.helpers import dependency_graph
from etloom.analyses.helpers.graph_model import GraphModel
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job
from support import small_traces

FORWARD, BACKWARD = 1.0, 2.0
MICRO_BATCHES = 4


def list_1f1b(stage: int, stages: int) -> Iterator[tuple[str, int]]:
    """The order of computation of a stage: (direction, micro-batch)."""
    warmup = min(stages - stage - 1, MICRO_BATCHES)
    yield from (("forward", i) for i in range(warmup))
    for i in range(MICRO_BATCHES - warmup):
        yield from (("forward", warmup + i), ("backward", i))
    yield from (("backward", i) for i in range(MICRO_BATCHES - warmup, MICRO_BATCHES))


def write_trace(
    path: Path, stages: int = 2, replicas: int = 2, scale: Callable[[int, int, int, str], float] | None = None
) -> Path:
    """Write an operation trace of two steps. scale: factor of a computation by step, stage, replica, direction.

    Start times only give the order; transfers take no time.
    """
    rows = []
    for step in (3, 4):
        for stage in range(stages):
            for replica in range(replicas):
                at = 0.0
                for direction, i in list_1f1b(stage, stages):
                    length = FORWARD if direction == "forward" else BACKWARD
                    length *= scale(step, stage, replica, direction) if scale else 1
                    receives = stage > 0 if direction == "forward" else stage < stages - 1
                    sends = stage < stages - 1 if direction == "forward" else stage > 0
                    operations = [(f"{direction}-recv", 0.0)] * receives
                    operations += [(f"{direction}-compute", length)]
                    operations += [(f"{direction}-send", 0.0)] * sends
                    for name, duration in operations:
                        rows.append(
                            (replica, stage, stage * replicas + replica, step, name, at, duration, i, i)
                        )
                        at += duration + 1e-3
                rows.append(
                    (replica, stage, stage * replicas + replica, step, "grads-reduce-scatter", at, 0.0, 0, -1)
                )
    columns = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mb_id")
    pl.DataFrame(rows, schema=columns, orient="row").write_parquet(path)
    return path


def compute_slowdowns(job: Job) -> dict[tuple[str, str], float]:
    table = etloom.analyze(job, "slowdown")
    return {(by, item): value for by, item, value in table.select("by", "item", "slowdown").iter_rows()}


@pytest.fixture(scope="module")
def published(data: Path) -> tuple[pl.DataFrame, dict[str, object], dict[str, dict[str, float]]]:
    folder = data / "straggler_what_if"
    job = etloom.open(folder / "trace-ST.parquet", use_cache=False)
    expected = json.loads((folder / "result-ST.json").read_text())
    parts = {name: json.loads((folder / f"{name}-ST.json").read_text()) for name in ("ms", "mw")}
    return etloom.analyze(job, "slowdown"), expected, parts


def test_published_results_are_reproduced(published) -> None:
    table, expected, parts = published
    rows = {(row["by"], row["item"]): row for row in table.iter_rows(named=True)}
    groups = {"stage": "stage", "data rank": "dp_rank", "type": "optype"}
    wanted = {("job", "all"): expected["blocking_slowdown"]}
    wanted |= {("step", step): value for step, value in expected["blocking_step_slowdown"].items()}
    for by, name in groups.items():
        wanted |= {(by, item): s for item, s in expected[f"blocking_decompose_by_{name}"].items()}
    assert {key for key in rows if key[0] not in ("worker", "slowest workers")} == set(wanted)
    for key, value in wanted.items():
        assert rows[key]["slowdown"] == pytest.approx(value, rel=1e-5), key
    assert rows["stage", "3"]["explained_pct"] == pytest.approx(100 * parts["ms"]["Ms"], rel=1e-4)
    (worst,) = (row for key, row in rows.items() if key[0] == "slowest workers")
    assert worst["time_ns"] == pytest.approx(1e9 * parts["mw"]["tadd"], rel=1e-5)
    assert worst["explained_pct"] == pytest.approx(100 * parts["mw"]["Mw"], rel=1e-3)


def test_the_recorded_step_times_are_those_of_the_publication(published) -> None:
    table, expected, _ = published
    steps = table.filter(pl.col("by") == "step")
    for step, recorded, simulated in steps.select("item", "recorded_ns", "time_ns").iter_rows():
        assert recorded == pytest.approx(1e9 * expected["step_t_base"][step], rel=1e-5)
        assert simulated == pytest.approx(1e9 * expected["step_t_nodelay"][step], rel=1e-5)


def test_a_job_of_equal_operations_has_no_slowdown(tmp_path: Path) -> None:
    table = etloom.analyze(etloom.open(write_trace(tmp_path / "even.parquet"), use_cache=False), "slowdown")
    assert table["slowdown"].to_list() == pytest.approx([1.0] * table.height)
    # 1F1B of two stages: all micro-batches on one stage, and one on the other.
    assert table["time_ns"][0] == pytest.approx((MICRO_BATCHES + 1) * (FORWARD + BACKWARD) * 1e9)
    assert table["explained_pct"].drop_nulls().to_list() in ([], [100.0])


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "slowest"), [(16, 1), (17, 2), (34, 3)])
def test_the_slowest_workers_are_three_percent(tmp_path: Path, replicas: int, slowest: int) -> None:
    """Of two stages, all replicas of the second are slower than the first, and a few of them much slower."""
    slow = {3: 4.0, 5: 3.0, 8: 2.5}

    def scale(step: int, stage: int, replica: int, direction: str) -> float:
        return slow.get(replica, 1.0) if stage == 1 else 1.0

    job = etloom.open(write_trace(tmp_path / "x.parquet", replicas=replicas, scale=scale), use_cache=False)
    table = etloom.analyze(job, "slowdown", by="slowest workers")
    assert table["item"].to_list() == [", ".join(str(replicas + one) for one in list(slow)[:slowest])]
    workers = etloom.analyze(job, "slowdown", by="worker")
    assert workers["item"].to_list()[:slowest] == table["item"][0].split(", ")
    assert table["time_ns"][0] >= workers["time_ns"].max()
    # Which of the slow ones are in the mask shows once the slowest of all is ideal.
    assert table["explained_pct"][0] >= workers["explained_pct"].max()


def test_one_slow_worker_is_detected(tmp_path: Path) -> None:
    """Rank 3 (stage 1, replica 1) takes twice as long. The mean of its type is 1.25 times the usual time."""

    def scale(step: int, stage: int, replica: int, direction: str) -> float:
        return 2.0 if (stage, replica) == (1, 1) else 1.0

    job = etloom.open(write_trace(tmp_path / "slow.parquet", scale=scale), use_cache=False)
    slowdowns = compute_slowdowns(job)
    # On the slow pipeline each micro-batch takes 6 on stage 1, and one passes stage 0 in 3.
    assert slowdowns["job", "all"] == pytest.approx((4 * 6 + 3) / (5 * 3 * 1.25))
    assert slowdowns["worker", "3"] == pytest.approx((4 * 6 + 3 * 1.25) / (5 * 3 * 1.25))
    assert slowdowns["worker", "0"] == pytest.approx(1.0, abs=0.03)
    explained = etloom.analyze(job, "slowdown", by="worker")
    assert explained["item"][0] == "3"
    assert explained["explained_pct"][0] > 100


def test_one_slow_step_is_detected(tmp_path: Path) -> None:
    job = etloom.open(
        write_trace(tmp_path / "step.parquet", scale=lambda step, *_: 3.0 if step == 4 else 1.0),
        use_cache=False,
    )
    slowdowns = compute_slowdowns(job)
    assert slowdowns["step", "3"] == pytest.approx(0.5)
    assert slowdowns["step", "4"] == pytest.approx(1.5)


def test_steps_of_different_operations_are_compared_too(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "cut.parquet")
    pl.read_parquet(path).filter(
        ~((pl.col("step") == 4) & (pl.col("mb_id") == MICRO_BATCHES - 1))
    ).write_parquet(path)
    steps = etloom.analyze(etloom.open(path, use_cache=False), "slowdown", by="step")
    assert steps["time_ns"].to_list() == pytest.approx([15e9, 12e9])


def test_several_chunks_and_circles_are_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "chunks.parquet")
    frame = pl.read_parquet(path)
    frame.with_columns(mc=pl.col("seq_id") % 2).write_parquet(path)
    with pytest.raises(EtloomError, match="interleaved"):
        etloom.analyze(etloom.open(path, use_cache=False), "slowdown")
    late = frame.with_columns(
        start_ts=pl.when((pl.col("optype") == "backward-compute") & (pl.col("rank") == 0))
        .then(-1.0 - pl.col("start_ts"))
        .otherwise("start_ts")
    )
    late.write_parquet(path)
    with pytest.raises(EtloomError, match="cycle"):
        etloom.analyze(etloom.open(path, use_cache=False), "slowdown")


def test_a_linked_job_is_compared_by_its_graph(data: Path) -> None:
    job = etloom.open(data / "cpu/ddp_2")
    table = etloom.analyze(job, "slowdown")
    rows = {(row["by"], row["item"]): row for row in table.iter_rows(named=True)}
    assert 1.0 < rows["job", "all"]["slowdown"] < 1.5
    assert {item for by, item in rows if by == "type"} >= {"all_reduce", "host"}
    assert rows["job", "all"]["time_ns"] == pytest.approx(rows["job", "all"]["recorded_ns"], rel=0.01)


def test_few_points_bound_the_steps_of_a_linked_job(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all points of the steps the times are the same."""
    job = etloom.open(data / "nccl_ddp")
    monkeypatch.setattr(GraphModel, "_select_extreme", lambda model, points, last: points)
    complete = GraphModel(job)
    monkeypatch.undo()
    model = GraphModel(job)
    sizes = zip(model._step_ends, complete._step_ends, strict=True)
    assert all(10 * len(few) < len(points) for few, points in sizes)
    masks = [np.random.default_rng(seed).random(model.size) < 0.5 for seed in range(3)]
    assert (model.simulate(masks) == complete.simulate(masks)).all()
    assert (model.span_ns == complete.span_ns).all()


def test_one_rank_of_a_linked_job_is_not_enough(tmp_path: Path) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run", ranks=(0,)), use_cache=False)
    with pytest.raises(EtloomError, match="two ranks"):
        etloom.analyze(job, "slowdown")


def test_each_of_many_ranks_is_not_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    monkeypatch.setattr(slowdown, "MAX_SIMULATED_EVENTS", 10)
    for by in (None, "worker"):
        with pytest.raises(AnalysisError, match=r"each of 2 ranks takes 4 simulations of .* --by job, type"):
            etloom.analyze(job, "slowdown", by=by)
    assert etloom.analyze(job, "slowdown", by="job").height == 1


def test_a_graph_that_would_exceed_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)
    monkeypatch.setattr(dependency_graph, "available_memory", lambda: 1)
    with pytest.raises(AnalysisError, match=r"graph of .* events takes about .* GB of memory.*rank=\[0, 1\]"):
        etloom.analyze(job, "critical-path")


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    job = etloom.open(write_trace(tmp_path / "t.parquet"), use_cache=False)
    with pytest.raises(EtloomError, match=r"'workers'; did you mean 'worker'\? \(expected one of "):
        etloom.analyze(job, "slowdown", by="workers")


def test_a_rank_that_only_gathers_parameters_waits_for_nothing(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "job.parquet")
    gather = (5, 0, 90, 3, "params-all-gather", 0.0, 1.0, 0, -1)
    rows = pl.read_parquet(path)
    pl.concat([rows, pl.DataFrame([gather], schema=rows.schema, orient="row")]).write_parquet(path)
    assert compute_slowdowns(etloom.open(path))["worker", "90"] == pytest.approx(1)
