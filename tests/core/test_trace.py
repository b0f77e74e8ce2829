"""Trace and Job: tables by name, never changed, asked in SQL, trouble counted."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom.core.errors import DataLoss, EtloomError, UnknownName
from etloom.core.schema import TABLES
from etloom.core.table_attributes import TableAttributes
from etloom.core.trace import Job, Trace, concat_ranks


def a_trace(rank: int | None = 0, durations: tuple[int, ...] = (5, 7)) -> Trace:
    events = pl.DataFrame(
        {
            "id": range(len(durations)),
            "name": [("aten::mm", "aten::add")[n % 2] for n in range(len(durations))],
            "cat": "cpu_op",
            "ts": range(len(durations)),
            "dur": durations,
        },
        schema_overrides={"dur": pl.Int64},
    )
    return Trace({"events": events}, {"rank": rank, "files": ["a.json"]})


def test_a_table_is_an_attribute_and_an_absent_one_is_empty() -> None:
    trace = a_trace()
    assert trace.events["dur"].to_list() == [5, 7]
    assert dict(trace.events.schema) == TABLES["events"].schema
    assert dict(trace.nodes.schema) == TABLES["nodes"].schema
    assert trace.nodes.height == 0
    assert list(trace.tables) == ["events"]
    assert set(TABLES) <= set(dir(trace))
    assert repr(trace) == "<Trace rank 0: events 2>"
    assert repr(Trace()) == "<Trace rank None: empty>"


def test_an_unknown_table_is_answered_with_the_nearest() -> None:
    trace = a_trace()
    with pytest.raises(UnknownName, match="unknown table 'event'; did you mean 'events'"):
        trace.table("event")
    with pytest.raises(UnknownName, match="did you mean 'kernels'"):
        Trace({"kernel": pl.DataFrame()})
    with pytest.raises(AttributeError, match="did you mean 'events'"):
        _ = trace.evnts
    with pytest.raises(UnknownName, match="did you mean 'events'"):
        Job({0: trace}).table("event")


def test_nothing_changes_a_trace() -> None:
    source = pl.DataFrame({"id": [0], "ts": [1]}, schema={"id": pl.UInt32, "ts": pl.Int64})
    full = TABLES["events"].conform(source)
    trace = Trace({"events": full}, {"rank": 3})
    full[0, "ts"] = 99
    trace.events[0, "ts"] = 98
    trace.tables["events"][0, "ts"] = 97
    assert trace.events["ts"].to_list() == [1]
    for name in ("events", "meta", "tables", "rank", "anything"):
        with pytest.raises(AttributeError):
            setattr(trace, name, None)
    with pytest.raises(TypeError):
        trace.meta["rank"] = 4  # type: ignore[index]
    with pytest.raises(TypeError):
        trace.tables["nodes"] = source  # type: ignore[index]
    assert trace.rank == 3


def test_later_changes_of_the_passed_meta_have_no_effect() -> None:
    given_meta = {"rank": 1}
    trace, job = Trace({}, given_meta), Job({}, given_meta)
    given_meta["rank"] = 2
    assert trace.rank == 1
    assert job.meta["rank"] == 1


def test_replace_shares_other_tables_and_does_not_change_the_first() -> None:
    first = a_trace()
    second = first.replace(meta={"linked": True}, launches=pl.DataFrame({"launch": [1]}))
    assert second.launches["launch"].to_list() == [1]
    assert second.events.equals(first.events)
    assert dict(second.meta) == {"rank": 0, "files": ["a.json"], "linked": True}
    assert first.launches.height == 0
    assert "linked" not in first.meta


def test_stats_are_rows_and_zero_counts_are_none() -> None:
    first = a_trace()
    assert first.with_stats([("read.x", "info", 0, None)]) is first
    assert first.count("read.x", 0) is first
    second = first.count("read.x", 2, "of them").with_stats(
        [("read.y", "error", 1, None), ("z", "info", 0, "")]
    )
    assert second.stats.rows() == [("read.x", "info", 2, "of them"), ("read.y", "error", 1, None)]
    assert first.stats.height == 0


def test_strict_raises_for_a_loss_and_names_it() -> None:
    fine = a_trace(rank=4).count("read.repaired_parent", 7, "node 3")
    fine.check_lossless()
    lost = fine.with_stats(
        [("read.invalid_event", "data_loss", 3, "line 8"), ("link.wrong", "error", 1, None)]
    )
    line = r"rank 4: read.invalid_event: 3 \(line 8\) and 1 more kind of loss; omit --strict"
    with pytest.raises(DataLoss, match=line):
        lost.check_lossless()
    with pytest.raises(DataLoss, match=line):
        Job({0: fine, 4: lost}).check_lossless()
    Job({0: fine}).with_stats([("job.missing_ranks", "info", 1, "1")]).check_lossless()
    with pytest.raises(DataLoss, match=r"the run: job\.two_files"):
        Job({0: fine}).with_stats([("job.two_files", "data_loss", 1, "x")]).check_lossless()


def test_a_job_is_a_mapping_in_the_order_of_ranks() -> None:
    job = Job({2: a_trace(2), 0: a_trace(0)}, {"path": "run"})
    assert list(job) == job.ranks == [0, 2]
    assert len(job) == 2
    assert job[2].rank == 2
    assert 1 not in job
    assert job.get(1) is None
    assert repr(job) == "<Job: ranks 0, 2>"
    doubled = job.map(lambda trace: trace.replace(meta={"linked": True}))
    assert [trace.meta["linked"] for trace in doubled.values()] == [True, True]
    assert dict(doubled.meta) == {"path": "run"}
    assert dict(job.replace({"a": 1}).meta) == {"path": "run", "a": 1}


def test_a_job_s_table_has_the_rank_first() -> None:
    job = Job({1: a_trace(1, (9,)), 0: a_trace(0)})
    table = job.table("events")
    assert table.columns == ["rank", *TABLES["events"].schema]
    assert table.select("rank", "dur").rows() == [(0, 5), (0, 7), (1, 9)]
    assert Job({}).table("events").columns == table.columns
    assert concat_ranks(job, lambda trace: trace.events.select(pl.col("dur").sum())).rows() == [
        (0, 12),
        (1, 9),
    ]


def test_stats_of_a_job_are_those_of_the_run_and_of_its_ranks() -> None:
    job = Job({0: a_trace().count("read.x", 1)}, stats=[("job.a", "info", 2, None)]).with_stats(
        [("job.b", "error", 1, "b"), ("job.none", "info", 0, None)]
    )
    expected = [(None, "job.a", 2), (None, "job.b", 1), (0, "read.x", 1)]
    assert job.stats.select("rank", "name", "count").rows() == expected
    assert job.query("select rank, name, count from stats").rows() == expected
    assert job.run_stats["name"].to_list() == ["job.a", "job.b"]
    assert job.map(lambda trace: trace).run_stats.equals(job.run_stats)


def test_a_query_sees_every_table_and_text_as_strings() -> None:
    trace = a_trace(durations=(5, 7, 11))
    answer = trace.query(
        "select name, sum(dur) ns from events where name like 'aten::%' group by name order by ns"
    )
    assert answer.rows() == [("aten::add", 7), ("aten::mm", 16)]
    assert answer.schema == {"name": pl.String, "ns": pl.Int64}
    assert trace.query("SELECT upper(name) n FROM events LIMIT 1").item() == "ATEN::MM"
    joined = trace.query("select count(*) from events e join nodes n on e.rf_id = n.rf_id")
    assert joined.item() == 0
    assert (
        trace.query("with long as (select * from events where dur > 6) select count(*) from long").item() == 2
    )
    assert trace.query("-- the count\n (select count(*) from events)").item() == 3
    assert trace.query("select 'no table' as x").item() == "no table"


def test_a_query_of_a_job_has_the_rank() -> None:
    job = Job({0: a_trace(0), 3: a_trace(3, (1, 2))})
    answer = job.query("select rank, sum(dur) ns from events group by rank order by rank")
    assert answer.rows() == [(0, 12), (3, 3)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select nam from events", "unknown column 'nam'; did you mean 'name'"),
        ("select * from evnts", "unknown table 'evnts'; did you mean 'events'"),
        ("drop table events", "the query is not a SELECT"),
        ("show tables", "the query is not a SELECT"),
        ("", "the query is not a SELECT"),
        ("select foo(", "the query was refused: sql parser error"),
        ("select name + 1 from events", "the query was refused"),
        ("select 1; select 2", "the query was refused"),
    ],
)
def test_a_refused_query_is_one_line_with_a_reason(sql: str, message: str) -> None:
    for what in (a_trace(), Job({0: a_trace()})):
        with pytest.raises(EtloomError) as raised:
            what.query(sql)
        assert str(raised.value).startswith(message)
        assert "\n" not in str(raised.value)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), st.text(max_size=5)), max_size=20), st.integers(0, 9))
def test_traces_and_jobs_cross_process_borders(rows: list[tuple[int, str]], rank: int) -> None:
    frame = pl.DataFrame(rows, schema={"ts": pl.Int64, "name": pl.String}, orient="row").with_row_index("id")
    trace = Trace({"events": frame}, {"rank": rank, "files": ["f"]}).count("read.x", 1, "y")
    job = Job({rank: trace}, {"path": "p"}, [("job.x", "info", 1, None)])
    clones: list[Any] = [pickle.loads(pickle.dumps(job)), copy.copy(job), copy.deepcopy(job)]
    for clone in clones:
        assert dict(clone.meta) == {"path": "p"}
        assert clone.stats.equals(job.stats)
        assert clone[rank].events.equals(trace.events)
        assert dict(clone[rank].meta) == dict(trace.meta)


def test_a_value_cached_per_trace_is_computed_once_for_each_trace() -> None:
    asked: list[Trace] = []

    def question(trace: Trace) -> int:
        asked.append(trace)
        return trace.events.height

    trace = Trace({}, {"rank": 0})
    assert (trace.compute_once(question), trace.compute_once(question)) == (0, 0)
    assert asked == [trace]
    other = trace.replace(meta={"rank": 1})
    assert other.compute_once(question) == 0
    assert asked == [trace, other]


def test_stored_results_are_looked_up_at_each_call() -> None:
    def count(trace: Trace) -> list[int]:
        raise AssertionError("computed")

    class FileResults(dict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            return list(super().__getitem__(key))  # as if it were read from a file

    trace = Trace().with_stored_results(FileResults({(count,): [2]}))
    assert trace.has_result(count) and trace.compute_once(count) == [2]
    assert trace.compute_once(count) is not trace.compute_once(count)


def test_rows_are_counted_also_of_a_table_that_is_not_there() -> None:
    trace = Trace({"events": pl.DataFrame({"id": [0, 1, 2], "ts": [5, 6, 7]})})
    assert (trace.rows("events"), trace.rows("nodes")) == (3, 0)


def test_a_value_cached_per_job_is_computed_once() -> None:
    asked: list[list[int]] = []

    def question(job: Job) -> int:
        asked.append(job.ranks)
        return len(job)

    job = Job({rank: Trace(meta={"rank": rank}) for rank in (0, 1)})
    assert [job.compute_once(question), job.compute_once(question)] == [2, 2]
    assert job.map(lambda trace: trace) is job
    assert job.map(lambda trace: trace.replace(meta={"seen": True})).compute_once(question) == 2
    assert asked == [[0, 1], [0, 1]]


def test_every_declared_table_is_a_typed_attribute() -> None:
    declared = {name for name, value in vars(TableAttributes).items() if isinstance(value, property)}
    assert declared == set(TABLES)
    assert Job({3: Trace({"threads": small_threads()})}).threads["rank"].to_list() == [3]


def test_html_of_traces_and_jobs_escapes_text_of_files() -> None:
    trace = Trace({"threads": small_threads()}, {"rank": 1, "formats": ["<b>"]}).count(
        "read.x", 2, "<i>", "error"
    )
    for text in (trace._repr_html_(), Job({1: trace})._repr_html_()):
        assert "rank 1" in text and "threads 1" in text and "read.x" in text
        assert "<b>" not in text and "<i>" not in text and "&lt;b&gt;" in text


def small_threads() -> pl.DataFrame:
    return pl.DataFrame({"pid": [1], "tid": [2], "name": ["main"]})


def test_threads_wait_for_a_result_that_another_thread_computes() -> None:
    job = Job({})
    calls: list[int] = []
    started, may_end = threading.Event(), threading.Event()

    def compute(_: Job) -> int:
        calls.append(1)
        started.set()
        may_end.wait(600)
        return len(calls)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(job.compute_once, compute)
        assert started.wait(600)
        second = threads.submit(job.compute_once, compute)
        may_end.set()
        assert (first.result(), second.result(), len(calls)) == (1, 1, 1)
