"""An analysis of several ranks, of which some cannot answer."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

import etloom
from etloom.analyses.answers import answer, answer_first_rows
from etloom.cli import app
from etloom.core.errors import AnalysisError, EtloomWarning
from etloom.core.trace import Job, Trace
from support import small_traces


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Ranks 0 to 2; the profile of 1 and 2 holds the host alone."""
    whole = etloom.open(small_traces.write_run(tmp_path / "run", (0, 1, 2)), use_cache=False)
    host = pl.col("cat").is_in(["cpu_op", "user_annotation"])
    traces = {
        rank: trace.replace(events=trace.events.filter(host), launches=trace.launches.clear())
        if rank
        else trace
        for rank, trace in whole.items()
    }
    return Job(traces, whole.meta)


def test_the_ranks_that_can_answer_do(job: Job) -> None:
    alone = etloom.analyze(job[0], "launches")
    with pytest.warns(
        EtloomWarning, match="launches: no answer for ranks 1, 2: the trace contains no GPU activity"
    ) as caught:
        table = etloom.analyze(job, "launches")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert table["rank"].unique().to_list() == [0]
    assert table.drop("rank").equals(alone)
    both = etloom.analyze(job, "temporal-breakdown")
    assert dict(both.select("rank", "basis").unique().rows()) == {0: "device", 1: "host", 2: "host"}


@pytest.mark.slow
def test_the_first_rows_are_those_of_the_first_ranks(job: Job) -> None:
    for name in ("temporal-breakdown", "launches", "collectives"):
        whole = answer(job, name).table
        for count in (1, 3, 100):
            assert answer_first_rows(job, name, count).equals(whole.head(count)), name
    analyzed: list[None] = []
    answer_first_rows(job, "temporal-breakdown", 1, lambda: analyzed.append(None))
    assert len(analyzed) == 1
    with pytest.raises(AnalysisError, match="contains no GPU activity"):
        answer_first_rows(Job({rank: job[rank] for rank in (1, 2)}), "launches", 1)


def test_if_no_rank_can_answer_the_first_reason_is_raised(job: Job) -> None:
    with pytest.raises(AnalysisError, match="contains no GPU activity"):
        etloom.analyze(Job({rank: job[rank] for rank in (1, 2)}), "launches")
    with pytest.raises(AnalysisError, match="the trace contains no step 99"):
        etloom.analyze(job, "temporal-breakdown", step=99)


@pytest.mark.slow
def test_the_command_line_reports_omitted_ranks_with_reasons(job: Job, tmp_path: Path) -> None:
    etloom.export(job, tmp_path / "kept.parquet")
    done = CliRunner().invoke(app, ["analyze", "launches", str(tmp_path / "kept.parquet"), "--format", "csv"])
    assert done.exit_code == 0, done.output
    assert {line.split(",")[0] for line in done.stdout.splitlines()[1:]} == {"0"}
    assert done.stderr.endswith("etloom: no answer for ranks 1, 2: the trace contains no GPU activity\n")
    every = CliRunner().invoke(app, ["analyze", "temporal-breakdown", str(tmp_path / "kept.parquet")])
    assert every.exit_code == 0 and "no answer" not in every.stderr


@pytest.fixture
def job_with_an_empty_rank(tmp_path: Path) -> Job:
    """Ranks 0 to 2; the trace of rank 1 holds no events."""
    whole = etloom.open(small_traces.write_run(tmp_path / "run", (0, 1, 2)), use_cache=False)
    empty = Trace({"stats": whole[1].stats}, whole[1].meta)
    return Job({0: whole[0], 1: empty, 2: whole[2]}, whole.meta)


@pytest.mark.slow
def test_findings_leave_out_an_empty_rank(job_with_an_empty_rank: Job, tmp_path: Path) -> None:
    job = job_with_an_empty_rank
    with pytest.warns(EtloomWarning, match="findings: no answer for rank 1: the trace contains no events"):
        table = etloom.analyze(job, "findings", min_pct=0)
    assert 0 in table["rank"].to_list() and 1 not in table["rank"].to_list()
    saved = tmp_path / "saved.parquet"
    etloom.export(job, saved)
    (added,) = etloom.store_add(saved, to=tmp_path / "store", jobs=1)
    with pytest.warns(EtloomWarning, match="findings: no answer for rank 1: the trace contains no events"):
        stored = etloom.analyze(etloom.open(added.path), "findings")
    with pytest.warns(EtloomWarning):
        assert stored.equals(etloom.analyze(job, "findings"))


@pytest.mark.slow
def test_a_stored_refusal_names_the_rank(job_with_an_empty_rank: Job, tmp_path: Path) -> None:
    empty = Job({1: job_with_an_empty_rank[1]})
    with pytest.raises(AnalysisError, match=r"^rank 1: the trace contains no events") as refused:
        etloom.analyze(empty, "findings")
    etloom.export(empty, tmp_path / "saved.parquet")
    (added,) = etloom.store_add(tmp_path / "saved.parquet", to=tmp_path / "store", jobs=1)
    for name in ("findings", "temporal-breakdown"):
        with pytest.raises(AnalysisError) as stored:
            etloom.analyze(etloom.open(added.path), name)
        assert str(stored.value) == str(refused.value)
