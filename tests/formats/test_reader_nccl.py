"""NCCL's own profilers: communicator, number, algorithm, protocol, channels, time and bandwidth of communications."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Trace
from support.nccl_profiles import HASH, inspector_line, write_lines, write_profile


def test_communications_of_the_profiler_plugin(tmp_path: Path) -> None:
    trace = etloom.open(write_profile(tmp_path, 1), use_cache=False)[1]
    reduce = trace.comms.filter(pl.col("collective").cast(pl.String) == "all_reduce")
    assert reduce.select("seq", "in_nelems", "bytes").rows() == [(i, 1 << 20, 4 << 20) for i in range(3)]
    assert reduce["comms_id"].unique().to_list() == [HASH]
    assert reduce["pg_name"].cast(pl.String)[0] == f"{HASH:#x}"
    events = trace.events.group_by(pl.col("cat").cast(pl.String)).len()
    assert dict(events.iter_rows()) == {"nccl_group": 3, "nccl_collective": 6, "nccl_gpu": 6}
    table = etloom.analyze(trace, "nccl-bandwidth")
    row = table.row(by_predicate=pl.col("collective") == "all_reduce", named=True)
    assert (row["algorithm"], row["protocol"], row["channels"], row["timing"]) == (
        "RING",
        "SIMPLE",
        2,
        "kernel",
    )
    assert (row["count"], row["mean_ns"], row["bytes"]) == (3, 100_000, 4 << 20)
    assert row["algo_gb_per_s"] == pytest.approx((4 << 20) / 100_000)
    assert not trace.stats["severity"].is_in(["data_loss", "error"]).any()


def test_ranks_of_a_folder_are_matched_by_number(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_profile(tmp_path, rank, delay_us=40 * rank)
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0, 1]
    table = etloom.analyze(job, "collectives").filter(pl.col("collective") == "all_reduce")
    assert table["how"].to_list() == ["seq"] * 3
    assert (table["wait_ns"].to_list(), table["last_rank"].to_list()) == ([40_000] * 3, [1] * 3)


def test_the_size_of_an_all_gather_needs_the_number_of_ranks(tmp_path: Path) -> None:
    trace = etloom.read(write_profile(tmp_path, 0, call="AllGather"))
    assert isinstance(trace, Trace)
    gathers = trace.comms.filter(pl.col("collective").cast(pl.String) == "all_gather")
    assert gathers.select("in_nelems", "out_nelems", "bytes").row(0) == (None, None, None)
    gather = trace.events.filter(pl.col("name").cast(pl.String) == "AllGather")
    assert json.loads(gather["args"][0])["count"] == 1 << 20
    table = etloom.analyze(etloom.link(trace), "nccl-bandwidth").filter(pl.col("collective") == "all_gather")
    assert table.select("bytes", "bus_gb_per_s").row(0) == (None, None)


def test_a_truncated_profile_keeps_complete_calls(tmp_path: Path) -> None:
    path = write_profile(tmp_path, 0)
    path.write_text(path.read_text()[:-900])
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    counts = dict(trace.stats.select("name", "count").iter_rows())
    assert counts["read.nccl_unfinished"] >= 1
    assert 0 < trace.comms.height < 6


def test_communications_of_the_inspector(tmp_path: Path) -> None:
    lines = [inspector_line(2, i) for i in (1407, 1408)] + [inspector_line(0, 5, ranks=2), '{"header": 1']
    trace = etloom.open(write_lines(tmp_path, lines), use_cache=False)[2]
    assert (trace.meta["host"], trace.rank) == ("example-hostname", 2)
    assert trace.comms["seq"].to_list() == [1407, 1408, 5]
    assert trace.comms["comms_id"].unique().to_list() == [0x7F8C496AE9F661]
    counts = dict(trace.stats.select("name", "count").iter_rows())
    assert (counts["read.damaged_entry"], counts["read.nccl_no_start"]) == (1, 3)
    row = etloom.analyze(trace, "nccl-bandwidth").row(0, named=True)
    assert (row["group_size"], row["count"], row["mean_ns"], row["bytes"]) == (8, 3, 61_974_000, 17179869184)
    assert (row["algo_gb_per_s"], row["bus_gb_per_s"]) == (
        pytest.approx(277.210914),
        pytest.approx(485.119099),
    )


def test_a_start_and_channels_of_the_verbose_inspector(tmp_path: Path) -> None:
    trace = etloom.read(write_lines(tmp_path, [inspector_line(0, 1, verbose=True)]))
    assert isinstance(trace, Trace)
    assert trace.events.select("ts", "dur").row(0) == (1748030377000100_000, 61_974_000)
    assert json.loads(trace.events["args"][0])["channels"] == 4


def test_overlapping_calls_and_one_without_a_start_are_exported(tmp_path: Path) -> None:
    lines = [inspector_line(0, number, verbose=number > 0) for number in range(3)]
    trace = etloom.read(write_lines(tmp_path, lines))
    document = json.loads(etloom.export(trace, tmp_path / "out.json", "chrome").read_text())
    tracks = [event["tid"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(tracks) == 3


def test_the_bandwidth_of_an_all_gather_counts_all_ranks(tmp_path: Path) -> None:
    line = inspector_line(0, 1)
    line["coll_perf"] |= {"coll": "AllGather", "coll_msg_size_bytes": 1_000_000, "coll_exec_time_us": 100}
    line["coll_perf"] |= {"coll_algobw_gbs": 80.0, "coll_busbw_gbs": 70.0}
    trace = etloom.link(etloom.read(write_lines(tmp_path, [line])))
    assert etloom.analyze(trace, "nccl-bandwidth")["bytes"].to_list() == [8_000_000]


@pytest.mark.parametrize("write", ["profiler", "inspector"])
def test_numbers_and_texts_that_no_column_holds_cost_themselves(tmp_path: Path, write: str) -> None:
    if write == "profiler":
        path = write_profile(tmp_path, 0, call="AllGather")
        text = path.read_text().replace('"Count": 1048576', f'"Count": {1 << 50}, "nRanks": {1 << 20}')
        path.write_text(text.replace('"RING"', r'"\ud800"'))
    else:
        line = inspector_line(0, 1)
        line["metadata"]["pid"], line["header"]["rank"] = 1 << 70, (1 << 32) - 1
        line["coll_perf"] |= {"coll": "\ud800AllReduce", "coll_sn": 1 << 63}
        path = write_lines(tmp_path, [line])
    job = etloom.open(tmp_path, use_cache=False)
    (rank,) = job.ranks
    assert rank < 1 << 31
    etloom.report(job, tmp_path / "report.html")
    assert job[rank].comms.height
    assert "\ud800" not in str(job[rank].events["name"].to_list()) + str(job[rank].events["args"].to_list())


@pytest.mark.parametrize("key", ["header", "coll_perf", "metadata"])
@pytest.mark.parametrize("value", [None, [], 3, "x", {"id": -1, "rank": "x", "coll": 3, "n_ranks": 1e300}])
def test_unexpected_values_end_in_an_answer_or_one_line(tmp_path: Path, key: str, value: Any) -> None:
    lines = [inspector_line(0, 1), inspector_line(0, 2) | {key: value}]
    try:
        assert isinstance(etloom.read(write_lines(tmp_path, lines)), Trace)
        etloom.read(write_lines(tmp_path, lines[1:]), "nccl-inspector")
    except EtloomError as error:
        assert "\n" not in str(error)


def test_a_process_with_several_gpus_is_several_ranks(data: Path) -> None:
    job = etloom.open(data / "cases/turn3/nccl_plugin_single_process.json", use_cache=False)
    assert job.ranks == [0, 1]
    row = etloom.analyze(job, "collectives").row(0, named=True)
    assert (row["collective"], row["source"], row["destination"], row["recorded"], row["bytes"]) == (
        "message", 0, 1, 2, 1 << 30
    )  # fmt: skip
    assert [row[name] for name in ("duration_ns", "transfer_ns", "algo_gb_per_s", "bus_gb_per_s")] == [
        None
    ] * 4
    bandwidths = etloom.analyze(job, "nccl-bandwidth")
    assert bandwidths.select("rank", "mean_ns", "bus_gb_per_s").rows() == [(0, None, None), (1, None, None)]


def _write_calls(path: Path, calls: list[tuple[int, int, int]]) -> Path:
    """Write all-reduces of (communicator, rank, sequence number), 1 ms apart, each with a kernel of unknown end."""
    lines = []
    for number, (communicator, rank, sequence) in enumerate(calls):
        start = 1000.0 * (number + 1)
        common = {"id": number, "pid": 7, "tid": 1}
        args = {
            "CommHash": communicator,
            "Rank": rank,
            "SeqNum": sequence,
            "Count": 8,
            "Datatype": "ncclFloat32",
        }
        call, kernel = {"name": "AllReduce", "cat": "COLL"}, {"name": "KernelCh", "cat": "GPU"}
        lines += [
            {**call, **common, "ph": "b", "ts": start, "args": args},
            {**kernel, **common, "ph": "b", "ts": start + 50, "args": {"Channel": 0}},
            {**kernel, **common, "ph": "e", "ts": 0},
            {**call, **common, "ph": "e", "ts": start + 10},
        ]
    path.write_text("[\n" + "".join(json.dumps(line) + ",\n" for line in lines) + "{}]\n")
    return path


def test_files_of_several_ranks_each_are_one_run(tmp_path: Path) -> None:
    _write_calls(tmp_path / "host-a.json", [(9, 0, 0), (9, 1, 0)])
    _write_calls(tmp_path / "host-b.json", [(9, 2, 0), (9, 3, 0)])
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0, 1, 2, 3]
    assert [trace.events.height for trace in job.values()] == [2] * 4


def test_calls_of_a_communicator_of_some_gpus_have_no_rank(tmp_path: Path) -> None:
    path = _write_calls(tmp_path / "trace.json", [(9, 0, 0), (9, 1, 0), (9, 2, 0), (5, 0, 0), (5, 1, 0)])
    job = etloom.read(path)
    assert isinstance(job, etloom.Job)
    assert [trace.comms.height for trace in job.values()] == [1] * 3
    counts = dict(job[0].stats.select("name", "count").iter_rows())
    assert counts["read.nccl_unknown_device"] == 2


def test_a_gpu_of_two_communicators_is_one_rank(tmp_path: Path) -> None:
    trace = etloom.read(_write_calls(tmp_path / "trace.json", [(9, 3, 0), (5, 0, 0)]))
    assert isinstance(trace, Trace)
    assert (trace.rank, trace.comms.height) == (None, 2)
