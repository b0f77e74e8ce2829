"""Of many ranks a text says ranges and what figures run from and to, in as many lines as of few."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.analyses.answers import Answer
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranges, format_ranks
from etloom.reports.formatting import convert_to_own_units
from etloom.reports.rank_spread import (
    MAX_LISTED_RANKS,
    group_equal_ranks,
    group_stats_by_name,
    summarize_rank_spread,
)
from support import small_traces


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0, 1"),
        ([0, 1, 2], "0-2"),
        ([9, 0, 1, 2, 5, 2], "0-2, 5, 9"),
        (range(2000), "0-1999"),
        ([*range(500), *range(501, 2000)], "0-499, 501-1999"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, ..."),
        ([550, 551, 552, 553, 554], "550-554"),
    ],
)
def test_ranges(numbers: list[int], said: str) -> None:
    assert format_ranges(numbers) == said


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], "no ranks"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        (range(2000), "ranks 0-1999"),
        (range(0, 2000, 2), "1,000 ranks (0, 2, 4, 6, 8, 10, 12, 14, ...)"),
    ],
)
def test_ranks_in_words(ranks: list[int], said: str) -> None:
    assert format_ranks(ranks) == said


def test_many_ranks_are_summarized_in_few_words(capsys: pytest.CaptureFixture[str]) -> None:
    job = etloom.Job({rank: etloom.Trace({}, {"rank": rank, "linked": True}) for rank in range(0, 40, 2)})
    of = "20 ranks (0, 2, 4, 6, 8, 10, 12, 14, ...)"
    assert repr(job) == f"<Job: {of}>"
    with pytest.raises(KeyError, match=re.escape(f"unknown rank 1; the job holds {of}")):
        job[1]
    with pytest.raises(AnalysisError, match=re.escape(f"unknown rank 1, 3; the run holds {of}")):
        etloom.select(job, rank=[3, 1])
    refused = dict.fromkeys(job, AnalysisError("the trace contains no events"))
    assert Answer(pl.DataFrame(), refused).explain_refusals() == [
        f"no answer for {of}: the trace contains no events"
    ]


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_number_once(numbers: set[int]) -> None:
    told: list[int] = []
    for part in filter(None, format_ranges(numbers, most=100).split(", ")):
        first, _, last = part.partition("-")
        told += range(int(first), int(last or first) + 1)
    assert told == sorted(numbers)


@given(st.sets(st.integers(0, 200)), st.integers(1, 9))
def test_ranges_are_limited_and_omitted_ones_reported(numbers: set[int], most: int) -> None:
    shown, whole = format_ranges(numbers, most).split(", "), format_ranges(numbers, 1000).split(", ")
    assert shown == (whole if len(whole) <= most else [*whole[:most], "..."])


def test_the_spread_states_the_least_and_the_most_with_their_ranks() -> None:
    frame = pl.DataFrame(
        {
            "rank": [0, 1, 2, 3],
            "how": ["a"] * 4,
            "time_ns": [2_000_000, 1_000_000, None, 4_000_000],
            "n": [7] * 4,
        }
    )
    assert summarize_rank_spread(frame).rows() == [
        ("time (µs)", "1,000", 1, "2,000", "4,000", 3),
        ("n", "7", 0, "7", "7", 0),
    ]


def test_stats_of_a_name_are_one_row() -> None:
    stats = pl.DataFrame(
        {
            "rank": [None, 0, 1, 2, 2],
            "name": ["whole", "lost", "lost", "lost", "other"],
            "severity": ["info", "error", "error", "error", "info"],
            "count": [1, 2, 3, 4, 5],
            "example": ["w", None, "first", "second", "o"],
        }
    )
    assert group_stats_by_name(stats).rows() == [
        ("run", "whole", "info", 1, "w"),
        ("0-2", "lost", "error", 9, "first"),
        ("2", "other", "info", 5, "o"),
    ]


def write_profiles(folder: Path, ranks: int) -> Path:
    """A run without execution traces."""
    run = small_traces.write_run(folder, tuple(range(ranks)))
    for file in run.glob("torch_et_*"):
        file.unlink()
    return run


@pytest.mark.slow
def test_info_of_many_ranks_is_as_long_as_of_few(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    last = MAX_LISTED_RANKS
    run = write_profiles(tmp_path / "run", last + 1)
    status, out, _ = call("info", run)
    assert status == 0
    assert f"ranks       {last + 1} of {last + 1} (ranks 0-{last})\n" in out
    assert re.search(r"^events +7 +0 +7 +7 +0$", out, re.MULTILINE)
    assert f"\n0-{last}   read.metadata_events" in out
    assert len(out.splitlines()) < 30 and max(map(len, out.splitlines())) < 200
    assert len(json.loads(call("info", run, "--format", "json")[1])["by_rank"]) == last + 1


@pytest.mark.slow
def test_a_report_of_many_ranks_is_as_long_as_of_few(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    run = write_profiles(tmp_path / "run", 12)
    status, out, _ = call("report", run, "--out", tmp_path / "report.html")
    assert status == 0
    assert "ranks 0-11" in (tmp_path / "report.html").read_text()
    assert len(out.splitlines()) < 50


def test_each_row_of_values_has_the_unit_that_suits_it() -> None:
    rows = [
        ("step time", "ns", 1_008_570_000.0, 20.0, None),
        ("memory", "B", 5e6, 0.0, 2.5e6),
        ("x", "%", 3.0, 4.0, 1.0),
    ]
    table = pl.DataFrame(rows, schema=["measure", "unit", "before", "after", "change"], orient="row")
    assert convert_to_own_units(table).rows() == [
        ("step time", "ms", 1008.57, pytest.approx(2e-5), None),
        ("memory", "kB", 5000.0, 0.0, 2500.0),
        ("x", "%", 3.0, 4.0, 1.0),
    ]
    schema = pl.DataFrame({"column": ["ts"], "unit": ["ns"]})
    assert convert_to_own_units(schema).equals(schema)


def test_equal_rows_of_ranks_are_one_row() -> None:
    frame = pl.DataFrame(
        {
            "rank": [0, 1, 2, None],
            "name": ["a", "a", "b", "a"],
            "count": [1, 1, 1, 1],
            "example": ["x", "y", "z", "w"],
        }
    )
    assert group_equal_ranks(frame, ignored="example").rows() == [
        ("0, 1", "a", 1, "x"),
        ("2", "b", 1, "z"),
        ("run", "a", 1, "w"),
    ]
    assert group_equal_ranks(frame) is frame
    assert group_equal_ranks(frame.filter(pl.col("rank").is_null()).vstack(frame.tail(1))).rows() == [
        ("run", "a", 1, "w")
    ]
