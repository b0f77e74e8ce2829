"""Findings rank causes by the gain of the job, and name what is outside of operators and in loops of tiny ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.analyses.findings import job_gain
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.patterns import idle_host
from etloom.core.trace import Job
from etloom.reports.finding_text import format_gain
from support.real_runs import open_run
from support.small_traces import RankBuilder, find_costs, find_rows

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
LOAD = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def write_job(folder: Path, ranks: list[RankBuilder]) -> Job:
    for rank, builder in enumerate(ranks):
        info = {"backend": "nccl", "rank": rank, "world_size": len(ranks)}
        builder.trace(folder, distributedInfo=info)
        (folder / "kineto_trace_0.json").rename(folder / f"rank{rank}_trace.json")
    return etloom.open(folder)


def make_ranks(gap_us: float, ranks: int = 3) -> list[RankBuilder]:
    """One step; in 30 rounds each rank computes 100 us, rank 0 after a pause of the host; then they all-reduce."""
    builders = []
    for rank in range(ranks):
        run, at, sizes = (
            RankBuilder(),
            0.0,
            {"In msg nelems": 10**6, "Out msg nelems": 10**6, "dtype": "Float"},
        )
        facts = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": ranks, **sizes}
        for number in range(30):
            begin = at + 10 + (gap_us if rank == 0 else 0)
            run.op("aten::mm", begin - 5, 8).kernel(begin, begin + 2, 100)
            end = at + 10 + gap_us + 100 + 2 + 20
            arrive = begin + 102
            run.op("c10d::allreduce_", begin + 4, 5)
            run.kernel(begin + 5, arrive, end - arrive, NCCL, Seq=number, **facts)
            run.op("cudaDeviceSynchronize", begin + 10, end - begin - 10, "cuda_runtime")
            at = end
        run.step(4, 0, at + 5)
        builders.append(run)
    return builders


@pytest.mark.slow
def test_the_gain_is_that_of_the_job_and_the_cost_that_of_the_rank(tmp_path: Path) -> None:
    """Ranks 1 and 2 wait 50 us a round for rank 0, whose host launches late: the job gains if rank 0 is not late."""
    rows = etloom.analyze(write_job(tmp_path, make_ranks(50)), "findings", min_pct=0)
    by_pattern = {row["pattern"]: row for row in rows.iter_rows(named=True)}
    straggler = by_pattern["stragglers"]
    assert (straggler["rank"], straggler["ranks"], straggler["cost_ns"]) == (0, 1, 30 * 50_000)
    assert straggler["job_gain_ns"] == pytest.approx(30 * 50_000, rel=0.05)
    assert straggler["step_gain_ns"] == straggler["job_gain_ns"]
    assert rows["job_gain_ns"].is_sorted(descending=True)
    # What the victims wait for is not a cause of its own.
    assert by_pattern["exposed-communication"]["cost_ns"] <= 30 * 21_000


@pytest.mark.slow
def test_a_finding_without_which_the_job_is_not_faster_is_not_listed(data: Path) -> None:
    job = open_run(data / "dlrm")
    everything = etloom.analyze(job, "findings", min_pct=0)
    assert 0.0 in everything["job_gain_pct"].to_list()
    assert etloom.analyze(job, "findings")["job_gain_pct"].min() >= 0.05  # type: ignore[operator]
    assert format_gain({"job_gain_ns": 0})[0] == "no gain"


def make_chain(late_us: float) -> list[RankBuilder]:
    """Rank 0 computes longer before it meets rank 1, which only then meets rank 2: rank 1 inherits the delay."""
    builders = []
    for rank in range(3):
        run = RankBuilder()
        for number in range(4):
            late = late_us if number == 2 else 0
            at = 2_000.0 * number + 100
            steps = [("a", (0, 1), at + 200, late), ("b", (1, 2), at + 600, late)]
            own = [(group, pair, start, late) for group, pair, start, late in steps if rank in pair]
            compute = 100 + (late if rank == 0 else 0)
            run.op("aten::mm", at - 5, 4).kernel(at - 4, at, compute)
            for group, pair, start, late in own:
                awaited = rank == pair[0]
                begin = start + (late if awaited else 0)
                facts = {
                    "Collective name": "allreduce",
                    "Process Group Name": group,
                    "Process Group Ranks": str(list(pair)),
                    "Group size": 2,
                    "In msg nelems": 10**6,
                    "Out msg nelems": 10**6,
                    "dtype": "Float",
                }
                run.op("c10d::allreduce_", start - 50, 5)
                run.kernel(start - 49, begin, start + late + 50 - begin, NCCL, Seq=number, **facts)
        run.step(0, 0, 8_500)
        builders.append(run)
    return builders


@pytest.mark.slow
def test_a_rank_that_inherits_its_delay_is_not_a_straggler(tmp_path: Path) -> None:
    job = write_job(tmp_path, make_chain(300))
    assert JobView(job).late_arrivals.select("rank", "late_ns", "own_late_ns", "reason").sort(
        "rank"
    ).rows() == [
        (0, 300_000, 300_000, "longer_compute"),
        (1, 300_000, 0, "other_work"),
    ]
    (row,) = etloom.analyze(job, "findings", pattern="stragglers", min_pct=0).iter_rows(named=True)
    assert (row["rank"], row["ranks"], row["count"], row["cost_ns"]) == (0, 1, 1, 300_000)
    assert row["title"] == "rank 0 delays other ranks once in its tp group: longer compute"


@pytest.mark.slow
def test_the_named_straggler_is_the_one_without_which_the_job_gains_most(data: Path) -> None:
    """As `simulate --like-peers 3`, which saves 8.2 %; the gain of the headline is that of all ranks."""
    (row,) = etloom.analyze(open_run(data / "cpu/pp_4"), "findings", pattern="stragglers").iter_rows(
        named=True
    )
    parts = {part["place"]: part for part in json.loads(row["parts"])}
    gains = {place: part["job_gain_ns"] for place, part in parts.items()}
    assert (row["rank"], row["ranks"]) == (3, 4) and "rank 3 delays" in row["title"]
    assert gains["rank 3"] == max(gains.values()) and row["job_gain_ns"] >= gains["rank 3"]
    assert (row["cost_ns"], row["count"]) == (parts["rank 3"]["cost_ns"], parts["rank 3"]["count"])
    assert gains["rank 3"] / row["job_gain_ns"] * row["job_gain_pct"] == pytest.approx(8.2, abs=0.5)


@pytest.mark.slow
def test_a_late_recording_is_named_as_such(data: Path) -> None:
    """It may not exist without recording: it comes after all that promises a gain, and promises none."""
    findings = etloom.analyze(open_run(data / "dlrm"), "findings").to_dicts()
    (late,) = [row for row in findings if "its recording begins later" in row["title"]]
    assert (late["pattern"], late["rank"], late["confidence"]) == ("stragglers", 2, "low")
    assert late["job_gain_ns"] is None and late["cost_ns"] > findings[1]["cost_ns"]
    assert not any(row["job_gain_ns"] for row in findings[findings.index(late) + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coll_4", "ddp_2"])
def test_exposed_communication_gains_at_most_as_much_as_free_transfers(data: Path, name: str) -> None:
    job = open_run(data / "cpu" / name)
    (row,) = etloom.analyze(job, "findings", pattern="exposed-communication").iter_rows(named=True)
    free = etloom.simulate(job, "comm x0")
    saved = int(free.recorded.max() - free.upper_bound.max())
    assert 0 < row["job_gain_ns"] <= saved


@pytest.mark.slow
def test_a_gain_of_one_rank_may_become_a_wait_of_another(tmp_path: Path) -> None:
    """All idle for 12 us a round, rank 0 for 50 us more: the job gains no more than rank 0 loses."""
    job = write_job(tmp_path, make_ranks(50))
    (row,) = etloom.analyze(job, "findings", pattern="host-sync", min_pct=0).iter_rows(named=True)
    (alone,) = etloom.analyze(Job({1: job[1]}), "findings", pattern="host-sync", min_pct=0).iter_rows(
        named=True
    )
    assert (row["rank"], row["ranks"]) == (0, 3)
    assert row["cost_ns"] > 29 * 50_000 > 2 * alone["cost_ns"] > 0
    assert 29 * 50_000 < row["job_gain_ns"] <= row["cost_ns"]


def test_time_before_the_first_kernel_of_a_marked_step_counts(tmp_path: Path) -> None:
    run = RankBuilder().step(3, 0, 1_000).op("my::decode", 10, 600).op("aten::mm", 690, 20)
    run.kernel(700, 705, 200)
    (row,) = find_rows(run.trace(tmp_path), "launch-bound")
    assert (row["cost_ns"], row["count"], row["step_pct"]) == (705_000 + 95_000, 2, 80.0)


def test_the_end_of_a_step_after_the_last_kernel_is_not_a_synchronization(tmp_path: Path) -> None:
    run = RankBuilder().step(0, 0, 1_000).op("aten::mm", 0, 20).kernel(1, 2, 20)
    run.op("cudaDeviceSynchronize", 30, 10, "cuda_runtime", correlation=900)
    trace = run.trace(tmp_path)
    assert find_costs(trace, "host-sync") == []
    assert [row[0] for row in find_costs(trace, "launch-bound")] == [980_000]


@pytest.mark.slow
def test_each_load_counts_and_is_named_on_all_ranks(tmp_path: Path) -> None:
    ranks = []
    for rank in range(3):
        run = RankBuilder()
        for step in range(2):
            at = 1_000 * step
            run.step(step, at, 900).op(LOAD, at + 5, 300 + rank, "user_annotation")
            run.op("aten::mm", at + 400, 20).kernel(at + 405, at + 410, 400)
        ranks.append(run)
    (row,) = etloom.analyze(
        write_job(tmp_path, ranks), "findings", pattern="data-loading", min_pct=0
    ).iter_rows(named=True)
    assert (row["ranks"], row["rank"], row["count"], row["cost_ns"]) == (3, 2, 2, 2 * 302_000)


def test_idle_time_before_work_without_a_recorded_launch_is_named(tmp_path: Path) -> None:
    run = RankBuilder().step(0, 0, 1_000).op("aten::mm", 5, 20)
    for at in (100, 900):
        run.kernel(at - 10, at, 10)
    run.events = [event for event in run.events if event["cat"] != "cuda_runtime"]
    rows = find_rows(run.trace(tmp_path), "device-waits")
    assert [row["cost_ns"] for row in rows] == [790_000]
    assert "launch was not recorded" in rows[0]["title"]


@pytest.mark.parametrize(
    ("parent", "advice"),
    [
        ("aten::select_backward", "aten::select_backward writes its gradient into zeros"),
        ("aten::embedding_dense_backward", "aten::embedding_dense_backward writes its gradient"),
        ("my::step", "torch.empty for memory"),
        (None, "torch.empty for memory"),
    ],
)
def test_zeros_are_those_of_the_parent(tmp_path: Path, parent: str | None, advice: str) -> None:
    run = RankBuilder()
    for at in (0, 100):
        if parent:
            run.op(parent, at, 60)
        run.op("aten::zeros", at + 5, 50).op("aten::zero_", at + 10, 40).op("aten::fill_", at + 12, 30)
    (row,) = find_rows(run.trace(tmp_path), "zero-fill")
    assert row["operator"] == (parent or "aten::zeros")
    assert row["advice"].startswith(advice) and "zero_grad" not in row["advice"]


def test_filling_gradients_with_zeros_suggests_zero_grad(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::_foreach_zero_", 0, 50).op("aten::_foreach_zero_", 100, 50)
    (row,) = find_rows(run.trace(tmp_path), "zero-fill")
    assert "zero_grad(set_to_none=True)" in row["advice"]


def loop(*names: str, count: int = 100, dur: float = 5, pause: float = 5) -> RankBuilder:
    run = RankBuilder().op("aten::mm", 0, 900)
    for at in range(count):
        run.op(names[at % len(names)], 1_000 + (dur + pause) * at, dur)
    return run.step(0, 0, 1_000 + (dur + pause) * count)


@pytest.mark.slow
def test_loops_of_tiny_operators(tmp_path: Path) -> None:
    (row,) = find_rows(loop("aten::select", "aten::add").trace(tmp_path), "tiny-operators")
    assert (row["cost_ns"], row["title"]) == (985_050, "loops of 100 tiny operators, mostly aten::add")
    assert find_costs(loop("aten::select", "aten::add").trace(tmp_path), "item-calls") == []
    for other in (
        loop("aten::select", count=40),
        loop("aten::add", dur=100),
        loop(*(f"my::layer_{at}" for at in range(20))),
        loop("c10d::allreduce_"),
    ):
        assert find_costs(other.trace(tmp_path), "tiny-operators") == []


def test_item_calls_of_a_cpu_run(tmp_path: Path) -> None:
    trace = loop("aten::norm", "aten::item").trace(tmp_path)
    (row,) = find_rows(trace, "item-calls")
    assert row["title"].startswith("loops that read values of tensors 50 times")
    assert row["cost_ns"] == 985_050
    assert (row["name"], row["operator"]) == ("aten::item", "aten::item")
    assert find_costs(trace, "tiny-operators") == []


@pytest.mark.parametrize(("elements", "size"), [(1, "4 bytes"), (1_000, "4 KiB")])
def test_small_collectives_count_exposed_time_and_name_bytes(
    tmp_path: Path, elements: int, size: str
) -> None:
    """Ten all-reduces of 10 us, five of which a kernel on another stream hides."""
    run = RankBuilder().op("aten::mm", 0, 5).kernel(1, 0, 150, stream=20)
    for at in range(10):
        run.all_reduce(10 + at, 100 + 10 * at, 10, at, elements)
    (row,) = find_rows(run.trace(tmp_path), "small-collectives")
    assert row["title"] == f"10 consecutive all_reduce of {size} each in groups of tp"
    assert row["cost_ns"] == 50_000 - 5_000


def test_an_open_range_of_a_backend_is_not_exposed_communication(tmp_path: Path) -> None:
    """A gloo range that was open when the recording stopped lasts until then; only the step counts."""
    run = RankBuilder().step(0, 0, 1_000).op("aten::mm", 0, 800)
    run.op("gloo:all_reduce", 850, 9_150, "user_annotation")
    assert [row["cost_ns"] for row in find_rows(run.trace(tmp_path), "exposed-communication")] == [150_000]


def test_idle_host_is_the_pause_of_every_step(tmp_path: Path) -> None:
    """Four steps, each of which pauses for 20 ms after aten::relu; one of them also elsewhere, for 30 ms."""

    def trace(steps: int) -> Any:
        run = RankBuilder()
        for step in range(steps):
            at = 100_000 * step
            run.step(step, at, 100_000).op("aten::mm", at, 40_000).op("aten::relu", at + 40_000, 1_000)
            odd = 30_000 if step == 2 else 0
            run.op("aten::add", at + 61_000, 39_000 - odd)
            if odd:
                run.op("aten::mul", at + 99_900, 100)
        return run.trace(tmp_path)

    (row,) = find_rows(trace(4), "idle-host")
    assert (row["cost_ns"], row["count"], row["name"]) == (4 * 20_000_000, 4, "aten::relu")
    assert row["title"].startswith(
        "4 times no operator runs for 1 ms or more, up to 20 ms, most often after aten::relu"
    )
    assert row["advice"].startswith("record Python stacks")


def test_the_late_rank_is_a_straggler_and_not_an_idle_host(data: Path) -> None:
    views = JobView(open_run(data / "cpu/ddp_2"))
    late = views[1].delaying_ranks
    assert late.total > 0
    for finding in idle_host.find(views[1]):
        assert (finding.lost & late).total == 0


@pytest.mark.slow
def test_parts_add_up(data: Path) -> None:
    rows = etloom.analyze(open_run(data / "dlrm"), "findings", min_pct=0).drop_nulls("parts")
    assert rows.height
    for row in rows.iter_rows(named=True):
        parts: list[dict[str, Any]] = json.loads(row["parts"])
        if row["pattern"] == "stragglers":  # By rank, each alone: not parts of the cost of the named one.
            continue
        assert sum(part["count"] for part in parts) == row["count"]
        assert sum(part["cost_ns"] for part in parts) >= row["cost_ns"]
        costs = [
            part["cost_ns"] for part in parts if not part["place"] or not part["place"].endswith(" more")
        ]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.slow
def test_the_first_cause_of_dlrm_is_the_host(data: Path) -> None:
    first = etloom.analyze(open_run(data / "dlrm"), "findings").row(0, named=True)
    assert (first["pattern"], first["ranks"]) == ("launch-bound", 4)
    assert first["job_gain_pct"] > 20


@pytest.mark.slow
def test_a_trace_that_is_idle_has_a_finding(data: Path) -> None:
    """99 % of the time of the first is idle; the second waits 8 ms for a device graph to start."""
    for name in ("hta_misc/compare_base.json.gz", "tracelens/mi300_vllm_graph_execution.json.gz"):
        rows = etloom.analyze(open_run(data / name), "findings")
        assert rows.height and (rows["pct"][0] > 30)


def test_costs_per_step(tmp_path: Path) -> None:
    run = RankBuilder()
    for step in range(4):
        at = 1_000 * step
        run.step(step, at, 1_000).op(LOAD, at, 300, "user_annotation")
        run.op("aten::mm", at + 400, 20).kernel(at + 405, at + 410, 400)
    row = etloom.analyze(run.trace(tmp_path), "findings", pattern="data-loading", min_pct=0).row(
        0, named=True
    )
    assert (row["cost_ns"], row["step_cost_ns"], row["step_pct"]) == (4 * 300_000, 300_000, 30.0)


@given(st.lists(st.dictionaries(st.integers(0, 9), st.integers(-5, 5)), min_size=1, max_size=4))
def test_gains_of_several_parts_are_summed_by_edge(parts: list[dict[int, int]]) -> None:
    edges = [np.array(sorted(part), np.int32) for part in parts]
    gains = [np.array([part[edge] for edge in sorted(part)], np.int64) for part in parts]
    expected = {edge: sum(part.get(edge, 0) for part in parts) for part in parts for edge in part}
    summed, gain = job_gain._sum_by_edge(edges, gains)
    assert dict(zip(summed.tolist(), gain.tolist(), strict=True)) == expected
    assert summed.tolist() == sorted(expected)
