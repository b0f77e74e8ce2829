"""Which files of a folder are read for which rank, and what is said of the rest."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import cli, formats, loading
from etloom.analyses.run_info import describe_ranks as described
from etloom.core import registry
from etloom.core.errors import DataLoss, EtloomError, ReadError
from etloom.loading.rank_discovery import discover_ranks
from support import small_traces


def kineto(path: Path, rank: int | None = None, world: int | None = None) -> None:
    document: dict[str, Any] = {
        "traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]
    }
    if rank is not None:
        document["distributedInfo"] = {
            "backend": "nccl",
            "rank": rank,
            "world_size": world,
            "pg_config": [{"pg_name": "0"}],
        }
    path.write_text(json.dumps(document))


def execution_trace(path: Path) -> None:
    path.write_text(
        json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1, "name": "a", "ctrl_deps": 1}]})
    )


def by_rank(folder: Path, pattern: str | None = None) -> dict[int, list[str]]:
    return {
        rank: sorted(path.name for path in paths)
        for rank, paths in discover_ranks(folder, pattern).ranks.items()
    }


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("kineto_trace_3.json", 3),
        ("_dump_12", 12),
        ("job_dump_3.json", 3),
        ("host.3.json", 3),
        ("device.12.json.gz", 12),
        ("chakra_host_et.7.json", 7),
        ("host.1102.pt.trace.json", 0),
        ("host.1716200000000.json", 0),
        ("kineto_rank12_step5.json", 12),
        ("rank7_trace.json", 7),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json", 34),
        ("worker2_step_12.1694128201554.pt.trace.json", 2),
        ("host1.rank_5.pt.trace.json", 5),
    ],
)
def test_ranks_by_the_names_the_field_uses(tmp_path: Path, name: str, rank: int) -> None:
    kineto(tmp_path / name)
    assert by_rank(tmp_path) == {rank: [name]}
    assert list(etloom.open(tmp_path / name, use_cache=False)) == [rank]


def test_host_and_device_trace_of_a_rank_go_together(tmp_path: Path) -> None:
    for rank in (0, 1):
        kineto(tmp_path / f"kineto_trace_{rank}.json")
        execution_trace(tmp_path / f"torch_et_{rank}.json")
    (tmp_path / "run.json").write_text("{}")
    assert by_rank(tmp_path) == {
        rank: [f"kineto_trace_{rank}.json", f"torch_et_{rank}.json"] for rank in (0, 1)
    }
    assert [path.name for path in discover_ranks(tmp_path).ignored] == ["run.json"]


def test_the_rank_in_the_file_counts_if_the_name_has_none(tmp_path: Path) -> None:
    kineto(tmp_path / "left.json", rank=4)
    kineto(tmp_path / "right.json", rank=5)
    assert by_rank(tmp_path) == {4: ["left.json"], 5: ["right.json"]}


@pytest.mark.parametrize("groups", [2, 100_000])
@pytest.mark.slow
def test_the_rank_inside_may_follow_the_process_groups(tmp_path: Path, groups: int) -> None:
    config = [{"pg_name": str(number), "ranks": [0, 1]} for number in range(groups)]
    for rank in (0, 1):
        info = {"backend": "nccl", "pg_config": config, "world_size": 2, "rank": rank}
        document = {"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2}], "distributedInfo": info}
        (tmp_path / f"host{5 - rank}.json").write_text(json.dumps(document))
    assert by_rank(tmp_path) == {0: ["host5.json"], 1: ["host4.json"]}


def test_a_pattern_overrides_the_names(tmp_path: Path) -> None:
    kineto(tmp_path / "rank0.node3.json")
    assert by_rank(tmp_path, r"node(\d+)") == {3: ["rank0.node3.json"]}
    for pattern in ("(", "node"):
        with pytest.raises(EtloomError, match=r"^rank_pattern: .*; for example"):
            discover_ranks(tmp_path, pattern)


def test_files_without_a_rank_are_an_error_and_omitted_ones_are_counted(tmp_path: Path) -> None:
    kineto(tmp_path / "one.json")
    assert by_rank(tmp_path) == {0: ["one.json"]}
    kineto(tmp_path / "two.json")
    with pytest.raises(ReadError, match=r": the rank of 2 traces is unknown: one.json, two.json; specify it"):
        discover_ranks(tmp_path)
    kineto(tmp_path / "rank3.json")
    kineto(tmp_path / "rank2.json")
    for number in range(20):
        kineto(tmp_path / f"more{number}.json")
    with pytest.raises(
        ReadError,
        match=r"22 traces is unknown: .* and 10 more; others have a rank: rank2.json \(2\), rank3.json \(3\); ",
    ):
        discover_ranks(tmp_path)
    for name in ("rank2", "rank3", *(f"more{number}" for number in range(20))):
        (tmp_path / f"{name}.json").unlink()
    (tmp_path / "two.json").rename(tmp_path / "rank_0.json")
    (tmp_path / "one.json").rename(tmp_path / "rank-0.json")
    found = discover_ranks(tmp_path)
    assert [len(paths) for paths in found.ranks.values()] == [1]
    example = "rank_0.json is ignored, rank-0.json was read"
    assert found.rank_stats == {0: [("job.duplicate_rank_files", "data_loss", 1, example)]}
    assert found.stats == []


def test_missing_ranks_and_disagreements_are_reported(tmp_path: Path) -> None:
    kineto(tmp_path / "kineto_trace_0.json", rank=0, world=4)
    kineto(tmp_path / "kineto_trace_2.json", rank=3, world=8)
    stats = {row[0]: (row[1], row[2]) for row in etloom.open(tmp_path, use_cache=False).run_stats.rows()}
    assert stats == {
        "job.missing_ranks": ("info", 1),
        "job.rank_mismatch": ("error", 1),
        "job.world_size_mismatch": ("error", 2),
    }


def test_a_folder_without_traces_names_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ReadError, match="no traces found; try one of its folders: inner"):
        discover_ranks(tmp_path)
    with pytest.raises(ReadError, match="no such folder"):
        discover_ranks(tmp_path / "none")


def test_the_error_of_a_folder_without_traces_lists_its_content(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="no traces found; it is empty; name the folder"):
        discover_ranks(tmp_path)
    for name in ("a.txt", "b.txt", "c.log.gz", "Makefile"):
        (tmp_path / name).write_text("x")
    said = "no traces found; it contains 2 .txt, 1 without a suffix, 1 .log.gz; supported are PyTorch"
    with pytest.raises(ReadError, match=said):
        discover_ranks(tmp_path)


def test_metrics_and_the_workload_card_come_along(tmp_path: Path) -> None:
    for rank in (0, 1):
        kineto(tmp_path / f"kineto_trace_{rank}.json")
    (tmp_path / "gpu.csv").write_text(
        "timestamp, index, power.draw [W]\n2026/11/21 02:25:35.100, 0, 50.5 W\n"
    )
    (tmp_path / "card.yaml").write_text("version: 1\nworkload: {model: {phase: training}}\n")
    job = etloom.open(tmp_path, use_cache=False)
    assert job[0].counters["value"].to_list() == [50.5]
    assert job[1].counters.height == 0
    assert job.meta["card"]["workload"]["model"]["phase"] == "training"
    (tmp_path / "card.yaml").write_text("version: 1\nworkload: !!python/object/apply:os.system [id]\n")
    broken = etloom.open(tmp_path, use_cache=False)
    assert "card" not in broken.meta
    assert "run" not in broken.meta
    assert broken.run_stats["name"].to_list() == ["job.workload_card"]


def test_samples_of_any_kind_are_mapped_once_and_come_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    kineto(run / "kineto_trace_0.json")
    samples = run / "samples.csv"
    samples.write_text("when,watts\n1700000000001.5,40\n1700000000002,41\n")
    assert etloom.open(run, use_cache=False)[0].counters.height == 0
    command = ["convert", str(samples), str(run / "samples.parquet")]
    assert cli.main(command) == 1
    assert "in a known format; for samples, name the column with their time: etloom convert" in (
        capsys.readouterr().err
    )
    assert cli.main([*command, "--time-column", "when", "--unit", "ms"]) == 0
    job = etloom.open(run, use_cache=False)
    assert job[0].counters["value"].to_list() == [40, 41]
    assert job[0].counters["ts"].to_list() == [1_700_000_000_001_500_000, 1_700_000_000_002_000_000]

    # A file that is known to be metrics, but not in which unit, is not read a second time.
    samples.write_text("time,watts\n1.5,40\n")
    assert cli.main(command) == 1
    assert "--unit" in capsys.readouterr().err
    assert cli.main([*command, "--unit", "s"]) == 0
    job = etloom.open(run, use_cache=False)
    assert job[0].counters["value"].to_list() == [40]
    assert job.run_stats.select("name", "severity").rows() == [("job.converted_file_used", "info")]
    with pytest.raises(EtloomError, match="no option 'unit'"):
        etloom.read(run / "kineto_trace_0.json", unit="s")


@pytest.mark.slow
def test_threads_follow_jobs(tmp_path: Path) -> None:
    kineto(tmp_path / "kineto_trace_0.json")
    code = (
        "import sys; from etloom import cli; cli.main(['info', sys.argv[1], '--jobs', '1', '--no-cache']); "
        "import polars; print(polars.thread_pool_size())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "1", done.stderr


def test_facts_written_by_collect_are_in_meta(tmp_path: Path) -> None:
    kineto(tmp_path / "kineto_trace_0.json")
    (tmp_path / "run.json").write_text(
        json.dumps({"schema": "etloom-run-1", "command": ["python", "train.py"]})
    )
    assert etloom.open(tmp_path, use_cache=False).meta["run"]["command"] == ["python", "train.py"]
    (tmp_path / "run.json").write_text("{")
    assert discover_ranks(tmp_path).run is None
    assert [row[0] for row in discover_ranks(tmp_path).stats] == ["job.run_json"]


def test_a_rank_that_no_job_has_costs_nothing(tmp_path: Path) -> None:
    kineto(tmp_path / "kineto_trace_1.json")
    kineto(tmp_path / "kineto_trace_999999999.json")
    found = discover_ranks(tmp_path)
    assert list(found.ranks) == [1, 999_999_999]
    example = "no trace of rank 0, 2, 3, 4, 5, 6, 7, 8, ..."
    assert found.stats == [("job.missing_ranks", "info", 999_999_998, example)]


def test_a_number_too_long_for_a_rank_is_none(tmp_path: Path) -> None:
    kineto(tmp_path / f"kineto_trace_{10**9}.json", rank=3)
    kineto(tmp_path / f"kineto_trace_{10**30}.json", rank=1)
    kineto(tmp_path / f"kineto_trace_{10**9 - 1}.json", rank=2)
    assert list(discover_ranks(tmp_path).ranks) == [1, 3, 10**9 - 1]
    assert etloom.open(tmp_path, use_cache=False).ranks == [1, 3, 10**9 - 1]


@pytest.mark.parametrize("pattern", ["(kineto)", "_([0-9]?)"])
def test_a_pattern_whose_group_is_not_a_number_is_wrong_usage(
    tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kineto(tmp_path / "kineto_trace.json")
    assert cli.main(["info", str(tmp_path), "--rank-pattern", pattern]) == 2
    assert capsys.readouterr().err.startswith(f"etloom: --rank-pattern: the group of {pattern!r} matches ")
    # A group that may be absent finds no rank where it is.
    assert list(discover_ranks(tmp_path, r"kineto(?:_rank(\d+))?").ranks) == [0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_and_links_that_lead_nowhere_are_passed_over(tmp_path: Path) -> None:
    kineto(tmp_path / "kineto_trace_0.json")
    os.mkfifo(tmp_path / "kineto_trace_1.json")
    (tmp_path / "kineto_trace_2.json").symlink_to(tmp_path / "none")
    found = discover_ranks(tmp_path)
    assert list(found.ranks) == [0]
    assert [path.name for path in found.ignored] == ["kineto_trace_1.json", "kineto_trace_2.json"]


def broken(path: Path) -> None:
    """A file that begins as a Kineto trace, and that no reader finds a row in."""
    path.write_text('{"schemaVersion": 1, "deviceProperties": [')


def unreadable(job: etloom.Job) -> list[tuple[int | None, str, int, str]]:
    found = job.stats.filter(pl.col("name") == "job.unreadable_file")
    return found.select("rank", "severity", "count", "example").rows()


def test_one_unreadable_file_costs_itself_only(tmp_path: Path) -> None:
    for rank in (0, 2):
        kineto(tmp_path / f"kineto_trace_{rank}.json")
    execution_trace(tmp_path / "torch_et_0.json")
    broken(tmp_path / "kineto_trace_0.json")
    broken(tmp_path / "kineto_trace_1.json")
    (tmp_path / "kineto_trace_3.json").write_text("")
    (tmp_path / "torch_et_2.json").write_text("no JSON")
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0, 2]
    assert job[0].nodes.height == job[2].events.height == 1
    remedy = "; expected Kineto JSON or an execution trace"
    assert unreadable(job) == [
        (None, "error", 1, f"{tmp_path / 'kineto_trace_1.json'}: no trace found{remedy}"),
        (None, "error", 1, f"{tmp_path / 'kineto_trace_3.json'}: the file is empty"),
        (0, "error", 1, f"{tmp_path / 'kineto_trace_0.json'}: no trace found{remedy}"),
        (2, "error", 1, f"{tmp_path / 'torch_et_2.json'}: not a trace in a known format"),
    ]
    # What `etloom info` counts of a rank is what of its files was lost.
    assert described(job)["lost"].to_list() == [1, 1]
    with pytest.raises(DataLoss, match="unreadable_file"):
        job.check_lossless()


def test_unreadable_folders_and_unreadable_named_files_fail(tmp_path: Path) -> None:
    for rank in (0, 1):
        broken(tmp_path / f"kineto_trace_{rank}.json")
    with pytest.raises(
        ReadError, match=r"kineto_trace_0\.json: no trace found; 1 more cannot be read either"
    ):
        etloom.open(tmp_path, use_cache=False)
    kineto(tmp_path / "kineto_trace_1.json")
    for asked in (tmp_path / "kineto_trace_0.json", {n: tmp_path / f"kineto_trace_{n}.json" for n in (0, 1)}):
        with pytest.raises(ReadError, match=r"kineto_trace_0\.json: no trace found"):
            etloom.open(asked, use_cache=False)
    for rank in (0, 1):
        (tmp_path / f"kineto_trace_{rank}.json").write_text("")
    with pytest.raises(ReadError, match=r"kineto_trace_0\.json: the file is empty"):
        etloom.open(tmp_path, use_cache=False)


def test_tables_read_without_a_file_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading.executor, "MIN_SECONDS_TO_CACHE", -1)
    monkeypatch.setattr(loading.plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    run = tmp_path / "run"
    run.mkdir()
    for rank in (0, 1):
        kineto(run / f"kineto_trace_{rank}.json")
        execution_trace(run / f"torch_et_{rank}.json")
    broken(run / "kineto_trace_0.json")
    assert unreadable(etloom.open(run)) == unreadable(etloom.open(run)) != []
    assert len(list((tmp_path / "cache").glob("runs/run=*/rank=*"))) == 1


def test_a_panic_of_polars_is_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        kineto(tmp_path / f"kineto_trace_{rank}.json")
    reader = registry.get("readers", "kineto")
    read = reader.read

    def panics(path: Path, **options: Any) -> Any:
        if path.name == "kineto_trace_0.json":
            raise pl.exceptions.PanicException("index out of bounds\nat some line")
        return read(path, **options)

    monkeypatch.setattr(reader, "read", panics)
    said = (
        f"{tmp_path / 'kineto_trace_0.json'}: polars, which reads tables, failed on this file: "
        "index out of bounds; please report it"
    )
    assert unreadable(etloom.open(tmp_path, use_cache=False)) == [(None, "error", 1, said)]
    assert cli.main(["info", str(tmp_path / "kineto_trace_0.json"), "--no-cache"]) == 1
    assert capsys.readouterr().err == f"etloom: {said}\n"

    def dies(path: Path, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader, "read", dies)
    with pytest.raises(KeyboardInterrupt):
        etloom.open(tmp_path, use_cache=False)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_salvaged_trace_replaces_its_original(tmp_path: Path, suffix: str) -> None:
    execution_trace(tmp_path / "torch_et_0.salvaged.json")
    (tmp_path / f"torch_et_0.json{suffix}").write_text('{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1,')
    kineto(tmp_path / "kineto_trace_0.json")
    assert by_rank(tmp_path) == {0: ["kineto_trace_0.json", "torch_et_0.salvaged.json"]}
    job = etloom.open(tmp_path, use_cache=False)
    example = (
        f"torch_et_0.salvaged.json is read instead of torch_et_0.json{suffix}, from which it was salvaged"
    )
    assert job.run_stats.is_empty()
    taken = job[0].stats.filter(pl.col("name") == "job.salvaged_file_used")
    assert taken.rows() == [("job.salvaged_file_used", "data_loss", 1, example)]
    assert described(job)["lost"].to_list() == [1]
    assert job[0].nodes.height == 1
    (tmp_path / f"torch_et_0.json{suffix}").unlink()
    assert discover_ranks(tmp_path).stats == []


def test_progress_is_reported_in_bytes_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading.executor, "MIN_SECONDS_TO_CACHE", -1)
    monkeypatch.setattr(loading.plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    run = small_traces.write_run(tmp_path / "run")
    plain = run / "kineto_trace_0.json"
    (run / "kineto_trace_0.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    sizes = {file.name: file.stat().st_size for file in run.iterdir()}
    for _ in ("read", "from the cache"):
        told: list[tuple[str, int]] = []
        etloom.open(run, progress=lambda file, count, told=told: told.append((file.name, count)))  # type: ignore[misc]
        assert dict(told[: len(sizes)]) == dict.fromkeys(sizes, 0)
        assert {name: sum(count for one, count in told if one == name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("free_mb", "jobs", "at_a_time"),
    [(1000, 8, 4), (1000, 3, 3), (26, 8, 3), (23, 8, 2), (20, 8, 1), (1, 8, 1), (1, 1, 1)],
)
def test_no_more_ranks_are_read_at_a_time_than_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, jobs: int, at_a_time: int
) -> None:
    """Ranks of 12 MB once unpacked, 3, 2 and 1 MB, at 1.5 bytes a byte."""
    sizes = []
    for size, packed in [(1_000_000, False), (1_000_000, True), (2_000_000, False), (3_000_000, False)]:
        path = tmp_path / "x"
        path.write_bytes((b"\x1f\x8b" if packed else b"{}") + bytes(size - 2))
        sizes.append(loading.file_reading.estimate_text_bytes(path))
    monkeypatch.setattr(loading.plan, "available_memory", lambda: free_mb * 10**6)
    assert loading.plan.max_parallel_ranks(sizes, jobs) == at_a_time


@pytest.mark.parametrize(("room", "alone"), [(0, True), (10**12, False)])
def test_a_job_larger_than_memory_is_read_rank_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, alone: bool
) -> None:
    for rank in range(4):
        kineto(tmp_path / f"kineto_trace_{rank}.json")
    lock, two, read = threading.Lock(), threading.Event(), formats.read
    running: list[Path] = []
    most = 0

    def counted(path: Path, **options: Any) -> Any:
        nonlocal most
        with lock:
            running.append(path)
            most = max(most, len(running))
            if most > 1:
                two.set()
        two.wait(0.05 if alone else 60)
        with lock:
            running.remove(path)
        return read(path, **options)

    monkeypatch.setattr(loading.plan, "available_memory", lambda: room)
    monkeypatch.setattr(formats, "read", counted)
    assert etloom.open(tmp_path, use_cache=False, jobs=4).ranks == [0, 1, 2, 3]
    assert (most == 1) == alone


def test_memory_that_is_available_is_less_than_there_is() -> None:
    assert (
        1 << 24 < loading.plan.available_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


@pytest.mark.slow
def test_a_run_is_linked_once_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading.executor, "MIN_SECONDS_TO_CACHE", -1)
    monkeypatch.setattr(loading.plan, "MIN_TEXT_BYTES_TO_CACHE", 0)
    run = tmp_path / "run"
    run.mkdir()
    for rank in (0, 1):
        kineto(run / f"kineto_trace_{rank}.json")
    asked: list[dict[str, Any]] = []
    link = loading.executor.linker.link

    def counted(*traces: etloom.Trace, **options: Any) -> etloom.Trace:
        asked.append(options)
        return link(*traces, **options)

    monkeypatch.setattr(loading.executor.linker, "link", counted)
    for _ in range(2):  # the second time from the cache, where each way of linking has an entry of its own
        etloom.open(run)
        etloom.open(run, iterations="all")
    assert asked == [{}, {}, {"iterations": "all"}, {"iterations": "all"}]
    saved = etloom.export(etloom.open(run), tmp_path / "saved.parquet")
    etloom.open(saved)
    assert len(asked) == 4
    etloom.open(saved, iterations="all")
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({5: (0, 2)}, [("job.missing_ranks", 2, "no trace of rank 0, 1 of 2"),
                       ("job.rank_mismatch", 1, "a file used for rank 5 states rank 0"),
                       ("job.world_size_mismatch", 1, "rank 5, but the world size is 2")]),
        ({0: (0, 1)}, []),
        ({1: (1, 3)}, [("job.missing_ranks", 2, "no trace of rank 0, 2 of 3")]),
        ({0: (0, 12), 2: (2, 12)},
         [("job.missing_ranks", 10, "no trace of rank 1, 3-11 of 12")]),
    ],
)  # fmt: skip
def test_the_rank_stated_by_a_file_is_compared_with_its_place(
    tmp_path: Path, files: dict[int, tuple[int, int]], said: list[tuple[str, int, str]]
) -> None:
    for place, (rank, world) in files.items():
        kineto(tmp_path / f"kineto_trace_{place}.json", rank, world)
    stats = etloom.open(tmp_path, use_cache=False).run_stats
    rows = stats.filter(pl.col("name") != "job.not_linked").select("name", "count", "example").rows()
    assert sorted(rows) == said


def test_runs_in_folders_next_to_traces_are_named(tmp_path: Path) -> None:
    kineto(tmp_path / "kineto_trace_0.json")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        kineto(tmp_path / name / "kineto_trace_0.json")
    (tmp_path / "notes").mkdir()
    rows = [row for row in discover_ranks(tmp_path).stats if row.name == "job.other_runs"]
    assert [(row.count, row.severity) for row in rows] == [(2, "info")]  # nothing of the run is lost
    assert rows[0].example == "kineto_trace_0.json is read; traces in the folders first, second are not"
    assert not [row for row in discover_ranks(tmp_path / "first").stats if row.name == "job.other_runs"]


def test_an_export_of_several_ranks_next_to_their_traces_is_skipped(tmp_path: Path) -> None:
    run = small_traces.write_run(tmp_path / "run")
    before = etloom.open(run, use_cache=False)
    etloom.export(before, run / "all.json.gz")
    job = etloom.open(run, use_cache=False)
    assert job.ranks == before.ranks
    (example,) = job.run_stats.filter(pl.col("name") == "job.skipped_file")["example"]
    assert example == "all.json.gz is an export of several ranks for a viewer"
    with pytest.raises(ReadError, match="several ranks were merged in this file"):
        etloom.open(run / "all.json.gz")


@pytest.mark.slow
def test_the_folder_of_chakras_collection_script(tmp_path: Path) -> None:
    """combine_trace.sh leaves host, device and linked traces and the converted ones: all belong to their ranks."""
    run = small_traces.write_run(tmp_path / "run")
    for rank in (0, 1):
        host, device = run / f"host.{rank}.json", run / f"device.{rank}.json"
        (run / f"torch_et_{rank}.json").rename(host)
        (run / f"kineto_trace_{rank}.json").rename(device)
        plus = etloom.link(etloom.read(host), etloom.read(device))
        etloom.export(plus, run / f"linked.{rank}.json", "etplus")
        etloom.export(plus, run / f"chakra_trace.{rank}.et", "chakra")
    job = etloom.open(run, use_cache=False)
    assert job.ranks == [0, 1]
    skipped = job[1].stats.filter(pl.col("name") == "job.skipped_file")["example"].to_list()
    assert sorted(text.partition(" ")[0] for text in skipped) == ["chakra_trace.1.et", "linked.1.json"]
    assert not any("unknown" in row["example"] for row in job.stats.iter_rows(named=True))
    assert etloom.open(run, use_cache=False)[0].links.height == 6 // 2
