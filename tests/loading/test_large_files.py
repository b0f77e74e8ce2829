"""A large trace stays on disk: the same answers, no more of it in memory than is asked for, nothing left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import tempfile
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom import cli, loading
from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.loading import cache
from support import small_traces

SQL = "select cat, name, ts, dur from events where dur > 20000 order by ts, name"


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading.file_reading, "SPILL_BYTES", 1)
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = small_traces.write_run(tmp_path / "run")
    for rank in (0, 1):
        (folder / f"torch_et_{rank}.json").unlink()
    return folder


def test_a_large_file_stays_on_disk_and_has_the_same_content(run: Path) -> None:
    file = run / "kineto_trace_1.json"
    whole, job = etloom.read(file), etloom.open(file, lazy=True)
    assert isinstance(whole, Trace)
    assert job[1].loaders
    assert dict(job[1].meta) == dict(whole.meta)
    for name in TABLES:
        assert job[1].table(name).equals(whole.table(name)), name
        assert job[1].scan(name).collect().equals(whole.table(name)), name
    assert job[1].query(SQL).equals(whole.query(SQL))
    assert job.query(SQL).equals(whole.query(SQL))
    assert job.run_stats.select("name", "severity", "count").rows() == [("job.not_linked", "info", 1)]
    assert "events" in repr(job[1])


def test_every_rank_of_a_folder(run: Path) -> None:
    job = etloom.open(run, lazy=True)
    assert all(trace.loaders for trace in job.values())
    assert job.query("select rank, count(*) as n from events group by rank order by rank").rows() == [
        (0, 7),
        (1, 7),
    ]
    assert job.run_stats.select("name", "count").rows() == [("job.not_linked", 2)]


@pytest.mark.slow
def test_analyses_of_linked_traces_link_it(run: Path) -> None:
    eager, lazy = etloom.open(run, use_cache=False), etloom.open(run, lazy=True)
    for name in ("temporal-breakdown", "steps", "link-quality"):
        assert etloom.analyze(lazy, name).equals(etloom.analyze(eager, name))


@pytest.mark.slow
def test_it_is_turned_into_parquet_once(run: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    spill = loading.file_reading.spill_to_parquet
    monkeypatch.setattr(
        loading.file_reading, "spill_to_parquet", lambda path, *rest: (made.append(path), spill(path, *rest))
    )
    file = run / "kineto_trace_0.json"
    for _ in range(2):
        assert etloom.open(file, lazy=True)[0].events.height == 7
    assert made == [file]
    (entry,) = cached.glob("runs/run=*/rank=0")
    (entry / "events.parquet").unlink()
    assert etloom.open(file, lazy=True)[0].events.height == 7
    assert made == [file, file]


def test_links_of_another_verb_are_reused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.executor, "MIN_SECONDS_TO_CACHE", -1)
    monkeypatch.setattr(loading.plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    file = run / "kineto_trace_0.json"
    linked = etloom.open(file)
    job = etloom.open(file, lazy=True)
    assert job[0].loaders
    assert job[0].launches.equals(linked[0].launches)
    assert job.run_stats.height == 0


@pytest.mark.parametrize("how", ["no cache", "a cache that cannot be written"])
@pytest.mark.slow
def test_without_the_cache_nothing_is_left_behind(
    run: Path, tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    if how != "no cache":
        monkeypatch.setenv("ETLOOM_CACHE", "/proc/no-such-place")
    job = etloom.open(run / "kineto_trace_0.json", lazy=True, use_cache=how != "no cache")
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    again = job[0].replace(meta={"rank": 5})
    del job
    gc.collect()
    assert again.query(SQL).height == 5
    del again
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not cached.exists()


def test_the_entry_in_use_is_not_evicted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE_BYTES", "1")
    for rank in (0, 1):
        job = etloom.open(run / f"kineto_trace_{rank}.json", lazy=True)
        assert job.query(SQL).height == 5
        assert len(list(cache.cache_folder().glob("[!.]*"))) == 1


def test_files_that_go_while_they_are_used_are_one_line(run: Path) -> None:
    job = etloom.open(run / "kineto_trace_0.json", lazy=True)
    shutil.rmtree(cache.cache_folder())
    with pytest.raises(ReadError, match=r"events\.parquet: was removed while in use"):
        _ = job[0].events
    with pytest.raises(EtloomError):
        job.query(SQL)


def test_a_changed_table_is_in_memory_and_others_see_all_of_it(run: Path) -> None:
    trace = etloom.open(run / "kineto_trace_0.json", lazy=True)[0]
    changed = trace.replace(events=trace.events.head(2))
    assert changed.query("select name from events").height == 2
    assert changed.kernels.equals(trace.kernels)
    assert changed.tables.keys() == trace.tables.keys()
    for other in (pickle.loads(pickle.dumps(changed)), copy.deepcopy(changed)):
        assert not other.loaders
        assert other.events.height == 2


def test_saved_runs_are_not_moved(run: Path, tmp_path: Path) -> None:
    job = etloom.open(run, use_cache=False)
    etloom.export(job, tmp_path / "run.parquet")
    lazy = etloom.open(tmp_path / "run.parquet", lazy=True)
    assert all(trace.loaders for trace in lazy.values())
    assert lazy.run_stats.equals(job.run_stats)
    assert lazy.query("select * from launches").equals(job.query("select * from launches"))
    pl.DataFrame({"id": [1], "speed": [2]}).write_parquet(
        tmp_path / "run.parquet" / "rank=0" / "events.parquet"
    )
    with pytest.raises(ReadError, match="table events has no column"):
        etloom.open(tmp_path / "run.parquet", lazy=True)


@pytest.mark.slow
def test_info_and_query_report_that_it_is_not_joined(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["query", str(run), "select count(*) as n from events", "--format", "csv"]) == 0
    told = capsys.readouterr()
    assert told.out == "n\n14\n"
    assert told.err.startswith(f"etloom: {run}: too large to link")
    assert cli.main(["info", str(run), "--format", "csv"]) == 0
    header, first, _ = capsys.readouterr().out.splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert (row["events"], row["device_events"], row["steps"], row["mean_step_ns"]) == (
        "7",
        "2",
        "1",
        "1000000.0",
    )
    assert cli.main(["info", str(run)]) == 0
    assert "job.not_linked" in capsys.readouterr().out
