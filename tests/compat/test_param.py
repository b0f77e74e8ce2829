"""PARAM's replay flags and basic traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.compat import comms_replay
from etloom.core.errors import EtloomError, ReadError
from etloom.replayer.comms.plan_builder import PlanOptions, parse_ranks, plan_replay
from support.processes import ended, forked, free_port
from support.real_runs import open_run


def basic(folder: Path) -> Path:
    """Two ranks: a sum in flight over an uneven exchange, a copy from rank 1, a message, a barrier."""
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        splits = ([2, 4], [2, 3]) if rank == 0 else ([3, 3], [4, 3])
        calls: list[dict[str, Any]] = [
            {"comms": "init", "pg_id": 7, "global_ranks": [0, 1]},
            {"comms": "all_reduce", "req": 1, "in_msg_size": 1024, "out_msg_size": 1024, "dtype": "Float"},
            {"compute": "gemm", "mm_dim": 100, "count": 1},
            {"comms": "all_to_allv", "req": 2, "in_msg_size": 6, "out_msg_size": sum(splits[1]), "dtype": "Int",
             "in_split": splits[0], "out_split": splits[1]},
            {"comms": "wait", "req": 1},
            {"comms": "broadcast", "in_msg_size": 8, "out_msg_size": 8, "dtype": "Long", "root": 1},
            {"comms": "send" if rank == 0 else "recv", "in_msg_size": 5, "out_msg_size": 5, "dtype": "Float",
             "src_rank": 0, "dst_rank": 1},
            {"comms": "barrier"},
        ]  # fmt: skip
        for at, call in enumerate(calls):
            call |= {"pg_id": 7, "world_size": 2}
            if call.get("comms") not in ("init", "wait", "barrier"):
                call["startTime_ns"] = at * 1_000_000
        (folder / f"rank-{rank}.json").write_text(json.dumps(calls))
    return folder


def test_basic_traces_contain_the_called_collectives(tmp_path: Path) -> None:
    job = etloom.open(basic(tmp_path / "run"), use_cache=False)
    assert list(job) == [0, 1]
    assert job[0].meta["formats"] == ["param-basic"]
    left = job[0].stats.filter(pl.col("name") == "read.skipped_entries")
    assert left.select("count", "example").rows() == [(1, "compute: gemm")]
    made = plan_replay(job, 2, PlanOptions(trace_type="basic"))
    assert [
        (call.collective, call.inputs, call.outputs, call.root, call.peer, call.waits_for)
        for call in made.calls[0]
    ] == [
        ("all_reduce", (1024,), (1024,), None, None, ()),
        ("all_to_all", (6,), (5,), None, None, ()),
        ("broadcast", (8,), (8,), 1, None, (0, 1)),
        ("send", (5,), (), None, 1, (2,)),
        ("barrier", (), (), None, None, (3,)),
    ]
    assert made.calls[1][1].in_split == (3, 3) and made.calls[1][3].peer == 0
    assert made.calls[0][2].gap_ns == 2_000_000


def test_equal_shares(tmp_path: Path) -> None:
    made = plan_replay(etloom.open(basic(tmp_path / "run"), use_cache=False), 2, PlanOptions(balance=True))
    for own in made.calls:
        assert (own[1].inputs, own[1].outputs, own[1].in_split) == ((6,), (6,), ())


@pytest.mark.parametrize("text", ["[]", '[{"comms": "all_reduce"', '{"comms": "x"}'])
def test_other_files_are_not_basic_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    if text == "[]":
        assert etloom.read(tmp_path / "rank-0.json", "param-basic").events.height == 0
    else:
        with pytest.raises(ReadError):
            etloom.read(tmp_path / "rank-0.json", "param-basic")


@pytest.mark.slow
def test_a_type_that_is_not_there_is_an_error(data: Path) -> None:
    with pytest.raises(EtloomError, match="no trace of type 'basic'"):
        plan_replay(open_run(data / "dlrm"), 4, PlanOptions(trace_type="basic"))
    with pytest.raises(EtloomError, match="trace_type: unknown trace type 'nsys'"):
        plan_replay(open_run(data / "dlrm"), 4, PlanOptions(trace_type="nsys"))


def test_files_called_after_their_rank_and_messages_of_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the older tool has them: 0.json, 1.json; a batch names its messages before it."""
    for rank in (0, 1):
        message = {"in_msg_size": 5, "out_msg_size": 5, "dtype": "Float", "use_batch": True, "world_size": 2}
        calls = [
            {"comms": "isend", "src_rank": rank, "dst_rank": 1 - rank, **message},
            {"comms": "irecv", "src_rank": 1 - rank, "dst_rank": rank, **message},
            {"comms": "batch_isend_irecv", "world_size": 2},
        ]
        (tmp_path / f"{rank}.json").write_text(json.dumps(calls))
    assert comms_replay.main(["--trace-path", str(tmp_path), "--trace-type", "basic", "--dry-run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [("0", "send"), ("0", "recv"), ("1", "send"), ("1", "recv")]


def test_lists_of_ranks() -> None:
    assert parse_ranks("0, 8-10") == [0, 8, 9, 10]
    assert parse_ranks("3,1-3") == [1, 2, 3]
    for text in ("1-", "5-2", "", "0-99999999999"):
        with pytest.raises(EtloomError, match=f"'{text}' is not a list of ranks"):
            parse_ranks(text)


@pytest.mark.slow
def test_dry_run_and_flags_without_effect(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--trace-path", str(data / "dlrm"), "--dry-run", "--bitwidth", "32", "--reuse-tensors"]
    assert comms_replay.main(given) == 0
    said = capsys.readouterr()
    assert said.out.count("all_to_all") == 4 * 5
    assert "--bitwidth has no effect: nothing is quantised" in said.err
    assert "--reuse-tensors has no effect" in said.err
    assert comms_replay.main([*given, "--max-msg-cnt", "2", "--allow-ops", "all_reduce,wait"]) == 0
    assert capsys.readouterr().out.count("all_reduce") == 4 * 2
    with pytest.raises(SystemExit):
        comms_replay.main([*given, "--blockin"])
    capsys.readouterr()
    assert comms_replay.main(["--trace-path", str(data / "simple_add"), "--dry-run"]) == 1
    assert capsys.readouterr().err.startswith("etloom-comms-replay: the run has no communication")


def test_batches_of_calls() -> None:
    calls = pl.DataFrame(
        {"rank": [0] * 5, "repeat": [0] * 5, "call": range(5), "issued_ns": [0, 10, 20, 30, 40],
         "completed_ns": [9, 25, 21, 39, 99]}
    )  # fmt: skip
    found = comms_replay.summarize_batches(calls, 2)
    assert found.select("batches", "min_ms", "max_ms", "total_ms").row(0) == pytest.approx(
        (2, 19e-6, 25e-6, 44e-6)
    )


@pytest.mark.slow
@pytest.mark.torch
def test_two_processes_under_params_flags(tmp_path: Path) -> None:
    run, out = basic(tmp_path / "run"), tmp_path / "out"
    flags = ["--trace-path", str(run), "--trace-type", "basic", "--backend", "gloo", "--num-replays", "3", "--c", "1",
             "--blocking", "--colls-per-batch", "2", "--output-path", str(out), "--output-ranks", "1",
             "--master-port", str(free_port())]  # fmt: skip
    said = ended(forked(2, flags, main="etloom.compat.comms_replay"))
    assert [status for status, _, _ in said] == [0, 0], said
    assert "all_reduce" in said[0][1] and "batches" in said[0][1] and not said[1][1]
    assert sorted(one.name for one in out.iterdir()) == ["replay.parquet", "replayedCommsPerf.rank-1.json"]
    rows = json.loads((out / "replayedCommsPerf.rank-1.json").read_text())
    assert [row["comms"] for row in rows[:5]] == ["all_reduce", "all_to_all", "broadcast", "recv", "barrier"]
    assert len(rows) == 15 and all(row["global_latency_us"] >= row["latency_us"] > 0 for row in rows)
    assert [(row["world_size"], row["pg_id"]) for row in rows[2:5]] == [(2, 0), (2, None), (2, 0)]
    assert len(etloom.open(out / "replay.parquet")) == 2
