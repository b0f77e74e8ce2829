"""Recordings of AMD's profilers: each form against a script of the test that reads the file without etloom."""

from __future__ import annotations

import csv
import json
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
from etloom.formats import rocprof
from support import rocm_recordings as recordings

Figures = dict[str, Any]
"""Count and sum of durations of kernels, copies and calls, texts of markers, and links (start of call, of activity)."""


def query_rocpd(path: Path) -> Figures:
    """Read a database of rocprofv3 in its usual layout with SQL."""
    with closing(sqlite3.connect(path)) as db:
        names = [name for (name,) in db.execute("select name from sqlite_master")]
        end = next(name for name in names if name.startswith("rocpd_string")).removeprefix("rocpd_string")
        sums = {
            kind: db.execute(f'select count(*), sum("end" - start) from rocpd_{table}{end}').fetchone()
            for kind, table in (("kernel", "kernel_dispatch"), ("gpu_memcpy", "memory_copy"))
        }
        domain = (
            f"from rocpd_region{end} r join rocpd_event{end} e on e.id = r.event_id "
            f"join rocpd_string{end} s on s.id = e.category_id where s.string like "
        )
        calls = {
            cat: db.execute(f"select count(*), sum(\"end\" - start) {domain} '{like}'").fetchone()
            for cat, like in (("cuda_runtime", "HIP%"), ("cuda_driver", "HSA%"))
        }
        marks = db.execute(
            f"select json_extract(extdata, '$.message') from rocpd_event{end} where extdata <> '{{}}'"
        ).fetchall()
        links = {
            row
            for table in ("kernel_dispatch", "memory_copy")
            for row in db.execute(
                f"select c.start, a.start from rocpd_{table}{end} a join rocpd_event{end} ae on ae.id = a.event_id "
                f"join rocpd_event{end} ce on ce.stack_id = ae.stack_id join rocpd_region{end} c on c.event_id = ce.id"
            )
        }
    return {**sums, **calls, "marks": sorted(mark for (mark,) in marks), "links": links}


def query_rpd(path: Path) -> Figures:
    """Read a .rpd with SQL."""
    with closing(sqlite3.connect(path)) as db:
        operations = "from rocpd_op o join rocpd_string t on t.id = o.opType_id where t.string like"
        calls = "from rocpd_api a join rocpd_string n on n.id = a.apiName_id where n.string like"
        figures: Figures = {
            kind: db.execute(f'select count(*), sum("end" - start) {table} ?', (like,)).fetchone()
            for kind, table, like in (
                ("kernel", operations, "Kernel%"),
                ("gpu_memcpy", operations, "MEMORY_COPY%"),
                ("cuda_runtime", calls, "hip%"),
                ("cuda_driver", calls, "hsa%"),
            )
        }
        marks = db.execute(
            "select t.string from rocpd_api a join rocpd_string n on n.id = a.apiName_id "
            "join rocpd_string t on t.id = a.args_id where n.string = 'UserMarker'"
        ).fetchall()
        links = db.execute(
            "select a.start, o.start from rocpd_api_ops l "
            "join rocpd_api a on a.id = l.api_id join rocpd_op o on o.id = l.op_id"
        ).fetchall()
    return {**figures, "marks": sorted(mark for (mark,) in marks), "links": set(links)}


def query_json(path: Path) -> Figures:
    """Read rocprofv3's JSON with the json module."""
    (document,) = json.loads(path.read_text())["rocprofiler-sdk-tool"]
    records = document["buffer_records"]
    kinds = (("kernel", "kernel_dispatch"), ("gpu_memcpy", "memory_copy"), ("cuda_runtime", "hip_api"))
    start = {row["correlation_id"]["internal"]: row["start_timestamp"] for row in records["hip_api"]}
    return {
        **{
            cat: (len(rows), sum(row["end_timestamp"] - row["start_timestamp"] for row in rows))
            for cat, name in (*kinds, ("cuda_driver", "hsa_api"))
            for rows in [records[name]]
        },
        "marks": sorted(entry["value"] for entry in document["strings"]["marker_api"]),
        "links": {
            (start[row["correlation_id"]["internal"]], row["start_timestamp"])
            for name in ("kernel_dispatch", "memory_copy")
            for row in records[name]
        },
    }


def query_csv(folder: Path) -> Figures:
    """Read rocprofv3's CSV with the csv module."""

    def read(kind: str) -> list[dict[str, str]]:
        (file,) = folder.glob(f"*_{kind}_trace.csv")
        with file.open(newline="") as stream:
            return list(csv.DictReader(stream))

    kinds = (("kernel", "kernel"), ("gpu_memcpy", "memory_copy"), ("cuda_runtime", "hip_api"))
    start = {row["Correlation_Id"]: int(row["Start_Timestamp"]) for row in read("hip_api")}
    return {
        **{
            cat: (len(rows), sum(int(row["End_Timestamp"]) - int(row["Start_Timestamp"]) for row in rows))
            for cat, kind in (*kinds, ("cuda_driver", "hsa_api"))
            for rows in [read(kind)]
        },
        "marks": sorted(row["Function"] for row in read("marker_api")),
        "links": {
            (start[row["Correlation_Id"]], int(row["Start_Timestamp"]))
            for kind in ("kernel", "memory_copy")
            for row in read(kind)
        },
    }


def sum_up(trace: Trace) -> Figures:
    """Return the same figures of a linked trace."""
    events = trace.events.with_columns(pl.col("cat", "name").cast(pl.String))
    sums = events.group_by("cat").agg(pl.len(), pl.col("dur").sum()).rows()
    start = dict(events.select("id", "ts").rows())
    pairs = trace.launches.select("launch", "device_event").drop_nulls().rows()
    return {
        **{cat: (count, total) for cat, count, total in sums if cat != "user_annotation"},
        "marks": sorted(events.filter(pl.col("cat") == "user_annotation")["name"]),
        "links": {(start[call], start[activity]) for call, activity in pairs},
    }


def open_rank(path: Path) -> Trace:
    job = etloom.open(path, use_cache=False)
    return job[job.ranks[0]] if isinstance(job, Job) else job


def stats(trace: Trace) -> dict[str, tuple[str, int]]:
    return {name: (severity, count) for name, severity, count, _ in trace.stats.rows()}


FORMS = {
    "rocpd": (recordings.write_rocpd, query_rocpd, "run.db"),
    "rpd": (recordings.write_rpd, query_rpd, "run.rpd"),
    "json": (recordings.write_json, query_json, "run_results.json"),
    "csv": (recordings.write_csv, query_csv, "csv"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_figures_are_those_of_a_plain_script(form: str, seed: int, tmp_path: Path) -> None:
    write, query, name = FORMS[form]
    path = write(tmp_path / name, recordings.make_recording(20, seed))
    expected = query(path)
    assert expected["kernel"][0] == expected["gpu_memcpy"][0] == 20
    assert len(expected["links"]) == 40
    assert sum_up(open_rank(path)) == expected


@pytest.mark.slow
def test_layouts_and_versions_read_the_same(tmp_path: Path) -> None:
    recording = recordings.make_recording()
    usual = formats.read(recordings.write_rocpd(tmp_path / "a.db", recording))
    early = formats.read(recordings.write_rocpd(tmp_path / "b.db", recording, early=True))
    second, third = (
        formats.read(recordings.write_rpd(tmp_path / f"{version}.rpd", recording, version=version))
        for version in (2, 3)
    )
    for first, other in ((usual, early), (second, third)):
        assert isinstance(first, Trace) and isinstance(other, Trace)
        for table in ("events", "kernels", "threads"):
            assert first.table(table).equals(other.table(table)), table
    assert isinstance(usual, Trace) and isinstance(second, Trace)
    columns = ("ts", "dur", "device")
    assert usual.events.select(columns).equals(second.events.select(columns))


@pytest.mark.slow
def test_json_and_csv_read_as_the_database(tmp_path: Path) -> None:
    recording = recordings.make_recording()
    database = formats.read(recordings.write_rocpd(tmp_path / "a.db", recording))
    document = formats.read(recordings.write_json(tmp_path / "a.json", recording))
    tables = formats.read(recordings.write_csv(tmp_path / "csv", recording))
    unnumbered = formats.read(recordings.write_csv(tmp_path / "csv_without_agents", recording, agents=False))
    of_file = formats.read(tmp_path / "csv" / "4100_kernel_trace.csv")
    assert isinstance(database, Trace) and isinstance(document, Trace) and isinstance(of_file, Trace)
    for trace in (document, tables, unnumbered, of_file):
        assert isinstance(trace, Trace)
        assert trace.meta["pid"] == 4100
        assert trace.events.drop("position").equals(database.events.drop("position"))
    assert document.kernels.equals(database.kernels)
    geometry = ("grid_x", "grid_y", "block_x", "shared_mem", "blocks_per_sm")
    kernels = database.kernels.filter(pl.col("grid_x").is_not_null())
    assert of_file.kernels.select(geometry).equals(kernels.select(geometry))
    assert of_file.meta["device_properties"] == database.meta["device_properties"]


def test_files_of_several_processes_in_a_folder_are_ranks(tmp_path: Path) -> None:
    pair = [recordings.make_recording(3, rank, pid=90 + rank) for rank in range(2)]
    job = etloom.open(recordings.write_csv(tmp_path / "csv", *pair), use_cache=False)
    assert [job[rank].meta["pid"] for rank in job.ranks] == [90, 91]
    document = formats.read(recordings.write_json(tmp_path / "a.json", *pair))
    assert isinstance(document, Job) and document.ranks == [0, 1]


@pytest.mark.slow
def test_other_values_of_json_and_csv_are_counted(tmp_path: Path) -> None:
    path = recordings.write_json(tmp_path / "a.json", recordings.make_recording())
    document = json.loads(path.read_text())
    records = document["rocprofiler-sdk-tool"][0]["buffer_records"]
    records["kernel_dispatch"][0]["start_timestamp"] = "soon"
    records["kernel_dispatch"][1] = None
    records["hip_api"][0]["operation"] = 99
    path.write_text(json.dumps(document))
    trace = formats.read(path)
    assert isinstance(trace, Trace)
    assert stats(trace)["read.wrong_type"] == ("data_loss", 1)
    assert stats(trace)["read.rocprof_no_time"] == ("data_loss", 2)
    assert stats(trace)["read.rocprof_no_name"] == ("data_loss", 1)
    path.write_text(json.dumps(document)[:-9])
    with pytest.raises(ReadError, match="is not complete JSON"):
        formats.read(path)
    folder = recordings.write_csv(tmp_path / "csv", recordings.make_recording())
    calls = folder / "4100_hip_api_trace.csv"
    calls.write_text(calls.read_text().replace("4100,4100,", "4100,main,", 2))
    tables = formats.read(folder)
    assert isinstance(tables, Trace)
    assert stats(tables)["read.wrong_type"] == ("data_loss", 2)


OTHERS = {
    "report.ncu-rep": (b"NVR\0" + bytes(40), "Nsight Compute", "--ncu"),
    "raw.csv": (b'"ID","Process ID","Kernel Name","Metric Name"\n', "Nsight Compute", "--ncu"),
    "7_hip_api_trace.csv": (
        b'"Domain","Function","Correlation_Id","Start_Timestamp","End_Timestamp"\n', "rocprofv3", "_kernel_trace.csv",
    ),
    "7_kernel_stats.csv": (b'"Name","Calls","TotalDurationNs"\n', "rocprofv3", "--output-format rocpd"),
    "op_statistic.csv": (b"Device_id,OP Type,Core Type,Count,Total Time(us)\n", "Ascend", "trace_view.json"),
    "sum.csv": (b"Time (%),Total Time (ns),Instances,Avg (ns),Name\n", "Nsight Systems", "nsys export"),
    "r.vtune": (b"<project/>", "VTune", "unitrace"),
    "a.bin": (b"memray\0\1", "memray", "_record_memory_history"),
    "s.json": (b'{"$schema": "https://www.speedscope.app/file-format-schema.json"}', "speedscope", "torch.profiler"),
    "events.out.tfevents.1": (bytes(21) + b"brain.Event:2", "TensorBoard", "xplane.pb"),
    "layers.json": (b'[{"count": 9}, {"name": "conv", "averageMs": 1.5}]', "TensorRT", "nsys profile"),
    "module.txt": (b"HloModule jit_f, is_scheduled=true", "XLA", "jax.profiler"),
    "results.csv": (b"Index,KernelName,gpu-id,queue-id,BeginNs,EndNs\n", "rocprof", "rocprofv3"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_files_that_are_not_read_name_their_tool_and_the_export(name: str, tmp_path: Path) -> None:
    content, tool, export = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ReadError) as raised:
        formats.read(tmp_path / name)
    assert (
        tool in str(raised.value) and export in str(raised.value) and "which is not read" in str(raised.value)
    )


@pytest.mark.parametrize(
    ("tables", "tool", "export"),
    [
        (["StringTable", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"], "nvprof", "nsys profile"),
        (["StepTraceTime"], "msprof-analyze", "kernel_details.csv"),
        (["notes"], "no known profiler", "rocprofv3"),
    ],
)
def test_databases_that_are_not_read_name_their_tool(
    tables: list[str], tool: str, export: str, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as db, db:
        for table in tables:
            db.execute(f"create table {table} (id int)")
    with pytest.raises(ReadError) as raised:
        formats.read(tmp_path / "a.db")
    assert (
        tool in str(raised.value) and export in str(raised.value) and "nsys export" not in str(raised.value)
    )


def test_rocpd_states_devices_geometry_and_names(tmp_path: Path) -> None:
    trace = formats.read(recordings.write_rocpd(tmp_path / "run.db"))
    assert isinstance(trace, Trace)
    assert trace.meta["rank"] == 3 and trace.meta["pid"] == 4100
    assert [device["numSms"] for device in trace.meta["device_properties"]] == [304, 304]
    kernels = trace.kernels.join(trace.events, left_on="event", right_on="id").filter(
        pl.col("cat") == "kernel"
    )
    row = kernels.row(0, named=True)
    assert (row["grid_x"], row["grid_y"], row["block_x"], row["shared_mem"]) == (4, 3, 256, 1024)
    assert row["blocks_per_sm"] == pytest.approx(12 / 304) and row["warps_per_sm"] == pytest.approx(48 / 304)
    assert kernels.select("device", "stream").unique().sort("device").rows() == [(0, 1), (1, 2)]
    copies = trace.events.filter(pl.col("cat") == "gpu_memcpy")
    assert set(copies["name"].cast(pl.String)) == {
        "Memcpy HtoD (Host -> Device)",
        "Memcpy DtoH (Device -> Host)",
    }
    assert set(copies["device"]) == {0, 1}
    assert stats(trace)["read.rocprof_not_read"] == ("info", 1)  # a counter


@pytest.mark.slow
def test_processes_are_ranks(tmp_path: Path) -> None:
    pair = [recordings.make_recording(3, rank, pid=100 - rank, rank=rank) for rank in range(2)]
    merged = formats.read(recordings.write_rocpd(tmp_path / "run.db", *pair))
    assert isinstance(merged, Job)
    assert [merged[rank].meta["pid"] for rank in merged.ranks] == [100, 99]
    assert "read.rocprof_inferred_rank" not in stats(merged[0])
    inferred = formats.read(recordings.write_rpd(tmp_path / "run.rpd", *pair))
    assert isinstance(inferred, Job)
    assert [inferred[rank].meta["pid"] for rank in inferred.ranks] == [99, 100]
    assert stats(inferred[0])["read.rocprof_inferred_rank"] == ("info", 2)
    assert [inferred[rank].events.height for rank in inferred.ranks] == [24, 24]


@pytest.mark.slow
def test_a_folder_of_databases_is_placed_by_the_environment(tmp_path: Path) -> None:
    for rank in range(2):
        recording = recordings.make_recording(3, rank, pid=100 - rank, rank=rank)
        recordings.write_rocpd(tmp_path / f"{recording.pid}_results.db", recording)
    job = etloom.open(tmp_path, use_cache=False)
    assert [job[rank].meta["pid"] for rank in job.ranks] == [100, 99]


def test_impossible_times_are_counted(tmp_path: Path) -> None:
    path = recordings.write_rocpd(tmp_path / "run.db")
    table = f"rocpd_kernel_dispatch_{recordings.UUID[:-1]}0"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f'update {table} set "end" = start - 5 where rowid = 1')
        db.execute(f'update {table} set start = 0, "end" = 0 where rowid = 2')
        db.execute(f"update {table} set start = 'soon' where rowid = 3")
    trace = formats.read(path)
    assert isinstance(trace, Trace)
    counted = stats(trace)
    for name in ("read.negative_dur", "read.unknown_time", "read.wrong_type", "read.rocprof_no_time"):
        assert counted[name] == ("data_loss", 1), name
    assert trace.events.filter(pl.col("cat") == "kernel").height == 4


def test_rows_of_a_journal_are_stated(tmp_path: Path) -> None:
    path = recordings.write_rpd(tmp_path / "run.rpd", recordings.make_recording())
    (tmp_path / "run.rpd-wal").write_bytes(b"x")
    trace = formats.read(path)
    assert isinstance(trace, Trace)
    assert stats(trace)["read.damaged_table"] == ("data_loss", 1)


def test_a_database_without_events_and_a_damaged_one_are_one_line(tmp_path: Path) -> None:
    path = recordings.write_rocpd(tmp_path / "run.db", recordings.Recording())
    with pytest.raises(ReadError, match="rocprofv3 --runtime-trace"):
        formats.read(path)
    whole = recordings.write_rpd(tmp_path / "run.rpd", recordings.make_recording(200)).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        trace = rocprof.read(path)
    except ReadError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(trace, Trace) and "read.damaged_table" in stats(trace)
