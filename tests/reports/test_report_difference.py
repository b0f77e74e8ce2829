"""The page of two runs without a browser: what it says, and that nothing of a trace becomes markup."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.cli import main
from etloom.core.trace import Job
from etloom.reports import difference_timelines
from etloom.reports.difference_page import list_causes, render_page
from etloom.reports.difference_steps import list_step_times, match_steps
from etloom.reports.html_tables import render_table
from support.real_runs import open_run
from support.reports import HOSTILE, hostile_job
from support.small_traces import write_stepped_run


class Parsed(HTMLParser):
    """The texts of a page by tag and the attributes of its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str, name: str) -> list[dict[str, str | None]]:
        return [
            found for seen, found in self.tags if seen == tag and name in (found.get("class") or "").split()
        ]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    times = [1000.0, 1004, 1002, 1008, 1006, 1001]
    return write_stepped_run(tmp_path / "old", times), write_stepped_run(
        tmp_path / "new", [1.1 * time for time in times]
    )


@pytest.mark.slow
def test_the_page_states_the_change_and_draws_the_steps(
    runs: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "diff.html"
    assert main(["diff", *map(str, runs), "--html", str(out)]) == 0
    assert "slower by 10.0 % per step" in capfd.readouterr().out
    page = Parsed(out.read_text())
    assert page.texts[page.texts.index("A step") + 1] == "+10.0 %"
    assert page.of("li", "bad")
    assert [len(page.of("circle", f"run-{run}")) for run in range(2)] == [6, 6]
    assert len(page.of("rect", "worse")) >= 6
    assert "step 3: before 1.008 ms, after 1.109 ms, change +10.0 %" in page.texts
    assert any("slower in 6 of 6 matched steps; mean change +100.3 µs." in text for text in page.texts)
    assert [text for text in page.texts if text.endswith("50 % of it")]  # compute, and idle the other half
    assert "old → new" in page.texts


@pytest.mark.slow
@pytest.mark.parametrize("names", [("slow", "new"), ("slow", "new", "old")])
def test_the_waterfall_sums_to_the_change_of_the_mean_step(tmp_path: Path, names: tuple[str, ...]) -> None:
    factors = {"old": 1.0, "new": 1.1, "slow": 1.31}
    runs = [
        etloom.open(write_stepped_run(tmp_path / name, [factors[name] * time for time in (1000, 1040, 1010)]))
        for name in names
    ]
    differences = [etloom.diff(runs[0], run) for run in runs[1:]]
    page = Parsed(render_page(differences))
    bars = [int(found["data-ns"] or 0) for tag, found in page.tags if "data-ns" in found]
    for difference in differences:
        table = difference.table("category")
        size = 2 + int((table["change_ns"] != 0).sum())
        (before, *changes, after), bars = bars[:size], bars[size:]
        assert before + sum(changes) == after
        assert [before, after] == pytest.approx([fmean(times) for times in difference.step_times], abs=3)
        assert sorted(changes) == sorted(change for change in table["change_ns"] if change)
    assert bars == []


def test_steps_are_matched_by_number_or_else_in_their_order() -> None:
    assert match_steps([{3: 10.0, 4: 11.0}, {4: 12.0, 5: 13.0}]) == (
        [("3", [10.0, None]), ("4", [11.0, 12.0]), ("5", [None, 13.0])],
        True,
    )
    assert match_steps([{3: 10.0, 4: 11.0}, {7: 12.0}]) == (
        [("3 and 7", [10.0, 12.0]), ("4", [11.0, None])],
        False,
    )


def test_the_chart_has_the_step_times_of_the_verdict(data: Path) -> None:
    jobs = [open_run(data / "cpu" / "ddp_2"), open_run(data / "hta_multirank")]
    difference = etloom.diff(*jobs)
    assert tuple(list(list_step_times(job).values()) for job in jobs) == difference.step_times


def test_what_the_categories_lack_is_a_cause() -> None:
    @dataclass
    class Uneven:
        step_times: tuple[list[float], list[float]]

        def table(self, _: str) -> pl.DataFrame:
            names, times = ["compute", "idle"], [[600, 300], [700, 100]]
            return pl.DataFrame({"category": names, "before_ns": times[0], "after_ns": times[1]})

    causes = list_causes(Uneven(([1000.0], [950.0])))  # type: ignore[arg-type]
    assert causes[-1] == ("outside of the categories", 100, 150)
    assert sum(after - before for _, before, after in causes) == -50


def test_a_change_is_drawn_to_the_side_of_its_sign() -> None:
    frame = pl.DataFrame({"operator": ["a", "b", "c"], "change_ns": [100, -50, 0]})
    page = Parsed(render_table(frame, "t", "T", bar="change_ns"))
    (worse,) = page.of("rect", "worse")
    better = page.of("rect", "better")
    assert (worse["x"], worse["width"]) == ("40.0", "40.0")
    assert [(one["x"], one["width"]) for one in better] == [("20.0", "20.0"), ("40.0", "0.0")]


@pytest.mark.slow
def test_text_of_a_trace_is_not_markup_and_nothing_is_fetched(runs: tuple[Path, Path]) -> None:
    for pair in ((hostile_job(), etloom.open(runs[0])), (etloom.open(runs[0]), hostile_job())):
        page = render_page(etloom.diff(*pair))
        tags = Parsed(page).tags
        kinds = [found["type"] for tag, found in tags if tag == "script"]
        assert kinds.count("module") == 1
        assert set(kinds) <= {"module", "application/json", "text/plain"}
        assert not re.search(r"https?://|@import|url\(", page)
        assert not [
            name for _, found in tags for name in found if name.startswith("on") or name in ("src", "style")
        ]
        assert HOSTILE[0] not in page


def test_runs_without_anything_are_a_page(runs: tuple[Path, Path]) -> None:
    job = etloom.open(runs[0])
    page = Parsed(render_page(etloom.diff(job, job)))
    assert "no change: the steps take the same time" in page.texts
    assert "Nothing changed." in page.texts


def test_the_timelines_draw_a_limited_number_of_events_and_ranks(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = map(etloom.open, runs)
    several = [Job(dict.fromkeys(range(3), job[0])) for job in (old, new)]
    monkeypatch.setattr(difference_timelines, "MAX_RANKS", 2)
    monkeypatch.setattr(difference_timelines, "MAX_EVENTS", 20)
    timelines = difference_timelines.pack_runs(several, True)
    assert timelines is not None
    assert timelines.ranks == [0, 1]
    assert [name for name, _ in re.findall(r'data-run="(\d)" data-rank="(\d)"', timelines.data)] == [*"0101"]
    drawn = 4 * 5
    assert timelines.notes == [
        "The timelines of 1 more common rank are omitted.",
        f"{4 * old[0].events.height - drawn} events are omitted from the timelines; "
        "the longest of each track and time are drawn.",
    ]
    assert difference_timelines.pack_runs([old, Job({7: new[0]})], True) is None


@pytest.mark.parametrize("value", [[], ["run/"]])
def test_a_list_of_anything_else_is_refused(value: list[Any], tmp_path: Path) -> None:
    with pytest.raises(etloom.EtloomError, match="expected a Trace, a Job or a path"):
        etloom.report(value, tmp_path / "page.html")
