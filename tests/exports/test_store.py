"""A store of runs: equal answers, no second reading, resumption after a kill, readable by others."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.analyses.answers import answer, find_stored_answer
from etloom.analyses.findings import job_gain
from etloom.analyses.findings.rank_findings import find_in_rank
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.helpers.run_tables import ARRIVAL_ORDER, WINDOWS
from etloom.analyses.run_info import find_stored_facts
from etloom.cli import main
from etloom.comparison.difference_tables import BY
from etloom.comparison.gate import METRICS
from etloom.comparison.measures import step_values
from etloom.core.errors import AnalysisError, EtloomError, EtloomWarning, InvalidValue, ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.exports.store import adding, batches, rank_results, summaries
from etloom.exports.store.rank_results import _decode_findings, _encode_findings
from etloom.exports.store.summaries import GRAPH_QUESTIONS, JOB_QUESTIONS, RANK_QUESTIONS
from etloom.formats.parquet import stored_runs, table_files
from etloom.formats.parquet.store_layout import list_runs
from etloom.formats.parquet.table_files import ParquetTable
from etloom.loading import LoadOptions, engines, load_path
from etloom.loading.plan import RankPlan
from etloom.loading.rank_stores import RankFolder
from etloom.loading.reading_tasks import read_ranks
from support import small_traces
from support.fleets import LATE_US, write_fleet
from support.saved_folders import update_checksum
from support.small_traces import RankBuilder

RANKS = int(os.environ.get("ETLOOM_STORE_RANKS", "10"))
"""Ranks of the comparison of answers; 64 take a minute."""
QUESTIONS = (*RANK_QUESTIONS, *JOB_QUESTIONS, *GRAPH_QUESTIONS)
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fleet(tmp_path_factory.mktemp("runs") / "monday", 4)


@pytest.fixture(scope="module")
def store(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    etloom.store_add(run, to=folder, jobs=1)
    return folder


@pytest.fixture(scope="module")
def job(run: Path) -> Job:
    return etloom.open(run, use_cache=False)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the questions of which a test needs the answers."""
    monkeypatch.setattr(summaries, "RANK_QUESTIONS", RANK_QUESTIONS[:1])
    monkeypatch.setattr(
        summaries,
        "JOB_QUESTIONS",
        [item for item in JOB_QUESTIONS if item.file in ("stragglers", "arrivals", "collectives")],
    )
    monkeypatch.setattr(summaries, "GRAPH_QUESTIONS", GRAPH_QUESTIONS[1:])
    monkeypatch.setattr(summaries, "MAX_GRAPH_EVENTS", 0)


@pytest.fixture
def stored(store: Path) -> Job:
    return etloom.open(store / "run=monday")


def answers_of(job: Job, name: str, **options: object) -> tuple[pl.DataFrame | str, list[str]]:
    try:
        result = answer(job, name, **options)
    except AnalysisError as error:
        return str(error), []
    return result.table, result.explain_refusals()


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.file)
def test_stored_answers_equal_those_in_memory(
    job: Job, stored: Job, question: summaries.StoredQuestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, refusals = answers_of(job, question.analysis, **question.options)
    monkeypatch.setattr(type(stored), "table", lambda *_: pytest.fail("a table was read"))
    kept, kept_refusals = answers_of(stored, question.analysis, **question.options)
    assert kept_refusals == refusals
    if isinstance(expected, str):
        assert kept == expected
    else:
        assert isinstance(kept, pl.DataFrame)
        assert_frame_equal(kept, expected, check_exact=True)


def test_runs_are_listed_with_their_mean_step(store: Path, job: Job) -> None:
    steps = etloom.analyze(job, "steps")["dur_ns"].mean()
    assert isinstance(steps, float)
    (row,) = etloom.store_list(store).iter_rows(named=True)
    assert (row["ranks"], row["step_ns"]) == (len(job), round(steps))


def test_facts_of_ranks_are_known_without_opening_them(
    job: Job, stored: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = job.rank_facts
    assert expected["events"].sum() > 0 and expected["host"].null_count() == 0
    monkeypatch.setattr(Job, "__getitem__", lambda *_: pytest.fail("a rank was opened"))
    assert_frame_equal(stored.rank_facts, expected)


def test_damaged_figures_of_a_stored_rank_are_left_out(store: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(store / "run=monday", tmp_path / "run=monday")
    file = damaged / "summaries" / "ranks.parquet"
    ranks = pl.read_parquet(file)
    ranks.with_columns(pl.col("meta").str.replace('"device_work": ', '"device_work": -')).write_parquet(file)
    update_checksum(file)
    trace = etloom.open(damaged)[0]
    assert trace.meta["link"]["launched"] > 0 and "device_work" not in trace.meta["link"]
    assert trace.stats.filter(name="read.invalid_meta")["count"].to_list() == [1]


@pytest.mark.slow
def test_answers_of_ranks_that_processes_prepared_equal_those_in_memory(tmp_path: Path) -> None:
    run = write_fleet(tmp_path / "monday", RANKS, slow=(5, 8, 9), steps=2)
    (added,) = etloom.store_add(run, to=tmp_path / "store", jobs=2)
    stored, job = etloom.open(added.path), etloom.open(run, use_cache=False)
    assert stored.ranks == job.ranks == list(range(RANKS))
    for question in QUESTIONS:
        expected, refusals = answers_of(job, question.analysis, **question.options)
        kept, kept_refusals = answers_of(stored, question.analysis, **question.options)
        assert kept_refusals == refusals, question
        if isinstance(expected, str):
            assert kept == expected, question
        else:
            assert isinstance(kept, pl.DataFrame) and kept.schema == expected.schema, question
            assert_frame_equal(kept, expected, check_exact=True)
    for rank in (0, 5, RANKS - 1):
        for name in TABLES:
            assert_frame_equal(stored[rank].table(name), job[rank].table(name), categorical_as_str=True)


@pytest.mark.slow
def test_kept_results_of_ranks_suffice_for_the_questions_to_all_ranks(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traces have no tables, so that whatever is computed from these, instead of kept, differs."""
    monkeypatch.setattr(job_gain, "MAX_EVENTS", -1)
    summaries.summarize_ranks(job.items(), tmp_path / "part")
    bare = Job({rank: Trace(meta=trace.meta) for rank, trace in job.items()}, job.meta)
    known = rank_results.attach_results(bare, [tmp_path / "part"])
    for rank, trace in job.items():
        for result in rank_results.RESULTS:
            kept = known[rank].compute_once(*result.key(rank))
            assert_frame_equal(
                result.encode(kept), result.encode(result.function(trace, *result.key(rank)[1:]))
            )
    for question in JOB_QUESTIONS:
        expected, kept = (answer(run, question.analysis).table for run in (Job(dict(job)), known))
        assert_frame_equal(kept, expected, check_exact=True)


def test_ranks_whose_results_are_kept_are_opened_without_their_tables(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: None
) -> None:
    options = LoadOptions(use_cache=False, rank_folder=RankFolder(tmp_path / "ranks"))
    first = load_path(run, options)
    summaries.summarize_ranks(first.items(), tmp_path / "part")
    results = rank_results.open_results([tmp_path / "part"])
    scan = Trace.scan
    monkeypatch.setattr(
        Trace,
        "scan",
        lambda trace, name: scan(trace, name) if name == "stats" else pytest.fail(f"{name} was read"),
    )
    again = load_path(run, replace(options, rank_folder=RankFolder(tmp_path / "ranks", results=results)))
    assert_frame_equal(again.stats, first.stats)


def test_ranks_that_a_batch_wrote_are_opened_without_reading_their_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LoadOptions(use_cache=False, rank_folder=RankFolder(tmp_path / "ranks"))
    first = load_path(run, options)
    monkeypatch.setattr(table_files, "_count_rows", lambda *_: pytest.fail("a footer was read"))
    again = load_path(run, options)
    assert [trace.rows("events") for trace in again.values()] == [
        trace.rows("events") for trace in first.values()
    ]


@pytest.mark.slow
def test_what_a_killed_process_left_in_a_run_is_not_published(run: Path, tmp_path: Path, brief: None) -> None:
    publish = adding.Staging.publish

    def publish_with_rest(stage: adding.Staging) -> None:
        (stage.folder / ".rank=0.x" / "new").mkdir(parents=True)
        publish(stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adding.Staging, "publish", publish_with_rest)
        added = adding.add_run(run, tmp_path / "store", adding.AddOptions(jobs=1))
    assert not list(added.path.glob(".*"))


@pytest.mark.slow
def test_the_tables_and_facts_of_a_stored_run_equal_those_in_memory(job: Job, stored: Job) -> None:
    assert dict(stored.meta) == dict(job.meta)
    assert etloom.info(stored) == etloom.info(job)
    for rank, trace in job.items():
        assert dict(stored[rank].meta) == dict(trace.meta)
        for name in TABLES:
            assert_frame_equal(stored[rank].table(name), trace.table(name), categorical_as_str=True)
            assert stored[rank].rows(name) == trace.rows(name)
    for name in TABLES:
        assert_frame_equal(stored.table(name), job.table(name), categorical_as_str=True)
    sql = "select rank, cat, count(*) n from events group by rank, cat order by rank, cat"
    assert_frame_equal(etloom.query(stored, sql), etloom.query(job, sql))


def test_stored_answers_are_read_without_the_ranks(
    store: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may hold ten thousand ranks."""
    monkeypatch.setattr(stored_runs._StoredRun, "open_rank", lambda *_: pytest.fail("a rank was opened"))
    path = store / "run=monday"
    for command in (["info", path], ["analyze", "stragglers", path], ["store", "stragglers", store]):
        assert call(*command)[0] == 0
    opened = etloom.open(path)
    assert etloom.query(opened, "select rank, count(*) n from events group by rank").height == 4
    assert opened.stats["rank"].n_unique() == 4


@pytest.mark.slow
def test_options_and_parts_of_a_run_are_computed_from_its_tables(
    job: Job, stored: Job, store: Path, call: Call
) -> None:
    for name, options in (("temporal-breakdown", {"step": 1}), ("top-ops", {"by": "count"})):
        assert find_stored_answer(stored, name, options) is None
        assert_frame_equal(*(etloom.analyze(run, name, **options) for run in (stored, job)))
    assert find_stored_answer(stored, "top-ops", {"top": 20}) is not None  # the default
    step = call("analyze", "collectives", store / "run=monday", "--step", 0, "--format", "json")[1]
    assert len(json.loads(step)) == 1
    part = etloom.select(stored, rank=[2, 3])
    assert part.stored is None
    assert etloom.analyze(part, "imbalance")["ranks"].max() == 2


def test_damaged_step_times_of_a_stored_run_are_computed_from_its_tables(
    job: Job, store: Path, tmp_path: Path
) -> None:
    shutil.copytree(store, tmp_path / "store")
    folder = next((tmp_path / "store").glob("run=*"))
    damaged = 0
    for file in (folder / "summaries").glob("*.parquet"):
        table = pl.read_parquet(file, hive_partitioning=False)
        if table.columns == ["value"]:
            table.with_columns(value=pl.lit(None, pl.Float64)).write_parquet(file)
            damaged += 1
    assert damaged
    assert step_values(etloom.open(folder), "step-time") == step_values(job, "step-time")


@pytest.mark.slow
def test_check_and_diff_and_report_take_stored_runs(run: Path, store: Path, tmp_path: Path) -> None:
    path = store / "run=monday"
    assert_frame_equal(etloom.check(path, path).table, etloom.check(run, run).table)
    assert_frame_equal(etloom.diff(path, run).table("category"), etloom.diff(run, run).table("category"))
    etloom.report(path, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 6])
def test_stored_runs_are_compared_without_a_table_of_events(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        write_fleet(tmp_path / name, 3, slow=slow, steps=steps or 1)
        for name, slow in (("a", ()), ("b", (1,)))
    ]
    if not steps:
        for file in tmp_path.rglob("*.json"):
            file.write_text(file.read_text().replace("ProfilerStep#", "Iteration"))
    etloom.store_add(*runs, to=tmp_path / "store", jobs=1)
    metrics = METRICS if steps else ("device-busy", "exposed-communication")
    expected = etloom.diff(*runs)
    judged = etloom.check(runs[1], runs[0], metrics=[name for name in metrics if name != "peak-memory"])
    tables = {by: expected.table(by) for by in BY}
    lines = expected.verdict, expected.explanation, expected.notes
    of_report = [table.read(expected.before) for table in (WINDOWS, ARRIVAL_ORDER)]
    assert all(table.height for table in of_report)
    for method in ("read", "scan"):
        monkeypatch.setattr(ParquetTable, method, lambda *_: pytest.fail("a table was read"))
    first, second = (tmp_path / "store" / f"run={run.name}" for run in runs)
    difference = etloom.diff(first, second)
    for by in BY:
        assert_frame_equal(difference.table(by), tables[by], check_exact=True)
    assert (difference.verdict, difference.explanation, difference.notes) == lines
    for table, rows in zip((WINDOWS, ARRIVAL_ORDER), of_report, strict=True):
        assert_frame_equal(table.read(difference.before), rows, check_exact=True)
    again = etloom.check(second, first, metrics=[name for name in metrics if name != "peak-memory"])
    assert_frame_equal(again.table, judged.table, check_exact=True)


def test_other_programs_read_the_store(store: Path) -> None:
    events = pl.read_parquet(store / "run=*" / "rank=*" / "events.parquet", hive_partitioning=True)
    assert events.select("run", "rank").unique().sort("rank").rows() == [
        ("monday", rank) for rank in range(4)
    ]
    arrivals = pl.read_parquet(store / "run=*" / "summaries" / "arrivals.parquet", hive_partitioning=True)
    assert arrivals["rank"].n_unique() == 4
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    query = f"select count(*) from read_parquet('{store}/*/*/events.parquet', hive_partitioning = true) where rank = 3"
    assert duckdb.sql(query).fetchall() == [(events.filter(rank=3).height,)]


def test_a_run_is_added_once(run: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adding, "load_path", lambda *_: pytest.fail("the run was read again"))
    (added,) = etloom.store_add(run, to=store)
    assert (added.name, added.ranks, added.is_new) == ("monday", tuple(range(4)), False)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_changed_files_replace_a_run(tmp_path: Path) -> None:
    run, store = write_fleet(tmp_path / "run", 2), tmp_path / "store"
    etloom.store_add(run, to=store, jobs=1)
    write_fleet(run, 2, steps=4)
    os.utime(run / "kineto_trace_0.json", (0, 0))
    (added,) = etloom.store_add(run, to=store, jobs=1)
    assert added.is_new and added.has_replaced
    assert etloom.info(added.path)["steps"] == [0, 1, 2, 3]
    assert sorted(path.name for path in (store / ".adding").iterdir()) == ["run.lock"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


KILL_POINTS: list[tuple[object, str]] = [
    (summaries, "answer_by_rank"),
    (summaries, "write_rank_answers"),
    (summaries, "write_job_answers"),
    (adding.Staging, "publish"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("place", KILL_POINTS, ids=lambda place: place[1])
def test_a_killed_addition_continues_where_it_stopped(
    run: Path, tmp_path: Path, place: tuple[object, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    source = adding.describe_source(run, None)
    stage = adding.Staging(store, "monday", source.key)
    assert source.discovered is not None

    def prepare() -> None:
        parts = stage.folder / adding.PARTS
        parts.mkdir(parents=True, exist_ok=True)
        for batch in batches.list_batches(source.discovered, stage.folder, parts, 1):
            batches.prepare_batch(batch.to_json())
        etloom.store_add(run, to=store, jobs=1)

    def die(*_: object) -> None:
        raise Killed

    adding.open_store(store, create=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(*place, die)
        prepare()
    assert etloom.store_list(store).is_empty()
    kept = {file: file.stat().st_mtime_ns for file in stage.folder.glob("rank=*/events.parquet")}
    etloom.store_add(run, to=store, jobs=1)
    events = {
        file.parent.name: file.stat().st_mtime_ns for file in store.glob("run=monday/rank=*/events.parquet")
    }
    assert {file.parent.name: time for file, time in kept.items()}.items() <= events.items()
    assert etloom.analyze(store / "run=monday", "stragglers")["rank"][0] == 2


def test_a_second_writer_of_the_same_run_is_refused(run: Path, store: Path) -> None:
    stage = adding.Staging(store, "monday", "key")
    with stage.locked(), pytest.raises(EtloomError, match="being added by another process"):
        etloom.store_add(run, to=store)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_run_stays_locked_as_long_as_a_process_prepares_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that adds the run may be killed, and those that it started go on."""
    run, store = write_fleet(tmp_path / "run", 9, steps=1), tmp_path / "store"
    kept = []

    def start(*_: object, pass_fds: tuple[int, ...], **__: object) -> None:
        kept.extend(map(os.dup, pass_fds))  # as a child has them
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(engines.subprocess, "Popen", start)
        etloom.store_add(run, to=store, jobs=2)
    with pytest.raises(EtloomError, match="being added by another process"):
        etloom.store_add(run, to=store, jobs=1)
    for descriptor in kept:
        os.close(descriptor)
    assert etloom.store_add(run, to=store, jobs=1)[0].is_new


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_processes_prepare_the_same_store(tmp_path: Path) -> None:
    larger = write_fleet(tmp_path / "larger", 9, steps=1)
    (added,) = etloom.store_add(larger, to=tmp_path / "store", jobs=2)
    (alone,) = etloom.store_add(larger, to=tmp_path / "alone", jobs=1)
    for file in sorted((alone.path / "summaries").glob("*.parquet")):
        assert file.read_bytes() == (added.path / "summaries" / file.name).read_bytes(), file.name


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_files_of_several_ranks_and_saved_runs_are_added(job: Job, tmp_path: Path) -> None:
    saved = etloom.export(job, tmp_path / "saved.parquet")
    (added,) = etloom.store_add(saved, to=tmp_path / "store", name="saved")
    assert_frame_equal(etloom.analyze(added.path, "stragglers"), etloom.analyze(job, "stragglers"))


@pytest.mark.slow
def test_a_batch_continues_after_unreadable_ranks(run: Path, tmp_path: Path, brief: None) -> None:
    """And holds the tables of one rank at a time, however many there are."""
    ranks = {rank: RankPlan((file,)) for rank, file in enumerate(sorted(run.iterdir()))}
    (tmp_path / "damaged.json").write_text("{")
    ranks[1] = RankPlan((tmp_path / "damaged.json",))
    task = batches.Batch(tmp_path, tmp_path / "part", ranks).to_json()
    batches.prepare_batch(task)
    assert json.loads((tmp_path / "part" / "part.json").read_text())["ranks"] == [0, 2, 3]
    counts = []
    for _ in read_ranks(json.loads(task), RankFolder(tmp_path / "new")):
        gc.collect()
        counts.append(sum(isinstance(item, Trace) for item in gc.get_objects()))
    assert counts[1:] == counts[:1] * 2


@pytest.mark.slow
def test_unreadable_ranks_are_stats_and_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "JOB_QUESTIONS", ())
    monkeypatch.setattr(summaries, "GRAPH_QUESTIONS", ())
    run = write_fleet(tmp_path / "run", 3)
    (run / "kineto_trace_1.json").write_text('{"schemaVersion": 1, "traceEvents": 5}')
    (added,) = etloom.store_add(run, to=tmp_path / "store", jobs=1)
    assert added.ranks == (0, 2)
    stats = etloom.open(added.path).stats
    assert_frame_equal(stats, etloom.open(run, use_cache=False).stats)
    assert "job.unreadable_file" in stats["name"]


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_answers_of_other_code_are_computed_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    (added,) = etloom.store_add(run, to=store, jobs=1)
    manifest = added.path / "meta.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "code": "0"}))
    opened = etloom.open(added.path)
    with pytest.warns(
        EtloomWarning, match=f"another version of etloom.*; etloom store refresh {store} stores them"
    ):
        assert find_stored_answer(opened, "stragglers", {}) is None
    assert etloom.analyze(opened, "stragglers")["rank"][0] == 2  # without a second warning
    assert etloom.store_list(store)["is_current"].to_list() == [False]
    (refreshed,) = etloom.store_refresh(store, jobs=1)
    assert refreshed.is_new
    row = etloom.store_list(store).row(0, named=True)
    assert (row["is_current"], row["source"]) == (True, str(run.resolve()))
    assert find_stored_answer(etloom.open(added.path), "stragglers", {}) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_graph_questions_of_large_runs_are_left_out_and_counted(run: Path, tmp_path: Path) -> None:
    (added,) = etloom.store_add(run, to=tmp_path / "store", jobs=1)
    opened = etloom.open(added.path)
    assert "store.not_summarized" in opened.run_stats["name"]
    assert find_stored_answer(opened, "slowdown", {}) is None


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_slow_hosts_are_named_over_the_last_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for number, slow in enumerate([(0,), (4, 5), (5,)]):
        etloom.store_add(write_fleet(tmp_path / f"run{number}", 6, slow=slow), to=store, jobs=1)
    table = etloom.store_stragglers(store, last=2)
    slow_hosts = table.filter(pl.col("slow_runs") > 0)
    assert slow_hosts.select("host", "runs", "slow_runs", "ranks").rows() == [("rack1-node2", 2, 2, 2)]
    assert table["delay_ns"][0] >= 3 * LATE_US * 1000
    assert slow_hosts["late_confirmed"].to_list() == [4]
    assert etloom.store_stragglers(store)["host"].to_list()[:2] == ["rack1-node2", "rack0-node0"]
    racks = etloom.store_stragglers(store, "rack").select("rack", "slow_runs")
    assert dict(racks.iter_rows()) == {"rack1": 2, "rack0": 1}
    named = etloom.store_stragglers(store, "rack", rack_pattern="node([0-9])")
    assert named["rack"][0] == "2"
    assert etloom.store_stragglers(store, "rank", last=1)["rank"][0] == 5
    etloom.store_add(write_fleet(tmp_path / "unnamed", 4, hosts=False), to=store, jobs=1)
    with pytest.warns(EtloomWarning, match=r"^1 run without .*, or no known host: unnamed$"):
        assert etloom.store_stragglers(store)["host"].to_list()[:2] == ["rack1-node2", "rack0-node0"]


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_run_that_cannot_be_added_does_not_keep_others_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "trace.json").write_text("{}")
    store = tmp_path / "store"
    assert main(["store", "add", str(bad), str(run), "--to", str(store)]) == 1
    assert list_runs(store) == [run.name]
    messages = capsys.readouterr().err.splitlines()
    assert messages[0].startswith(f"etloom: {bad}")
    assert messages[-1] == f"etloom: {store}: 1 of 2 runs could not be added; see above"


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_single_host_is_not_slow(tmp_path: Path) -> None:
    etloom.store_add(write_fleet(tmp_path / "run", 2), to=tmp_path / "store", jobs=1)
    assert etloom.store_stragglers(tmp_path / "store").select("runs", "slow_runs", "ranks").rows() == [
        (1, 0, 2)
    ]


@pytest.mark.slow
def test_a_stored_run_without_steps_has_a_report(tmp_path: Path) -> None:
    run = small_traces.write_run(tmp_path / "run")
    for file in run.glob("kineto_trace_*.json"):
        document = json.loads(file.read_text())
        document["traceEvents"] = [
            event for event in document["traceEvents"] if not event["name"].startswith("ProfilerStep")
        ]
        file.write_text(json.dumps(document))
    (stored,) = etloom.store_add(run, to=tmp_path / "store", jobs=1)
    page = etloom.report(stored.path, tmp_path / "report.html").read_text()
    assert page.count("no step is annotated") == etloom.report(run, tmp_path / "run.html").read_text().count(
        "no step is annotated"
    )


@pytest.mark.parametrize("key", ["categories", "by_rank", "stats", "rings", "start_ns"])
def test_damaged_facts_of_a_run_are_computed(store: Path, tmp_path: Path, key: str) -> None:
    folder = shutil.copytree(store / "run=monday", tmp_path / "store" / "run=monday")
    shutil.copy(store / "store.json", tmp_path / "store")
    expected = find_stored_facts(etloom.open(folder, lazy=True))
    assert expected is not None
    file = folder / "summaries" / "facts.json"
    file.write_text(json.dumps({**expected, key: {"x": ["y"]}}))
    assert find_stored_facts(etloom.open(folder, lazy=True)) is None
    assert {**etloom.info(folder), "path": None} == {**expected, "path": None}


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_stored_run_of_dumps_has_a_cause(data: Path, tmp_path: Path) -> None:
    dumps = data / "flight_recorder" / "gpu_error_2nd"
    (stored,) = etloom.store_add(dumps, to=tmp_path / "store", jobs=1)
    sentence = etloom.hangs(dumps).sentence
    assert etloom.hangs(stored.path).sentence == sentence
    assert etloom.hangs(tmp_path / "store").sentence == sentence, "a store of one run is that run"


@pytest.mark.usefixtures("brief")
def test_wrong_arguments_are_one_line(run: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot name a run"):
        etloom.store_add(run, to=store, name="../x")
    with pytest.raises(InvalidValue, match="2 runs cannot all be named"):
        etloom.store_add(run, run, to=store, name="x")
    with pytest.raises(EtloomError, match="is not a store"):
        etloom.store_add(run, to=run)
    with pytest.raises(ReadError, match="is not a store"):
        etloom.store_list(run)
    other = write_fleet(tmp_path / "monday", 2)
    with pytest.raises(EtloomError, match="specify another --name"):
        etloom.store_add(other, to=store)
    with pytest.raises(InvalidValue, match="not a regular expression"):
        etloom.store_stragglers(store, "rack", rack_pattern="(")
    with pytest.raises(InvalidValue, match="with one group, got 'x' with 0"):
        etloom.store_stragglers(store, "rack", rack_pattern="x")
    nameless = tmp_path / "nameless"
    etloom.store_add(small_traces.write_run(tmp_path / "alone", (0,)), to=nameless, jobs=1)
    with pytest.raises(AnalysisError, match="no run has ranks that can be compared"):
        etloom.store_stragglers(nameless)


def test_a_store_of_one_run_is_that_run_and_of_several_names_them(store: Path, tmp_path: Path) -> None:
    assert etloom.open(store).ranks == list(range(4))
    several = tmp_path / "several"
    shutil.copytree(store, several)
    shutil.copytree(store / "run=monday", several / "run=tuesday")
    with pytest.raises(ReadError, match=r"store of 2 runs.*run=tuesday"):
        etloom.open(several)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("meta.json", b"{}"),
        ("meta.json", b'{"store": 2, "meta": {}}'),
        ("meta.json", b'{"store": 1, "meta": 5}'),
        ("meta.json", b"\xff"),
        ("summaries/ranks.parquet", b"PAR1"),
        ("summaries/stats.parquet", b""),
    ],
)
def test_damaged_stores_are_one_line(store: Path, tmp_path: Path, file: str, content: bytes) -> None:
    run = tmp_path / "run=x"
    shutil.copytree(store / "run=monday", run)
    (run / file).write_bytes(content)
    with pytest.raises(ReadError, match=file.rpartition("/")[2]) as caught:
        etloom.open(run)
    assert "\n" not in str(caught.value)


def test_hostile_manifests_open_no_other_file(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run=x"
    shutil.copytree(store / "run=monday", run)
    pl.DataFrame({"secret": [1]}).write_parquet(tmp_path / "secret.parquet")
    content = json.loads((run / "meta.json").read_text())
    for entry in content["answers"]:
        entry["file"] = "../../secret"
    (run / "meta.json").write_text(json.dumps({**content, "answers": [*content["answers"], 3]}))
    assert find_stored_answer(etloom.open(run), "stragglers", {}) is None
    wrong = pl.read_parquet(store / "run=monday" / "summaries" / "clocks.parquet")
    wrong.write_parquet(run / "summaries" / "stragglers.parquet")
    (run / "meta.json").write_text((store / "run=monday" / "meta.json").read_text())
    assert find_stored_answer(etloom.open(run), "stragglers", {}) is None


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_the_command_line(run: Path, tmp_path: Path, call: Call) -> None:
    store = tmp_path / "store"
    status, _, messages = call("store", "add", run, "--to", store, "--jobs", "1")
    assert status == 0
    assert "run=monday: added 4 ranks" in messages
    assert "unchanged" in call("store", "add", run, "--to", store)[2]
    other = write_fleet(tmp_path / "monday", 2)
    assert "added 2 ranks" in call("store", "add", other, "--to", tmp_path / "new")[2]
    os.utime(other / "kineto_trace_0.json", (0, 0))
    assert "replaced the stored run by 2 ranks" in call("store", "add", other, "--to", tmp_path / "new")[2]
    assert json.loads(call("store", "list", store, "--format", "json")[1])[0]["run"] == "monday"
    status, text, _ = call("store", "stragglers", store, "--by", "rank", "--format", "csv")
    assert (status, text.splitlines()[1].split(",")[0]) == (0, "2")
    assert call("store", "stragglers", store, "--by", "x")[0] == 2
    assert "every run was stored by this version" in call("store", "refresh", store)[2]
    assert call("info", store)[0] == 0


@pytest.mark.slow
def test_damaged_summaries_are_computed_again_and_other_files_refused(store: Path, tmp_path: Path) -> None:
    source = store / "run=monday"
    intact = etloom.open(source)
    expected = {name: etloom.analyze(intact, name) for name in ("stragglers", "temporal-breakdown")}
    unused = {source / f"rank={rank}" / "stats.parquet" for rank in intact.ranks}
    unused |= {file for file in source.rglob("rank=*/*.parquet") if not pl.read_parquet(file).height}
    for file in sorted(file.relative_to(source) for file in {*source.rglob("*.parquet")} - unused):
        damaged = shutil.copytree(source, tmp_path / "damaged")
        content = bytearray((damaged / file).read_bytes())
        content[len(content) // 4] ^= 1
        (damaged / file).write_bytes(content)
        if file.parent.name == "summaries" and file.stem not in ("ranks", "stats"):
            stored = etloom.open(damaged).stored
            assert stored is not None and stored.answer(file.stem, {}) is None
            if file.stem in expected:
                assert_frame_equal(etloom.analyze(damaged, file.stem), expected[file.stem])
        else:
            rank = int(file.parts[0].removeprefix("rank=")) if file.parts[0] != "summaries" else 0
            with pytest.raises(ReadError, match=f"{file.name}: changed since it was written"):
                etloom.open(damaged)[rank].table(file.stem)
        shutil.rmtree(damaged)


def test_a_rank_without_a_number_is_one_line(store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged)
    (file,) = damaged.glob("run=*/summaries/ranks.parquet")
    table = pl.read_parquet(file)
    table.with_columns(rank=pl.when(pl.int_range(pl.len()) > 0).then("rank")).write_parquet(file)
    update_checksum(file)
    with pytest.raises(ReadError, match="is not a summary of a store: a rank is null; add the run again"):
        etloom.open(file.parents[1])


def test_findings_that_need_other_ranks_use_the_kept_tables_of_the_rank(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::mm", 0, 5).kernel(1, 5, 20)
    for at in range(10):
        run.all_reduce(10 + at, 30 + 10 * at, 5, at, 1_000)
    trace = run.trace(tmp_path)
    kept = _decode_findings(_encode_findings(find_in_rank(trace)))
    computed, stored = (
        list(RankView(trace, stored=findings).find("small-collectives")) for findings in (None, kept)
    )
    assert "small-collectives" not in kept.findings
    assert [finding.cost_ns for finding in stored] == [finding.cost_ns for finding in computed] == [45_000]
    assert [finding.title for finding in stored] == [finding.title for finding in computed]
