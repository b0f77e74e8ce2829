"""The heat map of many ranks names the planted outliers, and its size does not grow with the ranks."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.analyses.helpers.rank_kinds import MIN_FLEET
from etloom.core.trace import Job, Trace
from etloom.reports import html_report
from etloom.reports.fleet_map import (
    DRAWN_OUTLIERS,
    MAX_COLUMNS,
    MAX_ROWS,
    FleetMap,
    measure_fleet,
    render_fleet_map,
)
from support.fleets import write_fleet
from support.reports import HOSTILE

NO_HOSTS: dict[int, str | None] = {}


def make_times(own_ns: np.ndarray, *, waits: int = 500) -> pl.DataFrame:
    """Return an answer to temporal-breakdown in which every step takes as long on all ranks (rows) of a table."""
    ranks, steps = own_ns.shape
    rank, step = np.divmod(np.arange(ranks * steps), steps)
    span = own_ns.max(axis=0) + waits
    return pl.DataFrame(
        {
            "rank": rank,
            "step": 10 + step,
            "span_ns": span[step],
            "exposed_communication_ns": span[step] - own_ns.ravel(),
        }
    )


def measure(own_ns: np.ndarray) -> FleetMap:
    fleet = measure_fleet(make_times(own_ns), NO_HOSTS)
    assert fleet is not None
    return fleet


def read_data(page: str) -> dict[str, Any]:
    text = re.search(r'id="fleet-data">([^<]*)<', page)
    assert text is not None
    data: dict[str, Any] = json.loads(base64.b64decode(text[1]))
    return data


def decode(data: dict[str, Any], name: str, dtype: str) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(data[name]), dtype)
    return values.reshape(len(data["rows"]), len(data["columns"]))


def test_ranks_that_take_longer_in_most_steps_are_outliers() -> None:
    dice = np.random.default_rng(1)
    own = np.round(10_000 * (1 + 0.005 * dice.standard_normal((100, 12)))).astype(np.int64)
    own[40], own[77] = own[40] * 1.3, own[77] * 1.1
    own[3, 5] *= 4  # once is not often
    fleet = measure(own)
    assert fleet.outliers["rank"].to_list() == [40, 77]
    assert fleet.outliers["excess_pct"].round().to_list() == [30, 10]
    assert fleet.outliers["slow_steps"].to_list() == [12, 12]
    assert fleet.typical not in (3, 40, 77)
    assert fleet.notable_ranks == [40, 77, fleet.typical]


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_rank_is_compared_with_its_kind(seed: int) -> None:
    """Ranks of one to three kinds, of which one or two ranks take 10 to 60 % longer than the others of their kind."""
    dice = np.random.default_rng(seed)
    kinds = dice.integers(1, 4)
    kind = np.arange(48) % kinds
    own = 10_000 * (1 + 0.25 * kind[:, None]) * (1 + 0.003 * dice.standard_normal((48, 6)))
    slow = dice.choice(48, dice.integers(1, 3), replace=False)
    factors = dice.choice([1.1, 1.6], len(slow))
    own[slow] *= factors[:, None]
    outliers = measure(np.round(own).astype(np.int64)).outliers.sort("rank")
    assert outliers["rank"].to_list() == sorted(slow.tolist())
    # A rank that is slower than the next kind is compared with that one.
    for rank, factor in zip(slow.tolist(), factors.tolist(), strict=True):
        level = own[rank].mean() / (10_000 * (1 + 0.25 * np.arange(kinds)))
        excess = outliers.filter(pl.col("rank") == rank)["excess_pct"][0]
        assert excess == pytest.approx(100 * level[level > 1.02].min() - 100, abs=2), factor


@pytest.mark.parametrize("count", [7, 8, 9])
def test_ranks_of_a_slow_host_are_no_kind(count: int) -> None:
    own = np.full((32, 4), 10_000)
    own[:count] = 13_000
    fleet = measure_fleet(make_times(own), {rank: f"host{int(rank >= count)}" for rank in range(32)})
    assert fleet is not None and sorted(fleet.outliers["rank"].to_list()) == list(range(count))


@pytest.mark.slow
def test_the_slow_rank_of_a_fleet_with_two_kinds_is_named(data: Path) -> None:
    run = etloom.open(data / "cases/turn3/fleet_bimodal/run")
    fleet = measure_fleet(etloom.analyze(run, "temporal-breakdown"), NO_HOSTS)
    assert fleet is not None and fleet.outliers["rank"].to_list() == [20]
    assert fleet.outliers["excess_pct"][0] == pytest.approx(47, abs=3)


def test_equal_ranks_have_no_outliers_and_one_rank_no_map() -> None:
    assert measure(np.full((MIN_FLEET, 3), 1000)).outliers.is_empty()
    assert measure_fleet(make_times(np.full((1, 3), 1000)), NO_HOSTS) is None
    assert measure_fleet(make_times(np.full((2, 1), 1000)), NO_HOSTS) is None
    assert measure_fleet(make_times(np.zeros((MIN_FLEET, 3), np.int64)), NO_HOSTS) is None


def test_few_ranks_are_drawn_and_not_judged() -> None:
    times = np.full((3, 2), 1000)
    times[1, 1] = 3000
    fleet = measure(times)
    assert fleet.outliers.is_empty() and not fleet.is_fleet
    page = render_fleet_map(fleet, NO_HOSTS, [0, 1, 2])
    assert "notably" not in page and decode(read_data(page), "cells", "u1").tolist() == [
        [0, 0],
        [0, 254],
        [0, 0],
    ]


def test_a_rank_of_few_is_compared_with_the_others() -> None:
    own = np.array([[1500, 1000], [1000, 1000]])
    fleet = measure(own)
    assert fleet.excess.tolist() == [[0.5, 0], [pytest.approx(-1 / 3), 0]]
    assert fleet.typical == 1
    data = read_data(render_fleet_map(fleet, NO_HOSTS, []))
    assert data["compared"] == "the other rank"
    assert data["references"] == [["1.000 µs", "1.000 µs"], ["1.500 µs", "1.000 µs"]]
    assert data["top"] == 50 and decode(data, "cells", "u1").tolist() == [[254, 0], [0, 0]]
    three = measure(np.array([[1000, 1000], [2000, 1000], [1200, 1000]]))
    assert three.excess[:, 0].tolist() == pytest.approx([1000 / 1600 - 1, 2000 / 1100 - 1, 1200 / 1500 - 1])
    assert "compared with the median of the other ranks" in render_fleet_map(three, NO_HOSTS, [])


def test_a_step_of_one_rank_only_is_not_compared() -> None:
    times = make_times(np.full((2, 3), 1000)).filter((pl.col("rank") == 0) | (pl.col("step") != 12))
    fleet = measure_fleet(times, NO_HOSTS)
    assert fleet is not None
    assert np.argwhere(np.isnan(fleet.excess)).tolist() == [[0, 2], [1, 2]]
    assert read_data(render_fleet_map(fleet, NO_HOSTS, []))["references"][0] == ["1.000 µs"] * 2 + ["unknown"]


def test_a_rank_without_a_step_has_no_time_in_it() -> None:
    times = make_times(np.full((20, 4), 1000)).filter((pl.col("rank") != 7) | (pl.col("step") != 12))
    fleet = measure_fleet(times, NO_HOSTS)
    assert fleet is not None
    assert np.argwhere(np.isnan(fleet.excess)).tolist() == [[7, 2]]
    cells = decode(read_data(render_fleet_map(fleet, NO_HOSTS, [])), "cells", "u1")
    assert np.argwhere(cells == 255).tolist() == [[7, 2]]


def test_a_run_without_steps_is_compared_completely() -> None:
    times = make_times(np.full((20, 1), 1000)).with_columns(step=pl.lit(None, pl.Int64))
    fleet = measure_fleet(times, NO_HOSTS)
    assert fleet is not None
    data = read_data(render_fleet_map(fleet, NO_HOSTS, []))
    assert (data["columns"], data["references"]) == ([[None, None]], [["1.000 µs"]])


@pytest.mark.parametrize(("ranks", "steps"), [(MAX_ROWS, MAX_COLUMNS), (5000, 300)])
@pytest.mark.slow
def test_neighbors_share_cells_that_show_the_slowest(ranks: int, steps: int) -> None:
    own = np.full((ranks, steps), 1000)
    own[411, 100] = 2000
    data = read_data(render_fleet_map(measure(own), NO_HOSTS, [1]))
    assert len(data["rows"]) <= MAX_ROWS and len(data["columns"]) <= MAX_COLUMNS
    (cell,) = np.argwhere(decode(data, "cells", "u1") > 0)
    first, last = data["rows"][cell[0]]
    from_step, to_step = data["columns"][cell[1]]
    assert first <= 411 <= last and from_step <= 110 <= to_step
    assert decode(data, "slowest", "<u4")[tuple(cell)] == 411
    assert data["rows"][-1][1] == ranks - 1 and data["columns"][-1][1] == 9 + steps


@pytest.mark.slow
def test_the_page_of_many_ranks_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(html_report, "MAX_RANKS", 16)
    monkeypatch.setattr(html_report, "MAX_FLEET_RANKS", 4)
    job = etloom.open(write_fleet(tmp_path / "run", 18, slow=(5, 9)), use_cache=False)
    page = html_report.render_page(job)
    drawn = re.findall(r'data-rank="(\d+)"', page)
    assert drawn[:2] == ["9", "5"] and len(drawn) == 4
    assert f"rank {DRAWN_OUTLIERS}" not in drawn
    assert "2 ranks take longer than others of the same kind: 5, 9" in page
    data = read_data(page)
    assert data["drawn"] == list(map(int, drawn))
    assert data["hosts"]["9"] == "rack2-node4"


def test_names_of_hosts_cannot_leave_the_data() -> None:
    fleet = measure(np.full((20, 1), 1000))
    page = render_fleet_map(fleet, {fleet.typical: HOSTILE[1]}, [fleet.typical])
    assert "<script>alert" not in page
    assert read_data(page)["hosts"] == {str(fleet.typical): HOSTILE[1]}


def test_few_ranks_have_no_map() -> None:
    job = Job({0: Trace({}, {"rank": 0, "linked": True})})
    assert 'id="fleet-map"' not in html_report.render_page(job)
