"""Ascend's trace_view.json, database and table of kernels: kernels, calls and collectives, links, counts and sums."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import formats
from etloom.core.errors import ReadError
from etloom.core.trace import Job, Trace
from support.ascend_traces import (
    START,
    write_cluster_communication,
    write_database,
    write_kernel_table,
    write_trace_view,
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return etloom.open(write_trace_view(tmp_path_factory.mktemp("ascend")), use_cache=False)[0]


def test_work_of_the_device(trace: Trace) -> None:
    table = etloom.analyze(trace, "kernel-breakdown")
    rows = {name: (kind, total) for kind, name, total in table.select("kind", "name", "total_ns").iter_rows()}
    assert rows == {
        "MatMulV2": ("computation", 100_000),
        "hcom_allReduce__503_0_1": ("communication", 70_000),
        "Cast": ("computation", 30_000),
        "MEMCPY_ASYNC": ("memory", 10_000),
    }
    work = trace.events.filter(pl.col("cat").cast(pl.String) == "kernel")
    assert set(work["device"]) == {2}  # also of communication, whose process has no number
    assert trace.events["ts"].min() == START * 1000
    assert dict(trace.stats.select("name", "count").iter_rows())["read.ascend_tasks"] == 1


def test_work_has_its_launch_and_step(trace: Trace) -> None:
    names = trace.events.select("id", pl.col("name").cast(pl.String), "step")
    joined = trace.launches.join(names, left_on="device_event", right_on="id").join(
        names, left_on="launch", right_on="id", suffix="_launch"
    )
    assert dict(joined.select("name", "name_launch").iter_rows()) == {
        "MatMulV2": "Node@launch", "Cast": "Node@launch", "hcom_allReduce__503_0_1": "Hccl@launch"
    }  # fmt: skip
    assert set(joined["step"]) == {4}


def test_collectives_have_size_and_group(trace: Trace) -> None:
    row = etloom.analyze(etloom.Job({0: trace}), "collectives").row(0, named=True)
    assert (row["collective"], row["group"], row["bytes"], row["duration_ns"]) == (
        "all_reduce",
        "503",
        4096,
        70_000,
    )


def test_tasks_of_unknown_type_are_work_if_they_have_an_operators_name(data: Path) -> None:
    level0 = etloom.open(data / "cases/turn3/ascend_level0.json", use_cache=False)[0]
    names = level0.events.select("id", pl.col("name").cast(pl.String))
    rows = level0.launches
    for column in ("device_event", "launch", "operator"):
        rows = rows.join(names.rename({"id": column, "name": f"{column}_name"}), on=column)
    assert set(rows.select("device_event_name", "launch_name", "operator_name").iter_rows()) == {
        ("aclnnMm_MatMulAiCore_MatMul", "AscendCL@aclnnMm", "aten::mm"),
        ("aclnnAdd_AddAiCore_Add", "AscendCL@aclnnAdd", "aten::add_"),
    }
    assert etloom.analyze(level0, "kernel-breakdown")["total_ns"].sum() == 50_000


def test_tasks_of_unknown_type_with_the_name_of_a_type(tmp_path: Path) -> None:
    path = write_trace_view(tmp_path)
    text = re.sub('"Task Type": "[^"]*"', '"Task Type": "Other"', path.read_text())
    path.write_text(text.replace('"name": "Cast"', '"name": "aclnnLabelSmoothing_StreamingAttention"'))
    categories = etloom.read(path).events.select(pl.col("name", "cat").cast(pl.String))
    expected = {
        "MatMulV2": "kernel",
        "aclnnLabelSmoothing_StreamingAttention": "kernel",
        "EVENT_WAIT": "npu_task",
        "MEMCPY_ASYNC": "gpu_memcpy",
    }
    assert dict(categories.filter(pl.col("name").is_in(list(expected))).iter_rows()) == expected


def test_sums_of_the_file_that_differ_are_stated(tmp_path: Path, trace: Trace) -> None:
    assert "read.summary_differs" not in set(trace.stats["name"])
    path = write_trace_view(tmp_path)
    path.write_text(
        path.read_text().replace('"name": "Cast"', '"name": "EVENT_WAIT"').replace("MIX_AIV", "EVENT_WAIT")
    )
    stats = etloom.read(path).stats.filter(pl.col("name") == "read.summary_differs")
    assert stats["example"].to_list() == [
        "Computing: 130,000 ns in the file's own sums, 100,000 ns in its computation events"
    ]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_database(tmp_path_factory.mktemp("ascend") / "ascend_pytorch_profiler_0.db", repeat=3)


@pytest.fixture(scope="module")
def recording(database: Path) -> Trace:
    return etloom.open(database, use_cache=False)[0]


def test_counts_and_sums_of_a_database_equal_those_of_plain_sql(database: Path, recording: Trace) -> None:
    """The joins here are SQL's, by the documentation of the tables; in the reader they are those of polars."""
    kernels = """
        select s.value, count(*), sum(t.endNs - t.startNs), min(t.startNs) from TASK t
        join COMPUTE_TASK_INFO c on c.globalTaskId = t.globalTaskId join STRING_IDS s on s.id = c.name group by 1
        union all
        select s.value, count(*), sum(o.endNs - o.startNs), min(o.startNs) from COMMUNICATION_OP o
        join STRING_IDS s on s.id = o.opName group by 1 order by 1"""
    operators = """
        select s.value, count(*), sum(a.endNs - a.startNs), min(a.startNs) from PYTORCH_API a
        join STRING_IDS s on s.id = a.name join ENUM_API_TYPE e on e.id = a.type
        where e.name = 'op' group by 1 order by 1"""
    links = """
        select distinct operator.value, kernel.value from PYTORCH_API a join STRING_IDS operator on operator.id = a.name
        join CONNECTION_IDS i on i.id = a.connectionId join TASK t on t.connectionId = i.connectionId
        join COMPUTE_TASK_INFO c on c.globalTaskId = t.globalTaskId join STRING_IDS kernel on kernel.id = c.name"""
    names = recording.events.select("id", "ts", "dur", pl.col("name", "cat").cast(pl.String))
    with closing(sqlite3.connect(database)) as connection:
        for sql, category in ((kernels, "kernel"), (operators, "cpu_op")):
            table = (
                names.filter(pl.col("cat") == category)
                .group_by("name")
                .agg(pl.len(), pl.col("dur").sum(), pl.col("ts").min())
            )
            assert table.sort("name").rows() == connection.execute(sql).fetchall()
        expected = set(connection.execute(links))
    joined = recording.launches.join(names.select(device_event="id", kernel="name"), on="device_event")
    joined = joined.join(names.select(operator="id", name="name"), on="operator")
    assert set(joined.select("name", "kernel").iter_rows()) >= expected


def test_a_database_states_shapes_threads_steps_and_devices(recording: Trace) -> None:
    events = recording.events.with_columns(pl.col("name", "cat").cast(pl.String))
    operator = events.filter(pl.col("name") == "aten::mm").row(0, named=True)
    assert (operator["pid"], operator["tid"], operator["seq_id"]) == (10, 11, 3)
    shapes = recording.arguments.select("event", pl.col("dims", "types").cast(pl.String)).filter(
        event=operator["id"]
    )
    assert shapes.rows() == [(operator["id"], "[[2, 3], [3, 4]]", '["float", "float"]')]
    assert set(events.filter(pl.col("cat") == "user_annotation")["name"]) == {
        "forward", "ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6",
    }  # fmt: skip
    assert recording.meta["device_properties"] == [{"id": 2, "name": "Ascend910B4"}]
    assert (recording.meta["rank"], recording.meta["host"]) == (0, "host0")
    assert set(events.filter(pl.col("cat") == "kernel")["device"]) == {2}
    copies = recording.kernels.join(events, left_on="event", right_on="id").filter(
        pl.col("cat") == "gpu_memcpy"
    )
    assert copies["bytes"].to_list() == [4096] * 3
    counts = dict(recording.stats.select("name", "count").iter_rows())
    assert (counts["read.ascend_not_read"], counts["read.ascend_tasks"]) == (1, 3)
    row = etloom.analyze(etloom.Job({0: recording}), "collectives").row(0, named=True)
    assert (row["collective"], row["group"], row["bytes"], row["duration_ns"]) == (
        "all_reduce",
        "503",
        4096,
        70_000,
    )
    assert etloom.analyze(recording, "steps")["step"].to_list() == [4, 5, 6]


def test_databases_of_two_ranks_are_a_job(tmp_path: Path) -> None:
    for rank in range(2):
        write_database(tmp_path / f"ascend_pytorch_profiler_{rank}.db", rank)
    assert etloom.open(tmp_path, use_cache=False).ranks == [0, 1]


@pytest.mark.slow
def test_a_database_with_much_before_its_schema_is_found(tmp_path: Path) -> None:
    path = tmp_path / "msprof_1.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table notes (text)")
        connection.executemany("insert into notes values (?)", [("x" * 3000,)] * 100)
        for number in range(30):
            connection.execute(
                f"create table other_{number} (a, b, c, {', '.join(f'long_name_{i}' for i in range(20))})"
            )
    write_database(path)
    assert b"CANN_API" not in path.read_bytes()[: 1 << 16]
    assert formats.detect_format(path) == "ascend"


def test_tables_of_kernels_are_read_to_the_ns(tmp_path: Path) -> None:
    path = write_kernel_table(tmp_path / "kernel_details.csv")
    trace = etloom.open(path, use_cache=False)[0]
    rows = trace.events.select(pl.col("name", "cat").cast(pl.String), "ts", "dur", "device", "stream").rows()
    assert rows == [
        ("MatMulV2", "kernel", START * 1000 + 40_125, 100_500, 2, 3),
        ("Cast", "kernel", START * 1000 + 140_750, 30_000, 2, 3),
        ("hcom_allReduce__503_0_1", "kernel", START * 1000 + 160_000, 70_000, 2, 4),
    ]
    table = etloom.analyze(trace, "kernel-breakdown")
    assert dict(table.select("name", "kind").iter_rows())["hcom_allReduce__503_0_1"] == "communication"


def test_collectives_of_a_cluster_are_matched(tmp_path: Path) -> None:
    path = write_cluster_communication(tmp_path / "cluster_communication.json")
    job = etloom.open(path, use_cache=False)
    assert job.ranks == [0, 1]
    rows = [
        trace.events.select(pl.col("name", "cat").cast(pl.String), "ts", "dur").rows()
        for trace in job.values()
    ]
    assert rows == [
        [
            (
                "hcom_allReduce__503_0_1",
                "kernel",
                START * 1000 + 500 + 10_000 * rank,
                500_000 - 10_000 * rank,
            ),
            (
                "hcom_allGather__503_1_1",
                "kernel",
                START * 1000 + 1_000_000 + 10_000 * rank,
                500_000 - 10_000 * rank,
            ),
        ]
        for rank in range(2)
    ]
    table = etloom.analyze(job, "collectives").sort("collective")
    assert table.select("collective", "group").unique().sort("collective").rows() == [
        ("all_gather", "503"), ("all_reduce", "503"),
    ]  # fmt: skip
    args = job[1].events["args"].cast(pl.String)[0]
    assert json.loads(args)["links"]["HCCS"]["Transit Size(MB)"] == 4.0
    single = {"step1": {"collective": json.loads(path.read_text())["(0, 1)"]["step4"]}}
    operators = {name: entry["0"] for name, entry in single["step1"]["collective"].items()}
    (tmp_path / "communication.json").write_text(json.dumps({"step1": {"collective": operators, "p2p": {}}}))
    trace = formats.read(tmp_path / "communication.json")
    assert isinstance(trace, Trace) and trace.events.height == 2


def test_collectives_of_other_types_are_counted(tmp_path: Path) -> None:
    path = write_cluster_communication(tmp_path / "cluster_communication.json")
    path.write_text(path.read_text().replace('"Elapse Time(ms)": 0.5', '"Elapse Time(ms)": "long"'))
    job = formats.read(path)
    assert isinstance(job, Trace) and job.rank == 1, "rank 0 has none"
    assert dict(job.stats.select("name", "count").iter_rows())["read.no_time"] == 2
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ReadError, match="is not complete JSON"):
        formats.read(path)


def test_collectives_without_a_rank_are_counted(tmp_path: Path) -> None:
    operator = {"Communication Time Info": {"Start Timestamp(us)": START, "Elapse Time(ms)": 1.0}}
    keys = dict.fromkeys(("0", "1", "x", "100000000099999", "9" * 5000), operator)
    path = tmp_path / "cluster_communication.json"
    path.write_text(json.dumps({"p2p": {"step1": {"hcom_allReduce__503_0_1@1": keys}}}))
    job = formats.read(path)
    assert isinstance(job, Job) and [trace.events.height for trace in job.values()] == [1, 1]
    assert dict(job[0].stats.select("name", "count").iter_rows())["read.no_rank"] == 3


@pytest.mark.slow
def test_links_of_operators_with_one_connection_are_not_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_database(tmp_path / "ascend_pytorch_profiler_0.db")
    count = 300
    with closing(sqlite3.connect(path)) as connection, connection:
        row = connection.execute("select * from PYTORCH_API limit 1").fetchone()
        calls = [(row[0], row[1], row[2], 999, *row[4:])] * count
        connection.executemany(f"insert into PYTORCH_API values ({', '.join('?' * len(row))})", calls)
        links = [(999, 5000 + number) for number in range(count)]
        connection.executemany("insert into CONNECTION_IDS values (?, ?)", links)
    join, heights = pl.DataFrame.join, []

    def measure(*tables: pl.DataFrame, **options: Any) -> pl.DataFrame:
        heights.append(join(*tables, **options).height)
        return join(*tables, **options)

    monkeypatch.setattr(pl.DataFrame, "join", measure)
    formats.read(path)
    assert count < max(heights) < 3 * count


def test_a_database_without_events_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.execute("create table TASK (startNs integer)")
    with pytest.raises(ReadError, match="has no event that can be read"):
        formats.read(tmp_path / "a.db")
