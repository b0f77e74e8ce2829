"""Traces of MPI calls, the input of Chakra's mpi_converter: processes are ranks, calls are collectives and messages."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom import formats
from etloom.core.trace import Job
from support.chrome_timelines import MIB, write_mpi


@pytest.mark.parametrize("pids", [(0, 1), (4100, 4107)])
def test_processes_are_ranks_and_calls_have_sizes(pids: tuple[int, int], tmp_path: Path) -> None:
    path = write_mpi(tmp_path / "mpi.json", pids)
    assert formats.detect_format(path) == "mpi-trace"
    job = etloom.open(path, use_cache=False)
    assert isinstance(job, Job) and job.ranks == [0, 1]
    rows = (
        job[1]
        .comms.join(job[1].events, left_on="event", right_on="id")
        .select(pl.col("name", "collective", "dtype").cast(pl.String), "bytes", "root", "peer", "ts", "dur")
    )
    assert rows.rows() == [
        ("MPI_Allreduce", "all_reduce", "float", MIB * 4, None, None, 105_000, 45_000),
        ("MPI_Recv", "recv", "double", 800, None, 0, 200_000, 10_000),
        ("MPI_Ibcast", "broadcast", "int8", 8, 0, None, 250_000, 5_000),
        ("MPI_Barrier", "barrier", None, None, None, None, 300_000, 20_000),
    ]
    table = etloom.analyze(job, "collectives").filter(collective="all_reduce")
    assert table["bytes"].to_list() == [MIB * 4]
    counts = dict(job[0].stats.select("name", "count").iter_rows())
    assert counts["read.mpi_other_process"] == 1


def test_other_chrome_traces_stay_kineto_s(tmp_path: Path) -> None:
    path = write_mpi(tmp_path / "mpi.json")
    path.write_text(path.read_text().replace('"name": "compute"', '"cat": "cpu_op", "name": "compute"'))
    assert formats.detect_format(path) == "kineto"


def test_arguments_of_other_types_are_unknown(tmp_path: Path) -> None:
    path = write_mpi(tmp_path / "mpi.json")
    text = (
        path.read_text()
        .replace('"datatype": "0x09"', '"datatype": [9]')
        .replace('"count": 100', '"count": "many"')
    )
    path.write_text(text)
    job = formats.read(path)
    assert isinstance(job, Job)
    assert job[0].comms["bytes"].to_list() == [None, None, 8, None]


def test_a_call_without_a_process_is_counted(tmp_path: Path) -> None:
    path = write_mpi(tmp_path / "mpi.json")
    document = json.loads(path.read_text())
    call = next(event for event in document["traceEvents"] if event["name"] == "MPI_Barrier")
    document["traceEvents"].append({**call, "pid": None})
    path.write_text(json.dumps(document))
    job = formats.read(path)
    assert isinstance(job, Job) and job.ranks == [0, 1]
    assert dict(job[0].stats.select("name", "count").iter_rows())["read.mpi_other_process"] == 2


def write_calls(path: Path, name: str, ranks: int, **args: int) -> Path:
    """Write one call of 1024 floats per rank on communicator 0, and one on a communicator of each rank."""
    events = [
        {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": 100 + ts, "dur": 50,
         "args": {"comm": comm, "count": 1024, "datatype": 9, **args}}
        for rank in range(ranks) for comm, ts in ((0, 0), (1 + rank, 100))
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("MPI_Allreduce", 1),
        ("MPI_Bcast", 1),
        ("MPI_Allgather", 4),
        ("MPI_Iallgather", 4),
        ("MPI_Alltoall", 4),
        ("MPI_Reduce_scatter_block", 4),
        ("MPI_Gather", 4),
        ("MPI_Scatter", 4),
        ("MPI_Alltoallv", None),
    ],
)
def test_sizes_are_of_the_whole(name: str, parts: int | None, tmp_path: Path) -> None:
    job = etloom.open(write_calls(tmp_path / "mpi.json", name, 4), use_cache=False)
    table = etloom.analyze(job, "collectives").filter(group="0")
    size = None if parts is None else 1024 * 4 * parts
    assert set(table["bytes"]) == {size}
    assert set(table["group_size"]) == {4}
    counts = dict(job[0].stats.select("name", "count").iter_rows())
    assert counts.get("read.mpi_part", 0) == (0 if parts == 1 else 1 if parts else 2)


def test_parts_in_a_file_of_one_rank_have_no_size(tmp_path: Path) -> None:
    trace = formats.read(write_calls(tmp_path / "mpi.json", "MPI_Allgather", 1))
    assert trace.comms["bytes"].to_list() == [None, None]
    assert dict(trace.stats.select("name", "count").iter_rows())["read.mpi_part"] == 2
    trace = formats.read(write_calls(tmp_path / "mpi.json", "MPI_Allgather", 2, count=(1 << 48) - 1))[0]
    assert trace.comms["bytes"].to_list() == [None, None], "beyond the largest size"


def test_a_job_of_mpi_becomes_chakra(tmp_path: Path) -> None:
    job = etloom.open(write_mpi(tmp_path / "mpi.json"), use_cache=False)
    etloom.export(job, tmp_path / "mpi.et")
    nodes = etloom.read(tmp_path / "mpi.0.et").nodes
    assert "MPI_Allreduce" in set(nodes["name"].cast(pl.String))
