"""Replay of communication: the plan by hand, and the run on real processes with every result checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.replayer.comms.call_mapping import scale_call
from etloom.replayer.comms.plan_builder import build_plan
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import Call, Plan, plan_caveats, plan_table
from support.paths import ROOT
from support.processes import by_shell, ended, free_port, processes, wait_for_calls
from support.replays import all_reduce_call, write_calls


def steps(made: Plan, rank: int = 0) -> list[tuple[Any, ...]]:
    return [(c.collective, c.group, sum(c.inputs), sum(c.outputs), c.waits_for) for c in made.calls[rank]]


@pytest.mark.slow
def test_the_plan_of_every_recorded_call(data: Path) -> None:
    made = build_plan(etloom.open(data / "cpu/coll_4"))
    assert [len(own) for own in made.calls] == [35, 35, 32, 32]
    assert made.skipped == ()
    rows = plan_table(made)
    assert rows.filter(pl.col("rank") == 0)["collective"].to_list()[6:18] == [
        *(
            "all_gather",
            "all_gather",
            "reduce_scatter",
            "reduce_scatter",
            "all_to_all",
            "all_to_all",
            "all_to_all",
        ),
        *("broadcast", "reduce", "gather", "scatter", "send"),
    ]
    # An all-reduce of some ranks, whose group gloo does not record: told by who met.
    assert "[0, 1]" in rows["group"].to_list()


@pytest.mark.slow
def test_concurrent_calls_stay_concurrent(data: Path) -> None:
    made = build_plan(etloom.open(data / "cpu/pp_4"))
    # The fifth call, a receive, was made while the fourth, a send, was under way.
    assert [call.waits_for for call in made.calls[0][:6]] == [(), (0,), (1,), (2,), (), (3, 4)]


@pytest.mark.slow
def test_sizes_follow_a_smaller_world(data: Path) -> None:
    job = etloom.open(data / "dlrm")
    four, two = build_plan(job), build_plan(job, world_size=2)
    # Recorded on 8 ranks with 768 elements for each.
    assert steps(four)[0][:4] == ("all_to_all", (0, 1, 2, 3), 4 * 768, 4 * 768)
    assert steps(two)[0][:4] == ("all_to_all", (0, 1), 2 * 768, 2 * 768)
    assert steps(two)[4][:4] == ("all_reduce", (0, 1), 394_241, 394_241)
    # Half a call is not set against the whole one: that took 8 ranks.
    for made in (four, two):
        assert {(call.shrunk, call.recorded_ns) for own in made.calls for call in own} == {(True, None)}
    assert plan_caveats(four) == [
        "only 4 of 8 ranks are replayed: groups, splits and sizes of 32 calls shrink to them, and their times are not "
        "compared with the recorded ones"
    ]
    whole = build_plan(etloom.open(data / "cpu/ddp_2"))
    assert plan_caveats(whole) == [] and steps(whole) and all(call.recorded_ns for call in whole.calls[0])
    pipeline = build_plan(etloom.open(data / "cpu/pp_4"), world_size=2)
    assert {(call.collective, call.group, call.peer) for call in pipeline.calls[0]} == {
        ("send", (0, 1), 1),
        ("recv", (0, 1), 1),
    }
    assert pipeline.groups == []  # messages go through the world's group
    assert {(one.rank, one.reason) for one in pipeline.skipped} == {(1, "its peer, rank 2, is not replayed")}


@pytest.mark.slow
def test_first_only_and_scale(tmp_path: Path) -> None:
    barrier = {"collective_name": "barrier", "global_rank_start": 0, "global_rank_stride": 1}
    job = etloom.open(
        write_calls(
            tmp_path, {rank: [all_reduce_call(100), barrier, all_reduce_call(6)] for rank in range(2)}
        )
    )
    assert [step[0] for step in steps(build_plan(job))] == ["all_reduce", "barrier", "all_reduce"]
    assert [step[2] for step in steps(build_plan(job, only=["all_reduce"], scale=0.5))] == [50, 4]
    assert (
        scale_call(Call(0, "all_reduce", (0, 1), "float", (8,), (8,), recorded_ns=5), 0.5).recorded_ns is None
    )
    assert len(build_plan(job, first=2).calls[1]) == 2


def test_a_call_that_raised_in_the_recording_is_left_out(tmp_path: Path) -> None:
    job = etloom.open(
        write_calls(tmp_path, {rank: [all_reduce_call(100), all_reduce_call(6)] for rank in range(2)})
    )
    assert len(build_plan(job).calls[0]) == 2

    def ended(trace: etloom.Trace) -> etloom.Trace:
        last = pl.col("id") == pl.col("id").max()
        attrs = pl.when(last).then(pl.lit('{"raised": true}'))  # as our observer tells
        return trace.replace(nodes=trace.nodes.with_columns(attrs=attrs))

    made = build_plan(Job({rank: ended(trace) for rank, trace in job.items()}))
    assert [step[2] for step in steps(made)] == [100]
    assert {(one.rank, one.reason) for one in made.skipped} == {
        (0, "it raised an exception in the recording"),
        (1, "it raised an exception in the recording"),
    }


def calls_of(*rows: dict[str, Any], rank: int = 0, world: int = 4) -> etloom.Trace:
    """A trace of nothing but communications."""
    nodes = [{"id": at, "name": row.pop("name", "record_param_comms")} for at, row in enumerate(rows)]
    plain = {"dtype": "float", "in_nelems": 8, "out_nelems": 8}
    comms = [{"id": at, "node": at, **plain, **row} for at, row in enumerate(rows)]
    return etloom.Trace(
        {"nodes": pl.DataFrame(nodes), "comms": pl.DataFrame(comms)}, {"rank": rank, "world_size": world}
    )


def test_roots_are_ranks_but_of_operators_of_c10d_places_in_the_group() -> None:
    recorded = {"collective": "broadcast", "ranks": "[2, 3]"}
    job = Job(
        {
            rank: calls_of(
                {**recorded, "root": 3}, {**recorded, "root": 1, "name": "c10d::broadcast_"}, rank=rank
            )
            for rank in (2, 3)
        }
    )
    made = build_plan(job)
    assert [[call.root for call in own] for own in made.calls] == [[1, 1], [1, 1]]


def uneven(rank: int) -> dict[str, Any]:
    """All-to-all of rows 3 elements wide: rank 0 keeps 1 row and sends 4, rank 1 sends 2 and keeps none."""
    sent, got = ((1, 4), (1, 2)) if rank == 0 else ((2, 0), (4, 0))
    return {
        "collective": "all_to_all",
        "in_nelems": 3 * sum(sent),
        "out_nelems": 3 * sum(got),
        "in_split": json.dumps(sent),
        "out_split": json.dumps(got),
    }


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.5])
def test_sent_and_received_elements_match_at_every_scale(scale: float) -> None:
    made = build_plan(Job({rank: calls_of(uneven(rank), rank=rank, world=2) for rank in (0, 1)}), scale=scale)
    (first,), (second,) = made.calls
    assert first.in_split == tuple({1.0: (3, 12), 0.5: (2, 6), 2.5: (8, 30)}[scale])
    assert (first.in_split[1], second.in_split[0]) == (second.out_split[0], first.out_split[1])
    assert [call.inputs for call in (first, second)] == [(sum(call.in_split),) for call in (first, second)]
    assert [call.outputs for call in (first, second)] == [(sum(call.out_split),) for call in (first, second)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"in_nelems": -8}, "a negative size of a tensor was recorded"),
        (
            {"collective": "all_to_all", "in_split": f"[1, {10**22}]"},
            "a size of more than 2**50 elements was recorded",
        ),
        (
            {
                "collective": "all_to_all",
                "in_nelems": 1 << 50,
                "in_split": "[1, 0]",
                "out_split": f"[{1 << 50}, 0]",
            },
            "its splits have more than 2**50 elements",
        ),
        ({"dtype": "float128"}, "unknown data type 'float128'"),
        ({"dtype": None}, "its data type was not recorded"),
        ({"ranks": "[0, 0]"}, "its group has a duplicate or negative rank"),
        ({"ranks": "[1, 2]"}, "rank 0 is not in its group"),
        ({"in_nelems": None, "out_nelems": None}, "its size was not recorded"),
        ({"collective": "broadcast", "root": 9}, "its root is not replayed"),
        ({"collective": "send", "peer": 0}, "its peer is the rank itself"),
        ({"collective": "send", "peer": 1 << 60}, f"its peer, rank {1 << 60}, is not replayed"),
    ],
)
def test_calls_that_cannot_be_replayed_have_a_reason(row: dict[str, Any], reason: str) -> None:
    job = Job(
        {
            rank: calls_of({"collective": "barrier"}, {"collective": "all_reduce", **row}, world=1 << 60)
            for rank in (0, 1)
        }
    )
    made = build_plan(job)
    assert [call.collective for call in made.calls[0]] == ["barrier"]
    assert [one.reason for one in made.skipped if one.rank == 0] == [reason]


def test_reordered_groups_keep_their_splits() -> None:
    """Rank 0 is the second of its group: it keeps 2 rows and sends 0, rank 1 keeps 1 and sends 4."""
    named = ("[1, 0]", "[0, 1]")  # the ranks need not name it in one order
    for second in (0, 1):
        own = {
            0: {"in_split": "[0, 2]", "out_split": "[4, 2]", "in_nelems": 2, "out_nelems": 6},
            1: [
                {"in_split": "[1, 4]", "out_split": "[1, 0]", "in_nelems": 5, "out_nelems": 1},
                {"in_split": "[4, 1]", "out_split": "[0, 1]", "in_nelems": 5, "out_nelems": 1},
            ][second],
        }
        ranks = {0: named[0], 1: named[second]}
        rows = {
            rank: {"collective": "all_to_all", "ranks": ranks[rank], **row}  # type: ignore[dict-item]
            for rank, row in own.items()
        }
        made = build_plan(Job({rank: calls_of(row, rank=rank, world=2) for rank, row in rows.items()}))
        ((first,), (other,)) = made.calls
        assert (first.group, first.in_split, first.out_split) == ((0, 1), (2, 0), (2, 4))
        assert (other.group, other.in_split, other.out_split) == ((0, 1), (4, 1), (0, 1))


def test_a_scale_beyond_all_memory_is_an_error() -> None:
    job = Job({rank: calls_of(uneven(rank), rank=rank, world=2) for rank in (0, 1)})
    with pytest.raises(EtloomError, match="more than 2\\*\\*50 elements at scale 1e\\+30"):
        build_plan(job, scale=1e30)


def test_a_wait_is_for_the_call_of_its_group() -> None:
    def call(collective: str, group: str | None) -> dict[str, Any]:
        return {"collective": collective, "pg_name": group, "seq": 1, "ranks": "[0, 1]"}

    rows = [call("all_reduce", "a"), call("all_reduce", "b"), call("wait", "a"), call("broadcast", "c")]
    made = build_plan(Job({rank: calls_of(*map(dict, rows), rank=rank) for rank in (0, 1)}))
    assert made.calls[0][2].waits_for == (0,)
    rows[2]["pg_name"] = None  # as some versions of torch record it: the last of that number
    made = build_plan(Job({rank: calls_of(*map(dict, rows), rank=rank) for rank in (0, 1)}))
    assert made.calls[0][2].waits_for == (1,)


def test_nothing_to_replay_is_an_error(data: Path) -> None:
    with pytest.raises(EtloomError, match="no communication that can be replayed"):
        build_plan(etloom.open(data / "simple_add"))
    job = etloom.open(data / "cpu/ddp_2")
    with pytest.raises(EtloomError, match="3 processes, but only 2 recorded ranks"):
        build_plan(job, world_size=3)
    with pytest.raises(EtloomError, match="rank 7 was not recorded"):
        build_plan(job, ranks=[0, 7])


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Process(0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Process(3, 8, 1)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, Process(2, 4, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Process(1, 2, 1)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}, Process(5, 16, 1)),
    ],
)
def test_the_launcher_determines_the_rank_of_the_process(environment: dict[str, str], place: Process) -> None:
    assert Process.current(environment) == place


def test_nonsense_from_a_launcher() -> None:
    with pytest.raises(EtloomError, match="are not a rank and a world size"):
        Process.current({"RANK": "x", "WORLD_SIZE": "2"})


@pytest.mark.slow
def test_dry_run_needs_no_process_group(data: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    asked = ("--trace-path", data / "dlrm", "--trace-type", "et", "--backend", "mpi", "--format", "json")
    status, out, _ = call("replay", "comms", "--dry-run", *asked)
    assert status == 0
    assert len(json.loads(out)) == 32
    status, _, err = call("replay", "comms", data / "dlrm", "--dry-run", "--trace-type", "basic")
    assert (status, "no trace of type 'basic'" in err, err.count("\n")) == (1, True, 1)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "ranks", "launcher", "options"),
    [
        ("cpu/ddp_2", 2, "mpirun", ["--timing", "recorded", "--gap", "load"]),
        ("cpu/coll_4", 4, "torchrun", []),
        ("cpu/pp_4", 4, "torchrun", ["--blocking"]),
        ("dlrm", 2, "torchrun", ["--shrink"]),
    ],
)
def test_recorded_calls_run_again(
    data: Path, tmp_path: Path, name: str, ranks: int, launcher: str, options: list[str]
) -> None:
    out, sums = tmp_path / "replay.parquet", tmp_path / "sums.json"
    asked = ["--verify", "--repeats", "2", "--warmup", "0", "--out", str(out), "--json", str(sums), *options]
    found = ended(processes(ranks, data / name, *asked, launcher=launcher))
    assert [status for status, _, _ in found] == [0] * ranks, found
    assert [bool(text) for _, text, _ in found] == [True] + [False] * (ranks - 1)
    made = build_plan(etloom.open(data / name), world_size=ranks)
    replayed = etloom.open(out)
    for rank, own in enumerate(made.calls):
        rows = replayed[rank].comms.sort("id")
        assert rows["collective"].cast(pl.String).to_list() == [call.collective for call in own]
        assert rows["in_nelems"].to_list() == [sum(call.inputs) for call in own]
    counts = sum(row["count"] for row in json.loads(sums.read_text())["table"])
    assert counts == 2 * sum(map(len, made.calls))
    # What was replayed is a run like any other.
    together = etloom.analyze(replayed, "collectives")
    assert set(together["recorded"] == together["group_size"]) == {True}


@pytest.mark.slow
@pytest.mark.torch
def test_a_killed_rank_ends_all(data: Path) -> None:
    running = processes(2, data / "cpu" / "ddp_2", "--repeats", "100000")
    wait_for_calls(running)
    assert [one.poll() for one in running] == [None, None]
    running[0].send_signal(signal.SIGKILL)
    since = time.monotonic()
    found = ended(running, timeout=400)
    assert time.monotonic() - since < 300
    status, _, err = found[1]
    assert status == 1
    assert err.strip().count("\n") <= 1
    assert "rank 0" in err and "gone" in err


@pytest.mark.slow
@pytest.mark.torch
def test_a_recording_with_long_gaps_reports_how_long_it_takes(tmp_path: Path) -> None:
    run = tmp_path / "basic.json"
    calls = [
        {
            "comms": "all_reduce",
            "in_msg_size": 8,
            "out_msg_size": 8,
            "dtype": "float32",
            "startTime_ns": at,
            "req": one,
        }
        for one, at in enumerate((10**6, 10**12))
    ]
    run.write_text(json.dumps(calls))
    (one,) = processes(
        1, run, "--trace-type", "basic", "--timing", "recorded", "--repeats", "1", "--warmup", "1"
    )
    wait_for_calls([one])
    one.send_signal(signal.SIGINT)
    ((status, _, err),) = ended([one])
    assert status == 130
    assert "the recorded gaps between calls are kept: 2 passes take 2,000 s" in err


@pytest.mark.slow
@pytest.mark.torch
def test_an_interrupt_is_reported_once(data: Path) -> None:
    """As Ctrl-C and torchrun send it: to all."""
    running = processes(2, data / "cpu" / "ddp_2", "--repeats", "100000")
    wait_for_calls(running)
    for one in running:
        one.send_signal(signal.SIGINT)
    found = ended(running, timeout=400)
    assert [status for status, _, _ in found] == [130, 130]
    (line,) = "".join(err for _, _, err in found).strip().splitlines()
    assert re.match("etloom: interrupted at (call|the end of a repeat)", line)


@pytest.mark.slow
@pytest.mark.torch
def test_a_plan_that_fails_fails_on_all(data: Path) -> None:
    found = ended(processes(2, data / "simple_add"))
    assert [status for status, _, _ in found] == [1, 1]
    assert all("1 recorded ranks to replay" in err and err.count("\n") == 1 for _, _, err in found)


@pytest.mark.slow
def test_one_trace_for_all(data: Path) -> None:
    from etloom.replayer.comms.plan_builder import PlanOptions, _replicate_lowest_rank, plan_replay

    job, other = _replicate_lowest_rank(Job({0: etloom.open(data / "nccl_ddp")[0]}), 2)
    assert not other  # than were recorded
    made = build_plan(job)
    assert made.world_size == 2
    assert made.groups == [(0, 1)]
    assert {call.collective for call in made.calls[1]} == {"all_reduce", "broadcast"}
    dlrm = etloom.open(data / "dlrm")  # of 8 ranks
    timed = [
        [call.recorded_ns for call in plan_replay(dlrm, world, PlanOptions(one_for_all=True)).calls[0]]
        for world in (8, 16)
    ]
    assert all(timed[0]) and not any(timed[1])


@pytest.mark.slow
@pytest.mark.torch
def test_recordings_of_collect_are_replayed(tmp_path: Path) -> None:
    """A pipeline of two ranks, under real launchers."""
    launchers = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    }
    script = ROOT / "examples" / "train_experts.py"
    run, out = tmp_path / "run", tmp_path / "replay.parquet"
    plain = {**os.environ, "OMP_NUM_THREADS": "1"}
    collect = [sys.executable, "-m", "etloom", "collect", "--observer", "stock", "--out", str(run), "--"]
    subprocess.run(
        [*collect, *by_shell(2, sys.executable, str(script), "1f1b", "--steps", "6")],
        env=plain, check=True, capture_output=True,
    )  # fmt: skip
    recorded = build_plan(etloom.open(run))
    assert recorded.skipped == ()
    assert [{call.collective for call in own} for own in recorded.calls] == [{"send", "recv"}] * 2
    replay = ["-m", "etloom", "replay", "comms", str(run), "--verify", "--repeats", "1", "--warmup", "0"]
    for launcher, started in launchers.items():
        if launcher == "mpirun" and not shutil.which(launcher):
            continue
        shutil.rmtree(out, ignore_errors=True)
        done = subprocess.run(
            [*started, *replay, "--master-port", str(free_port()), "--out", str(out)],
            env=plain, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        replayed = etloom.open(out)
        for rank, own in enumerate(recorded.calls):
            rows = (
                replayed[rank]
                .comms.sort("id")
                .select(pl.col("collective").cast(pl.String), "in_nelems", "out_nelems")
            )
            assert rows.rows() == [(call.collective, sum(call.inputs), sum(call.outputs)) for call in own]


def test_figures_of_a_replay_worked_out_by_hand() -> None:
    """Two ranks, one all-reduce of 1,000 B and one message, two repeats; the clock of rank 1 is 5,000 ahead."""
    from etloom.replayer.comms.results import call_table, pass_table, summarize_calls
    from etloom.replayer.comms.runner import CallTimes

    reduced = Call(0, "all_reduce", (0, 1), "float", (250,), (250,), recorded_ns=1_000)
    ends = [
        Call(1, "send", (0, 1), "float", (100,), (), peer=1),
        Call(1, "recv", (0, 1), "float", (), (100,), peer=0),
    ]
    made = Plan(tuple((reduced, end) for end in ends))

    def times(made: list[list[int]], done: list[list[int]], zero: int) -> CallTimes:
        arrays = [np.array(one) + zero for one in (made, made, done)]
        return CallTimes(*arrays, zero, np.array([9_000, 8_000]), np.array([3_000, 4_000]))

    measured = {
        0: times([[0, 3_000], [5_000, 8_000]], [[2_000, 3_500], [7_000, 9_000]], 0),
        1: times([[1_000, 3_200], [5_500, 8_000]], [[2_000, 4_000], [7_500, 9_600]], 5_000),
    }
    table = call_table(made, measured)
    assert table.filter(pl.col("rank") == 1)["issued_ns"].to_list() == [1_000, 3_200, 5_500, 8_000]
    found = {row["collective"]: row for row in summarize_calls(table).iter_rows(named=True)}
    row = found["all_reduce"]  # latencies 2, 2, 1 and 2 us
    assert (row["count"], row["bytes"], row["group_size"]) == (4, 1_000, 2)
    assert (row["p50_us"], row["min_us"], row["max_us"], row["total_ms"]) == (2.0, 1.0, 2.0, 0.007)
    assert (row["p95_us"], row["p99_us"]) == (2.0, 2.0)
    assert row["skew_p50_us"] == 0.75  # of 1 and 0.5
    # From the last call to the last end: 1,000 ns and 2,000 ns; 1,000 B in the median of 1,500 ns.
    assert row["algo_gb_per_s"] == pytest.approx(1_000 / 1_500)
    assert row["bus_gb_per_s"] == row["algo_gb_per_s"]  # 2 (n - 1) / n of 2 ranks
    assert (row["recorded_p50_us"], row["replayed_over_recorded"]) == (1.0, 2.0)
    row = found["message"]  # latencies 0.5, 1, 0.8 and 1.6 us
    assert row["p50_us"] == pytest.approx(0.9)
    assert row["p95_us"] == pytest.approx(1.0 + 0.85 * 0.6)
    assert row["p99_us"] == pytest.approx(1.0 + 0.97 * 0.6)
    assert row["share_pct"] == pytest.approx(100 * 3.9 / 10.9)
    assert row["algo_gb_per_s"] == pytest.approx(400 / 1_200)  # medians of 800 ns and 1,600 ns
    assert summarize_calls(table, "all")["collective"].to_list() == ["all_reduce", "message"]
    assert pass_table(measured).rows() == [
        (0, 0, 9_000, 3_000),
        (0, 1, 8_000, 4_000),
        (1, 0, 9_000, 3_000),
        (1, 1, 8_000, 4_000),
    ]


def test_groups_are_separated_or_merged() -> None:
    from etloom.replayer.comms.results import call_table, summarize_calls
    from etloom.replayer.comms.runner import CallTimes

    own = [Call(at, "all_reduce", group, "float", (8,), (8,)) for at, group in enumerate([(0, 1), (0, 2)])]
    of_rank = {0: own, 1: own[:1], 2: [replace(own[1], index=0)]}
    made = Plan(tuple(map(tuple, of_rank.values())))
    zeros = np.zeros(1, dtype=np.int64)
    measured = {
        rank: CallTimes(*(np.full((1, len(calls)), at) for at in (0, 0, 1_000)), 0, zeros, zeros)
        for rank, calls in of_rank.items()
    }
    table = call_table(made, measured)
    assert summarize_calls(table)["group"].to_list() == ["[0, 1]", "[0, 2]"]
    (row,) = summarize_calls(table, "all").iter_rows(named=True)
    assert (row["group"], row["group_size"], row["count"], row["p50_us"]) == (None, 2, 4, 1.0)


def test_messages_in_flight_together_are_one_batch() -> None:
    from etloom.replayer.comms.runner import _message_batches

    def message(at: int, collective: str = "send") -> Call:
        return Call(at, collective, (0, 1), "float", (8,), (8,), peer=1)

    own = [
        message(0),
        message(1, "recv"),
        Call(2, "barrier", (0, 1), "float", (), ()),
        message(3),
        message(4),
    ]
    own += [message(5), message(6)]
    after: list[tuple[int, ...]] = [(), (), (0, 1), (2,), (), (3,), ()]
    assert _message_batches(own, after) == {0: range(2), 3: range(3, 5), 5: range(5, 7)}


@pytest.mark.slow
@pytest.mark.torch
def test_every_type_and_collective_brings_the_right_values(tmp_path: Path) -> None:
    types = (
        "BFloat16",
        "Bool",
        "ComplexFloat",
        "Float8_e4m3fn",
        "Short",
        "c10::Half",
        "unsigned char",
        "UInt16",
    )
    even = {"global_rank_start": 0, "global_rank_stride": 1}
    sizes = {
        "allreduce": (8, 8), "_allgather_base": (8, 16), "_reduce_scatter_base": (16, 8), "all_to_all": (8, 8),
        "broadcast": (8, 8), "reduce": (8, 8), "gather": (8, 16), "scatter": (16, 8),
    }  # fmt: skip
    own = [
        {"collective_name": name, "dtype": dtype, "in_msg_nelems": sent, "out_msg_nelems": got, **even}
        for dtype in types
        for name, (sent, got) in sizes.items()
    ]
    run = write_calls(tmp_path, dict.fromkeys(range(2), own))
    found = ended(
        processes(2, run, "--verify", "--repeats", "1", "--warmup", "0", "--per", "all", "--format", "json")
    )
    assert [status for status, _, _ in found] == [0, 0], found
    rows = json.loads(found[0][1])
    assert sum(row["count"] for row in rows) == 2 * len(own)
    assert "not replayed" not in found[0][2]
