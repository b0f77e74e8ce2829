"""Analyses against answers worked out by hand (tests/golden) and HolisticTraceAnalysis' checked ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.core import registry
from etloom.core.trace import Job
from support.hta import drop_last_step
from support.paths import ROOT

OWN = ROOT / "tests" / "golden"
QUESTIONS = sorted(OWN.glob("*/*.csv"))
US = 1000


def opened(path: Path) -> Job:
    return etloom.open(path)


def asked(job: Job, name: str, **options: Any) -> pl.DataFrame:
    return etloom.analyze(job, name, **options)


@pytest.mark.parametrize("question", QUESTIONS, ids=[f"{q.parent.name}/{q.stem}" for q in QUESTIONS])
def test_own_golden(question: Path) -> None:
    name, *settings = question.stem.split(".")
    options = {
        key: int(value) if value.isdigit() else value
        for key, _, value in (s.partition("=") for s in settings)
    }
    answer = asked(opened(question.parent / "trace.json"), name, **options).drop("rank")
    columns = registry.get("analyses", name).COLUMNS
    assert dict(answer.schema) == columns
    expected = pl.read_csv(question, schema=columns)
    assert_frame_equal(answer, expected, rel_tol=0, abs_tol=5e-5)


def hta(golden: Path, table: str, folder: str = "sampled_all_steps") -> pl.DataFrame:
    return pl.read_csv(golden / "hta" / folder / f"{table}.csv")


# HTA cuts times to whole microseconds, which moves an event by at most 1 us. The files compared here hold
# whole microseconds, so nothing may differ.


def test_temporal_breakdown_is_htas(data: Path, golden: Path) -> None:
    ours = asked(opened(data / "hta_multirank"), "temporal-breakdown").filter(pl.col("step").is_null())
    theirs = hta(golden, "get_temporal_breakdown")
    assert ours["rank"].to_list() == theirs["rank"].to_list() == [0, 1]
    for our, their in (
        (ours["span_ns"], "kernel_time(us)"),
        (ours["compute_ns"], "compute_time(us)"),
        (ours["busy_ns"] - ours["compute_ns"], "non_compute_time(us)"),
        (ours["idle_ns"], "idle_time(us)"),
    ):
        assert our.to_list() == (theirs[their] * US).to_list(), their


def test_comm_overlap_is_htas(data: Path, golden: Path) -> None:
    ours = asked(opened(data / "hta_multirank"), "comm-overlap").filter(pl.col("step").is_null())
    assert (
        ours["overlap_pct"].round(2).to_list()
        == hta(golden, "get_comm_comp_overlap")["comp_comm_overlap_pctg"].to_list()
    )


def type_table(answer: pl.DataFrame) -> dict[str, int]:
    """kernel-overlap as HTA writes it: of all ranks together, in us."""
    summed = answer.group_by("kinds").agg(pl.col("time_ns").sum() // US)
    return {kinds.upper().replace(" + ", " overlapping "): time for kinds, time in summed.rows()}


def test_kernel_overlap_is_htas_type_table(data: Path, golden: Path) -> None:
    ours = type_table(asked(opened(data / "hta_multirank"), "kernel-overlap"))
    theirs = hta(golden, "get_gpu_kernel_breakdown.0")
    assert ours == dict(theirs.select("kernel_type", "sum").rows())
    assert len(ours) == 7


def test_htas_first_step(data: Path, golden: Path) -> None:
    job = opened(data / "hta_multirank").map(drop_last_step)
    folder = "sampled_first_step"
    ours = asked(job, "temporal-breakdown").filter(pl.col("step").is_null())
    theirs = hta(golden, "get_temporal_breakdown", folder)
    assert ours["span_ns"].to_list() == (theirs["kernel_time(us)"] * US).to_list()
    assert ours["compute_ns"].to_list() == (theirs["compute_time(us)"] * US).to_list()
    assert ours["idle_ns"].to_list() == (theirs["idle_time(us)"] * US).to_list()
    types = hta(golden, "get_gpu_kernel_breakdown.0", folder)
    assert type_table(asked(job, "kernel-overlap")) == dict(types.select("kernel_type", "sum").rows())
    overlap = asked(job, "comm-overlap").filter(pl.col("step").is_null())["overlap_pct"].round(2)
    assert (
        overlap.to_list() == hta(golden, "get_comm_comp_overlap", folder)["comp_comm_overlap_pctg"].to_list()
    )


def test_synchronizations_are_not_work_although_hta_counts_them(data: Path, golden: Path) -> None:
    job = opened(data / "critical_path" / "simple_add.json.gz")
    ours = asked(job, "temporal-breakdown").filter(pl.col("step").is_null()).row(0, named=True)
    theirs = hta(golden, "get_temporal_breakdown", "simple_add_cp").row(0, named=True)
    assert ours["compute_ns"] == theirs["compute_time(us)"] * US
    assert type_table(asked(job, "kernel-overlap")) == {"MEMORY": 39088, "COMPUTATION": 10670}
    assert asked(job, "comm-overlap")["overlap_pct"].drop_nulls().is_empty()
    # With the synchronisations put among the work, HTA's figures come out.
    (trace,) = job.values()
    waits = pl.col("cat") == "cuda_sync"
    as_hta = trace.replace(
        events=trace.events.with_columns(
            pl.when(waits).then(pl.lit("gpu_memset")).otherwise(pl.col("cat").cast(pl.String)).alias("cat")
        )
    )
    counted = etloom.analyze(as_hta, "temporal-breakdown").filter(pl.col("step").is_null()).row(0, named=True)
    assert counted["span_ns"] == theirs["kernel_time(us)"] * US
    assert counted["idle_ns"] == theirs["idle_time(us)"] * US
    assert ours["busy_ns"] < counted["busy_ns"]
