"""A trace or job that is saved reads back equal, to us and to others, and nothing else is overwritten."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.formats import parquet as reader
from etloom.formats.parquet import writer as export
from support import random_traces, small_traces
from support.examples import examples
from support.saved_folders import remove_checksums, update_checksum


def assert_same(one: Trace, other: Trace) -> None:
    assert dict(one.meta) == dict(other.meta)
    assert set(one.tables) == set(other.tables)
    for name, frame in one.tables.items():
        assert list(frame.schema.items()) == list(other.table(name).schema.items())
        assert frame.equals(other.table(name), null_equal=True), name


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(random_traces.traces)
def test_a_trace_reads_back_equal(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export.write(trace, Path(folder, "it.parquet"))
        back = reader.read(Path(folder, "it.parquet"))
        assert isinstance(back, Trace)
        assert_same(trace, back)


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(random_traces.jobs)
def test_a_job_reads_back_equal(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export.write(job, Path(folder, "it.parquet"))
        back = reader.read(Path(folder, "it.parquet"))
        assert isinstance(back, Job)
        assert dict(back.meta) == dict(job.meta)
        assert back.ranks == job.ranks
        assert back.run_stats.equals(job.run_stats)
        for rank, trace in job.items():
            assert_same(trace, back[rank])


@pytest.mark.parametrize("folder", ["cpu/ddp_2", "hta_multirank", "simple_add"])
def test_a_real_run_reads_back_equal_and_linked(data: Path, folder: str, tmp_path: Path) -> None:
    job = etloom.open(data / folder)
    etloom.export(job, tmp_path / "run.parquet")
    back = etloom.open(tmp_path / "run.parquet")
    assert back.ranks == job.ranks
    assert back.run_stats.equals(job.run_stats)
    for rank, trace in job.items():
        assert_same(trace, back[rank])
        alone = etloom.open(tmp_path / "run.parquet" / f"rank={rank}")
        assert_same(trace, alone[rank])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return etloom.open(small_traces.write_run(tmp_path / "run"), use_cache=False)


def test_others_read_it_with_the_rank_as_a_column(job: Job, tmp_path: Path) -> None:
    export.write(job, tmp_path / "it")
    everywhere = pl.read_parquet(tmp_path / "it" / "rank=*" / "events.parquet", hive_partitioning=True)
    assert everywhere.group_by("rank").len().sort("rank").rows() == [(0, 7), (1, 7)]
    arrow = pq.read_table(tmp_path / "it" / "rank=1" / "events.parquet", partitioning=None)
    assert arrow.column("name").to_pylist()[:2] == ["ProfilerStep#3", "aten::linear"]
    assert arrow.column("ts").to_pylist()[0] == small_traces.BASE_NS + 100_000


def test_meta_json_and_folder_are_recognized_by_content(job: Job, tmp_path: Path) -> None:
    export.write(job, tmp_path / "it")
    assert reader.sniff_folder(tmp_path / "it")
    assert reader.sniff_folder(tmp_path / "it" / "rank=0")
    assert not reader.sniff_folder(tmp_path)
    assert reader.sniff((tmp_path / "it" / "meta.json").read_bytes()[:64])
    assert isinstance(etloom.read(tmp_path / "it" / "meta.json"), Job)


def test_only_tables_saved_before_are_replaced(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    target.mkdir()
    export.write(job, target)
    export.write(job[0], target)
    assert not (target / "rank=0").exists()
    (target / "notes.txt").write_text("mine")
    for taken in (target, tmp_path / "run", tmp_path / "run" / "torch_et_0.json"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(EtloomError, match="was not written by etloom"):
            export.write(job, taken)
        assert sorted(tmp_path.rglob("*")) == before
    assert (target / "notes.txt").read_text() == "mine"


def test_a_failed_write_leaves_nothing_and_keeps_existing_tables(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    export.write(job, target)
    with pytest.raises(TypeError):
        export.write(job[0].replace(meta={"not json": object()}), target)
    assert isinstance(reader.read(target), Job)
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["it.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "meta.json",
            b'{"etloom": "9", "layout": 2, "kind": "trace", "meta": {}}',
            "was saved with version 2 of the layout; this etloom reads version 1; update etloom",
        ),
        ("meta.json", b'{"etloom": "9"', "is not the meta.json of a saved trace; export it again"),
        (
            "meta.json",
            b'{"etloom": 1, "layout": 1, "kind": "x", "meta": {}}',
            "is not the meta.json of a saved trace",
        ),
        ("meta.json", b'{"etloom": 1, "layout": 1, "kind": "trace", "meta": 3}', "is not the meta.json"),
        (
            "meta.json",
            b'{"etloom": 1, "layout": 1, "kind": "trace", "meta": {}, "tables": ["events"]}',
            "is not the meta.json",
        ),
        (
            "meta.json",
            b'{"etloom": 1, "layout": 1, "kind": "job", "meta": {}, "ranks": [[0]]}',
            "is not the meta.json",
        ),
        ("meta.json", b"[]", "is not the meta.json"),
        ("meta.json", b"[" * 100_000, "is not the meta.json"),
        ("events.parquet", b"PAR1 and no more", "is not a valid table 'events'"),
        ("events.parquet", b"", "is not a valid table 'events'"),
    ],
)
def test_a_damaged_folder_is_one_line(
    job: Job, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    target = tmp_path / "it.parquet"
    export.write(job[0], target)
    remove_checksums(target)
    (target / name).write_bytes(content)
    with pytest.raises(ReadError) as raised:
        reader.read(target)
    assert str(raised.value).startswith(f"{target / name}: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_column_that_is_damaged_behind_a_valid_footer_is_one_line(job: Job, tmp_path: Path) -> None:
    saved = tmp_path / "saved.parquet"
    etloom.export(job, saved)
    events = saved / "rank=0" / "events.parquet"
    start = pq.ParquetFile(events).metadata.row_group(0).column(2).dictionary_page_offset
    content = bytearray(events.read_bytes())
    content[start : start + 16] = b"\xff" * 16
    events.write_bytes(content)
    with pytest.raises(ReadError, match=r"events\.parquet: changed since it was written.*; export it again"):
        etloom.info(saved)
    remove_checksums(saved)
    with pytest.raises(ReadError, match=r"is not a valid table 'events'.*; export it again"):
        etloom.info(saved)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(trace=random_traces.traces, data=st.data())
def test_a_changed_byte_of_any_table_is_noticed(trace: Trace, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "saved")
        export.write(trace, target)
        files = sorted(target.glob("*.parquet"))
        assume(files)
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        with pytest.raises(ReadError, match=r"changed since it was written"):
            reader.read(target)
        for access in (Trace.table, Trace.scan):
            # A damaged footer is an error of its own: it is read when the folder is opened.
            with pytest.raises(ReadError, match=r"changed since it was written|is not a valid table"):
                access(reader.read(target, lazy=True), file.stem)


def test_a_table_with_a_foreign_column_is_refused(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    export.write(job[0], target)
    pl.DataFrame({"speed": [1]}).write_parquet(target / "launches.parquet")
    update_checksum(target / "launches.parquet")
    with pytest.raises(
        ReadError, match=r"launches\.parquet: is not a valid table 'launches': table launches has no column"
    ):
        reader.read(target)


def test_only_tables_of_the_schema_are_opened(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    export.write(job[0], target)
    (target / "secrets.parquet").write_bytes(b"no table")
    meta = json.loads((target / "meta.json").read_text())
    meta["tables"] |= {"/etc/passwd": 1, "../secrets": 2}
    (target / "meta.json").write_text(json.dumps(meta))
    back = reader.read(target)
    assert isinstance(back, Trace)
    assert set(back.tables) <= set(TABLES)


def test_a_missing_or_truncated_table_is_an_error(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    export.write(job[0], target)
    job[0].events.head(6).write_parquet(target / "events.parquet")
    update_checksum(target / "events.parquet")
    with pytest.raises(ReadError) as raised:
        reader.read(target)
    assert str(raised.value) == f"{target / 'events.parquet'}: has 6 rows, but 7 were saved; export it again"
    (target / "events.parquet").unlink()
    with pytest.raises(ReadError, match=r"events\.parquet: is missing: 7 rows were saved"):
        reader.read(target)


def test_a_rank_or_the_stats_of_a_job_that_are_missing_are_missed(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    export.write(job, target)
    (target / "stats.parquet").unlink()
    with pytest.raises(ReadError, match=r"stats\.parquet: is missing"):
        reader.read(target)
    export.write(job, target)
    shutil.rmtree(target / "rank=1")
    with pytest.raises(ReadError, match=r"rank=1: is missing; export it again"):
        reader.read(target)


def test_a_folder_saved_before_rows_were_noted_is_read(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "it.parquet"
    export.write(job[0], target)
    old = json.loads((target / "meta.json").read_text())
    del old["tables"]
    (target / "meta.json").write_text(json.dumps(old))
    (target / "threads.parquet").unlink()
    back = reader.read(target)
    assert isinstance(back, Trace)
    assert back.events.equals(job[0].events)


@pytest.mark.parametrize(
    ("column", "value"),
    [("id", None), ("ts", None), ("dur", -5), ("pid", None), ("parent", 0), ("args", "[1")],
)
def test_an_invalid_value_in_a_table_on_disk_is_refused(
    column: str, value: object, job: Job, tmp_path: Path
) -> None:
    export.write(job[0], tmp_path / "it")
    file = tmp_path / "it" / "events.parquet"
    events = pl.read_parquet(file)
    events.with_columns(pl.lit(value).cast(events.schema[column]).alias(column)).write_parquet(file)
    update_checksum(file)
    trace = reader.read(tmp_path / "it", lazy=True)
    assert isinstance(trace, Trace)
    with pytest.raises(ReadError, match=r"events\.parquet: is not a valid table 'events': .*export it again"):
        trace.table("events")


@pytest.mark.parametrize("max_small_rows", [0, 2, 100])
def test_small_and_large_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_small_rows: int
) -> None:
    monkeypatch.setattr(export, "_MAX_SMALL_ROWS", max_small_rows)
    tables = {tmp_path / f"{height}.parquet": pl.DataFrame({"n": range(height)}) for height in (0, 1, 5)}
    export.write_tables(tables)
    assert all(pl.read_parquet(file).equals(table) for file, table in tables.items())


def read_small_trace() -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        return etloom.open(small_traces.write_run(Path(folder), (0,)))[0]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(random_traces.traces, st.booleans())
def test_a_trace_in_one_file_reads_back_equal_if_its_folder_is_trusted(trace: Trace, lazy: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "it")
        export.write(trace, saved, packs=True)
        assert {file.name for file in saved.iterdir()} == {"meta.json", "tables.arrow"}
        back = reader.read(saved, owner=folder, lazy=lazy)
        assert isinstance(back, Trace)
        assert not (trace.tables and lazy) or back.loaders
        for name in trace.tables:
            assert back.rows(name) == trace.rows(name)
            assert back.scan(name).collect().equals(trace.table(name), null_equal=True)
        assert_same(trace, back)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.data())
def test_a_changed_byte_of_tables_in_one_file_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "it")
        export.write(read_small_trace(), saved, packs=True)
        content = bytearray((saved / "tables.arrow").read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        (saved / "tables.arrow").write_bytes(content)
        with pytest.raises(ReadError):
            reader.read(saved, owner=folder)


def test_tables_in_one_file_of_another_folder_are_not_read(tmp_path: Path) -> None:
    export.write(read_small_trace(), tmp_path / "it", packs=True)
    with pytest.raises(ReadError, match="rows were saved"):
        reader.read(tmp_path / "it")


def test_large_traces_are_a_file_per_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_MAX_PACKED_BYTES", 10)
    export.write(read_small_trace(), tmp_path / "it", packs=True)
    assert (tmp_path / "it" / "events.parquet").exists()
    assert not (tmp_path / "it" / "tables.arrow").exists()


def test_only_folders_of_the_cache_may_be_replaced_because_of_tables_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "tables.arrow").touch()
    with pytest.raises(EtloomError, match="was not written by etloom"):
        export.write(read_small_trace(), tmp_path / "it")
    export.write(read_small_trace(), tmp_path / "it", packs=True)
    assert (tmp_path / "it" / "meta.json").exists()


@pytest.mark.parametrize("edit", [{"evenus": 3}, {}, {"events": "x"}, {"events": 1}])
def test_other_tables_in_the_meta_of_tables_in_one_file_are_noticed(
    tmp_path: Path, edit: dict[str, object]
) -> None:
    export.write(read_small_trace(), tmp_path / "it", packs=True)
    content = json.loads((tmp_path / "it" / "meta.json").read_text())
    content["tables"] = {name: rows for name, rows in content["tables"].items() if name != "events"} | edit
    (tmp_path / "it" / "meta.json").write_text(json.dumps(content))
    with pytest.raises(ReadError):
        reader.read(tmp_path / "it", lazy=True, owner=tmp_path)


@pytest.mark.parametrize(
    "line",
    ["[]", '{"events": 1}', '{"events": [1, 2]}', '{"events": [1, -2, 3]}', '{"other": [1, 2, 3]}', "{"],
)
def test_invalid_first_lines_of_tables_in_one_file_are_one_message(tmp_path: Path, line: str) -> None:
    export.write(read_small_trace(), tmp_path / "it", packs=True)
    text = line.encode()
    (tmp_path / "it" / "tables.arrow").write_bytes(f"{zlib.crc32(text):08x} ".encode() + text + b"\n")
    with pytest.raises(ReadError):
        reader.read(tmp_path / "it", owner=tmp_path)


def test_an_interrupted_replacement_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.write(read_small_trace(), tmp_path / "it")
    rename = Path.rename

    def interrupt(path: Path, target: Path) -> Path:
        if target == tmp_path / "it" and not path.name.endswith(".old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export.write(read_small_trace(), tmp_path / "it")
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]
    assert isinstance(reader.read(tmp_path / "it"), Trace)


@pytest.mark.slow
def test_a_process_that_ends_meanwhile_leaves_no_scratch(tmp_path: Path) -> None:
    code = (
        "import sys, threading, time; from etloom.formats.parquet import writer\n"
        "def write():\n"
        "    with writer.create_atomically(sys.argv[1]) as new:\n"
        "        (new / 'file').touch(); started.set(); time.sleep(60)\n"
        "started = threading.Event(); threading.Thread(target=write, daemon=True).start(); started.wait()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "it")], check=True)
    assert list(tmp_path.iterdir()) == []
