"""Analyses over ranks: who waits for whom, what the ranks share unevenly, what a job hangs on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError
from support.real_runs import open_run
from support.small_traces import RankBuilder, complete_event

CAUSES = ["longer_compute_ns", "other_work_ns", "late_launch_ns", "inherited_delay_ns"]


def rank_trace(
    rank: int, kernels: list[tuple[str, float, float]], size: int = 2, **group: Any
) -> dict[str, Any]:
    """A Kineto trace of kernels (name, start, duration in us); those called nccl are numbered all-reduces of a group of
    ``size`` ranks, with more facts of it."""
    events = [complete_event("cpu_op", "aten::mm", 0, 1, 100 + rank, 100 + rank)]
    seq = 0
    for at, (name, start, took) in enumerate(kernels):
        args: dict[str, Any] = {"device": 0, "stream": 7, "correlation": at + 1}
        if name.startswith("nccl"):
            args |= {
                "Collective name": "allreduce",
                "Process Group Name": "0",
                "Group size": size,
                "dtype": "Float",
                "In msg nelems": 1000,
                "Out msg nelems": 1000,
                "Seq": seq,
                **group,
            }
            seq += 1
        call = complete_event("cuda_runtime", "cudaLaunchKernel", at + 2, 0.5, 100 + rank, 100 + rank)
        call["args"] |= {"correlation": at + 1}
        events += [call, complete_event("kernel", name, start, took, 0, 7, **args)]
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    }


@pytest.fixture
def late_pair(tmp_path: Path) -> Path:
    """Rank 1 comes 300 us late to the second all-reduce: 200 of it in a longer GEMM, 100 in an idle device."""
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    ranks = (
        [(nccl, 100, 100), ("gemm", 200, 300), (nccl, 500, 350)],
        [(nccl, 100, 100), ("gemm", 300, 500), (nccl, 800, 50)],
    )
    for rank, kernels in enumerate(ranks):
        (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps(rank_trace(rank, kernels)))
    return tmp_path


@pytest.mark.slow
def test_a_late_rank_and_why(late_pair: Path) -> None:
    job = etloom.open(late_pair)
    rows = etloom.analyze(job, "stragglers")
    late = rows.row(0, named=True)
    assert {name: late[name] for name in ("rank", "last", "delay_ns", *CAUSES, "cause", "waited_ns")} == {
        "rank": 1,
        "last": 1,  # the first time both come at once
        "delay_ns": 300_000,
        "longer_compute_ns": 200_000,
        "other_work_ns": 0,
        "late_launch_ns": 100_000,
        "inherited_delay_ns": 0,
        "cause": "longer compute",
        "waited_ns": 0,
    }
    assert rows["waited_ns"].to_list() == [0, 300_000]
    second = etloom.analyze(job, "collectives").row(1, named=True)
    assert (second["wait_ns"], second["transfer_ns"], second["last_rank"]) == (300_000, 50_000, 1)
    assert second["algo_gb_per_s"] == pytest.approx(4000 / 50_000)
    assert second["bus_gb_per_s"] == pytest.approx(4000 / 50_000)  # 2 (n - 1) / n is 1 of two ranks


def test_a_rank_of_another_run_is_compared_with_no_rank(tmp_path: Path) -> None:
    """Numbers match, times do not: rank 2 leaves one before the others come, another after they left."""
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    plain = [(nccl, 1000.0 * at, 100.0) for at in range(6)]
    other = [(nccl, 1000.0 * at + (-400 if at % 2 else 400), 100.0) for at in range(6)]
    for rank, kernels in enumerate((plain, plain, other)):
        (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps(rank_trace(rank, kernels, 3)))
    job = etloom.open(tmp_path)
    assert etloom.analyze(job, "clocks")["verdict"].to_list() == ["reference", "agrees", "impossible"]
    rows = etloom.analyze(job, "collectives")
    assert sorted(rows["recorded"]) == [1] * 6 + [2] * 6
    assert rows.filter(pl.col("recorded") == 1)["how"].null_count() == 6
    assert rows["wait_ns"].drop_nulls().to_list() == [0] * 6
    assert etloom.analyze(job, "stragglers")["rank"].to_list() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "names"),
    [
        (lambda rank: {"Process Group Name": f"9400{rank}123"}, 4),
        (lambda _: {"Process Group Name": "1", "Process Group Ranks": "[0, ...]"}, 1),
    ],
)
def test_no_more_ranks_are_matched_than_their_group_has(tmp_path: Path, group: Any, names: int) -> None:
    """Two pairs, named by addresses or by one name; the second comes 3 ms later, by clocks that are right."""
    for rank in range(4):
        starts = [20_000.0 * at + 3000 * (rank // 2) + 100 for at in range(12)]
        kernels = [("ncclKernel_AllReduce_RING_LL_Sum_float", start, 100.0) for start in starts]
        made = json.dumps(rank_trace(rank, kernels, 2, **group(rank)))
        (tmp_path / f"kineto_trace_{rank}.json").write_text(made)
    job = etloom.open(tmp_path)
    rows = etloom.analyze(job, "collectives")
    # Which two of the four met is not told.
    assert set(rows.select("recorded", "group_size", "how").rows()) == {(1, 2, None)}
    with pytest.raises(AnalysisError, match="no communication could be matched"):
        etloom.analyze(job, "clocks")
    (said,) = job.run_stats.filter(name="job.ranks_beyond_group").iter_rows(named=True)
    assert (said["severity"], said["count"]) == ("data_loss", names)
    two = etloom.open({rank: tmp_path / f"kineto_trace_{rank}.json" for rank in (0, 1)})
    assert not two.run_stats["name"].is_in(["job.ranks_beyond_group"]).any()
    pair = etloom.analyze(two, "collectives")
    assert set(pair.select("recorded", "group_size", "how").rows()) == {(2, 2, "seq")}
    assert (pair["bus_gb_per_s"] == pair["algo_gb_per_s"]).all()


@pytest.mark.slow
def test_no_rank_waits_longer_than_its_call_lasts(tmp_path: Path) -> None:
    """A message that is gone 950 us before its receiver comes, and one that keeps its sender until then."""
    for stays, waited in ((50.0, 0), (1050.0, 1_000_000)):
        folder = tmp_path / str(waited)
        folder.mkdir()
        nccl = "ncclDevKernel_SendRecv"
        ends = (
            ([("ncclAll", 0.0, 100.0), (nccl, 500.0, stays)], {"Collective name": "send", "Dst Rank": 1}),
            ([("ncclAll", 0.0, 100.0), (nccl, 1500.0, 50.0)], {"Collective name": "recv", "Src Rank": 0}),
        )
        for rank, (kernels, end) in enumerate(ends):
            made = rank_trace(rank, kernels) | {"host_name": "a"}
            message = [event for event in made["traceEvents"] if event["name"] == nccl]
            message[0]["args"] |= end
            (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(made))
        job = etloom.open(folder)
        rows = etloom.analyze(job, "stragglers").sort("rank")
        assert rows["waited_ns"].to_list() == [waited, 0]
        # The receiver comes last, which delays nobody if nobody waits; both come at once to the all-reduce.
        assert rows.select("last", "delay_ns", "late_confirmed").rows() == [
            (0, 0, 0),
            (1, waited, waited // 1_000_000),
        ]
        assert rows["worst_ns"].to_list() == [None, waited or None]
        arrivals = etloom.analyze(job, "arrivals").filter(collective="message")
        assert arrivals["wait_ns"].to_list() == [waited, 0]
        (message_row,) = etloom.analyze(job, "collectives").filter(collective="message").iter_rows(named=True)
        assert (message_row["start_spread_ns"], message_row["wait_ns"]) == (1_000_000, waited)
        found = etloom.analyze(job, "findings", pattern="stragglers", min_pct=0)
        assert found.height == (waited > 0)


def chain(folder: Path, **header: Any) -> Path:
    """Messages from 0 to 1 take 100 us, from 1 to 2 take 400; the third time rank 0 is 300 us late."""
    folder.mkdir()
    starts = [1000.0 * at + (300 if at == 2 else 0) for at in range(4)]
    sent = [("Dst Rank", 1, start, 100.0) for start in starts]
    got = [("Src Rank", 0, 1000.0 * at, start - 1000 * at + 100) for at, start in enumerate(starts)]
    on = [("Dst Rank", 2, start + 200, 400.0) for start in starts]
    ranks = (sent, sorted(got + on, key=lambda one: one[2]), [("Src Rank", 1, *one[2:]) for one in on])
    for rank, messages in enumerate(ranks):
        made = rank_trace(rank, [("ncclDevKernel_SendRecv", start, took) for _, _, start, took in messages])
        kernels = [event for event in made["traceEvents"] if event["cat"] == "kernel"]
        for event, (end, peer, _, _) in zip(kernels, messages, strict=True):
            event["args"] |= {"Collective name": "recv" if end[0] == "S" else "send", "Seq": 7, end: peer}
        host = 100 + rank
        made["traceEvents"].append(complete_event("user_annotation", "ProfilerStep#3", 0, 10_000, host, host))
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(made | header))
    return folder


@pytest.mark.slow
def test_the_latest_rank_and_the_slow_link(tmp_path: Path) -> None:
    job = etloom.open(chain(tmp_path / "run", host_name="a"))
    rows = {row["rank"]: row for row in etloom.analyze(job, "stragglers").iter_rows(named=True)}
    # Rank 1 takes part in all of them; rank 2 only in the slow ones.
    assert {rank: row["slow_link_ns"] for rank, row in rows.items()} == {0: 0, 1: None, 2: 4 * 300_000}
    assert (rows[2]["cause"], rows[2]["delay_ns"]) == ("slow link", 0)
    assert (rows[0]["worst_ns"], rows[0]["worst_step"], rows[0]["late_confirmed"]) == (300_000, 3, 1)
    assert rows[0]["worst_start_ns"] == 1_700_000_000_002_300_000


@pytest.mark.slow
def test_messages_of_one_direction_determine_no_clock_offset(tmp_path: Path) -> None:
    """On one host the clock is one; of two nothing bounds the sender's from above."""
    job = etloom.open(chain(tmp_path / "run"))
    with pytest.raises(AnalysisError, match="messages in one direction"):
        etloom.analyze(job, "stragglers")
    rows = etloom.analyze(job, "collectives")
    assert rows["wait_ns"].null_count() == rows.height == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "cpu/pp_4", "cpu/coll_4", "cpu/ddp_2"])
def test_the_causes_of_a_delay_sum_to_it(data: Path, name: str) -> None:
    rows = etloom.analyze(open_run(data / name), "stragglers")
    assert (rows.select(pl.sum_horizontal(CAUSES)).to_series() == rows["delay_ns"]).all()
    assert rows["delay_ns"].sum() > 0


def test_sums_of_communications_are_those_of_their_rows(data: Path) -> None:
    job = open_run(data / "cpu/coll_4")
    rows, sums = etloom.analyze(job, "collectives"), etloom.analyze(job, "collective-summary")
    for name in ("wait_ns", "transfer_ns", "duration_ns"):
        assert sums[name].sum() == rows[name].sum()
    assert sums["count"].sum() == rows.height


@pytest.mark.slow
def test_imbalance_compares_ranks_of_one_kind(tmp_path: Path) -> None:
    """Odd ranks compute 65 us, even ones 80 us, rank 20 120 us: it is compared with the other even ones."""
    for rank in range(32):
        compute = 120 if rank == 20 else 80 if rank % 2 == 0 else 65
        run = RankBuilder().step(0, 0, compute + 5).op("aten::mm", 1, 2).kernel(2, 4, compute)
        run.trace(tmp_path, distributedInfo={"rank": rank, "world_size": 32})
        (tmp_path / "kineto_trace_0.json").rename(tmp_path / f"rank{rank}_trace.json")
    table = etloom.analyze(etloom.open(tmp_path, use_cache=False), "imbalance").filter(part="compute")
    columns = ("kind", "ranks", "median_ns", "max_rank", "max_ns")
    assert table.select(columns).rows() == [(0, 16, 80_000, 20, 120_000), (1, 16, 65_000, 1, 65_000)]


@pytest.mark.slow
def test_imbalance_of_two_programs(tmp_path: Path) -> None:
    """Ranks 0 and 1 run another program than ranks 2 and 3; rank 4 has no peer."""
    for rank in range(5):
        name, compute = ("a", "b", "c")[rank // 2], 100 + 10 * rank
        run = RankBuilder().op(f"aten::{name}", 1, 2).kernel(2, 4, compute, name=f"kernel_{name}")
        run.op(f"aten::{name}2", 5, 2).op(f"aten::{name}3", 8, 2)
        run.trace(tmp_path, distributedInfo={"rank": rank, "world_size": 5})
        (tmp_path / "kineto_trace_0.json").rename(tmp_path / f"rank{rank}_trace.json")
    table = etloom.analyze(etloom.open(tmp_path, use_cache=False), "imbalance").filter(part="compute")
    assert table.select("kind", "ranks", "max_rank").rows() == [(0, 2, 1), (1, 2, 3)]


def test_imbalance(late_pair: Path) -> None:
    rows = etloom.analyze(etloom.open(late_pair), "imbalance")
    compute = rows.filter(pl.col("part") == "compute").row(0, named=True)
    assert (compute["min_ns"], compute["min_rank"]) == (300_000, 0)
    assert (compute["max_ns"], compute["max_rank"]) == (500_000, 1)
    assert (compute["mean_ns"], compute["imbalance_pct"]) == (400_000, pytest.approx(25))
    one = etloom.read(late_pair / "kineto_trace_0.json")
    with pytest.raises(AnalysisError, match="imbalance needs at least two ranks"):
        etloom.analyze(one, "imbalance")


def entry(seq: int, name: str = "all_reduce", state: str = "completed", sizes: Any = None) -> dict[str, Any]:
    return {
        "record_id": seq,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        "input_sizes": sizes or [[10]],
        "output_sizes": sizes or [[10]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "train.py", "line": seq}],
    }


def dumps(folder: Path, ranks: dict[int, list[dict[str, Any]]], world: int) -> Path:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(range(world)))}}
    for rank, entries in ranks.items():
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
    return folder


def hung(folder: Path, ranks: dict[int, list[dict[str, Any]]], world: int = 2) -> list[tuple[Any, ...]]:
    rows = etloom.analyze(etloom.open(dumps(folder, ranks, world)), "hangs")
    return rows.select("seq", "finding", "collective", "ranks", "others", "called_at").rows()


def test_a_rank_that_never_came(tmp_path: Path) -> None:
    found = hung(tmp_path, {0: [entry(1), entry(2, state="started")], 1: [entry(1)]})
    assert found == [
        (2, "missing", "all_reduce", [1], [0], "step (train.py:2)"),
        (2, "not finished", "all_reduce", [0], [], "step (train.py:2)"),
    ]


def test_ranks_with_different_calls(tmp_path: Path) -> None:
    found = hung(
        tmp_path,
        {
            0: [entry(4), entry(5, state="started")],
            1: [entry(4), entry(5, "all_gather", "started")],
            2: [entry(4), entry(5, sizes=[[12]], state="started")],
        },
        world=4,
    )
    assert [row[:4] for row in found] == [
        (None, "missing", None, [3]),
        (5, "collective mismatch", "all_gather", [1]),
        (5, "size mismatch", "all_reduce", [0, 2]),  # no size has a majority
        (5, "not finished", "all_reduce", [0, 1, 2]),
    ]


def test_the_named_call_site_is_outside_torch(tmp_path: Path) -> None:
    inner = {
        "name": "all_reduce",
        "filename": "/x/site-packages/torch/distributed/distributed_c10d.py",
        "line": 9,
    }
    late = entry(2, state="started")
    late["frames"] = [inner, *late["frames"]]
    found = hung(tmp_path, {0: [entry(1), late], 1: [entry(1)]})
    assert [row[5] for row in found] == ["step (train.py:2)"] * 2
    late["frames"] = [inner]
    found = hung(tmp_path, {0: [entry(1), late], 1: [entry(1)]})
    assert found[0][5].startswith("all_reduce (/x/site-packages/torch/")


@pytest.mark.slow
def test_other_collectives_have_other_sizes(tmp_path: Path) -> None:
    found = hung(tmp_path, {0: [entry(1)], 1: [entry(1, "all_gather", sizes=[[20]])]})
    assert [row[:4] for row in found] == [(1, "collective mismatch", "all_reduce", [0, 1])]


@pytest.mark.slow
def test_gloo_records_no_state(tmp_path: Path) -> None:
    """It stays at scheduled; what is finished is retired."""

    def by_gloo(seq: int, retired: bool) -> dict[str, Any]:
        return {**entry(seq, state="scheduled"), "profiling_name": "gloo:all_reduce", "retired": retired}

    found = hung(tmp_path, {0: [by_gloo(1, True), by_gloo(2, False)], 1: [by_gloo(1, True)]})
    assert [row[:4] for row in found] == [
        (2, "missing", "all_reduce", [1]),
        (2, "not finished", "all_reduce", [0]),
    ]
    # Of NCCL what is retired and not completed has timed out.
    timed_out = {**entry(1, state="started"), "retired": True}
    assert [row[:2] for row in hung(tmp_path, {0: [timed_out], 1: [timed_out]})] == [(1, "not finished")]


def message(seq: int, name: str, state: str = "started", length: int = 10) -> dict[str, Any]:
    sizes = [[length]]
    return {**entry(0, name, state, sizes), "is_p2p": True, "p2p_seq_id": seq, "frames": [
        {"name": "pipe", "filename": "train.py", "line": seq}
    ]}  # fmt: skip


def test_messages_without_a_sender(tmp_path: Path) -> None:
    """Rank 1 got one of the three messages it waits for; the second is being sent, with another length."""
    found = hung(
        tmp_path,
        {
            0: [message(1, "send 0->1", "completed"), message(2, "send 0->1", length=12)],
            1: [message(1, "recv 1<-0", "completed"), message(2, "recv 1<-0"), message(3, "recv 1<-0")],
        },
    )
    assert found == [
        (2, "size mismatch", "message", [0, 1], [], "pipe (train.py:2)"),
        (2, "not finished", "message", [0, 1], [], "pipe (train.py:2)"),
        (3, "missing", "send", [0], [1], "pipe (train.py:3)"),
    ]
    assert (
        hung(tmp_path, {0: [message(1, "send 0->1", "completed")], 1: [message(1, "recv 1<-0", "completed")]})
        == []
    )


def test_entries_overwritten_by_a_ring_are_not_a_divergence(tmp_path: Path) -> None:
    assert hung(tmp_path, {0: [entry(1), entry(2), entry(3)], 1: [entry(3)]}) == []


@pytest.mark.slow
def test_an_unfinished_call_needs_no_second_dump(tmp_path: Path) -> None:
    """Rank 0 ran on, and its ring holds no more of what rank 1 hangs on; that of rank 2 does, and not the call."""
    stuck = [entry(3), entry(4, state="started"), entry(5, state="scheduled")]
    ahead = [entry(9, state="scheduled")]
    found = hung(tmp_path, {0: ahead, 1: stuck})
    assert [row[:4] for row in found] == [
        (4, "not finished", "all_reduce", [1]),
        (5, "not finished", "all_reduce", [1]),
        (9, "missing", "all_reduce", [1]),
        (9, "not finished", "all_reduce", [0]),
    ]
    rows = etloom.analyze(etloom.open(tmp_path), "hangs")
    assert rows["detail"][0] == "rank 1: started; the dump of rank 0 no longer reaches back to it"
    found = hung(tmp_path, {0: ahead, 1: stuck, 2: [entry(3)]}, world=3)
    assert [row[:5] for row in found[:2]] == [
        (4, "missing", "all_reduce", [2], [1]),
        (4, "not finished", "all_reduce", [1], []),
    ]


def test_no_dump_no_answer(late_pair: Path) -> None:
    with pytest.raises(AnalysisError, match="no Flight Recorder dump"):
        etloom.analyze(etloom.open(late_pair), "hangs")
