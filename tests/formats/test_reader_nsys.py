"""Nsight Systems exports: a hand-made one with every table, a real one, and damaged ones."""

from __future__ import annotations

import gzip
import importlib.util
import random
import sqlite3
import stat
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from etloom.core.errors import EtloomError, LimitError, ReadError
from etloom.core.trace import Job, Trace
from etloom.formats import nsys
from etloom.formats.io import limits


@pytest.fixture(scope="session")
def maker(own: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_nsys", own / "nsys" / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def export(maker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nsys") / "run.sqlite"
    maker.build(path)
    return path


@pytest.fixture(scope="session")
def job(export: Path) -> Job:
    found = nsys.read(export)
    assert isinstance(found, Job)
    return found


def events(trace: Trace, **where: str) -> list[dict[str, object]]:
    frame = trace.events.with_columns(pl.col(pl.Categorical).cast(pl.String))
    for column, value in where.items():
        frame = frame.filter(pl.col(column) == value)
    return frame.to_dicts()


def stats(trace: Trace) -> dict[str, tuple[str, int]]:
    return {name: (severity, count) for name, severity, count, _ in trace.stats.rows()}


def test_each_process_is_a_rank_numbered_by_nccl(job: Job) -> None:
    assert job.ranks == [0, 1]
    assert (job[0].meta["pid"], job[1].meta["pid"]) == (300, 200)
    assert job[1].meta["world_size"] == 2
    assert "read.nsys_inferred_rank" not in stats(job[0])


def test_without_nccl_ranks_go_by_pid_and_are_counted_as_a_guess(maker: ModuleType, tmp_path: Path) -> None:
    maker.build(tmp_path / "x.sqlite", ranks=False)
    job = nsys.read(tmp_path / "x.sqlite")
    assert isinstance(job, Job)
    assert (job[0].meta["pid"], job[1].meta["pid"]) == (200, 300)
    assert stats(job[0])["read.nsys_inferred_rank"] == ("info", 2)


def test_correlation_joins_within_a_process_only(job: Job) -> None:
    for rank, name, duration in ((0, "cudaLaunchKernel", 800), (1, "cudaLaunchKernel", 500)):
        calls = job[rank].events.filter(pl.col("cat").is_in(["cuda_runtime"]) & (pl.col("name") == name))
        work = job[rank].events.filter(pl.col("cat") == "kernel")
        both = calls.join(work, on="correlation", suffix="_work")
        assert both["dur_work"].to_list() == [duration]


def test_times_are_nanoseconds_of_the_epoch(job: Job, maker: ModuleType) -> None:
    (kernel,) = events(job[1], name="void gemm<float>(float*)")
    assert (kernel["ts"], kernel["dur"]) == (maker.EPOCH + 1000, 500)
    assert job[1].meta["clock"] == "epoch"
    assert job[1].meta["base_ns"] == maker.EPOCH


def test_events_are_sorted_and_numbered(job: Job) -> None:
    for trace in job.values():
        frame = trace.events
        key = frame.select("ts", -pl.col("dur").fill_null(-1), "position").rows()
        assert key == sorted(key)
        assert trace.rank == 0 or frame["ts"].is_duplicated().any()  # so that the longest first is seen
        assert frame["id"].to_list() == list(range(frame.height))
        assert frame["step"].null_count() == frame["parent"].null_count() == frame.height


def test_categories_and_names_are_kinetos(job: Job) -> None:
    found = {(event["cat"], event["name"]) for event in events(job[1])}
    assert {
        ("cuda_runtime", "cudaMemcpyAsync"),
        ("cuda_runtime", "cudaGraphLaunch"),
        ("cuda_driver", "cuLaunchKernel"),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
        ("gpu_memset", "Memset (Device)"),
        ("cuda_sync", "Stream Wait Event"),
        ("cuda_sync", "Context Sync"),
        ("overhead", "Command Buffer Full"),
        ("kernel", "CUDA graph 9"),
        ("user_annotation", "ProfilerStep#3"),
        ("user_annotation", "ncclAllReduce"),
        ("cpu_op", "aten::mul"),
    } <= found


def test_gpu_activity_is_on_the_same_tracks_as_in_kineto(job: Job) -> None:
    (copy,) = events(job[1], cat="gpu_memcpy")
    assert (copy["pid"], copy["tid"], copy["device"], copy["stream"]) == (0, 7, 0, 7)
    (call,) = events(job[1], name="cudaMemcpyAsync")
    assert (call["pid"], call["tid"], call["correlation"]) == (200, 201, copy["correlation"])
    lanes = {(row["pid"], row["tid"]): row["name"] for row in job[1].threads.to_dicts()}
    assert lanes == {
        (200, None): "python3",
        (200, 201): "pt_main_thread",
        (0, None): "GPU 0",
        (0, 7): "stream 7",
        (0, 20): "stream 20",
    }


def test_torch_operators_carry_their_ids(job: Job) -> None:
    (mul,) = events(job[1], name="aten::mul")
    assert (mul["rf_id"], mul["seq_id"], mul["cat"]) == (990726, 45328, "cpu_op")
    (backward,) = events(job[1], name="AddmmBackward0")
    assert (backward["rf_id"], backward["seq_id"]) == (12, 7)
    assert backward["args"] == '{"input_op_ids": "[(11,0)]"}'
    assert job[1].arguments.select("event", "dims").rows() == [(backward["id"], "[[2, 3], [3]]")]
    (step,) = events(job[1], name="ProfilerStep#3")
    assert (step["cat"], step["rf_id"]) == ("user_annotation", 5)


def test_other_ranges_are_annotations(job: Job) -> None:
    (text,) = events(job[1], name="a, seq of words")
    assert (text["cat"], text["rf_id"], text["dur"]) == ("user_annotation", None, 10)
    assert text["args"] == '{"payload": 42, "range": "start_end"}'
    (mark,) = events(job[1], name="checkpoint")
    assert (mark["ph"], mark["dur"]) == ("i", None)
    (unclosed,) = events(job[1], name="never closed")
    assert (unclosed["ph"], unclosed["dur"]) == ("X", None)
    assert events(job[1], name="ncclSend")[0]["args"] == '{"domain": "NCCL"}'


def test_kernels_have_geometry_graphs_and_coverage(job: Job) -> None:
    rows = {row["event"]: row for row in job[1].kernels.to_dicts()}
    gemm = rows[events(job[1], name="void gemm<float>(float*)")[0]["id"]]
    assert [gemm[f"grid_{axis}"] for axis in "xyz"] == [132, 2, 1]
    assert [gemm[f"block_{axis}"] for axis in "xyz"] == [64, 2, 1]
    assert (gemm["registers"], gemm["shared_mem"], gemm["context"]) == (32, 128, 1)
    assert (gemm["blocks_per_sm"], gemm["warps_per_sm"]) == (2.0, 8.0)  # 264 blocks of 4 warps on 132 SMs
    nccl = rows[events(job[1], name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")[0]["id"]]
    assert (nccl["graph_id"], nccl["graph_node_id"]) == (5, 51)
    copy = rows[events(job[1], cat="gpu_memcpy")[0]["id"]]
    assert (copy["bytes"], copy["bandwidth"]) == (5000, 50.0)
    assert rows[events(job[1], name="CUDA graph 9")[0]["id"]]["graph_id"] == 9


def test_a_wait_knows_the_stream_that_recorded_its_event(job: Job) -> None:
    rows = job[1].syncs.with_columns(pl.col("kind").cast(pl.String)).drop("event").rows()
    # Both processes have event 33: the one of this process was recorded on stream 7 by call 77.
    assert rows == [("Stream Wait Event", 7, 33, 77), ("Context Sync", None, None, None)]
    (context,) = events(job[1], name="Context Sync")
    assert (context["stream"], context["tid"]) == (None, None)


def test_a_wait_is_on_the_device_of_its_context(job: Job) -> None:
    # Rank 0 is process 300, whose kernels run on device 1.
    (wait,) = events(job[0], cat="cuda_sync")
    assert (wait["device"], wait["pid"], wait["stream"]) == (1, 1, 7)


def test_nccl_payloads_become_comms(job: Job, maker: ModuleType) -> None:
    columns = ("collective", "bytes", "group_size", "reduce_op", "peer", "is_p2p", "comms_id")
    rows = job[1].comms.with_columns(pl.col(pl.Categorical).cast(pl.String)).select("event", *columns).rows()
    names = {event["id"]: event["name"] for event in events(job[1])}
    assert [(names[row[0]], *row[1:]) for row in rows] == [
        ("ncclAllReduce", "all_reduce", 4096, 2, "max", None, False, maker.COMMUNICATOR),
        ("ncclSend", "send", 64, 2, None, 0, True, maker.COMMUNICATOR),
    ]


def test_metrics_go_to_the_rank_that_uses_the_gpu(job: Job, maker: ModuleType) -> None:
    def values(trace: Trace) -> list[tuple[object, ...]]:
        frame = trace.counters.with_columns(pl.col(pl.Categorical).cast(pl.String))
        return frame.select(pl.col("ts") - maker.EPOCH, "name", "series", "value").rows()

    assert values(job[1]) == [(100, "SMs Active [%]", "GPU 0", 50.0), (200, "SMs Active [%]", "GPU 0", 60.0)]
    assert values(job[0]) == [(100, "SMs Active [%]", "GPU 1", 75.0)]


def test_memory_frees_are_negative(job: Job) -> None:
    assert job[1].memory.select("bytes", "addr", "device").rows() == [(512, 4096, 0), (-512, 4096, 0)]


def test_skipped_and_guessed_entries_are_counted(job: Job) -> None:
    assert stats(job[0]) == {
        "read.nsys_graph_launch": ("info", 1),
        "read.nsys_device_of_sync": ("info", 1),
        "read.nsys_failed_call": ("info", 1),
        "read.nsys_open_range": ("info", 1),
        "read.nsys_payload": ("data_loss", 1),
        "read.nsys_table_not_read": ("info", 3),
        "read.negative_dur": ("data_loss", 1),
        "read.nsys_idle_process": ("data_loss", 1),
    }


def test_all_processes(export: Path) -> None:
    job = nsys.read(export, all_processes=True)
    assert isinstance(job, Job)
    assert len(job) == 3
    assert sum(trace.events.height for trace in job.values()) == 30
    assert "read.nsys_idle_process" not in stats(job[0])


def test_parquetdir_reads_the_same(export: Path, job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "run_pqtdir"
    folder.mkdir()
    with sqlite3.connect(export) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master").fetchall():
            cursor = db.execute(f"SELECT * FROM {name}")
            columns = [column[0] for column in cursor.description]
            frame = pl.DataFrame(cursor.fetchall(), schema=columns, orient="row", infer_schema_length=None)
            frame.write_parquet(folder / f"{name}.parquet")
    assert nsys.sniff_folder(folder)
    again = nsys.read(folder)
    assert isinstance(again, Job)
    for rank in job.ranks:
        for table, frame in job[rank].tables.items():
            assert again[rank].table(table).equals(frame), table


def test_an_old_export_lacks_tables_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id, value)")
        db.execute("INSERT INTO StringIds VALUES (1, 'k')")
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
            "(start, end, deviceId, streamId, correlationId, globalPid, shortName)"
        )
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 30, 0, 7, 1, ?, 1)", (5 << 24,))
    trace = nsys.read(path)
    assert isinstance(trace, Trace)
    assert trace.meta["clock"] == "relative"
    assert trace.meta["rank"] is None
    ((name, ts, dur),) = trace.events.select(pl.col("name").cast(pl.String), "ts", "dur").rows()
    assert (name, ts, dur) == ("k", 10, 20)
    assert trace.kernels["grid_x"].to_list() == [None]
    assert trace.stats.height == 0


def test_the_rank_of_a_lone_process_is_in_its_environment(tmp_path: Path) -> None:
    path = tmp_path / "one.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE NVTX_EVENTS (start, end, eventType, text, globalTid)")
        db.execute("INSERT INTO NVTX_EVENTS VALUES (10, 30, 59, 'x', ?)", (5 << 24 | 9,))
        db.execute("CREATE TABLE META_DATA_CAPTURE (name, value)")
        db.execute("INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'RANK=\"3\"')")
    trace = nsys.read(path)
    assert isinstance(trace, Trace)
    assert trace.rank == 3


def test_values_of_the_wrong_type_become_null_and_are_counted(export: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong.sqlite"
    path.write_bytes(export.read_bytes())
    with sqlite3.connect(path) as db:
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET registersPerThread = 'many', gridX = 4000000000")
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 9223372036854775807 WHERE nameId = 4")
    job = nsys.read(path)
    assert isinstance(job, Job)
    assert stats(job[0])["read.wrong_type"] == ("data_loss", 3)
    assert stats(job[0])["read.out_of_range"] == ("data_loss", 1)
    assert stats(job[1])["read.out_of_range"] == ("data_loss", 2)
    assert stats(job[0])["read.nsys_no_time"] == ("data_loss", 1)
    assert job[1].kernels["registers"].null_count() == job[1].kernels.height


def test_views_and_virtual_tables_are_not_queried(tmp_path: Path) -> None:
    path = tmp_path / "hostile.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id, value)")
        db.execute(
            "CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE forever(start) AS "
            "(SELECT 1 UNION ALL SELECT start + 1 FROM forever) SELECT start, 59 AS eventType FROM forever"
        )
        try:
            db.execute(
                "CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_KERNEL USING rtree_i32(globalPid, start, end)"
            )
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, 1, 2)", (5 << 24,))
        except sqlite3.OperationalError:
            pytest.skip("this SQLite has no rtree to make a virtual table of")
    with pytest.raises(ReadError, match=r"has no CUDA activity and no NVTX range .*not read.; record"):
        nsys.read(path)


def test_the_error_of_a_report_without_cuda_lists_its_content(tmp_path: Path) -> None:
    """As nsys 2022.4 records a script on the CPU: calls of the OS alone."""
    path = tmp_path / "cpu.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id, value)")
        db.execute("CREATE TABLE OSRT_API (start, end, globalTid, nameId)")
        db.executemany("INSERT INTO OSRT_API VALUES (?, 5, 7, 1)", [(time,) for time in range(3)])
        db.execute("CREATE TABLE PROFILER_OVERHEAD (start)")
    with pytest.raises(ReadError) as raised:
        nsys.read(path)
    assert raised.value.what == "has no CUDA activity and no NVTX range (rows in OSRT_API 3, not read)"


def test_nothing_is_written_next_to_the_file(export: Path) -> None:
    before = sorted(path.name for path in export.parent.iterdir())
    nsys.read(export)
    assert sorted(path.name for path in export.parent.iterdir()) == before


@pytest.mark.slow
def test_gzip_reads_the_same_and_a_bomb_is_refused(
    export: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "unknown"
    packed.write_bytes(gzip.compress(export.read_bytes()))
    again = nsys.read(packed)
    assert isinstance(again, Job)
    assert again[1].events.equals(job[1].events)
    packed.write_bytes(packed.read_bytes()[:2000])
    with pytest.raises(ReadError, match="compressed data is damaged"):
        nsys.read(packed)
    monkeypatch.setattr(limits, "MIN_CHECKED_BYTES", 1 << 20)
    packed.write_bytes(gzip.compress(b"SQLite format 3\0" + bytes(1 << 26)))
    with pytest.raises(LimitError, match="decompress to more than 200 times"):
        nsys.read(packed)


REPORT = b"NVIDIA Tegra Profiler Report 2026@2@1@210\n"


def test_a_raw_report_without_nsys_gives_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(REPORT)
    assert nsys.sniff(REPORT)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = f"nsys export --type=sqlite --force-overwrite=true --output=run.sqlite {path}"
    with pytest.raises(ReadError, match="not on the PATH") as error:
        nsys.read(path)
    assert str(error.value).endswith(command)


def _fake_nsys(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_a_raw_report_is_exported(
    export: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'for a; do case "$a" in --output=*) cp "{export}" "${{a#--output=}}";; esac; done'
    _fake_nsys(tmp_path, script, monkeypatch)
    report = tmp_path / "run; touch hacked.nsys-rep"
    report.write_bytes(REPORT)
    again = nsys.read(report)
    assert isinstance(again, Job)
    assert again[0].events.equals(job[0].events)
    assert again.meta["files"] == [str(report)]


def test_a_failing_and_a_hanging_nsys_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nsys(tmp_path, "echo 'newer version'; exit 1", monkeypatch)
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(REPORT)
    with pytest.raises(ReadError, match="nsys export failed: newer version"):
        nsys.read(report)
    (tmp_path / "bin" / "nsys").write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(ReadError, match="timed out"):
        nsys.read(report, export_timeout=0.2)


@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3\0", b"SQLite format 3\0" + bytes(4096), b"hello"], ids=range(4)
)
def test_no_export_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(ReadError) as error:
        nsys.read(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.slow
def test_damage_anywhere_is_an_error_or_counted(export: Path, tmp_path: Path) -> None:
    whole, path, rng = export.read_bytes(), tmp_path / "damaged.sqlite", random.Random(7)
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.choice([1, 20, 400])):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            nsys.read(path)
        except EtloomError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 0 < refused < 60


def test_h100_two_gpus(data: Path) -> None:
    job = nsys.read(data / "nsys" / "h100_2gpu_1s.sqlite.gz")
    assert isinstance(job, Job)
    assert job.ranks == [0, 1]
    assert job[0].meta["base_ns"] == 1779630014975716426
    counts = job.table("events").group_by("cat").len()
    assert dict(counts.with_columns(pl.col("cat").cast(pl.String)).rows()) == {
        "kernel": 3442,
        "gpu_memcpy": 904,
        "gpu_memset": 22,
        "cuda_runtime": 5796,
        "cuda_sync": 244,
        "overhead": 198,
        "cpu_op": 16546,
        "user_annotation": 236,  # FSDP::, whose scope is the user's; with cpu_op all 16,782 ranges
    }
    named = job.table("events").filter(pl.col("cat").is_in(["cpu_op", "user_annotation"]))
    assert named["rf_id"].null_count() == 0
    matched = 0
    for trace in job.values():
        work = trace.events.filter(pl.col("cat") == "kernel")
        calls = trace.events.filter(pl.col("cat") == "cuda_runtime")
        matched += work.join(calls, on="correlation", how="semi").height
    assert matched == 1632  # of 3,442 on (process, correlation)
    assert stats(job[0]) == {
        "read.nsys_inferred_rank": ("info", 2),
        "read.nsys_device_of_sync": ("info", 122),
    }


@pytest.mark.slow
def test_names_that_are_not_there_are_counted(export: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.sqlite"
    file.write_bytes(export.read_bytes())
    connection = sqlite3.connect(file)
    connection.execute("DROP TABLE StringIds")
    connection.commit()
    connection.close()
    job = nsys.read(file, all_processes=True)
    assert isinstance(job, Job)
    counts = dict(job[0].stats.select("name", "count").iter_rows())
    assert counts["read.nsys_no_name"] == sum(trace.events["name"].null_count() for trace in job.values()) > 0
    assert "read.nsys_no_name" not in nsys.read(export)[0].stats["name"].to_list()


def test_every_row_of_a_real_export_is_accounted_for(data: Path, tmp_path: Path) -> None:
    packed = next((data / "nsys").glob("*.sqlite.gz"))
    file = tmp_path / "x.sqlite"
    file.write_bytes(gzip.decompress(packed.read_bytes()))
    connection = sqlite3.connect(file)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    timed = [name for name in tables if name.startswith("CUPTI_ACTIVITY_KIND_") or name == "NVTX_EVENTS"]
    rows = sum(connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in timed)
    connection.close()
    job = nsys.read(packed)
    assert isinstance(job, Job)
    assert sum(trace.events.height for trace in job.values()) == rows
    assert not [row for trace in job.values() for row in trace.stats.rows() if row[1] != "info"]


def without_processes(path: Path, *columns: str, pid: int | None = None) -> None:
    """Drop these columns everywhere, and the rows of all other processes than ``pid``."""
    with sqlite3.connect(path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            present = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
            for column in {"globalPid", "globalTid"} & present if pid is not None else ():
                db.execute(f"DELETE FROM {table} WHERE ({column} >> 24) & 16777215 != {pid}")
            for column in present & set(columns):
                db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")


def counts(trace: Trace) -> dict[str, int]:
    return {str(cat): len for cat, len in trace.events.group_by(pl.col("cat").cast(pl.String)).len().rows()}


@pytest.mark.slow
def test_activities_without_a_process_belong_to_the_only_one(
    maker: ModuleType, job: Job, tmp_path: Path
) -> None:
    path = tmp_path / "x.sqlite"
    maker.build(path)
    without_processes(path, "globalPid", pid=200)
    trace = nsys.read(path)
    assert isinstance(trace, Trace)
    assert counts(trace) == counts(job[1])
    assert trace.meta["pid"] == 200 and trace.memory.height == job[1].memory.height
    assert stats(trace)["read.nsys_inferred_process"][0] == "info"
    assert "read.nsys_no_process" not in stats(trace)
    assert trace.syncs.drop("event").rows() == job[1].syncs.drop("event").rows()


def test_an_export_without_any_process_is_one_process(maker: ModuleType, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    maker.build(path)
    without_processes(path, "globalPid", "globalTid", pid=200)
    trace = nsys.read(path)
    assert isinstance(trace, Trace)
    assert counts(trace)["kernel"] == counts(job[1])["kernel"]


def test_activities_without_a_process_follow_their_calls_in_an_export_of_two(
    maker: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "x.sqlite"
    maker.build(path)
    with sqlite3.connect(path) as db:
        db.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = correlationId + (globalTid >> 24) % 100000"
        )
        db.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = correlationId + (globalPid >> 24) % 100000"
        )
    without_processes(path, "globalPid")
    job = nsys.read(path)
    assert isinstance(job, Job)
    # A kernel of rank 1 has no call: it stays unknown, and is counted.
    assert [counts(job[rank])["kernel"] for rank in job.ranks] == [1, 2]
    assert "read.nsys_no_process" in {name for rank in job.ranks for name in stats(job[rank])}
